"""Sampling parameters of one request: rows of the fields that an engine was made with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.processing.sampling_params import SamplingParams, read_sampling

__all__ = ["parse_defaults", "parse_request_sampling", "spread_over_slots"]

_RANKS = {"bias": 1, "allowed": 1, "bad_words": 2}


def parse_defaults(sampling: SamplingParams | None) -> SamplingParams | None:
    """Returns the fields that requests may set, each a row without a batch axis; None for none.

    Example:
      >>> defaults = parse_defaults(SamplingParams(top_k=0, bias=np.zeros(3)))
      >>> defaults.top_k.shape, defaults.bias.shape, defaults.top_p
      ((), (3,), None)
    """
    if sampling is None:
        return None
    fields = read_sampling(sampling, 1)._asdict()
    rows = {name: _row(name, value) for name, value in fields.items() if name != "grammar"}
    is_given = any(row is not None for row in rows.values())
    return SamplingParams(**rows, grammar=fields["grammar"]) if is_given else None


def _row(name: str, value: Any) -> Any:
    if value is None:
        return None
    value = np.asarray(value)
    return value[0] if value.ndim > _RANKS.get(name, 0) else value


def parse_request_sampling(
    sampling: SamplingParams | None, defaults: SamplingParams | None
) -> SamplingParams | None:
    """Returns a request's rows; what it does not set has the engine's value.

    The tables of a grammar are not among them, as all requests share the engine's.

    Raises:
      ValueError: for a field that the engine was not made with, or one of another shape.
    """
    given = _parse_given(sampling, defaults)
    if given is None:
        return defaults and defaults._replace(grammar=None)
    rows = {}
    for name, default in (defaults or SamplingParams())._asdict().items():
        value = getattr(given, name)
        if name == "grammar":
            continue
        if value is None:
            rows[name] = default
        elif default is None:
            raise ValueError(
                f"sampling.{name} is given, and the engine was made without it; a field that "
                f"requests may set is given to Engine, such as sampling=SamplingParams({name}=...) "
                "with the value of requests that do not set it."
            )
        elif name == "bad_words" and all(map(int.__le__, value.shape, default.shape)):
            missing = [
                (0, most - size) for most, size in zip(default.shape, value.shape, strict=True)
            ]
            rows[name] = np.pad(value, missing, constant_values=-1)
        elif (value.shape, value.dtype) != (default.shape, default.dtype):
            raise ValueError(
                f"sampling.{name} is {value.dtype}{list(value.shape)}; the engine was made with "
                f"{default.dtype}{list(default.shape)}, and all requests need that."
            )
        else:
            rows[name] = value
    return SamplingParams(**rows)


def _parse_given(
    sampling: SamplingParams | None, defaults: SamplingParams | None
) -> SamplingParams | None:
    """Returns what a request sets, as rows; its first state is one of the engine's grammar."""
    if not isinstance(sampling, SamplingParams):
        return parse_defaults(sampling)
    if sampling.grammar is not None:
        raise ValueError(
            "sampling.grammar is given; requests share the tables of the engine's grammar, and "
            "sampling.grammar_state says in which of its states a text begins."
        )
    if sampling.grammar_state is not None and defaults is not None:
        sampling = sampling._replace(grammar=defaults.grammar)
    return parse_defaults(sampling)


def spread_over_slots(defaults: SamplingParams | None, num_slots: int) -> SamplingParams | None:
    """Returns the defaults with a leading axis of slots, on the device; a grammar as it is."""
    if defaults is None:
        return None
    rows = jax.tree.map(
        lambda row: jnp.tile(row, (num_slots,) + (1,) * row.ndim), defaults._replace(grammar=None)
    )
    return rows._replace(grammar=jax.tree.map(jnp.asarray, defaults.grammar))
