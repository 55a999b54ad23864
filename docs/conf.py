"""Sphinx configuration: pages in Markdown, the API reference from docstrings."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("RTXARR_DEVICE", "cpu")  # the examples print CPU arrays

import families

import rtxarr

project = "rtxarr"
author = "the rtxarr developers"
copyright = "the rtxarr developers"
version = release = rtxarr.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"rtxarr {release}"

autodoc_inherit_docstrings = False  # only what a class says of its own methods
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give types, with shapes
autosummary_generate = True
autosummary_ignore_module_all = False
autosummary_context = {
    "dtypes": ", ".join(rtxarr.dtypes.DTYPES),  # NumPy documents them
    "families": families.FAMILIES,
}
napoleon_google_docstring = False
napoleon_use_param = False  # types are prose ("array, shape (n,)"), not names to link
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # allows "weight, bias : Parameter"
suppress_warnings = ["ref.python"]  # an attribute's type "dtype" is not Tensor.dtype

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

doctest_global_setup = """
__name__ = "__main__"  # the module of what an example defines
import numpy as np
import rtxarr as rx
"""
