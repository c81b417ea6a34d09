"""google-tunix 0.1.7: its transformers as `specjax.Model`, and rollouts with speculation for it.

    Qwen3, Llama3 or Gemma -> `model` names the arrays and makes a `specjax.Model`
    prompts of a training step -> `rollout` tokenizes, decodes with a drafter and returns texts

`values` reads tunix's values. `group_lookup` is the drafter that looks for a
sample's last tokens in the other samples of its prompt. Open `model` first. Letters: `B` requests,
`L` tokens of each, `P` of prompts, `V` vocabulary.

Only the construction of a `SpecRollout` needs tunix: ``pip install specjax[tunix]``.
"""

from specjax.contrib.tunix.group_lookup import group_lookup_drafter
from specjax.contrib.tunix.model import tunix_model
from specjax.contrib.tunix.rollout import SpecRollout

__all__ = ["SpecRollout", "group_lookup_drafter", "tunix_model"]
