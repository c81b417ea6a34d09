"""Sphinx's configuration: `make docs` builds the site into build/docs, without the network."""

import importlib
import pathlib
import sys

import latex2mathml.converter
from docutils import nodes

import specjax

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
reference_pages = importlib.import_module("reference_pages")
site_text = importlib.import_module("site_text")

project = "specjax"
author = "The specjax authors"
copyright = "The specjax authors, Apache License 2.0"
version = release = specjax.__version__

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_title = f"specjax {release}"
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {
    "source_repository": site_text.REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    # Pages of the reference have no file to view or edit.
    "top_of_page_buttons": [],
}
exclude_patterns = ["_build"]
pygments_style = "friendly"
# Output of programs and shell lines stay as they are where a lexer does not know a character.
suppress_warnings = ["misc.highlighting_failure"]


def rewrite_source(app, name, source):
    """Gives Sphinx a page as the site has it."""
    if not name.startswith("reference/"):
        source[0] = site_text.adapt(source[0], name.count("/"))


def visit_math(self, node):
    """A formula becomes MathML, which browsers draw by themselves."""
    self.body.append(latex2mathml.converter.convert(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math"))
    self.body.append(latex2mathml.converter.convert(node.astext(), display="block") + "</div>")
    raise nodes.SkipNode


def setup(app):
    reference_pages.write(HERE / "reference")
    app.connect("source-read", rewrite_source)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
