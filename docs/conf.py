"""Sphinx's configuration: `make docs` builds the site into build/docs, without the network."""

import pathlib
import re
import sys

import latex2mathml.converter
from docutils import nodes

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import reference_pages  # noqa: E402

import specjax  # noqa: E402

REPOSITORY = "https://github.com/specjax/specjax"
RAW = "https://raw.githubusercontent.com/specjax/specjax/main"

project = "specjax"
author = "The specjax authors"
copyright = "The specjax authors, Apache License 2.0"
version = release = specjax.__version__

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"specjax {release}"
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}
exclude_patterns = ["_build"]
pygments_style = "friendly"
# Output of programs and shell lines stay as they are where a lexer does not know a character.
suppress_warnings = ["misc.highlighting_failure"]


def site_text(text, depth):
    """Returns a page's Markdown with the parts of root files, and with links as the site has them.

    `<!-- FILE stands here -->` becomes a file of the root without its title, and `<!-- FILE, TITLE
    stands here -->` its section of that title. Links of docs/ that leave it lead to the repository,
    pictures to files. Links to the repository's docs/ stay in the site.
    """
    text = re.sub(r"<!-- (\S+\.md)(?:, (.*?))? stands here -->", quoted_text, text)
    here, up = "../" * depth, r"\.\./" * (depth + 1)
    text = re.sub(rf"\]\({up}(?!\.\.)([^()\s]+\.(?:png|svg))\)", rf"]({RAW}/\1)", text)
    text = re.sub(rf"\]\({up}(?!\.\.)([^()\s]+)\)", rf"]({REPOSITORY}/blob/main/\1)", text)
    text = text.replace(f"]({REPOSITORY}/blob/main/docs/", f"]({here}")
    return text.replace(f"]({RAW}/docs/", f"]({here}").replace(f"]({RAW}/", f"](../{here}")


def quoted_text(match):
    """Returns what a mark of `site_text` names, with links from the root of the repository."""
    text = (HERE.parent / match[1]).read_text(encoding="utf-8").partition("\n")[2]
    if match[2]:
        title = rf"^#+ {re.escape(match[2])}\n(.*?)(?=^#|\Z)"
        text = re.findall(title, text, re.MULTILINE | re.DOTALL)[0]
    return re.sub(r"\]\((?!https?:|#)([^()\s]+)\)", rf"]({REPOSITORY}/blob/main/\1)", text)


def rewrite_source(app, name, source):
    """Gives Sphinx `site_text` in place of a file's own text."""
    source[0] = site_text(source[0], name.count("/"))


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
