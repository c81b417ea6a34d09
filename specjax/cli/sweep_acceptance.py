"""Measures the acceptance of a pair: the prompts are decoded once, at the largest K."""

from collections.abc import Callable

import jax
import numpy as np

from specjax.cli.sweep_choice import Acceptance
from specjax.cli.sweep_measure import Workload, all_ended
from specjax.config import SpeculativeConfig
from specjax.decode.init_and_step import init, step

__all__ = ["measure_acceptance"]

# Prompts are padded to a multiple of this.
_PROMPT_MULTIPLE = 64


def measure_acceptance(workload: Workload, K: int, on_stage: Callable[[str], None]) -> Acceptance:
    """Decodes the prompts one by one and counts accepted tokens per step.

    Args:
      workload: the pair and the prompts.
      K: drafted tokens per step, >= 1.
      on_stage: called before each prompt with a sentence about it.

    Returns:
      The number of drafted tokens that each step of each prompt accepted, up to the end of its
      text. The last step drafts K tokens, too: the buffer is longer than the text.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
    """
    config = SpeculativeConfig(
        num_speculative_tokens=K, draft_sample_method=workload.draft_sample_method
    )
    width = -(-max(map(len, workload.prompts)) // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    num_accepted: list[list[int]] = []
    for number, ids in enumerate(workload.prompts):
        on_stage(f"decoding prompt {number + 1} of {len(workload.prompts)}, K = {K}")
        prompt = np.zeros((1, width), np.int32)
        prompt[0, : len(ids)] = ids
        state = init(
            workload.target,
            workload.drafter,
            prompt,
            np.array([len(ids)], np.int32),
            keys=jax.random.fold_in(workload.key, number)[None],
            config=config,
            max_new_tokens=workload.max_new_tokens + K + 1,
            temperature=np.float32(workload.temperature),
            eos_token_ids=np.array(workload.eos_token_ids, np.int32),
        )
        num_accepted.append([])
        while not all_ended(state) and int(state.lengths[0]) < len(ids) + workload.max_new_tokens:
            before = int(state.lengths[0])
            state, _ = step(workload.target, workload.drafter, state, config=config)
            # Each step commits one token beyond the accepted ones, or ends in an accepted EOS.
            num_accepted[-1].append(int(state.lengths[0]) - before - 1)
    return Acceptance(K, num_accepted)
