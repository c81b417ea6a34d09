"""Additions to the library: grammars, adapters of other libraries, and a server.

`grammars` makes a `specjax.Grammar` on the host, and matchers of llguidance; it needs only jax and
numpy. `tunix` is for google-tunix. `serve` serves an engine in OpenAI's protocol. No module of the
library imports these folders. They promise less stability, because they follow the libraries that
they serve. `docs/adapters.md` shows how a model of any library becomes a `specjax.Model`.
"""

import importlib
import typing

__all__: list[str] = []

_ROOMS = ("grammars", "serve", "tunix")


def __dir__() -> list[str]:
    return list(_ROOMS)


if not typing.TYPE_CHECKING:  # A checker would take any name for one of this module.

    def __getattr__(name: str) -> object:
        if name in _ROOMS:
            return importlib.import_module(f"specjax.contrib.{name}")
        raise AttributeError(f"module 'specjax.contrib' has no attribute {name!r}")
