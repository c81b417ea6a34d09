"""Total variation of a case: of the first token, and of all K + 1 tokens of a step."""

from typing import Any

import numpy as np

from benchmarks.peers.inputs import (
    Kind,
    Outcomes,
    Rows,
    outer,
    target_probs,
    text_distribution,
    total_variation,
    variation_by_chance,
)


def measure(
    case: str,
    call: str,
    outcomes: Outcomes,
    rows: Rows,
    kind: Kind,
    *,
    size: str,
    num_samples: int | None = None,
    note: str = "",
) -> dict[str, Any]:
    """A record of outcomes (probabilities, or counts of samples) against what `kind` asks for."""
    p = target_probs(rows, kind)
    outcomes = outcomes / outcomes.sum()
    joint, text = outer(list(p)), text_distribution(outcomes, p)
    later = tuple(range(1, len(p)))
    record = {
        "case": case,
        "rows": size,
        "call": call,
        "first_token": total_variation(text.sum(axis=later), p[0]),
        "step": total_variation(text, joint),
        "tokens_per_step": tokens_per_step(outcomes),
    }
    if num_samples is not None:
        record["samples"] = num_samples
        record["first_token_by_chance"] = variation_by_chance(p[0], num_samples)
        squares = text_distribution(outcomes, p, power=2)
        record["step_by_chance"] = variation_by_chance(text, num_samples, squares)
    if size == "smallest":
        record["emitted"] = [round(float(x), 6) for x in text.sum(axis=later)]
        record["target"] = [round(float(x), 6) for x in p[0]]
    return record | ({"note": note} if note else {})


def tokens_per_step(outcomes: Outcomes) -> float:
    """The mean number of tokens that a step emits."""
    size = outcomes.shape[0] - 1
    lengths = sum((index < size).astype(float) for index in np.indices(outcomes.shape))
    return float((lengths * outcomes).sum())
