"""Options of `specjax generate` for drafting and verification: a `SpeculativeConfig`."""

import argparse
import json
import os
import re
from collections.abc import Callable
from typing import Any

from specjax.cli.option_table import Option, flag, option_name, suggest
from specjax.config import SpeculativeConfig
from specjax.core import rules
from specjax.core.rule import StaticRule
from specjax.file_io import quote, read_file, shorten
from specjax.theory.step_costs import StepCosts, read_step_costs

# Rules: their constructors, parameters, and the parameters that an error shows.
_RULES: dict[str, tuple[Callable[..., StaticRule], tuple[type, ...], str]] = {
    "lenience": (rules.lenience, (float,), "0.5"),
    "typical": (rules.typical_acceptance, (float, float), "0.09,0.3"),
    "relaxed": (rules.relaxed, (int, float), "10,0.6"),
    "ensemble": (rules.ensemble, (float,), "0.5"),
}
_CHOICES = {
    "rejection_sample_method": ("standard", "block", "coupled", "synthetic"),
    "draft_sample_method": ("probabilistic", "greedy"),
}
_MAX_BYTES = 2**24


def make_config(options: argparse.Namespace) -> SpeculativeConfig:
    """Returns the config that the options describe; refuses a wrong one by the option's name."""
    fields = {name: getattr(options, name) for name in SPECULATION_OPTIONS}
    if fields["num_speculative_tokens"] is None:
        synthetic = options.rejection_sample_method == "synthetic"
        fields["num_speculative_tokens"] = 4 if synthetic else "auto"
    return make_config_of(**fields)


def make_config_of(*, rule: str | None = None, **fields: Any) -> SpeculativeConfig:
    """Returns the config of some fields; names in an error are those of options."""
    try:
        return SpeculativeConfig(rule=None if rule is None else _parse_rule(rule), **fields)
    except ValueError as error:
        names = rf"\b(?:{'|'.join(SPECULATION_OPTIONS)})\b"
        message = re.sub(names, lambda name: option_name(name[0]), str(error))
        for name, choices in _CHOICES.items():
            if message.startswith(option_name(name)) and fields.get(name) not in choices:
                message += suggest(str(fields.get(name)), choices)
        raise ValueError(message) from None


def _parse_numbers(text: str, example: str = "0.8,0.6,0.4") -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{quote(text)} is no list of numbers; separate them by commas, like {example}"
        ) from None


def _parse_k(text: str) -> int | str:
    return int(text) if re.fullmatch(r"[+-]?\d+", text.strip()) else text


def _parse_step_costs(text: str) -> StepCosts | tuple[float, ...]:
    """Returns numbers of an argument, or of a file of `specjax sweep` or `StepCosts.save`."""
    if not os.path.exists(text):
        try:
            return _parse_numbers(text, "1,1.2,1.4")
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; and there is no such file") from None
    try:
        data = read_file(text, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(shorten(error).rstrip(".")) from None
    try:
        costs = json.loads(data)["step_costs"]
        return read_step_costs(costs) if isinstance(costs, dict) else tuple(costs)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"{text} is no JSON object with step_costs, as `specjax sweep --json` prints it"
        ) from None


def _parse_rule(text: str) -> StaticRule:
    """Returns the rule of a name and numbers, such as relaxed:10,0.6."""
    name, _, numbers = text.partition(":")
    examples = [f"{name}:{example}" for name, (_, _, example) in _RULES.items()]
    if name not in _RULES:
        # The exact ones are methods.
        method = suggest(name, _CHOICES["rejection_sample_method"])
        hint = suggest(name, _RULES) or method.replace("mean", "mean rejection_sample_method")
        raise ValueError(f"rule is {text!r}; it needs to be like {' or '.join(examples)}.{hint}")
    make, kinds, example = _RULES[name]
    try:
        values = [kind(x) for kind, x in zip(kinds, numbers.split(","), strict=True)]
    except ValueError:
        raise ValueError(f"rule is {text!r}; it needs to be like {name}:{example}.") from None
    try:
        return make(*values)
    except ValueError as error:
        raise ValueError(f"rule is {text!r}: {error}") from None


# An option for each field of `SpeculativeConfig`.
SPECULATION_OPTIONS = {
    "num_speculative_tokens": Option(
        *(_parse_k, "K"),
        "drafted tokens per step (K), 1 to 32, or auto: as many as are worth it, by the past "
        "acceptance and --step-costs; default: a head's own, else auto, for synthetic 4",
    ),
    "rejection_sample_method": Option(
        *(str, "METHOD"),
        "standard: accept by min(1, p / q); block: accept drafted tokens together, and more of "
        "them; coupled: accept what the target draws too, which makes a seed's text the one "
        "without drafts, and accepts as many greedy drafts and tokens of prompt lookup; "
        "synthetic: accept at given rates",
        default="standard",
    ),
    "draft_sample_method": Option(
        *(str, "METHOD"),
        "probabilistic: sample drafted tokens; greedy: draft the most probable",
        default="probabilistic",
    ),
    "synthetic_acceptance_rate": Option(float, "R", "for synthetic: mean of the rates, in [0, 1]"),
    "synthetic_acceptance_rates": Option(
        *(_parse_numbers, "R,R,..."),
        "for synthetic: K rates; rate i is the share of steps that accept positions 1 to i",
    ),
    "synthetic_acceptance_length": Option(
        float, "L", "for synthetic: mean tokens per step, in [1, K + 1]"
    ),
    "use_fp64_gumbel": flag("draw Gumbel noise in float64"),
    "step_costs": Option(
        *(_parse_step_costs, "C,C,...|FILE"),
        "for auto: relative times of steps that draft 0, 1, ... tokens, or a FILE of the JSON "
        "of `specjax sweep` or specjax.StepCosts on this machine; default: a cautious table, or "
        "that next to a head",
    ),
    "usual_acceptance_rate": Option(
        *(float, "R"),
        "for auto with --input: how often a drafted token is accepted whose predecessors were, in "
        "[0, 1], as `specjax sweep` says; default: 0.55, or that next to a head",
    ),
    "rule": Option(
        *(str, "RULE"),
        "for standard: another rule of acceptance, not exact: lenience:L accepts by "
        "min(1, p / (L q)); typical:E,D where p > min(E, D exp(-entropy)); relaxed:N,D the N "
        "most probable tokens within D of the top one; ensemble:A follows A p + (1 - A) q",
    ),
}
