"""Gemma 4 with its assistant in transformers' `generate`, by enumeration, on small random weights.

The first new token is drawn without drafts, and given here. Then the assistant drafts by argmax.
The draws of `_speculative_sampling` are replaced as in `hugging_face.py`: the acceptance ratio and
the weights of the residual give the distribution of the second new token. The target's own comes
from a plain forward pass.
"""

from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.peers.inputs import total_variation

SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build() -> tuple[Any, Any]:
    """A target and an assistant of random weights."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**SIZES, num_kv_shared_layers=0)
    target = transformers.Gemma4ForCausalLM(config).eval()
    text = transformers.Gemma4TextConfig(**SIZES, num_kv_shared_layers=SIZES["num_hidden_layers"])
    assistant = transformers.Gemma4AssistantForCausalLM(
        transformers.Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=SIZES["hidden_size"]
        )
    ).eval()
    assistant.generation_config.num_assistant_tokens = 1
    with torch.no_grad():
        for model in (target, assistant):
            for name, weights in model.named_parameters():
                if "norm" not in name:
                    weights.normal_(0, 0.4)
    return target, assistant


class _Draws:
    """Stands in for torch's draws: gives the first token, then rejects the draft."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.accept = 0.0
        self.weights: list[torch.Tensor] = []

    def multinomial(self, weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        self.weights.append(weights.double().reshape(-1))
        return torch.full((1, num_samples), self.first)

    def rand_like(self, ratio: torch.Tensor) -> torch.Tensor:
        self.accept = float(ratio.double().clamp(max=1).reshape(-1)[0])
        return torch.full_like(ratio, torch.inf)


class _Drafts:
    """Keeps the draft that the assistant made."""

    def __init__(self) -> None:
        self.token = -1
        self.verify = transformers.generation.utils._speculative_sampling

    def __call__(self, candidates: torch.Tensor, *rest: Any, **more: Any) -> Any:
        self.token = int(candidates[0, -1])
        return self.verify(candidates, *rest, **more)


def gemma_case() -> dict[str, Any]:
    """A record of the second new token, the mean over all first ones."""
    target, assistant = build()
    prompt, differences = torch.tensor([[1, 2, 3]]), []
    for first in range(SIZES["vocab_size"]):
        draws, drafts = _Draws(first), _Drafts()
        with (
            mock.patch.object(torch, "multinomial", draws.multinomial),
            mock.patch.object(torch, "rand_like", draws.rand_like),
            mock.patch.object(transformers.generation.utils, "_speculative_sampling", drafts),
        ):
            target.generate(
                prompt, assistant_model=assistant, do_sample=True, top_k=0, max_new_tokens=3
            )
        emitted = (1 - draws.accept) * draws.weights[1] / draws.weights[1].sum()
        emitted[drafts.token] += draws.accept
        with torch.no_grad():
            logits = target(torch.cat([prompt, torch.tensor([[first]])], dim=1)).logits[0, -1]
        p = logits.double().softmax(dim=-1)
        differences.append(total_variation(emitted.numpy(), p.numpy()))
    mean = sum(differences) / len(differences)
    return {
        "case": "argmax, with logits: Gemma 4 with its assistant, the second new token",
        "rows": "random weights",
        "call": "generate(assistant_model=Gemma4AssistantForCausalLM)",
        "first_token": mean,
        "step": mean,
        "note": f"smallest {min(differences):.3f}, largest {max(differences):.3f} of 8 texts",
    }
