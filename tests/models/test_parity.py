"""Small random checkpoints that transformers wrote give transformers' logits, family by family.

Without transformers and torch there is nothing to compare with; `make parity` installs both, and
SPECJAX_PARITY_TEST makes their absence a failure.
"""

import dataclasses
import functools
import importlib.util
import os
import warnings

import jax
import numpy as np
import pytest

from specjax.models import functions, load, load_config

if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

    torch.set_num_threads(1)
elif "SPECJAX_PARITY_TEST" in os.environ:
    raise ModuleNotFoundError("transformers and torch are needed here: make parity.")
else:
    pytest.skip("transformers and torch are not installed: make parity", allow_module_level=True)

# What transformers warns of is its own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = SIZES | {"head_dim": 16, "sliding_window": 5}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}
# Name: transformers' class of the configuration, what it is given, and what of it is felt: a
# decoder without it gives other logits.
FAMILIES = {
    "llama-2": ("LlamaConfig", SIZES | {"num_key_value_heads": 4}, {"rope_theta": 9e3}),
    "llama-3.2": (
        "LlamaConfig",
        SIZES | {"rope_parameters": LLAMA_3, "tie_word_embeddings": True},
        {"rope_scaling": None},
    ),
    "llama-bias": ("LlamaConfig", SIZES | {"attention_bias": True}, {"rms_norm_eps": 1e-2}),
    "mistral": (
        "MistralConfig",
        SIZES | {"sliding_window": 5, "head_dim": 12},
        {"layer_windows": ()},
    ),
    "qwen2": ("Qwen2Config", SIZES, {"rope_theta": 9e3}),
    "qwen2-window": (
        "Qwen2Config",
        SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"layer_windows": (5, 5, 5)},
    ),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}, {"rope_theta": 9e3}),
    "gemma-2": (
        "Gemma2Config",
        GEMMA
        | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
        {
            "attention_softcap": None,
            "logit_softcap": None,
            "query_scale": None,
            "embedding_scale": None,
            "norm_offset": 0.0,
            "hidden_act": "silu",
            "layer_windows": (5, 5, 5),
        },
    ),
    "gemma-3": (
        "Gemma3TextConfig",
        GEMMA
        | {"query_pre_attn_scalar": 24, "rope_parameters": LOCAL_AND_GLOBAL}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {
            "local_rope_theta": None,
            "rope_scaling": None,
            "layer_windows": (),
            "query_scale": None,
            "embedding_scale": None,
            "norm_offset": 0.0,
        },
    ),
}
LENGTHS = (13, 9, 1)
SLOTS = 16
KEPT = (8, 9, 1)  # of each request, when it is rewound
AGAIN = 4


def randomized(model):
    """Weights large enough that attention is not uniform, norms and biases that do something."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                # Each product keeps about the size of what goes into it.
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
    return model.eval()


@functools.cache
def reference(name):
    kind, fields, _ = FAMILIES[name]
    config = getattr(transformers, kind)(**fields)
    config._attn_implementation = "eager"
    return randomized(transformers.AutoModelForCausalLM.from_config(config))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    path = tmp_path_factory.mktemp(family)
    reference(family).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, "float32")[0]


@pytest.fixture(scope="module")
def token_ids():
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (len(LENGTHS), SLOTS + AGAIN))
    return ids.astype(np.int32)


def expected(name, row):
    """Logits [T, V] of one sequence on its own, without padding and without a cache."""
    with torch.no_grad():
        return reference(name)(torch.tensor(row[None].astype(np.int64))).logits[0].numpy()


@jax.jit
def run(model, token_ids, positions, cache):
    hidden, cache = model.apply(model.params, token_ids, positions, cache)
    return model.logits(model.params, hidden), cache


def prefill(model, token_ids):
    """Logits of a ragged batch, and its cache; the padding stands behind."""
    place = np.arange(max(LENGTHS), dtype=np.int32)[None]
    positions = np.where(place < np.array(LENGTHS)[:, None], place, -1)
    return run(model, token_ids[:, : max(LENGTHS)], positions, model.init_cache(3, SLOTS))


def step_by_step(model, token_ids, cache, starts, num_steps):
    """Logits [B, num_steps, V] of one token after the other, each request at its own place."""
    found = []
    for step in range(num_steps):
        at = np.array(starts, np.int32) + step
        fed = np.take_along_axis(token_ids, at[:, None], axis=1)
        logits, cache = run(model, fed, at[:, None], cache)
        found.append(logits[:, 0])
    return np.stack(found, axis=1), cache


def close(found, wanted):
    assert wanted.std() > 0.3, "logits that hardly differ show nothing"
    error = np.abs(np.asarray(found) - wanted).max()
    assert error < TOLERANCE, error


def test_a_ragged_prefill_gives_the_logits_of_transformers(
    family, model, token_ids, record_property
):
    logits, _ = prefill(model, token_ids)
    errors = []
    for row, length in enumerate(LENGTHS):
        wanted = expected(family, token_ids[row, :length])
        close(logits[row, :length], wanted)
        errors.append(np.abs(np.asarray(logits[row, :length]) - wanted).max())
    record_property("max_abs_error", float(max(errors)))


def test_one_token_after_the_other_gives_them_too(family, model, token_ids):
    found, _ = step_by_step(model, token_ids, model.init_cache(3, SLOTS), (0, 0, 0), SLOTS)
    for row in range(3):
        close(found[row], expected(family, token_ids[row, :SLOTS]))


def test_they_are_the_same_after_each_request_was_rewound(family, model, token_ids):
    _, cache = prefill(model, token_ids)
    # What is taken back is replaced by other tokens.
    other = (token_ids + 7) % SIZES["vocab_size"]
    kept = np.arange(token_ids.shape[1])[None] < np.array(KEPT)[:, None]
    ids = np.where(kept, token_ids, other)
    found, _ = step_by_step(model, ids, cache, KEPT, AGAIN)
    for row, length in enumerate(KEPT):
        wanted = expected(family, ids[row, : length + AGAIN])
        close(found[row], wanted[length:])


def test_what_a_family_has_of_its_own_is_felt(family, folder, model, token_ids):
    config = load_config(folder)
    wanted = expected(family, token_ids[0, : LENGTHS[0]])
    for field, value in FAMILIES[family][2].items():
        assert getattr(config, field) != value
        other = dataclasses.replace(config, **{field: value})
        faulty = dataclasses.replace(
            model, **dict(zip(("init_cache", "apply", "logits"), functions(other), strict=True))
        )
        logits, _ = prefill(faulty, token_ids)
        error = np.abs(np.asarray(logits[0, : LENGTHS[0]]) - wanted).max()
        assert error > 20 * TOLERANCE, (field, error)
