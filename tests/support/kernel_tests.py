"""The tests of a kernel file, which `make kernels K=next_token` runs, by names and imports alone.

A test is of a module if its node id has the module's name, or its folder's, or if its file imports
the module; one of `make checks`, if its file has the name. Where none of these runs in the
interpreter, the tests of the modules that import the module follow, and so on.
"""

import ast
import functools
import pathlib
import re

from references import leads_to, names_of, uses

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("specjax/pallas", "specjax/models/decoder/pallas")


@functools.cache
def modules():
    """Returns the files of the package, by their dotted names."""
    paths = sorted(ROOT.glob("specjax/**/*.py"))
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    return {
        ".".join(each).removesuffix(".__init__"): path
        for each, path in zip(parts, paths, strict=True)
    }


def kernel_modules(name=""):
    """Returns the modules with kernels of a name, such as verify, block/verify or a folder's."""
    found = []
    for module, path in modules().items():
        place = path.relative_to(ROOT).with_suffix("").as_posix()
        is_named = not name or f"/{place}".endswith(f"/{name}") or f"/{name}/" in place
        if place.startswith(ROOMS) and path.stem != "__init__" and is_named:
            found.append(module)
    return found


@functools.cache
def imports_of(path):
    """Returns the modules of specjax that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules().keys()


def _word_of(module):
    """Returns the name of a module that is in tests' names: its folder's, if it has one there."""
    return module.rpartition(".pallas.")[2].split(".")[0]


def _is_of(item, module):
    """Whether a test names a module, or is in a file that imports it."""
    if "decoder" not in module and item.nodeid.startswith("tests/models/"):
        return False
    word = re.compile(rf"(?<![a-z]){_word_of(module)}(?![a-z])")
    if item.get_closest_marker("checks"):
        return word.search(item.path.name) is not None
    return word.search(item.nodeid) is not None or module in imports_of(item.path)


def _interprets(item):
    return item.get_closest_marker("interpret") is not None


def tests_of(module, items):
    """Returns the tests of a module among `kernel_tests`."""
    level, seen, found = {module}, set(), []
    while level and not any(map(_interprets, found)):
        found += [item for item in items if any(_is_of(item, each) for each in level)]
        seen |= level
        level = {name for name, path in modules().items() if imports_of(path) & level} - seen
    return found


def kernel_tests(items):
    """Returns the tests that run or lower kernels, or are in `tests/pallas`, without a GPU."""
    return [
        item
        for item in items
        if item.get_closest_marker("gpu") is None
        and (
            _interprets(item)
            or item.get_closest_marker("lowering")
            or item.nodeid.startswith("tests/pallas/")
        )
    ]


def modules_of_kernels():
    """Returns the modules that each kernel leads to from what launches it, by its launch name."""
    found = {}
    kernel_files = {module: modules()[module] for module in kernel_modules()}
    for module, path in kernel_files.items():
        for name, node in names_of(path)[1].items():
            kernels = {use for use in uses(node) if use.endswith("_kernel")}
            reached = {each.rpartition(".")[0] for each in leads_to(path, name, kernel_files.get)}
            for kernel in kernels:
                found.setdefault(kernel, set()).update({module}, reached & kernel_files.keys())
    return found
