"""What programs are compiled for: arrays by their types, models by their functions."""

import dataclasses
from typing import Any

from specjax.file_io import JsonObject

__all__ = ["check_arrays", "check_functions", "list_functions"]


def check_arrays(given: dict[str, str], compiled: dict[str, str]) -> None:
    """Refuses a call whose arrays are others than programs are compiled for.

    Args:
      given: name -> dtype and shape, of the call.
      compiled: name -> dtype and shape, of the programs.

    Raises:
      ValueError: for the first name that differs.
    """
    for name in compiled | given:
        if given.get(name) != compiled.get(name):
            raise ValueError(
                f"{name} is {given.get(name, 'absent')}; these programs are compiled for "
                f"{compiled.get(name, 'calls without it')}."
            )


def list_functions(**models: Any) -> JsonObject:
    """Returns name -> value of what models hold besides parameters, which is compiled in.

    Args:
      **models: each a `Model`, a `Drafter` or None, by its name.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> list(list_functions(target=markov_chain([[1.0]]), drafter=None))[:2]
      ['target.init_cache', 'target.apply']
    """
    return {
        f"{name}.{field.name}": getattr(model, field.name)
        for name, model in models.items()
        if model is not None
        for field in dataclasses.fields(model)
        if field.name != "params"
    }


def check_functions(given: JsonObject, compiled: JsonObject) -> None:
    """Refuses a call with other functions of models than programs are compiled with.

    Args:
      given: from `list_functions`, of the call.
      compiled: from `list_functions`, of the programs.

    Raises:
      ValueError: for the first name that differs.
    """
    for name, value in compiled.items():
        if given[name] != value:
            was = "another function" if callable(value) else repr(value)
            raise ValueError(
                f"{name} is {given[name]!r}, and {was} is compiled in; call with the models that "
                "were compiled, or with others of their functions."
            )
