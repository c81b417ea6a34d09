"""Heads that `speculators` wrote draft from what `speculators` computes, one request at a time.

Without it there is nothing to compare with; `make head-parity` installs it, and
SPECJAX_HEAD_PARITY_TEST makes its absence a failure. It has no `target_hidden_size` in EAGLE-3, no
`aux_norm_*` and no `logit_scale`, nor DeepSpec's and SpecForge's formats: there NumPy is what the
heads are held to, in `test_eagle3.py` and `test_eagle3_folder.py`.
"""

import dataclasses
import importlib.util
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_steps import Acceptance, accepted_steps, drafted_steps, generated_steps, softmax
from embedded_heads import NUM_DRAFT_TOKENS, code_prompts, write_part_of_head

from specjax.models import (
    TransformerConfig,
    build,
    load,
    load_dflash,
    load_drafter,
    load_eagle3,
    pretrained_folder,
    save_dflash,
    save_eagle3,
)

if importlib.util.find_spec("speculators"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

    torch.set_num_threads(1)
elif "SPECJAX_HEAD_PARITY_TEST" in os.environ:
    raise ModuleNotFoundError("speculators is needed here: make head-parity.")
else:
    pytest.skip("speculators is not installed: make head-parity", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

VOCAB, DRAFT_VOCAB, SIZE = 96, 40, 32
TARGET = TransformerConfig(VOCAB, SIZE, 64, 4, 4, 2, 8)
LAYER = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Name -> class of the layer's configuration, what it sets, and what the head sets.
VARIANTS = {
    "llama": ("LlamaConfig", {}, {}),
    "norm_output": ("LlamaConfig", {}, {"norm_output": True}),
    "qwen3": ("Qwen3Config", {}, {"norm_before_residual": True}),
    "fc_norm": (
        "Qwen3Config",
        {"attention_bias": True},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    ),
    "whole vocabulary": (
        "LlamaConfig",
        {"attention_bias": True, "rope_parameters": LLAMA_3},
        {"norm_before_fc": True, "draft_vocab_size": VOCAB},
    ),
}


def speculators_config(algorithm):
    return SpeculatorsConfig(
        algorithm=algorithm,
        default_proposal_method="greedy",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def random_head(kind, layer, fields):
    """An EAGLE-3 head of one of the variants."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config={"LlamaConfig": LlamaConfig, "Qwen3Config": Qwen3Config}[kind](
            **LAYER, **layer
        ),
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=speculators_config("eagle3"),
        **{"draft_vocab_size": DRAFT_VOCAB, **fields},
    )
    torch.manual_seed(0)
    return filled(Eagle3DraftModel(config))


@torch.no_grad()
def filled(head):
    """A head with weights 0.3 N(0, 1), norms about 1, and offsets that are not constant."""
    config = head.config
    for name, parameter in head.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    if config.draft_vocab_size < VOCAB:
        ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, value=True)
        head.load_vocab_mappings(known, ids - torch.arange(DRAFT_VOCAB))
    return head.eval()


@torch.no_grad()
def step_logits(head, tokens, taps, num_steps):
    """The logits [steps, T, V_d] of a head's steps at every token, those of the text being fed.

    The forward is for training and returns none: they are taken where the lm_head leaves them.
    """
    rows = []
    hook = head.lm_head.register_forward_hook(lambda *call: rows.append(call[2]))
    ids, taps = torch.tensor(tokens)[None].long(), torch.tensor(taps)[None]
    head(taps, ids, torch.zeros_like(ids), ttt_steps=num_steps)
    hook.remove()
    return torch.stack(rows)[:, 0].numpy()


def draft_logits(head, text, features, drafted):
    """The logits [K, V_d] of a head's first steps after a text, each given the one before it."""
    tokens = np.concatenate([text[1:], drafted])
    taps = np.pad(features, ((0, len(tokens) - len(features)), (0, 0)))
    return step_logits(head, tokens, taps, len(drafted))[:, len(text) - 2]


# Name -> class of the layers' configuration, what it sets, and what the head sets.
BLOCK_VARIANTS = {
    "qwen3": ("Qwen3Config", {}, {}),
    "llama": ("LlamaConfig", {"attention_bias": True, "rope_parameters": LLAMA_3}, {}),
    "whole vocabulary": (
        "Qwen3Config",
        {},
        {"draft_vocab_size": VOCAB, "sample_from_anchor": True},
    ),
}


def random_block_head(kind, layer, fields):
    """A DFlash head of one of the variants."""
    config = DFlashSpeculatorConfig(
        transformer_layer_config={"LlamaConfig": LlamaConfig, "Qwen3Config": Qwen3Config}[kind](
            **LAYER | {"num_hidden_layers": 2}, **layer
        ),
        block_size=4,
        mask_token_id=VOCAB - 1,
        aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=speculators_config("dflash"),
        **{"draft_vocab_size": DRAFT_VOCAB, **fields},
    )
    torch.manual_seed(0)
    return filled(DFlashDraftModel(config))


@torch.no_grad()
def block_logits(head, text, features, drafted):
    """The logits [K, V_d] of a head's block after a text, where the lm_head leaves them.

    The forward is for training: the block begins at the one token that its mask selects.
    """
    rows, length = [], len(text) + head.block_size + 1
    hook = head.lm_head.register_forward_hook(lambda *call: rows.append(call[2][0].numpy()))
    ids = torch.tensor(np.pad(text, (0, length - len(text))))[None].long()
    # What follows the text is not to be read.
    taps = np.pad(features, ((0, length - len(features)), (0, 0)), constant_values=9.0)
    mask = torch.zeros(1, length)
    mask[:, len(text) - 1] = 1
    head(
        torch.tensor(taps)[None],
        ids,
        mask,
        torch.zeros(1, length, SIZE),
        torch.zeros_like(ids),
        max_anchors=1,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    hook.remove()
    first = 0 if head.config.sample_from_anchor else 1
    return rows[0][first : first + len(drafted)]


def target():
    return build(TARGET)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_drafts_from_what_its_makers_compute(tmp_path, name):
    """Steps 0, 1 and 2 of ragged batches, and after rewinds."""
    head = random_head(*VARIANTS[name])
    head.save_pretrained(tmp_path)
    (tmp_path / "config.py").write_text("raise RuntimeError('this file is never run')")
    drafter = load_drafter(tmp_path, target(), "float32")
    for *given, logits in drafted_steps(drafter, vocab_size=VOCAB, width=3 * SIZE):
        wanted = draft_logits(head, *given)
        assert wanted.std() > 1
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", BLOCK_VARIANTS)
def test_a_block_is_drafted_from_what_its_makers_compute(tmp_path, name):
    """Of ragged batches, and after rewinds."""
    head = random_block_head(*BLOCK_VARIANTS[name])
    head.save_pretrained(tmp_path)
    # What its folder has not is the target's.
    model = build(dataclasses.replace(TARGET, tie_word_embeddings=False))
    tables = {"embedding": head.embed_tokens.weight}
    if name == "whole vocabulary":
        tables["head"] = head.lm_head.weight
    model.params.update({n: jnp.asarray(table.detach()) for n, table in tables.items()})
    drafter = load_drafter(tmp_path, model, "float32")
    for *given, logits in drafted_steps(drafter, vocab_size=VOCAB, width=3 * SIZE):
        wanted = block_logits(head, *given)
        assert wanted.std() > 1
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


def embedded_sides(folder):
    """The embedded target, and its head with a part of the vocabulary: here, in torch, and q's ids.

    `speculators` reads the head from its folder; the embeddings are put into it, since it looks
    for those of a target that are not tied.
    """
    target_folder = pretrained_folder("target")
    _, _, ids = write_part_of_head(folder, verifier=target_folder)
    own, _ = load(target_folder, "float32")
    theirs = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    # The attention that it would choose wants to be compiled.
    config.transformer_layer_config._attn_implementation = "eager"
    head = Eagle3DraftModel.from_pretrained(folder, config=config).float().eval()
    head.embed_tokens.weight = theirs.get_input_embeddings().weight
    assert head.d2t.tolist() == list(ids - np.arange(len(ids)))
    return own, load_drafter(folder, own, "float32"), theirs, head, ids


def shifted(drafter):
    """One that reads the features of the position before."""

    def extend(params, state, ids, positions, features):
        return drafter.extend(params, state, ids, positions, jnp.roll(features, 1, axis=1))

    return dataclasses.replace(drafter, extend=extend)


# Wrong versions of a drafter, each of which is accepted less often than it ought to be.
WRONG = {
    "taps one layer too late": lambda x: dataclasses.replace(x, taps=(3, 5, 6)),
    "taps one layer too early": lambda x: dataclasses.replace(x, taps=(1, 3, 4)),
    "features of the position before": shifted,
    "no offsets of d2t": lambda x: dataclasses.replace(
        x, params=x.params | {"token_map": jnp.arange(NUM_DRAFT_TOKENS)}
    ),
}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return embedded_sides(tmp_path_factory.mktemp("embedded") / "head")


@torch.no_grad()
@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_acceptance_is_the_overlap_with_what_its_makers_compute_at_every_position(embedded, wrong):
    """Counted by `generate`; p is of transformers, q of `speculators` from its hidden states.

    The least fault, taps one layer too late, takes 0.06 of the first draft's acceptance and 0.04 of
    the others': about 6.5 standard errors of 3500 drafts. Four fail.
    """
    own, drafter, theirs, head, ids = embedded
    drafter = drafter if wrong is None else WRONG[wrong](drafter)
    prompts, lengths = (np.repeat(x, 4, axis=0) for x in code_prompts())
    options = {"temperature": 1.0, "num_drafted": 3, "max_new_tokens": 160}
    acceptance, seen = Acceptance(3), {}
    for text, begin, accepted, judged in generated_steps(own, drafter, prompts, lengths, **options):
        key = text.tobytes()
        if key not in seen:
            # Of one text alone, all of its steps.
            seen.clear()
            output = theirs(torch.tensor(text)[None].long(), output_hidden_states=True)
            # Entry k is the state after k layers; only the last entry is after the final norm.
            taps = torch.cat([output.hidden_states[k][0] for k in (2, 4, 5)], dim=-1).numpy()
            seen[key] = output.logits[0].numpy(), step_logits(head, text[1:], taps[:-1], 3)
        logits, rows = seen[key]
        size = min(accepted + 1, judged)
        q = np.zeros((size, logits.shape[1]))
        q[:, ids] = softmax(rows[:size, begin - 2])
        acceptance.add(softmax(logits[begin - 1 : begin - 1 + size]), q, accepted)
    print(wrong, acceptance.num_accepted, acceptance.expected.round(1))
    if wrong is None:
        acceptance.check(at_least=1500)
    else:
        with pytest.raises(AssertionError, match="standard errors"):
            acceptance.check(at_least=0)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
@torch.no_grad()
def test_taps_are_the_hidden_states_that_transformers_counts(tmp_path, kind):
    """What the loop accepts is the mean of sum min(p, q), by transformers' p and speculators' q."""
    layer = LAYER | {"num_hidden_layers": 4, "tie_word_embeddings": False}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**layer)).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    model.save_pretrained(tmp_path / "target")
    if kind == "eagle3":
        head, logits = random_head(*VARIANTS["norm_output"]), draft_logits
    else:
        head, logits = random_block_head(*BLOCK_VARIANTS["qwen3"]), block_logits
        head.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
    head.save_pretrained(tmp_path / "head")
    own, _ = load(tmp_path / "target", "float32")
    drafter = load_drafter(tmp_path / "head", own, "float32")
    rng, size, temperature = np.random.default_rng(7), 32, 6.0
    lengths = rng.integers(1, 6, size).astype(np.int32)
    prompts = rng.integers(0, VOCAB, (size, 5)).astype(np.int32)
    options = {"temperature": temperature, "num_drafted": 3, "num_steps": 4}
    ids, acceptance = head.d2t.numpy() + np.arange(DRAFT_VOCAB), Acceptance(3)
    for text, length, found, accepted in accepted_steps(own, drafter, prompts, lengths, **options):
        output = model(torch.tensor(text[: length + 3])[None].long(), output_hidden_states=True)
        taps = torch.cat([output.hidden_states[k][0] for k in (1, 2, 3)], dim=-1).numpy()
        drafted = text[length : length + 3]
        wanted = logits(head, text[:length], taps[: length - 1], drafted)
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
        q = np.zeros((3, VOCAB))
        q[:, ids] = softmax(wanted / temperature)
        p = softmax(output.logits[0, length - 1 : length + 2].numpy() / temperature)
        acceptance.add(p, q, accepted)
    acceptance.check(at_least=40)


@pytest.mark.parametrize("name", ["qwen3", "whole vocabulary"])
def test_its_makers_read_a_head_that_is_saved_here(tmp_path, name):
    from safetensors.torch import load_file

    kind, layer, fields = VARIANTS[name]
    head = random_head(kind, layer, fields)
    head.save_pretrained(tmp_path / "theirs")
    params, config = load_eagle3(tmp_path / "theirs", "float32", num_target_layers=4)
    save_eagle3(tmp_path / "ours", params, config, "float32")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    for tensor, value in head.state_dict().items():
        if not tensor.startswith("verifier_"):
            np.testing.assert_array_equal(saved[tensor], value)
    again, found = load_eagle3(tmp_path / "ours", "float32", num_target_layers=4)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize("name", BLOCK_VARIANTS)
def test_its_makers_read_a_block_head_that_is_saved_here(tmp_path, name):
    head = random_block_head(*BLOCK_VARIANTS[name])
    head.save_pretrained(tmp_path / "theirs")
    params, config = load_dflash(tmp_path / "theirs", "float32", num_target_layers=4)
    save_dflash(tmp_path / "ours", params, config, "float32")
    again = DFlashDraftModel.from_pretrained(tmp_path / "ours").state_dict()
    for tensor, value in head.state_dict().items():
        is_targets = tensor.startswith(("verifier_", "embed_tokens", "lm_head"))
        if not is_targets or (tensor == "lm_head.weight" and config.has_lm_head):
            np.testing.assert_array_equal(again[tensor], value)
    ours, found = load_dflash(tmp_path / "ours", "float32", num_target_layers=4)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, ours, params)
