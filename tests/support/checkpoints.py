"""Random checkpoints, small ones, where the commands of docs/checkpoints.md look for them."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.models import (
    Eagle3Config,
    TransformerConfig,
    build,
    build_eagle3,
    load,
    load_tokenizer,
    pretrained_folder,
    save,
    save_eagle3,
)

# The target's vocabulary is padded beyond the tokenizer's, the draft's is not.
TARGET = TransformerConfig(
    vocab_size=4160,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    qkv_bias=True,
)
HEAD = Eagle3Config(
    dataclasses.replace(TARGET, qkv_bias=False), 32, 1024, taps=(0, 1), num_speculative_tokens=3
)
DRAFT = dataclasses.replace(TARGET, vocab_size=4096, hidden_size=16)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_checkpoint(path, config, seed=0):
    """Writes a model with the tokenizer and a template; its texts are not one token repeated."""
    # By NumPy: of arrays of JAX each shape would be a program.
    params = jax.device_get(build(config, seed=seed).params)
    params = jax.tree.map(lambda a: a * a.dtype.type(2), params)
    save(path, params, config, load_tokenizer(pretrained_folder("target")))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def write_checkpoints(folder):
    """Writes a Qwen, its small sibling and a head under the names of docs/checkpoints.md.

    The models are unrelated but their distributions flat: about half of the drafted tokens are
    accepted.
    """
    for name, config in (("Qwen2.5-7B-Instruct", TARGET), ("Qwen2.5-0.5B-Instruct", DRAFT)):
        write_checkpoint(folder / "path" / "to" / name, config)
    params = build_eagle3(HEAD) | {"token_map": jnp.arange(0, 4096, 4)}
    name, verifier = "EAGLE3-Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
    save_eagle3(folder / "path" / "to" / name, params, HEAD, verifier=verifier)


def write_shallow(folder, role, num_layers, dtype=None):
    """Writes the first layers of an embedded model, which compile in less time than all of them."""
    model, config = load(pretrained_folder(role), dtype)
    layers = {n: model.params["layers"][n] for n in range(num_layers)}
    windows = config.layer_windows[:num_layers]
    config = dataclasses.replace(config, num_hidden_layers=num_layers, layer_windows=windows)
    tokenizer = load_tokenizer(pretrained_folder(role))
    save(folder, model.params | {"layers": layers}, config, tokenizer)
    return folder
