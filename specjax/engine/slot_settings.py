"""What slots begin with: the settings that no request changes, and masks that allow every token."""

from typing import Any

import numpy as np

from specjax.checks import check_flag
from specjax.config import SpeculativeConfig
from specjax.decode.capacity import pad_eos
from specjax.decode.choose_k import ever_drafts, k_by_rate, speeds_by_rate
from specjax.decode.state_and_info import Settings
from specjax.engine.request_sampling import spread_over_slots
from specjax.engine.submission import MOST_STOP_IDS
from specjax.grammars.row_masks import new_masks
from specjax.processing.sampling_params import SamplingParams

__all__ = ["read_masks", "slot_settings"]


def slot_settings(
    settings: Settings,
    defaults: SamplingParams | None,
    config: SpeculativeConfig | None,
    k_by_load: bool,
) -> Settings:
    """Returns the settings of slots, without `k_by_rate` if no request would ever draft.

    Args:
      settings: of a batch of as many requests, checked.
      defaults: from `parse_defaults`.
      config: as in `Engine`.
      k_by_load: as in `Engine`, unchecked.

    Raises:
      ValueError: for `k_by_load` without a K that is chosen.
    """
    num_slots = settings.prompt_lengths.shape[0]
    if check_flag("k_by_load", k_by_load):
        if config is None or settings.k_by_rate is None:
            raise ValueError(
                "k_by_load is True, and num_speculative_tokens is no choice; it needs a drafter "
                'and SpeculativeConfig("auto", ...).'
            )
        settings = settings._replace(k_by_rate=speeds_by_rate(config))
    elif config is not None and settings.k_by_rate is not None:
        settings = settings._replace(k_by_rate=k_by_rate(config, num_slots))
    if settings.k_by_rate is not None and not ever_drafts(settings.k_by_rate):
        settings = settings._replace(k_by_rate=None)
    no_stop_ids: Any = pad_eos(np.zeros(0, np.int32), MOST_STOP_IDS)
    given: dict[str, Any] = {
        "temperature": np.ones(num_slots, np.float32),
        "eos_token_ids": np.tile(no_stop_ids, (num_slots, 1)),
        "sampling": spread_over_slots(defaults, num_slots),
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
