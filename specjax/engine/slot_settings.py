"""What an engine is made with: the choice of K, settings of slots, and masks of all tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_flag
from specjax.config import SpeculativeConfig
from specjax.decode.adaptive_k import constant_k, k_by_rate, throughput_by_rate
from specjax.decode.capacity import pad_eos
from specjax.decode.drafters import Drafter
from specjax.decode.matchers import new_masks
from specjax.decode.state import Settings
from specjax.engine.submission import MOST_STOP_IDS
from specjax.processing.sampling_params import SamplingParams

__all__ = ["choose_drafts", "read_masks", "slot_settings"]


def choose_drafts(
    drafter: Drafter | None,
    config: SpeculativeConfig | None,
    num_slots: int,
    k_by_load: bool,
) -> tuple[Drafter | None, SpeculativeConfig | None, Any]:
    """Returns the drafter and the config of an engine, and its `k_by_rate` if rates decide.

    Where every request would always draft the same number, the engine is one of that K, or of no
    drafter: its steps hold nothing that chooses.

    Args:
      drafter: as in `Engine`, unchecked.
      config: as in `Engine`, unchecked.
      num_slots: B.
      k_by_load: as in `Engine`, unchecked.

    Raises:
      ValueError: for `k_by_load` without a K that is chosen.
    """
    is_by_load = check_flag("k_by_load", k_by_load)
    is_adaptive = isinstance(config, SpeculativeConfig) and config.adaptive_k
    if config is None or not is_adaptive or not isinstance(drafter, Drafter):
        if is_by_load:
            raise ValueError(
                "k_by_load is True, and num_speculative_tokens is no choice; it needs a drafter "
                'and SpeculativeConfig("auto", ...).'
            )
        return drafter, config, None
    table = throughput_by_rate(config) if is_by_load else k_by_rate(config, num_slots)
    k = constant_k(table)
    if k is None:
        return drafter, config, table
    if k == 0:
        return None, config, None
    fixed = dataclasses.replace(
        config, num_speculative_tokens=k, step_costs=None, usual_acceptance_rate=None
    )
    return drafter, fixed, None


def slot_settings(settings: Settings, defaults: SamplingParams | None, k_by_rate: Any) -> Settings:
    """Returns the settings of slots.

    Args:
      settings: of a batch of as many requests, checked.
      defaults: from `parse_defaults`.
      k_by_rate: from `choose_drafts`.
    """
    num_slots = settings.prompt_lengths.shape[0]
    no_stop_ids: Any = pad_eos(np.zeros(0, np.int32), MOST_STOP_IDS)
    given: dict[str, Any] = {
        "temperature": np.ones(num_slots, np.float32),
        "eos_token_ids": np.tile(no_stop_ids, (num_slots, 1)),
        "sampling": _spread_over_slots(defaults, num_slots),
        "k_by_rate": k_by_rate,
    }
    return settings._replace(**given)


def read_masks(
    takes_matchers: bool,
    defaults: SamplingParams | None,
    num_slots: int,
    num_rows: int,
    vocab_size: int,
) -> np.ndarray | None:
    """Returns masks that allow every token in every row, or None if no request has a matcher.

    Args:
      takes_matchers: as in `Engine`, unchecked.
      defaults: from `parse_defaults`.
      num_slots: B.
      num_rows: K + 1.
      vocab_size: V.

    Raises:
      ValueError: if requests may have masks of their own, too.
    """
    if not check_flag("takes_matchers", takes_matchers):
        return None
    if defaults is not None and defaults.allowed is not None:
        raise ValueError(
            "takes_matchers is True, and sampling.allowed is given; a matcher's masks would take "
            "its place, so an engine needs one of the two."
        )
    return new_masks(num_slots, num_rows, vocab_size)


def _spread_over_slots(defaults: SamplingParams | None, num_slots: int) -> SamplingParams | None:
    """Returns the defaults with a leading axis of slots, on the device; a grammar as it is."""
    if defaults is None:
        return None
    rows = jax.tree.map(
        lambda row: jnp.tile(row, (num_slots,) + (1,) * row.ndim), defaults._replace(grammar=None)
    )
    return rows._replace(grammar=jax.tree.map(jnp.asarray, defaults.grammar))
