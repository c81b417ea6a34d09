"""The result of a decoding as plain numbers: the object of `specjax generate --json`."""

import math
from typing import Any

import jax
import numpy as np

from specjax.cli.generate import GenerateJob, GenerateResult, Timings
from specjax.config import SpeculativeConfig
from specjax.core.temperature import MIN_TEMPERATURE
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import TopLogprobs


def is_exact(drafter: Drafter | None, config: SpeculativeConfig, temperature: float) -> bool:
    """Returns whether texts of a drafter, rule and temperature follow the target's distribution."""
    if drafter is None:
        return True
    if config.rejection_sample_method == "synthetic":
        return False
    # A greedy request accepts the argmax by any of these rules.
    return config.rule is None or temperature < MIN_TEMPERATURE


def metrics_json(result: GenerateResult) -> dict[str, Any]:
    """Returns counts and rates of a result as plain numbers; lists are per drafted position.

    A rate with denominator 0 is None, which is null in JSON.
    """
    counts = jax.tree.map(lambda count: np.asarray(count)[0], result.metrics)

    # In NumPy: the properties of `Metrics` would compile a dozen programs.
    def ratio(numerator: Any, denominator: Any) -> float | None:
        return float(numerator / denominator) if denominator else None

    return {
        "mean_acceptance_length": ratio(counts.num_emitted, counts.num_steps),
        "draft_acceptance_rate": ratio(counts.num_accepted.sum(), counts.num_drafted.sum()),
        "acceptance_rates": list(map(ratio, counts.num_accepted, counts.num_drafted)),
        "num_steps": int(counts.num_steps),
        "num_emitted": int(counts.num_emitted),
        "num_drafted": counts.num_drafted.tolist(),
        "num_accepted": counts.num_accepted.tolist(),
    }


def json_report(job: GenerateJob, result: GenerateResult, timings: Timings) -> dict[str, Any]:
    """Returns the object that `--json` prints."""
    ids, top = result.token_ids, result.top_logprobs
    return {
        "text": result.text,
        "token_ids": ids,
        "finish": result.finish,
        "logprobs": None if top is None else list_logprobs(job.pair.tokenizer, ids, top),
        "num_prompt_tokens": len(job.prompt_ids),
        "metrics": metrics_json(result),
        "step_costs": job.pair.config.for_batch_size(1).step_costs,
        "rejection_sample_method": job.pair.config.rejection_sample_method,
        "rule": job.options.rule,
        "generation_config": job.options.from_generation_config,
        "exact": is_exact(job.drafter, job.pair.config, job.options.temperature),
        "timings": timings._asdict(),
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
    }


def list_logprobs(tokenizer: Any, token_ids: list[int], top: TopLogprobs) -> list[dict[str, Any]]:
    """Returns each generated token with its log-probability and most probable alternatives.

    Args:
      tokenizer: with `decode(ids, skip_special_tokens)`.
      token_ids: N generated tokens.
      top: with a leading axis of N.

    Returns:
      N dicts: `token_id`, `token` (text), `logprob` (None for -inf), `rank` (1 for the most
      probable token) and `top`. `top` lists the most probable tokens in descending order, each
      with `token_id`, `token` and `logprob`.
    """

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        finite = logprob if math.isfinite(logprob) else None
        return {"token_id": token_id, "token": text, "logprob": finite}

    ids, logprobs, ranks, token_logprobs = (values.tolist() for values in top)
    descriptions = []
    for index, token_id in enumerate(token_ids):
        pairs = zip(ids[index], logprobs[index], strict=True)
        top_tokens = [describe(other_id, logprob) for other_id, logprob in pairs if other_id >= 0]
        descriptions.append(
            {**describe(token_id, token_logprobs[index]), "rank": ranks[index], "top": top_tokens}
        )
    return descriptions
