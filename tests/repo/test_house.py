"""The house rules: floors, budgets, names, docstrings, and documents whose code runs."""

import ast
import collections
import functools
import importlib
import inspect
import io
import pathlib
import re
import subprocess
import sys
import tokenize

import public_names
import pytest
from checkpoints import write_checkpoints, write_shallow
from scripts import run_process, run_script

import specjax

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "specjax"

# From the ground up. A room imports rooms of lower floors; rooms of one floor do not import
# one another. A room is a folder of the package, or one of its top-level files.
FLOORS = (
    ("types", "version"),
    ("implementation", "file_io", "markov_chain"),
    ("core",),
    ("devices",),
    ("checks",),
    ("call_options",),
    ("call_arrays",),
    ("theory", "pallas"),
    ("config",),
    ("samplers", "processing"),
    ("decode",),
    ("engine",),
    ("__init__",),
    ("models", "selftest"),
    ("contrib",),
    ("cli",),
    ("__main__",),
)
# Rooms inside `models`, by the modules that may import them, and what the kernels there may import.
INSIDE_MODELS = {
    "specjax.models.decoder.pallas": ("specjax.models.decoder.decode_ops",),
    "specjax.models.heads": (
        "specjax.models",
        "specjax.models.load_drafter",
    ),
    "specjax.models.sharding": (
        "specjax.models",
        "specjax.models.hf.checkpoint",
    ),
    "specjax.models.hf": (
        "specjax.models",
        "specjax.models.load_drafter",
        "specjax.models.heads.head_formats",
        "specjax.models.heads.head_fields",
        "specjax.models.heads.head_folder",
    ),
}
GROUND_OF_KERNELS = (
    "specjax.pallas.launch",
    "specjax.pallas.kernel_config",
    "specjax.models.decoder.shared_math",
    "specjax.models.decoder.pallas",
)
# Only modules that choose an implementation import the kernels.
CHOOSE_KERNELS = (
    "specjax.samplers.batch",
    "specjax.samplers.gumbel_sample",
    "specjax.processing.logit_cutoff",
    "specjax.models",
)
# Rows of logits are values of `devices.rows`. Only these ask whether a vocabulary is split: where
# rows and their parts are made, and what chooses kernels for them.
MAY_ASK_FOR_A_SPLIT = (
    "specjax.devices",
    "specjax.pallas.split.sample",
    "specjax.pallas.verify",
)
# What stands on the library: it may import what extras install, and the library never imports it.
ON_THE_LIBRARY = ("models", "contrib", "cli")
NOT_BY_IMPORT = {
    "flax",
    "optax",
    "chex",
    "safetensors",
    "tokenizers",
    "jinja2",
    "rich",
    "matplotlib",
    "llguidance",
    "starlette",
    "uvicorn",
    "tunix",
}

FUNCTION_BUDGET, KERNEL_BUDGET, MAX_PARAMETERS = 60, 80, 10

