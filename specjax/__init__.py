"""Speculative-decoding verification in JAX: exact, batched, jitted.

Verification: `rejection_sample`, `tree_rejection_sample`, `gumbel_sample`; what accepts: `rules`,
`Rule`; how each runs: `Options`.
Drafts: `Draft`, `RaggedDraft`, `TreeDraft`, `DraftInputs`, `propose`, `draft_from_probs`,
`gather_drafts`.
Processing: `SamplingParams`, `process_logits`, `top_logprobs`, `kept_tokens`, `kept_logprobs`,
`count_tokens`.
Decoding: `generate`, `init`, `step`, `LoopOptions`, `commit`, `unpad`, `model_drafter`,
`ngram_drafter`, `whole_prompt_drafter`, `RowMasks`.
Evaluation: `score`, `TextScores`; a model's rows: `check_row_invariance`.
Serving: `Engine`, `AsyncEngine`, `Request`; memory: `memory_needs`.
Compilation: `compile_generate`, `load_compiled`, `enable_compilation_cache`.
Synthetic acceptance: `geometric_rates`, `conditional_rates`, `rates_for_length`.
Expected acceptance and speed: `theory`; K = "auto": `StepCosts`, `measure_step_costs`.
"""

import importlib
import typing

from specjax import theory
from specjax.call_options import Options
from specjax.config import SpeculativeConfig
from specjax.core import rules
from specjax.core.noise import Stream
from specjax.core.rule import Rule
from specjax.decode.capacity import unpad
from specjax.decode.commit import Finish, Origin, commit
from specjax.decode.compile.cache_folder import enable_compilation_cache
from specjax.decode.compile.compile_generate import (
    CompiledGenerate,
    compile_generate,
    load_compiled,
)
from specjax.decode.drafters import Drafter, model_drafter, ngram_drafter, whole_prompt_drafter
from specjax.decode.generate import Generation, generate
from specjax.decode.init_and_step import init, step
from specjax.decode.logprobs import TopLogprobs, top_logprobs
from specjax.decode.matchers import Matcher, RowMasks
from specjax.decode.memory import MemoryNeeds, memory_needs
from specjax.decode.metrics import Metrics, init_metrics, update_metrics
from specjax.decode.options import LoopOptions
from specjax.decode.propose import DraftInputs, propose
from specjax.decode.row_invariance import RowCase, RowInvariance, check_row_invariance
from specjax.decode.score import TextScores, score
from specjax.decode.state import DecodeState, Settings, StepInfo
from specjax.decode.step_times import measure_step_costs
from specjax.engine.async_engine import AsyncEngine
from specjax.engine.engine import Engine
from specjax.engine.request import FinishReason, Request, StreamChunk, openai_finish_reason
from specjax.engine.request_stream import RequestStream
from specjax.engine.usage import Usage
from specjax.processing.apply_sampling import apply_sampling
from specjax.processing.bad_words import bad_words_array
from specjax.processing.bias import bias_array
from specjax.processing.grammar import Grammar
from specjax.processing.history import History
from specjax.processing.kept_tokens import KeptTokens, kept_logprobs, kept_tokens
from specjax.processing.logit_cutoff import logit_cutoff
from specjax.processing.process_logits import process_logits
from specjax.processing.sampling_params import SamplingParams
from specjax.processing.token_counts import TokenCounts, count_tokens, update_counts
from specjax.samplers.drafts import draft_from_probs, gather_drafts
from specjax.samplers.gumbel_sample import gumbel_sample
from specjax.samplers.rejection_sample import rejection_sample
from specjax.samplers.tree_rejection_sample import tree_rejection_sample
from specjax.theory.acceptance_rates import (
    conditional_rates,
    expected_acceptance_length,
    geometric_rates,
    rates_for_length,
)
from specjax.theory.step_costs import StepCosts
from specjax.types import (
    Draft,
    Model,
    RaggedDraft,
    Sample,
    TreeDraft,
    TreeVerification,
    Verification,
)
from specjax.version import __version__ as __version__

__all__ = [
    "AsyncEngine",
    "CompiledGenerate",
    "DecodeState",
    "Draft",
    "DraftInputs",
    "Drafter",
    "Engine",
    "Finish",
    "FinishReason",
    "Generation",
    "Grammar",
    "History",
    "KeptTokens",
    "LoopOptions",
    "Matcher",
    "MemoryNeeds",
    "Metrics",
    "Model",
    "Options",
    "Origin",
    "RaggedDraft",
    "Request",
    "RequestStream",
    "RowCase",
    "RowInvariance",
    "RowMasks",
    "Rule",
    "Sample",
    "SamplingParams",
    "Settings",
    "SpeculativeConfig",
    "StepCosts",
    "StepInfo",
    "Stream",
    "StreamChunk",
    "TextScores",
    "TokenCounts",
    "TopLogprobs",
    "TreeDraft",
    "TreeVerification",
    "Usage",
    "Verification",
    "apply_sampling",
    "bad_words_array",
    "bias_array",
    "check_row_invariance",
    "commit",
    "compile_generate",
    "conditional_rates",
    "count_tokens",
    "draft_from_probs",
    "enable_compilation_cache",
    "expected_acceptance_length",
    "gather_drafts",
    "generate",
    "geometric_rates",
    "gumbel_sample",
    "init",
    "init_metrics",
    "kept_logprobs",
    "kept_tokens",
    "load_compiled",
    "logit_cutoff",
    "measure_step_costs",
    "memory_needs",
    "model_drafter",
    "ngram_drafter",
    "openai_finish_reason",
    "process_logits",
    "propose",
    "rates_for_length",
    "rejection_sample",
    "rules",
    "score",
    "step",
    "theory",
    "top_logprobs",
    "tree_rejection_sample",
    "unpad",
    "update_counts",
    "update_metrics",
    "whole_prompt_drafter",
]

# Imported where they are first named: they need what extras install.
_ROOMS = ("contrib", "models")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS, "__version__"])


if not typing.TYPE_CHECKING:  # A checker would take any name for one of this module.

    def __getattr__(name: str) -> object:
        if name in _ROOMS:
            return importlib.import_module(f"specjax.{name}")
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
