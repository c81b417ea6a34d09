"""Random checkpoints, as small as the README's are large, where its commands look for them."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.models import TransformerConfig, build, load_tokenizer, pretrained_folder, save

# The head has more rows than the tokenizer has words, and the draft's has not.
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
DRAFT = dataclasses.replace(TARGET, vocab_size=4096, hidden_size=16)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def write_checkpoints(folder):
    """Writes a Qwen and its small sibling under the names that the README gives them."""
    tokenizer = load_tokenizer(pretrained_folder("target"))
    for name, config in (("Qwen2.5-7B-Instruct", TARGET), ("Qwen2.5-0.5B-Instruct", DRAFT)):
        # Larger weights than at the start of a training, so that texts are not one token repeated;
        # the models agree no more than their laws are flat, which is about half of the time.
        params = jax.tree.map(lambda a: a * jnp.asarray(2, a.dtype), build(config, seed=0).params)
        made = folder / "path" / "to" / name
        save(made, params, config, tokenizer)
        (made / "chat_template.jinja").write_text(TEMPLATE)