FILES = sorted(PACKAGE.rglob("*.py"))
SCRIPT = ROOT / "_specjax_command.py"
CODE = sorted(
    [SCRIPT]
    + [
        path
        for folder in ("specjax", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
)
# Pages of docs/reference are written by a build, of docstrings whose examples run as doctests.
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages of `models` need other libraries: `test_model_pages` runs them where these are installed.
DOCUMENTS = [path for path in DOCUMENTS if path.parent.name not in ("reference", "models")]
# Python is executed; these are not Python. A block must be one or the other.
NOT_PYTHON = {"console", "text", "toml", "json", "bibtex", "{toctree}"}


def name_of(path):
    return str(path.relative_to(ROOT))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    """Every node of a file, in the order of `ast.walk`, which takes longer than parsing."""
    return tuple(ast.walk(tree_of(path)))


def refuse(offences):
    """Fails with every offence at once, so that a change is mended in one go."""
    offences = list(offences)
    assert not offences, "\n".join([f"{len(offences)}:", *offences])


# Rooms -------------------------------------------------------------------------------------------


def room_of(module):
    """The room that a dotted name inside specjax is found in."""
    parts = module.split(".")[1:]
    if parts and ((PACKAGE / f"{parts[0]}.py").exists() or (PACKAGE / parts[0]).is_dir()):
        return parts[0]
    return "__init__"


def floor_of(room):
    floors = [floor for floor, rooms in enumerate(FLOORS) if room in rooms]
    assert floors, (
        f"{room} has no floor: add it to FLOORS in tests/repo/test_house.py, above all that it "
        "imports and below all that import it."
    )
    return floors[0]


def imports_of(path):
    """Dotted names of everything a file imports, wherever in it."""
    package = module_of(path).split(".")
    package = package if path.stem == "__init__" else package[:-1]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)


def is_in(module, places):
    """Whether a dotted name is one of some modules, or inside one of them."""
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def offences_of_import(here, module):
    """What is wrong with an import of a module of specjax, in sentences."""
    room, other = room_of(here), room_of(module)
    if other != room and floor_of(other) >= floor_of(room):
        yield f"{here} imports {module}, which is not below it."
    if other == "pallas" and room != "pallas" and not is_in(here, CHOOSE_KERNELS):
        yield f"{here} imports {module} and chooses nothing."
    for inside, importers in INSIDE_MODELS.items():
        if is_in(module, [inside]) and not is_in(here, [inside]) and here not in importers:
            yield f"{here} imports {module}: only {importers} may."
    if is_in(here, ["specjax.models.decoder.pallas"]) and not is_in(module, GROUND_OF_KERNELS):
        yield f"{here} imports {module}."


def test_imports_go_downhill_only():
    refuse(
        offence
        for path in FILES
        for module in imports_of(path)
        if module.split(".")[0] == "specjax"
        for offence in offences_of_import(module_of(path), module)
    )


def circles_of(imports):
    """Circles of a graph of modules: the sets of those that reach one another."""
    reached = {}

    def reach(module):
        if module not in reached:
            reached[module], new = set(), [module]
            while new:
                for other in imports.get(new.pop(), ()):
                    if other not in reached[module]:
                        reached[module].add(other)
                        new.append(other)
        return reached[module]

    circles = {
        frozenset(other for other in reach(module) if module in reach(other)) for module in imports
    }
    return sorted(sorted(circle) for circle in circles if circle)


def test_no_files_import_one_another_in_a_circle_also_where_a_function_imports():
    modules = {module_of(path) for path in FILES}
    imports = {
        module_of(path): {
            # A name of a module, or of something in a module.
            name if name in modules else name.rpartition(".")[0]
            for name in imports_of(path)
        }
        for path in FILES
    }
    refuse(" and ".join(circle) for circle in circles_of(imports))
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_an_import_uphill_is_an_offence():
    assert list(offences_of_import("specjax.core.noise", "specjax.engine.engine"))
    assert list(offences_of_import("specjax.decode.step", "specjax.pallas.launch"))
    assert list(offences_of_import("specjax.models.decoder.pallas.matmul", "specjax.core.noise"))
    assert list(offences_of_import("specjax.engine.engine", "specjax.contrib.grammars"))
    assert not list(offences_of_import("specjax.engine.engine", "specjax.core.noise"))


def questions_of_a_split(tree):
    """Lines on which a name or an attribute `split` is compared with None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {getattr(side, "id", getattr(side, "attr", None)) for side in sides}
            is_none = [isinstance(side, ast.Constant) and side.value is None for side in sides]
            if "split" in names and any(is_none):
                yield node.lineno


def test_only_what_makes_rows_or_chooses_kernels_asks_whether_a_vocabulary_is_split():
    refuse(
        f"{name_of(path)}:{line} asks whether a vocabulary is split: specjax.devices.rows knows."
        for path in FILES
        if not is_in(module_of(path), MAY_ASK_FOR_A_SPLIT)
        for line in questions_of_a_split(tree_of(path))
    )
    asked = "split is None\nif None is not options.split: pass\nsplit == 2\nsplit_logits is None"
    assert list(questions_of_a_split(ast.parse(asked))) == [1, 2]


def test_the_core_imports_jax_and_numpy_alone():
    known = {"specjax", "jax", "numpy", *sys.stdlib_module_names}
    core = [path for path in FILES if room_of(module_of(path)) not in ON_THE_LIBRARY]
    refuse(
        f"{name_of(path)} is core and imports {module}."
        for path in core
        for module in imports_of(path)
        if module.split(".")[0] not in known
    )


def test_importing_specjax_imports_nothing_optional_and_starts_no_backend():
    # The number of CPU devices can be changed for as long as no backend has started.
    program = (
        "import sys, specjax, jax; print(*sys.modules); "
        "jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices('cpu')) == 3"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    loaded = {module.split(".")[0] for module in run.stdout.split()}
    assert not loaded & NOT_BY_IMPORT


def test_the_oracle_imports_nothing_from_specjax_or_jax():
    roots = {
        module.split(".")[0] for module in imports_of(ROOT / "tests" / "support" / "oracle.py")
    }
    assert not roots & {"specjax", "jax"}


# Budgets -----------------------------------------------------------------------------------------


def size_of(function):
    """Lines of a function without its docstring."""
    size = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        size -= function.body[0].end_lineno - function.body[0].lineno + 1
    return size


def test_functions_keep_to_their_budgets():
    budgets = {
        path: KERNEL_BUDGET if path.parent.name == "pallas" else FUNCTION_BUDGET for path in FILES
    }
    refuse(
        f"{name_of(path)}: {node.name} has {size_of(node)} lines, more than {budget}."
        for path, budget in budgets.items()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and size_of(node) > budget
    )


# Parsed JSON and fields of a job that are read by their names: the most parameters that a room has
# of this kind. Elsewhere a parameter says what it holds; `Mapping[str, object]` is read by no name.
DICTS_OF_ANYTHING = {
    "specjax.contrib.grammars": 15,
    "specjax.contrib.serve": 2,
    "specjax.contrib.tunix": 1,
    "specjax.models.heads": 6,
    "specjax.models.hf": 16,
    "specjax.decode.compile": 1,
    "specjax.cli": 16,
}
_OF_ANYTHING = r"\b((\w*[dD]ict|\w*Mapping)\[str, Any\]|{})"


def aliases_of_a_dict_of_anything(trees):
    """Names of modules' own that stand for such a type, or for a name that does."""
    values = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                values.setdefault(ast.unparse(target), set()).add(ast.unparse(node.value))
    names, before = set(), None
    while names != before:
        before = set(names)
        whole = re.compile(pattern_of_anything(names))
        names |= {name for name, types in values.items() if any(map(whole.fullmatch, types))}
    return names


def pattern_of_anything(aliases):
    """A regular expression of a dict of anything in an annotation, by any of its names."""
    return _OF_ANYTHING.format("|".join(rf"{name}\b" for name in aliases) or "(?!)")


def parameters_of(function):
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return given[1:] if given and given[0].arg in ("self", "cls") else given


def functions_of(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in nodes_of(path) if isinstance(node, kinds)]


def test_a_function_has_at_most_ten_parameters():
    refuse(
        f"{name_of(path)}: {function.name} has {len(given)}, more than {MAX_PARAMETERS}."
        for path in FILES
        for function in functions_of(path)
        if len(given := parameters_of(function)) > MAX_PARAMETERS
    )


def test_no_parameter_is_a_dict_of_anything_but_for_parsed_json_in_the_rooms_that_read_it():
    pattern = re.compile(pattern_of_anything(aliases_of_a_dict_of_anything(map(tree_of, FILES))))
    found = collections.defaultdict(list)
    for path in FILES:
        room = next((room for room in DICTS_OF_ANYTHING if is_in(module_of(path), [room])), "")
        for function in functions_of(path):
            for one in parameters_of(function):
                if one.annotation and pattern.search(ast.unparse(one.annotation)):
                    found[room].append(f"{name_of(path)}: {function.name}({one.arg})")
    refuse(
        f"{room or 'specjax'} has {len(places)} dicts of anything: {', '.join(places)}."
        for room, places in found.items()
        if len(places) > DICTS_OF_ANYTHING.get(room, 0)
    )


def test_an_alias_of_a_dict_of_anything_is_one_as_is_a_mapping():
    code = "A: TypeAlias = dict[str, Any]\nB = A\nC = Mapping[str, Any]\nD = dict[str, int]"
    names = aliases_of_a_dict_of_anything([ast.parse(code)])
    assert names == {"A", "B", "C"}
    held = re.compile(pattern_of_anything(names))
    assert all(map(held.search, ("list[B]", "A | None", "MutableMapping[str, Any]")))
    assert not any(map(held.search, ("D", "Mapping[str, object]", "Callable[[], Any]", "AB")))


# What one room decides, and hands out as a value, by the names that are compared with None.
ASKED_IN = {
    "draft_history": ("specjax.decode.adaptive_k",),
    "k_by_rate": ("specjax.decode.adaptive_k", "specjax.cli.sweep.measure"),
    "step_costs": ("specjax.config", "specjax.cli"),
    "repetition_penalty": ("specjax.processing",),
    "frequency_penalty": ("specjax.processing",),
    "presence_penalty": ("specjax.processing",),
    "bad_words": ("specjax.processing",),
}
# Axes that several rooms ask for, and how often each does at most.
ASKED_AT_MOST = {
    "drafter": {"decode": 19, "cli": 11},
    "grammar": {"processing": 5, "engine": 1, "cli": 2},
    "placement": {"devices": 3, "samplers": 1, "decode": 5, "engine": 2, "models": 7, "cli": 1},
}


def asked_for_none(path):
    """Names and attributes that a file compares with None by `is` or `is not`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            other = node.comparators[0]
            if isinstance(other, ast.Constant) and other.value is None:
                yield getattr(node.left, "attr", getattr(node.left, "id", ""))


def test_an_axis_is_asked_for_none_in_one_room():
    refuse(
        f"{name_of(path)} asks whether {name} is None: {ASKED_IN[name]} does."
        for path in FILES
        for name in asked_for_none(path)
        if name in ASKED_IN and not is_in(module_of(path), ASKED_IN[name])
    )


def test_an_axis_is_asked_for_none_in_no_more_places_than_it_was():
    counted = {name: collections.Counter() for name in ASKED_AT_MOST}
    for path in FILES:
        for name in asked_for_none(path):
            if name in counted:
                counted[name][room_of(module_of(path))] += 1
    refuse(
        f"{room} asks {number} times whether {name} is None: at most "
        f"{ASKED_AT_MOST[name].get(room, 0)} are left. A value that needs no question is better."
        for name, numbers in counted.items()
        for room, number in numbers.items()
        if number > ASKED_AT_MOST[name].get(room, 0)
    )


def test_no_checker_is_told_to_look_away():
    told = re.compile(r"type:\s*ignore|noqa|mypy:|pyright:|ruff:")
    texts = {path: path.read_text() for path in CODE}
    refuse(
        f"{name_of(path)}:{token.start[0]}: {token.string}"
        for path, text in texts.items()
        # A text that says it nowhere is not read word by word, which takes longer.
        if told.search(text)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and told.search(token.string)
    )
    refuse(
        f"{name_of(path)} asks for no_type_check."
        for path, text in texts.items()
        if "no_type_check" in text
        for node in nodes_of(path)
        if "no_type_check" in (getattr(node, "attr", ""), getattr(node, "id", ""))
    )


# Names and docstrings ----------------------------------------------------------------------------


def public_definitions(path):
    """Names without an underscore that a file defines; in an `__init__`, those it gathers."""
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            names = [node.target.id]
        elif isinstance(node, ast.ImportFrom) and path.stem == "__init__":
            names = [alias.asname or alias.name for alias in node.names]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def offences_of_all(path):
    """What is wrong with the `__all__` of a file, in sentences."""
    defined = set(public_definitions(path))
    is_room = path.stem == "__init__" or module_of(path) in public_names.ROOMS
    names = getattr(importlib.import_module(module_of(path)), "__all__", None)
    if names is None:
        if is_room and defined:
            yield f"{name_of(path)} has no __all__."
        return
    if not is_room:
        yield f"{name_of(path)} has an __all__, and is not public."
    if list(names) != sorted(names):
        yield f"__all__ of {name_of(path)} is not sorted."
    for name in sorted({name for name in names if not name.startswith("_")} ^ defined):
        yield f"{name_of(path)}: {name} is in __all__ or defined here, but not both."


def test_public_modules_alone_have_all_which_is_sorted_and_what_they_define():
    paths = [path for path in FILES if path.stem != "__main__"]
    refuse(offence for path in paths for offence in offences_of_all(path))


def undocumented(path):
    """Public names of a file, and of its classes, without a docstring."""
    if not ast.get_docstring(tree_of(path)):
        yield "its idea, in its first line,"
    for node in tree_of(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        for member in [node, *(node.body if isinstance(node, ast.ClassDef) else [])]:
            is_public = isinstance(member, ast.FunctionDef | ast.ClassDef) and member.name[0] != "_"
            if is_public and not ast.get_docstring(member):
                yield member.name


def test_every_public_name_is_documented():
    refuse(
        f"{name_of(path)}: {name} is not documented."
        for path in FILES
        for name in undocumented(path)
    )


def offences_of_docstring(name, function):
    """What the docstring of a public function lacks, in sentences."""
    sections = re.split(r"^(\w+):$", inspect.getdoc(function) or "", flags=re.MULTILINE)
    sections = dict(zip(sections[1::2], sections[2::2], strict=True))
    signature = inspect.signature(function)
    for parameter in signature.parameters:
        if not re.search(rf"\b{parameter}\b[^:]*:", sections.get("Args", "")):
            yield f"Args of {name} does not name {parameter}."
    if signature.return_annotation is not None and "Returns" not in sections:
        yield f"{name} does not say what it returns."
    if ">>>" not in sections.get("Example", ""):
        yield f"{name} has no example that runs."


def test_a_public_function_names_its_arguments_and_what_it_returns():
    refuse(
        offence
        for room in (specjax, specjax.rules, specjax.theory)
        for name in room.__all__
        if callable(getattr(room, name)) and name.islower()
        for offence in offences_of_docstring(name, getattr(room, name))
    )


def test_the_docstring_of_a_room_names_its_modules():
    refuse(
        f"{name_of(room)} does not name {path.stem}."
        for room in FILES
        # What `specjax` itself holds is public names, which it lists by what they do.
        if room.stem == "__init__" and room.parent != PACKAGE
        for path in sorted(room.parent.glob("*.py"))
        if not path.stem.startswith("__")
        and not re.search(rf"\b{path.stem}\b", ast.get_docstring(tree_of(room)) or "")
    )


# Documents ---------------------------------------------------------------------------------------


@pytest.mark.lenient
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_the_code_in_a_document_runs(path, tmp_path, monkeypatch):
    program, language, num_python = [], None, 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        fence = re.match(r"\s*```+\s*(\S*)", line)
        if fence:
            language = fence[1] if language is None else None
            known = language in (None, "python", *NOT_PYTHON)
            assert known, f"{name_of(path)}:{number}: a block of {language!r} is not checked here."
            num_python += language == "python"
        # Blank lines for all that is not Python: line numbers of errors are the document's.
        program.append(line if language == "python" and not fence else "")
    assert num_python or path.name != "README.md", "README.md shows no Python."
    if "path/to/" in path.read_text():
        write_checkpoints(tmp_path)
    script = tmp_path / f"{path.stem}.py"
    script.write_text("\n".join(program))
    # README's in a process and with the models that ship, as one who copies it runs it.
    if path.name == "README.md":
        run_process(script, cwd=tmp_path)
    elif num_python:
        # In others one layer of these models, which all go through, stands for eight.
        shallow = functools.cache(lambda role: write_shallow(tmp_path / role, role, 1))
        monkeypatch.setattr(specjax.models, "pretrained_folder", shallow)
        run_script(monkeypatch, script, cwd=tmp_path)
