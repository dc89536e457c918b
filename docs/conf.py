"""How the documentation is built: ``sphinx-build -W docs build/site``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from onnxq.version import VERSION

sys.path.insert(0, str(Path(__file__).parent))
from generated import fill

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


def setup(app: Any) -> None:
    """Fill pages with tables of the product."""
    app.connect("source-read", lambda _app, _name, source: source.__setitem__(0, fill(source[0])))
