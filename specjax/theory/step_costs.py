"""`StepCosts`: milliseconds of steps by batch size and drafted tokens, measured beforehand."""

import dataclasses
import json
import operator
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.file_io import quote, read_file, replace_file
from specjax.theory.acceptance_rates import to_float

MAX_SPECULATIVE_TOKENS = 32
_MAX_FILE_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class StepCosts:
    r"""Times of full steps, by which K = "auto" chooses in a batch of any size.

    A step of B requests that each draft and verify k tokens takes

    :math:`t_k(B) = (1 - w)\, t_k(B_i) + w\, t_k(B_{i+1}),\quad w = (B - B_i) / (B_{i+1} - B_i)`

    where :math:`B_i \le B \le B_{i+1}` are the measured sizes next to B. Below the smallest and
    above the largest size, the times of that size hold. Hashable plain numbers: no clock is read
    where K is chosen, so that a text is a function of its seed and the table.

    Attributes:
      batch_sizes: measured sizes in rising order, ints >= 1.
      milliseconds: for each size K + 1 numbers > 0, the time of a step of 0, 1, ..., K drafted
        tokens per request; K is 1 to 32. They need not rise.
      measured_on: device, version of JAX and date, for a reader.

    Raises:
      ValueError: if a value is outside these ranges.

    Example:
      >>> costs = StepCosts((8, 16), ((6.0, 7.0), (8.0, 11.0)))
      >>> costs.interpolate(8), costs.interpolate(10), costs.interpolate(64)
      ((6.0, 7.0), (6.5, 8.0), (8.0, 11.0))
    """

    batch_sizes: tuple[int, ...]
    milliseconds: tuple[tuple[float, ...], ...]
    measured_on: str = ""

    def __post_init__(self) -> None:
        sizes = _check_sizes(self.batch_sizes)
        rows = self.milliseconds
        if isinstance(rows, str) or not hasattr(rows, "__len__") or len(rows) != len(sizes):
            raise ValueError(
                f"milliseconds is {quote(rows)}; it needs a row of times for each of the "
                f"{len(sizes)} batch_sizes."
            )
        each = tuple(check_costs(f"milliseconds[{i}]", row) for i, row in enumerate(rows))
        for i, row in enumerate(each):
            if len(row) != len(each[0]):
                raise ValueError(
                    f"milliseconds[{i}] has {len(row)} times and milliseconds[0] {len(each[0])}; "
                    "every batch size needs those of 0, 1, ..., K drafted tokens."
                )
        if not isinstance(self.measured_on, str):
            raise ValueError(f"measured_on is {quote(self.measured_on)}; it needs to be a str.")
        object.__setattr__(self, "batch_sizes", sizes)
        object.__setattr__(self, "milliseconds", each)

    def __len__(self) -> int:
        """Returns K + 1."""
        return len(self.milliseconds[0])

    def interpolate(self, batch_size: int) -> tuple[float, ...]:
        """Returns the milliseconds of steps of B requests with 0, 1, ..., K drafted tokens."""
        columns = zip(*self.milliseconds, strict=True)
        return tuple(float(np.interp(batch_size, self.batch_sizes, times)) for times in columns)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON object {"step_costs": {...}}, which `load` and the command read.

        Example:
          >>> import tempfile
          >>> path = tempfile.mkdtemp() + "/step_costs.json"
          >>> StepCosts((8,), ((6.0, 7.0),)).save(path)
          >>> StepCosts.load(path)
          StepCosts(batch_sizes=(8,), milliseconds=((6.0, 7.0),), measured_on='')
        """
        with replace_file(path) as temporary:
            content = json.dumps({"step_costs": dataclasses.asdict(self)}, indent=1)
            temporary.write_text(content + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StepCosts":
        """Reads what `save` wrote.

        Raises:
          ValueError: for a file of anything else.
          OSError: if the file cannot be read.
        """
        try:
            costs = read_step_costs(json.loads(read_file(path, _MAX_FILE_BYTES))["step_costs"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no file of step costs: {quote(str(error))}") from None
        if not isinstance(costs, cls):
            raise ValueError(
                f"{pathlib.Path(path)} has step_costs of one batch size; StepCosts needs "
                "batch_sizes and milliseconds."
            )
        return costs


def read_step_costs(value: Any) -> StepCosts | tuple[float, ...]:
    """Returns step costs as a table or, of one batch size, as numbers.

    Args:
      value: `StepCosts`, its fields as a mapping, or numbers.
    """
    if isinstance(value, StepCosts):
        return value
    if not isinstance(value, Mapping):
        return check_costs("step_costs", value)
    names = [field.name for field in dataclasses.fields(StepCosts)]
    if not {"batch_sizes", "milliseconds"} <= value.keys() <= set(names):
        raise ValueError(f"step_costs has the fields {quote(list(value))}; it needs {names}.")
    return StepCosts(**value)


def check_costs(name: str, values: Any) -> tuple[float, ...]:
    """Returns the times of steps with 0, 1, ..., K drafted tokens as floats, or refuses them."""
    try:
        costs = () if isinstance(values, str) else tuple(values)
    except TypeError:
        costs = ()
    if not 2 <= len(costs) <= MAX_SPECULATIVE_TOKENS + 1:
        came = f"has {len(costs)} of them" if costs else f"is {quote(values)}"
        raise ValueError(
            f"{name} needs 2 to {MAX_SPECULATIVE_TOKENS + 1} numbers, the times of steps "
            f"with 0, 1, ... drafted tokens; it {came}."
        )
    for k, cost in enumerate(costs):
        if not 0 < to_float(cost) <= np.finfo(np.float32).max:
            raise ValueError(
                f"{name}[{k}] is {quote(cost)}; a step's time needs to be a number > 0, and "
                "finite in float32."
            )
    return tuple(float(cost) for cost in costs)


def _check_sizes(values: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, values))
    except TypeError:
        sizes = ()
    is_rising = all(low < high for low, high in zip((0, *sizes), sizes, strict=False))
    if not sizes or not is_rising:
        raise ValueError(
            f"batch_sizes is {quote(values)}; it needs one int >= 1 or several in rising order."
        )
    return sizes
