"""The house rules: floors, budgets, names, docstrings, and documents whose code runs."""

import ast
import functools
import importlib
import inspect
import io
import pathlib
import re
import subprocess
import sys
import tokenize

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
    ("draft", "verification", "sample", "model"),
    ("acceptance_rates", "markov_chain", "mesh", "implementation", "file_io", "vocabulary_split"),
    ("call_arrays", "checks", "map_parts", "programs"),
    ("core",),
    ("config", "pallas"),
    ("samplers", "processing", "theory"),
    ("decode",),
    ("grammars",),
    ("engine",),
    ("__init__", "models"),
    ("adapters", "cli"),
    ("__main__",),
)
# Rooms inside `models`, by the modules that may import them, and what the kernels there may import.
INSIDE_MODELS = {
    "specjax.models.pallas": ("specjax.models.kernel_ops",),
    "specjax.models.heads": ("specjax.models", "specjax.models.load_drafter"),
    "specjax.models.shares": (
        "specjax.models",
        "specjax.models.hf.checkpoint",
        "specjax.models.hf.read_shares",
    ),
    "specjax.models.hf": (
        "specjax.models",
        "specjax.models.load_drafter",
        "specjax.models.heads.dflash_folder",
        "specjax.models.heads.dflash_writer",
        "specjax.models.heads.eagle3_folder",
        "specjax.models.heads.eagle3_writer",
        "specjax.models.heads.folder_kind",
        "specjax.models.heads.head_fields",
        "specjax.models.heads.head_tensors",
        "specjax.models.heads.head_writer",
    ),
}
GROUND_OF_KERNELS = (
    "specjax.pallas.launch",
    "specjax.pallas.kernel_config",
    "specjax.models.shared_math",
    "specjax.models.pallas",
)
# Only modules that choose an implementation import the kernels.
CHOOSE_KERNELS = (
    "specjax.samplers.batch",
    "specjax.samplers.gumbel_sample",
    "specjax.processing.logit_cutoff",
    "specjax.models",
)
ANY_THIRD_PARTY = ("adapters", "models", "cli")
MOST_MODULES = 15
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
    "tunix",
}

FILE_BUDGET, FUNCTION_BUDGET, KERNEL_BUDGET = 500, 60, 80

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
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Python is executed; these are not Python. A block must be one or the other.
NOT_PYTHON = {"console", "text", "toml", "json", "bibtex"}


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


def for_each(paths):
    return pytest.mark.parametrize("path", paths, ids=name_of)


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


@for_each(FILES)
def test_imports_go_downhill_only(path):
    here = module_of(path)
    room = room_of(here)
    for module in imports_of(path):
        if module.split(".")[0] != "specjax":
            continue
        other = room_of(module)
        is_below = other == room or floor_of(other) < floor_of(room)
        assert is_below, f"{here} imports {module}, which is not below it."
        if other == "pallas" and room != "pallas":
            assert is_in(here, CHOOSE_KERNELS), f"{here} imports {module} and chooses nothing."
        for inside, importers in INSIDE_MODELS.items():
            if is_in(module, [inside]) and not is_in(here, [inside]):
                assert here in importers, f"{here} imports {module}: only {importers} may."
        if is_in(here, ["specjax.models.pallas"]):
            assert is_in(module, GROUND_OF_KERNELS), f"{here} imports {module}."


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=name_of)
def test_no_room_is_crowded(folder):
    modules = [path for path in FILES if path.parent == folder and path.stem != "__init__"]
    assert len(modules) <= MOST_MODULES


@for_each(FILES)
def test_the_core_imports_jax_and_numpy_alone(path):
    room = room_of(module_of(path))
    if room in ANY_THIRD_PARTY:
        return
    roots = {module.split(".")[0] for module in imports_of(path)}
    foreign = roots - {"specjax", "jax", "numpy"} - sys.stdlib_module_names
    assert not foreign, f"{name_of(path)} is core and imports {sorted(foreign)}."


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


@for_each(FILES)
def test_files_and_functions_keep_to_their_budgets(path):
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= FILE_BUDGET, f"{name_of(path)} has {num_lines} lines: it is two ideas."
    budget = KERNEL_BUDGET if path.parent.name == "pallas" else FUNCTION_BUDGET
    for node in nodes_of(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        size = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node) is not None:
            size -= node.body[0].end_lineno - node.body[0].lineno + 1
        assert size <= budget, f"{name_of(path)}: {node.name} has {size} lines, more than {budget}."


@for_each(CODE)
def test_no_checker_is_told_to_look_away(path):
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            assert not re.search(r"type:\s*ignore|noqa|mypy:|pyright:|ruff:", token.string), (
                f"{name_of(path)}:{token.start[0]}: {token.string}"
            )
    assert "no_type_check" not in {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute | ast.Name)
    }


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


@for_each([path for path in FILES if path.stem != "__main__"])
def test_all_is_sorted_and_is_what_the_module_defines(path):
    module = importlib.import_module(module_of(path))
    defined = sorted(set(public_definitions(path)))
    if path.stem == "__init__" and not defined:
        return
    names = getattr(module, "__all__", None)
    assert names is not None, f"{name_of(path)} has no __all__."
    assert list(names) == sorted(names), f"__all__ of {name_of(path)} is not sorted."
    public = [name for name in names if not name.startswith("_")]
    unlike = sorted(set(public) ^ set(defined))
    assert not unlike, f"{name_of(path)}: {unlike} are in __all__ or defined here, but not both."


@for_each(FILES)
def test_every_public_name_is_documented(path):
    module = importlib.import_module(module_of(path))
    assert inspect.getdoc(module), f"{name_of(path)} does not say its idea in its first line."
    for node in tree_of(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        members = [node, *(node.body if isinstance(node, ast.ClassDef) else [])]
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.ClassDef) and member.name[0] != "_":
                assert ast.get_docstring(member), f"{name_of(path)}: {member.name} has no docstring"


@pytest.mark.parametrize(
    ("room", "name"),
    [
        (room, name)
        for room in (specjax, specjax.theory)
        for name in room.__all__
        if callable(getattr(room, name)) and name.islower()
    ],
)
def test_a_public_function_names_its_arguments_and_what_it_returns(room, name):
    function = getattr(room, name)
    sections = re.split(r"^(\w+):$", inspect.getdoc(function) or "", flags=re.MULTILINE)
    sections = dict(zip(sections[1::2], sections[2::2], strict=True))
    signature = inspect.signature(function)
    missing = [
        parameter
        for parameter in signature.parameters
        if not re.search(rf"\b{parameter}\b[^:]*:", sections.get("Args", ""))
    ]
    assert not missing, f"Args of {name} does not name {missing}."
    assert signature.return_annotation is None or "Returns" in sections
    assert ">>>" in sections.get("Example", ""), f"{name} has no example that runs."


# Documents ---------------------------------------------------------------------------------------


@pytest.mark.lenient
@for_each(DOCUMENTS)
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
