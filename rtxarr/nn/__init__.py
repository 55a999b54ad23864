"""Modules: layers with parameters, losses and initializers."""

from rtxarr.nn import initializers
from rtxarr.nn._module import Module
from rtxarr.nn._parameter import Buffer, Parameter

__all__ = ["Buffer", "Module", "Parameter", "initializers"]
