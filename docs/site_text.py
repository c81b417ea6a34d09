"""Pages of docs/ as the site shows them: links, names of the reference, and what root files say.

A page reads well in the repository, too: there a link leads to a file, and a mark to nothing.
"""

import pathlib
import re

import reference_pages

ROOT = pathlib.Path(__file__).parents[1]
REPOSITORY = "https://github.com/specjax/specjax"
BLOB = f"{REPOSITORY}/blob/main"
RAW = "https://raw.githubusercontent.com/specjax/specjax/main"


def adapt(text: str, depth: int) -> str:
    """Returns the Markdown of a page that lies `depth` folders below docs/, as the site has it.

    `<!-- FILE stands here -->` becomes a file of the root without its title, and `<!-- FILE, TITLE
    stands here -->` its section of that title. Links of docs/ that leave it lead to the repository,
    pictures to files. Links to the repository's docs/ stay in the site. The first time that a page
    names a public name as code, the name leads to its page in the reference.
    """
    text = re.sub(r"<!-- (\S+\.md)(?:, (.*?))? stands here -->", _quoted, text)
    here, root = "../" * depth, "../" * (depth + 1)

    def moved(match: re.Match) -> str:
        start, target, end = match.groups()
        if target.startswith(root) and not target.startswith(f"{root}../"):
            is_picture = target.endswith((".png", ".svg"))
            target = f"{RAW if is_picture else BLOB}/{target.removeprefix(root)}"
        target = re.sub(f"^(?:{BLOB}|{RAW})/docs/", here, target)
        return start + target.replace(f"{RAW}/", root) + end

    text = re.sub(r"(\]\()([^()\s]+)(\))", moved, text)
    text = re.sub(r"^(\[[^\]]+\]: )(\S+)()$", moved, text, flags=re.MULTILINE)
    return _with_links(text, here)


def _quoted(match: re.Match) -> str:
    """Returns what a mark of `adapt` names, with links from the root of the repository."""
    text = (ROOT / match[1]).read_text(encoding="utf-8").partition("\n")[2]
    if match[2]:
        title = rf"^#+ {re.escape(match[2])}\n(.*?)(?=^#|\Z)"
        text = re.findall(title, text, re.MULTILINE | re.DOTALL)[0]
    return re.sub(r"\]\((?!https?:|#)([^()\s]+)\)", rf"]({BLOB}/\1)", text)


def _with_links(text: str, here: str) -> str:
    """Returns Markdown whose first mention of each public name leads to its page."""
    seen = set()

    def linked(match: re.Match) -> str:
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
