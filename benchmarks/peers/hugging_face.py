"""transformers' assisted generation, by enumeration.

`_speculative_sampling` draws uniforms with `torch.rand_like`, in the shape of the ratios, and the
last token with `torch.multinomial`, from its weights. Both are replaced: the first accepts as many
tokens as it is told and keeps the ratios, the second keeps the weights. So each outcome has its
probability. Drafts without logits go through `generate` as a whole.
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.generation import utils
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from benchmarks.peers.gemma import gemma_case
from benchmarks.peers.inputs import (
    ROWS,
    Array,
    Kind,
    Outcomes,
    Rows,
    drafts_of,
    empty_outcomes,
)
from benchmarks.peers.measure import measure

NAME = "transformers"
CALL = "generation.utils._speculative_sampling"


def version() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


class _Draws:
    """Stands in for torch's draws: accepts `num_accepted` tokens, and keeps what is drawn from."""

    def __init__(self, num_accepted: int) -> None:
        self.num_accepted = num_accepted
        self.accept = torch.zeros(0)
        self.weights = torch.zeros(0)

    def rand_like(self, ratio: torch.Tensor) -> torch.Tensor:
        flat = ratio.reshape(-1)
        self.accept = flat.double().clamp(max=1)
        rejects = torch.arange(flat.numel()) >= self.num_accepted
        # A token is accepted where the uniform is at most the ratio.
        return torch.where(rejects, torch.inf, -torch.inf).reshape(ratio.shape)

    def multinomial(self, weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        self.weights = weights.double().reshape(-1)
        return torch.zeros(1, num_samples, dtype=torch.long)


def warp(logits: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Rows [1, n, V] as `generate` processes them: temperature, then top-p."""
    out = logits.clone()
    for i in range(out.shape[1]):
        if kind.temperature != 1:
            out[:, i] = TemperatureLogitsWarper(kind.temperature)(None, out[:, i])
        if kind.top_p < 1:
            out[:, i] = TopPLogitsWarper(kind.top_p)(None, out[:, i])
    return out


def sampling_outcomes(rows: Rows, target: torch.Tensor, draft: torch.Tensor, q: Array) -> Outcomes:
    """Outcomes of `_speculative_sampling` where drafts follow q, and `draft` are their logits."""
    outcomes, k = empty_outcomes(rows), rows.k
    for tokens, mass in drafts_of(q):
        # The prompt is one token, which the function does not read.
        candidates = torch.tensor([[0, *tokens]])
        for num_accepted in range(k + 1):
            draws = _Draws(num_accepted)
            with (
                mock.patch.object(torch, "rand_like", draws.rand_like),
                mock.patch.object(torch, "multinomial", draws.multinomial),
            ):
                _, matches = utils._speculative_sampling(candidates, draft, k, target)
            assert int(matches) == num_accepted
            accept = draws.accept.numpy()
            chance = float(np.prod(accept[:num_accepted]))
            chance *= float(1 - accept[num_accepted]) if num_accepted < k else 1.0
            if chance > 0:
                at = (*tokens[:num_accepted], slice(rows.vocab_size))
                at += (rows.vocab_size,) * (k - num_accepted)
                weights = draws.weights.numpy()
                outcomes[at] += mass * chance * weights / weights.sum()
    return outcomes


class _TableModel(transformers.LlamaForCausalLM):
    """A Llama with fixed logits: row i of `table` is for its i-th new token, from 0 on."""

    table: torch.Tensor
    num_prompt_tokens: int

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **more: Any) -> Any:
        outputs = super().forward(input_ids=input_ids, position_ids=position_ids, **more)
        places = position_ids[0, -outputs.logits.shape[1] :] - self.num_prompt_tokens + 1
        outputs.logits = self.table[places.clamp(0, len(self.table) - 1)][None].clone()
        return outputs


class _GivenTokens:
    """Stands in for `torch.multinomial`: returns given tokens, and keeps their probability."""

    def __init__(self, tokens: tuple[int, ...] | None) -> None:
        self.tokens = tokens
        self.chance = 1.0

    def multinomial(self, weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        drawn = torch.tensor(self.tokens)[: weights.shape[0], None]
        self.chance = float(weights.double().gather(1, drawn).prod())
        return drawn


class _FirstStep:
    """A streamer that keeps the tokens of the first step, and ends the run."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_prompt = False

    def put(self, tokens: torch.Tensor) -> None:
        if self.has_prompt:
            self.tokens = tokens.reshape(-1).tolist()
            raise StopIteration
        self.has_prompt = True

    def end(self) -> None:
        pass


def lookup_outcomes(rows: Rows, kind: Kind) -> Outcomes:
    """Outcomes of `generate(prompt_lookup_num_tokens=K)`, whose drafts have no logits.

    The prompt makes it draft the argmax of the draft's rows. It draws a token of each target row by
    `torch.multinomial`, which is replaced: each triple of tokens is drawn once, with its weight.
    """
    size, k = rows.vocab_size, rows.k
    drafted = rows.draft.argmax(axis=1).tolist()
    config = transformers.LlamaConfig(
        vocab_size=size + 1,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = _TableModel(config).eval()
    model.table = torch.full((k + 1, size + 1), -1e9)
    model.table[:, :size] = torch.tensor(rows.target)
    prompt = torch.tensor([[size, *drafted, size]])
    model.num_prompt_tokens = prompt.shape[1]
    options = {"max_new_tokens": k + 1, "prompt_lookup_num_tokens": k}
    if kind.temperature > 0:
        options |= {"do_sample": True, "top_k": 0, "top_p": kind.top_p}
        options |= {"temperature": kind.temperature}
    outcomes = empty_outcomes(rows)
    triples = itertools.product(range(size), repeat=k + 1) if kind.temperature else [None]
    for triple in triples:
        draws, streamer = _GivenTokens(triple), _FirstStep()
        given = mock.patch.object(torch, "multinomial", draws.multinomial)
        with given, contextlib.suppress(StopIteration):
            model.generate(prompt, streamer=streamer, **options)
        padding = (size,) * (k + 1 - len(streamer.tokens))
        outcomes[(*streamer.tokens, *padding)] += draws.chance
    return outcomes


def cases() -> Iterator[dict[str, Any]]:
    for size, make in ROWS.items():
        rows = make()
        raw_target, raw_draft = (torch.tensor(x)[None] for x in (rows.target, rows.draft))
        argmax = np.eye(rows.vocab_size)[rows.draft.argmax(axis=1)]
        kinds = {
            "sampled": Kind(),
            "sampled, T = 0.7": Kind(0.7),
            "sampled, T = 0.7, top-p 0.8": Kind(0.7, 0.8),
        }
        for case, kind in kinds.items():
            target, draft = warp(raw_target, kind), warp(raw_draft, kind)
            q = draft[0].double().softmax(dim=-1).numpy()
            outcomes = sampling_outcomes(rows, target, draft, q)
            yield measure(case, CALL, outcomes, rows, kind, size=size)
        note = "as `SinglePositionMultiTokenCandidateGenerator` drafts for Gemma 4"
        for case, kind in (
            ("argmax, with logits", Kind()),
            ("argmax, with logits, T = 0.7, top-p 0.8", Kind(0.7, 0.8)),
        ):
            outcomes = sampling_outcomes(rows, warp(raw_target, kind), raw_draft, argmax)
            yield measure(case, CALL, outcomes, rows, kind, size=size, note=note)
        call = "generate(prompt_lookup_num_tokens=...)"
        for case, kind in (("argmax, without logits", Kind()), ("greedy", Kind(0.0))):
            yield measure(case, call, lookup_outcomes(rows, kind), rows, kind, size=size)
    yield gemma_case()
