"""Pages of the reference: one for each public name, written from its docstring when docs are built.

`PAGES` says in which section a name stands. `write(folder)` writes an index and a page per name, as
Markdown that Sphinx reads. A docstring is Markdown already, but for formulas and for its sections
(`Args:`, `Returns:` and others), which become lists here.
"""

import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterable

# Section, a sentence about it, and its names: those of `specjax` unless a room is named.
PAGES = (
    (
        "Verify one step",
        "Drafted tokens and the target's logits give accepted tokens.",
        """rejection_sample Draft RaggedDraft Verification gumbel_sample Sample Stream Options
        tree_rejection_sample TreeDraft TreeVerification draft_from_probs gather_drafts""",
    ),
    (
        "Rules of acceptance",
        "Values of the argument `rule` of `rejection_sample`.",
        """rules.standard rules.block rules.coupled rules.synthetic rules.lenience
        rules.typical_acceptance rules.relaxed rules.ensemble Rule""",
    ),
    (
        "Decode a batch",
        "The whole loop: draft, verify, commit.",
        """generate Generation SpeculativeConfig StepCosts measure_step_costs LoopOptions
        memory_needs MemoryNeeds unpad init step DecodeState Settings
        StepInfo compile_generate CompiledGenerate load_compiled enable_compilation_cache""",
    ),
    (
        "Parts of a loop of your own",
        "Functions for one step of your own loop.",
        """propose DraftInputs commit Finish Origin Metrics init_metrics update_metrics""",
    ),
    (
        "Models and drafters",
        "A model or a drafter is parameters and pure functions.",
        """Model Drafter model_drafter ngram_drafter whole_prompt_drafter
        markov_chain.markov_chain""",
    ),
    (
        "Serve requests",
        "Requests that come at any time share one compiled step.",
        """Engine Request AsyncEngine RequestStream StreamChunk FinishReason Usage
        openai_finish_reason""",
    ),
    (
        "Evaluate",
        "Log-probabilities of given texts, and whether a model's rows depend on their neighbours.",
        """score TextScores check_row_invariance RowInvariance RowCase""",
    ),
    (
        "Sampling parameters",
        "Cutoffs, penalties, masks, grammars, listed log-probabilities and kept tokens.",
        """SamplingParams apply_sampling process_logits logit_cutoff top_logprobs TopLogprobs
        kept_tokens KeptTokens kept_logprobs
        History TokenCounts count_tokens update_counts bias_array bad_words_array Grammar RowMasks
        Matcher contrib.grammars.json_schema_grammar contrib.grammars.llguidance_matchers
        contrib.grammars.min_tokens_grammar
        contrib.grammars.token_bytes""",
    ),
    (
        "Synthetic acceptance",
        "Rates at which `rules.synthetic` accepts.",
        """rates_for_length geometric_rates conditional_rates expected_acceptance_length""",
    ),
    (
        "Theory",
        "Expected acceptance and speed, as formulas.",
        """theory.acceptance_rate theory.acceptance_lengths theory.best_k theory.BestK
        theory.expected_acceptance_length theory.match_probability theory.optimal_acceptance_rate
        theory.rates_given_text theory.unconditional_rates""",
    ),
    (
        "Checkpoints",
        "Folders of Hugging Face's format. They need the extra `flax`.",
        """models.load models.load_tokenizer models.load_config models.load_shapes models.save
        models.chat_prompt models.pretrained_folder models.split_model models.load_drafter
        models.read_draft models.DraftInfo models.draft_kind""",
    ),
    (
        "The decoder and draft heads",
        "The models of this package as modules. They need the extra `flax`.",
        """models.TransformerConfig models.RopeScaling models.Transformer models.build
        models.functions models.causal_hidden models.causal_taps models.Eagle3Config
        models.build_eagle3 models.unrolled_eagle3 models.eagle3_drafter models.load_eagle3
        models.save_eagle3 models.DFlashConfig models.build_dflash models.dflash_drafter
        models.load_dflash models.save_dflash""",
    ),
    (
        "google-tunix",
        "An adapter. It needs the extra `tunix`.",
        """contrib.tunix.tunix_model contrib.tunix.SpecRollout
        contrib.tunix.group_lookup_drafter""",
    ),
)
NAMES = tuple(name for _, _, names in PAGES for name in names.split())
_SECTIONS = (
    "Args",
    "Attributes",
    "Returns",
    "Yields",
    "Raises",
    "Example",
    "Examples",
    "References",
)
_LISTS = ("Args", "Attributes", "Raises")


