"""The result of a decoding as plain numbers: the object of `specjax generate --json`."""

from typing import Any

import jax
import numpy as np

from specjax.cli.generate import GenerateJob, GenerateResult, Timings
from specjax.cli.token_text import list_logprobs
from specjax.config import SpeculativeConfig
from specjax.core.temperature import MIN_TEMPERATURE
from specjax.decode.drafters import Drafter
from specjax.engine.stop_strings import StoppedText

__all__ = ["is_exact", "is_exact_rule", "json_report", "metrics_json"]


def is_exact(job: GenerateJob) -> bool:
    """Returns whether the text follows the target's distribution, whatever was drafted."""
    return is_exact_rule(job.drafter, job.config, job.temperature)


def is_exact_rule(drafter: Drafter | None, config: SpeculativeConfig, temperature: float) -> bool:
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
    text = StoppedText(job.tokenizer, job.prompt_ids, job.stop)
    for token in result.token_ids:
        text.feed(token)
    text.flush()
    top = result.top_logprobs
    return {
        "text": text.text,
        "token_ids": result.token_ids,
        "finish": result.finish,
        "logprobs": None if top is None else list_logprobs(job.tokenizer, result.token_ids, top),
        "num_prompt_tokens": len(job.prompt_ids),
        "metrics": metrics_json(result),
        "step_costs": job.config.step_costs,
        "rejection_sample_method": job.config.rejection_sample_method,
        "rule": job.rule,
        "exact": is_exact(job),
        "timings": timings._asdict(),
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
    }
