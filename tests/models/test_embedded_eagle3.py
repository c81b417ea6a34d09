"""The embedded EAGLE-3 head: what it drafts is accepted as its own forward, elsewhere, expects."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_steps import Acceptance, generated_steps, softmax
from embedded_heads import code_prompts, write_part_of_head
from oracle_eagle3 import Head

from specjax.models import load, load_drafter, pretrained_folder

pytestmark = pytest.mark.once

K = 3


@pytest.mark.checks
def test_acceptance_of_generate_is_the_overlap_at_every_position_of_a_step(tmp_path):
    """q is NumPy's, from the target's states after the layers that config.json names."""
    fields, tensors, ids = write_part_of_head(tmp_path / "head")
    target, config = load(pretrained_folder("target"), "float32")
    drafter = load_drafter(tmp_path / "head", target, "float32")
    table = target.params["embedding"]
    oracle = Head(
        fields["transformer_layer_config"] | fields, tensors, embedding=table, lm_head=table
    )
    taps = tuple(fields["eagle_aux_hidden_state_layer_ids"])

    @jax.jit
    def forward(model, text):
        place = jnp.arange(len(text), dtype=jnp.int32)[None]
        cache = model.init_cache(1, len(text))
        hidden, states, _ = model.apply_with_taps(model.params, text[None], place, cache, taps)
        return model.logits(model.params, hidden[0]), states[0]

    prompts, lengths = code_prompts()
    room, acceptance = prompts.shape[1] + 32, Acceptance(K)
    options = {"temperature": 1.0, "num_drafted": K, "max_new_tokens": 32}
    seen = {}
    for text, begin, accepted, judged in generated_steps(
        target, drafter, prompts, lengths, **options
    ):
        key = text.tobytes()
        if key not in seen:
            padded = np.pad(text, (0, room - len(text)))
            seen[key] = [np.asarray(x, np.float64) for x in forward(target, padded)]
        logits, states = seen[key]
        size = min(accepted + 1, judged)
        drafted = text[begin : begin + size]
        q = np.zeros((size, config.vocab_size))
        q[:, ids] = softmax(oracle.draft_logits(text[:begin], states[: begin - 1], drafted))
        acceptance.add(softmax(logits[begin - 1 : begin - 1 + size]), q, accepted)
    acceptance.check(at_least=90)


def test_the_embedded_head_is_the_one_of_the_record():
    record = pathlib.Path(__file__).parents[2] / "examples" / "pair" / "record"
    report = json.loads((record / "head.json").read_text(encoding="utf-8"))
    assert min(report["heldout"]["acceptance"]) > 0.7
    size = (pretrained_folder("eagle3") / "model.safetensors").stat().st_size
    assert size < 4_400_000