def write(folder: pathlib.Path) -> None:
    """Writes every page into `folder`, and removes pages of names that are gone."""
    folder.mkdir(exist_ok=True)
    pages = {f"{name}.md": page(name) for name in NAMES} | {"index.md": index()}
    pages |= {f"{_file(title)}.md": section(*row) for row in PAGES for title in row[:1]}
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        # Sphinx reads again what is newer than its copy.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def index() -> str:
    """Returns the first page: all names, by section."""
    rows = []
    for title, _, names in PAGES:
        links = ", ".join(_text(f"`{name}`") for name in names.split())
        rows.append(f"| [{title}]({_file(title)}.md) | {links} |")
    return (
        "# Reference\n\nA page for each public name. What has no page here is private.\n\n"
        "| | |\n|---|---|\n" + "\n".join(rows) + "\n\n" + _toctree(_file(row[0]) for row in PAGES)
    )


def section(title: str, sentence: str, names: str) -> str:
    """Returns the page of a section: its names, each with the first line of its docstring."""
    rows = [f"| [`{name}`]({name}.md) | {_text(_first_line(name))} |" for name in names.split()]
    table = "| | |\n|---|---|\n" + "\n".join(rows)
    return f"# {title}\n\n{sentence}\n\n{table}\n"


def page(name: str) -> str:
    """Returns the page of a public name, without the `specjax.` before it."""
    value = find(name)
    kind = "class" if isinstance(value, type) else "function"
    body = _docstring(inspect.getdoc(value) or "", name)
    if isinstance(value, type):
        body += "\n" + "\n".join(_members(value, name))
    signature = _directive(kind, f"specjax.{name}{_signature(value)}", body, 5)
    # A sidebar of a hundred names more would take half of a build's time.
    return f"---\norphan: true\n---\n\n# {name}\n\n{signature}\n{_siblings(name)}\n"


def find(name: str) -> object:
    """Returns the value of a name that may stand in a room, such as `theory.best_k`."""
    room, _, attribute = f"specjax.{name}".rpartition(".")
    if room == "specjax.rules":
        room = "specjax.core.rules"
    return getattr(importlib.import_module(room), attribute)


def _directive(kind: str, signature: str, body: str, num_ticks: int) -> str:
    fence = "`" * num_ticks
    return f"{fence}{{py:{kind}}} {signature}\n{body.rstrip()}\n{fence}\n"


def _file(title: str) -> str:
    return title.lower().replace(" ", "-")


def _toctree(pages: Iterable[str]) -> str:
    return "```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def _siblings(name: str) -> str:
    """Returns a line that leads to the section of a name, and to its other names."""
    title, names = next((row[0], row[2].split()) for row in PAGES if name in row[2].split())
    links = ", ".join(f"[`{other}`]({other}.md)" for other in names if other != name)
    return f"See also, in [{title}]({_file(title)}.md): {links}"


def _first_line(name: str) -> str:
    return (inspect.getdoc(find(name)) or "").partition("\n")[0]


def _members(value: type, name: str) -> list[str]:
    """Returns the public methods and properties of a class, and the constants of a plain one."""
    parts = []
    for attribute, member in list(vars(value).items()):
        if attribute.startswith("_") or attribute in getattr(value, "__annotations__", {}):
            continue
        if isinstance(member, str | int):
            parts.append(_directive("attribute", f"{attribute} = {member!r}", "", 4))
            continue
        function = getattr(member, "__func__", getattr(member, "fget", member))
        text = inspect.getdoc(function) if inspect.isroutine(function) else None
        if not text or getattr(function, "__module__", "").split(".")[0] != "specjax":
            continue
        kind = "property" if isinstance(member, property) else "method"
        signature = "" if kind == "property" else _signature(getattr(value, attribute))
        parts.append(_directive(kind, attribute + signature, _docstring(text, name), 4))
    return parts


