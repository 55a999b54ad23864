"""Graph and geometric learning over the array API."""

from rtxarr.geom._graph import Graph

__all__ = ["Graph"]
