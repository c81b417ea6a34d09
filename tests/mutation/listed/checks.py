"""Wrong versions of the checks of arguments, the choice of kernels and rates of nothing."""

from ..mutation import Mutation
from .tests import capacity, commands, lowered, ragged

_CUMULATIVE = "specjax.checks.check_cumulative"
_VERIFIERS = "test_cumulative_counts_may_leave_out_their_first_0_as_those_of_vllm_do"
_COUNTS = "test_counts_that_are_not_cumulative_are_refused"
_IDS = "test_an_id_outside_the_vocabulary_is_refused_where_the_host_reads_prompts"
_PROMPT_IDS = "specjax.decode.request_batch.check_prompt_ids"
_WARNED = "test_a_gpu_without_pallas_triton_is_said_to_run_plain_jax_once"

MUTATIONS = (
    Mutation(
        _CUMULATIVE,
        "[xp.zeros(1, xp.int32), counts]",
        "[counts, counts[-1:]]",
        ragged(_VERIFIERS),
        "counts without their first 0 are taken for starts: each request has the next one's drafts",
    ),
    Mutation(
        _CUMULATIVE,
        "known.max(initial=0) > num_drafted",
        "known.max(initial=0) > num_rows",
        ragged(_COUNTS),
        "a request may own rows past the last drafted token",
    ),
    Mutation(
        _CUMULATIVE,
        "steps.min(initial=0)",
        "steps.sum()",
        ragged(_COUNTS),
        "counts may fall in between",
    ),
    Mutation(
        _PROMPT_IDS,
        "is_token & (",
        "(",
        capacity(_IDS),
        "what pads a prompt has to be a token",
    ),
    Mutation(
        _PROMPT_IDS,
        "ids >= vocab_size",
        "ids > vocab_size",
        capacity(_IDS),
        "the first id past the vocabulary is read as a token",
    ),
    Mutation(
        "specjax.implementation.resolve_implementation",
        '"auto" if why_no_gpu is None else "xla"',
        '"auto"',
        lowered(_WARNED),
        "a machine without a GPU is warned that its GPU is slow",
    ),
    Mutation(
        "specjax.implementation._warn_of_plain_jax",
        "@functools.cache\n",
        "@functools.lru_cache(maxsize=0)\n",
        lowered(_WARNED),
        "every call warns",
    ),
    Mutation(
        "specjax.cli.json_report.metrics_json.ratio",
        "if denominator else None",
        "if denominator else 0.0",
        commands("test_a_rate_of_nothing_is_null"),
        "the rate of a position that was never drafted reads as one of rejections",
    ),
)
