"""The public names of specjax with their signatures, and the sentence why each is there.

PYTHONPATH=. python tests/support/public_names.py --write

writes `tests/repo/public_names.txt` anew. It keeps the sentences; a new name gets none, and
`tests/repo/test_public_names.py` refuses a name without one.
"""

import enum
import importlib
import inspect
import pathlib
import sys

FILE = pathlib.Path(__file__).parents[1] / "repo" / "public_names.txt"
ROOMS = (
    "specjax",
    "specjax.theory",
    "specjax.core.rules",
    "specjax.markov_chain",
    "specjax.models",
    "specjax.contrib.grammars",
    "specjax.contrib.tunix",
)


def signatures():
    """Returns the signature of every public name, without types: a str by the name."""
    found = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                found[f"{room.partition('.')[2]}.{name}".lstrip(".")] = _signature(value)
    return found


def _signature(value):
    if not callable(value):
        return "a value"
    is_protocol = getattr(value, "_is_protocol", False)
    if is_protocol or (isinstance(value, type) and issubclass(value, enum.Enum | BaseException)):
        return "a class"
    signature = inspect.signature(value)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_shown(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _shown(default):
    """Returns a default as it is, or the name of a type, a function or another value's type."""
    if default is inspect.Parameter.empty or isinstance(default, str | int | float | tuple | None):
        return default
    return _Named(getattr(default, "__name__", type(default).__name__))


class _Named:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


def read():
    """Returns (signature, why) of every name in the file."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {name: (signature, why) for name, signature, why in rows}


def write():
    """Writes the file: today's signatures, and the sentences that it has."""
    known = read()
    rows = [
        "\t".join((name, signature, known.get(name, ("", ""))[1]))
        for name, signature in sorted(signatures().items())
    ]
    head = "# name, signature, why it is public; see tests/support/public_names.py"
    FILE.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__" and "--write" in sys.argv:
    write()
