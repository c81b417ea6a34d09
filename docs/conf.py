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
BLOB = f"{REPOSITORY}/blob/main"
RAW = "https://raw.githubusercontent.com/specjax/specjax/main"

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
    pictures to files. Links to the repository's docs/ stay in the site. The first time that a page
    names a public name as code, the name leads to its page in the reference.
    """
    text = re.sub(r"<!-- (\S+\.md)(?:, (.*?))? stands here -->", quoted_text, text)
    here, root = "../" * depth, "../" * (depth + 1)

    def moved(match):
        start, target, end = match.groups()
        if target.startswith(root) and not target.startswith(f"{root}../"):
            is_picture = target.endswith((".png", ".svg"))
            target = f"{RAW if is_picture else BLOB}/{target.removeprefix(root)}"
        target = re.sub(f"^(?:{BLOB}|{RAW})/docs/", here, target)
        return start + target.replace(f"{RAW}/", root) + end

    text = re.sub(r"(\]\()([^()\s]+)(\))", moved, text)
    text = re.sub(r"^(\[[^\]]+\]: )(\S+)()$", moved, text, flags=re.MULTILINE)
    return linked_names(text, here)


def quoted_text(match):
    """Returns what a mark of `site_text` names, with links from the root of the repository."""
    text = (HERE.parent / match[1]).read_text(encoding="utf-8").partition("\n")[2]
    if match[2]:
        title = rf"^#+ {re.escape(match[2])}\n(.*?)(?=^#|\Z)"
        text = re.findall(title, text, re.MULTILINE | re.DOTALL)[0]
    return re.sub(r"\]\((?!https?:|#)([^()\s]+)\)", rf"]({BLOB}/\1)", text)


def linked_names(text, here):
    """Returns Markdown whose first mention of each public name leads to its page."""
    seen = set()

    def linked(match):
        name = match[1].removeprefix("specjax.")
        if name not in reference_pages.NAMES or name in seen:
            return match[0]
        seen.add(name)
        return f"[{match[0]}]({here}reference/{name}.md)"

    # Blocks of code, headings and links stay as they are.
    parts = re.split(
        r"(^```.*?^```|^#.*?$|\[[^\]]*\]\([^)]*\))", text, flags=re.MULTILINE | re.DOTALL
    )
    pattern = r"(?<!`)`([\w.]+)(?:\([^`]*\))?`(?!`)"
    return "".join(part if i % 2 else re.sub(pattern, linked, part) for i, part in enumerate(parts))


def rewrite_source(app, name, source):
    """Gives Sphinx `site_text` in place of a file's own text."""
    if not name.startswith("reference/"):
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
