"""What stands on the library: grammars of JSON schemas, and other libraries' models and rollouts.

`grammars` makes a `specjax.Grammar` on the host, and matchers of llguidance; it needs jax and numpy
alone. `tunix` is for google-tunix. Each has a folder, which nothing in the library imports, and
promises less: it follows the library that it serves.
`docs/adapters.md` shows how a model of any library becomes a `specjax.Model`.
"""

import importlib
import typing

__all__: list[str] = []

_ROOMS = ("grammars", "tunix")


def __dir__() -> list[str]:
    return list(_ROOMS)


if not typing.TYPE_CHECKING:  # A checker would take any name for one of this module.

    def __getattr__(name: str) -> object:
        if name in _ROOMS:
            return importlib.import_module(f"specjax.contrib.{name}")
        raise AttributeError(f"module 'specjax.contrib' has no attribute {name!r}")
