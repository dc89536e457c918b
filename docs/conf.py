"""How the documentation is built: ``sphinx-build -W docs build/site``."""

from __future__ import annotations

from onnxq.version import VERSION

project = "onnxq"
author = "the onnxq authors"
release = version = VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
]
html_theme = "furo"
html_title = "onnxq"
html_show_sourcelink = False

# Links to headings of other pages, and the quotes of code as they stand.
myst_heading_anchors = 3
smartquotes = False

# Classes say in their docstring what their constructor takes.
autodoc_class_signature = "separated"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
