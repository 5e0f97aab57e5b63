"""How Sphinx builds the docs: ``make docs``. A warning fails the build."""

from importlib import metadata

project = "Paceline"
author = "Paceline contributors"
project_copyright = "Paceline contributors"
release = metadata.version("paceline")

extensions = [
    "myst_parser",  # guides are Markdown
    "sphinx.ext.autodoc",  # the reference is made from docstrings
    "sphinx.ext.napoleon",  # which have Google's sections: Args, Raises
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "Paceline"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Attributes are no link targets: `bytes` in a signature is Python's, no attribute of ours.
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