def _signature(value: object) -> str:
    """Returns the arguments of a call without their types, which `Args` has."""
    if not callable(value) or getattr(value, "_is_protocol", False):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    parameters = list(signature.parameters.values())
    if [p.name for p in parameters] == ["args", "kwargs"] and isinstance(value, type):
        # A module of Flax says by its `__init__` what it takes.
        parameters = list(inspect.signature(value.__init__).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    bare = [
        p.replace(annotation=inspect.Parameter.empty, default=_shown(p.default)) for p in parameters
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _shown(default: object) -> object:
    """Returns a default as it is, or the name of a type, a function or another value's type."""
    if default is inspect.Parameter.empty or isinstance(default, str | int | float | tuple | None):
        return default
    plain = "=" not in repr(default) and "<" not in repr(default)
    return _Named(
        getattr(default, "__name__", repr(default) if plain else f"{type(default).__name__}()")
    )


def _docstring(text: str, here: str) -> str:
    """Returns a docstring as Markdown, with its sections as lists and examples."""
    pieces = re.split(rf"^({'|'.join(_SECTIONS)}):\n", text, flags=re.MULTILINE)
    parts = [_prose(pieces[0], here)]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        body = textwrap.dedent(body).strip("\n")
        if title in _LISTS:
            items = re.split(r"^(?=\S)", body, flags=re.MULTILINE)
            body = "\n".join(_item(item, here) for item in items if item.strip())
        elif title.startswith("Example"):
            body = _examples(body, here)
        else:
            body = _prose(body, here)
        parts.append(f"**{'Fields' if title == 'Attributes' else title}**\n\n{body}\n")
    return "\n".join(parts)


def _item(text: str, here: str) -> str:
    """Returns an item of a list: `name: what it is`, continued on lines that are indented."""
    name, colon, rest = text.strip().partition(":")
    if not colon:
        return "- " + _prose(text.strip(), here).strip()
    rest = " ".join(line.strip() for line in rest.splitlines())
    names = ", ".join(f"`{part.strip()}`" for part in name.split(","))
    return f"- {names}: {_prose(rest, here).strip()}"


def _examples(text: str, here: str) -> str:
    """Returns examples in fences, and the sentences between them as they are."""
    parts = []
    for block in re.split(r"\n\n+", text):
        code = block.startswith(">>>")
        parts.append(f"```pycon\n{block}\n```" if code else _prose(block, here))
    return "\n\n".join(parts)


def _prose(text: str, here: str) -> str:
    """Returns paragraphs as Markdown: formulas between dollars, names as links to their pages."""
    text = re.sub(r"``([^`\n]+)``", r"`\1`", text)
    text = re.sub(
        r"^\.\. math::(.*(?:\n(?:[ ]+.*|(?=\n[ ])))*)", _display, text, flags=re.MULTILINE
    )
    text = re.sub(r":math:`([^`]+)`", lambda match: f"${' '.join(match[1].split())}$", text)
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    lines = text.splitlines()
    return (
        "\n".join(line if line.startswith("    ") else _text(line, here) for line in lines) + "\n"
    )


def _display(match: re.Match) -> str:
    return "\n\n$$\n" + textwrap.dedent(match[1]).strip() + "\n$$\n\n"


def _text(line: str, here: str = "") -> str:
    """Returns a line whose public names are links, and whose stars and angles are themselves."""
    parts = re.split(r"(`[^`]*`|\$[^$]*\$)", line)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = re.sub(r"([*<])", r"\\\1", part) if not part.startswith("$$") else part
        elif part.startswith("`"):
            target = _linked(re.sub(r"^specjax\.|\(.*", "", part.strip("`")), here)
            parts[i] = f"[{part}]({target}.md)" if target else part
    return "".join(parts)


def _linked(name: str, here: str) -> str | None:
    """Returns the page to which a name leads: that of the same room before one of `specjax`."""
    if not here:
        return name if name in NAMES else None
    if hasattr(find(here), name):  # A method of that class, or a field.
        return None
    room, _, own = here.rpartition(".")
    known = [page for page in (f"{room}.{name}".lstrip("."), name) if page in NAMES]
    return known[0] if known and name != own else None
