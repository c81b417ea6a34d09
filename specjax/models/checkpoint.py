"""Models as Hugging Face folders: config.json, model.safetensors, tokenizer.json."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import tokenizers
from safetensors.flax import save as serialized

from specjax.models.config import TransformerConfig
from specjax.models.transformer import build
from specjax.typing import Model

__all__ = ["load", "load_config", "load_tokenizer", "save"]

_LAYER = "model.layers.{}."
_FLOATS = ("BF16", "F16", "F32", "F64")


def _open(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder; it needs to be a Hugging Face folder with config.json, "
            "model.safetensors and tokenizer.json."
        )
    if (path / f"{name}.index.json").is_file() and not (path / name).is_file():
        raise ValueError(f"{path} has its {name} in several files; it needs to be in one.")
    if not (path / name).is_file():
        raise ValueError(f"{path} has no {name}; a Hugging Face folder needs it to be read.")
    return path / name


def load_config(folder: str | os.PathLike[str]) -> TransformerConfig:
    """Reads `config.json`.

    Args:
      folder: a Hugging Face folder of the Llama family.

    Raises:
      ValueError: on a missing or unreadable file, or one that asks for what is not built here.
    """
    path = _open(folder, "config.json")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object; it needs the fields of a configuration.")
    return TransformerConfig.from_dict(fields, str(path))


def load_tokenizer(folder: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Reads `tokenizer.json` with the `tokenizers` library; it neither truncates nor pads.

    Raises:
      ValueError: on a missing or unreadable file.
    """
    path = _open(folder, "tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"{path} cannot be read as a tokenizer ({error}).") from None
    # A training's lengths, left in the file: they would cut prompts in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _shapes(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, one by one: config.json may ask for any number."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    yield "model.norm.weight", (hidden,)
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        yield from ((_LAYER.format(number) + name, shape) for name, shape in layer.items())


def _read(path: pathlib.Path, config: TransformerConfig) -> dict[str, jax.Array]:
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            names, wanted = set(file.keys()), []
            for name, shape in _shapes(config):
                if name not in names:
                    raise ValueError(f"{path} has no tensor {name}; config.json asks for it.")
                lies = file.get_slice(name)
                found, dtype = tuple(lies.get_shape()), lies.get_dtype()
                if found != shape:
                    raise ValueError(
                        f"{path} holds {name} with shape {found}; config.json makes it {shape}."
                    )
                if dtype not in _FLOATS:
                    raise ValueError(
                        f"{path} holds {name} in {dtype}; quantised weights are not read here, it "
                        f"needs to be one of {', '.join(_FLOATS)}."
                    )
                wanted.append(name)
            return {name: file.get_tensor(name).astype(config.dtype) for name in wanted}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}).") from None


def _params(tensors: dict[str, jax.Array], config: TransformerConfig) -> dict[str, Any]:
    def joined(prefix: str, *names: str) -> jax.Array:
        return jnp.concatenate([tensors[f"{prefix}{name}.weight"].T for name in names], axis=1)

    def layer(prefix: str) -> dict[str, Any]:
        return {
            "attention_norm": {"weight": tensors[prefix + "input_layernorm.weight"]},
            "attention": {
                "qkv": joined(prefix + "self_attn.", "q_proj", "k_proj", "v_proj"),
                "out": joined(prefix + "self_attn.", "o_proj"),
            },
            "mlp_norm": {"weight": tensors[prefix + "post_attention_layernorm.weight"]},
            "mlp": {
                "gate_up": joined(prefix + "mlp.", "gate_proj", "up_proj"),
                "down": joined(prefix + "mlp.", "down_proj"),
            },
        }

    params = {
        "embedding": tensors["model.embed_tokens.weight"],
        "layers": {n: layer(_LAYER.format(n)) for n in range(config.num_hidden_layers)},
        "norm": {"weight": tensors["model.norm.weight"]},
    }
    if not config.tie_word_embeddings:
        params["head"] = tensors["lm_head.weight"]
    return params


def load(
    folder: str | os.PathLike[str], dtype: str | None = None
) -> tuple[Model, TransformerConfig]:
    """Reads a model of the Llama family.

    Args:
      folder: holds config.json and model.safetensors in Hugging Face's layout.
      dtype: of parameters, activations and cache. None is the file's own, but
        float32 on a CPU, where bfloat16 products are slow.

    Returns:
      The model, and its configuration with that dtype.

    Raises:
      ValueError: in a sentence that names the file, or the tensor, and what is needed.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> model, config = load(pretrained_folder("draft"))
      >>> config.vocab_size
      4096
    """
    config = load_config(folder)
    if dtype is None and jax.default_backend() == "cpu":
        dtype = "float32"
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    tensors = _read(_open(folder, "model.safetensors"), config)
    return build(config, _params(tensors, config)), config


def _tensors(params: Any, config: TransformerConfig) -> dict[str, Any]:
    queries = config.num_attention_heads * config.head_dim
    keys = queries + config.num_key_value_heads * config.head_dim
    tensors = {"model.embed_tokens.weight": params["embedding"]}
    tensors["model.norm.weight"] = params["norm"]["weight"]
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = params["head"]
    for number, layer in params["layers"].items():
        q, k, v = jnp.split(layer["attention"]["qkv"].T, [queries, keys])
        gate, up = jnp.split(layer["mlp"]["gate_up"].T, 2)
        named = {
            "input_layernorm": layer["attention_norm"]["weight"],
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer["attention"]["out"].T,
            "post_attention_layernorm": layer["mlp_norm"]["weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer["mlp"]["down"].T,
        }
        prefix = _LAYER.format(number)
        tensors |= {f"{prefix}{name}.weight": array for name, array in named.items()}
    return tensors


def save(
    folder: str | os.PathLike[str],
    params: Any,
    config: TransformerConfig,
    tokenizer: tokenizers.Tokenizer,
    dtype: str = "bfloat16",
) -> None:
    """Writes a Hugging Face folder that `load` reads back, up to rounding to `dtype`.

    Args:
      folder: is made if absent; its config.json, model.safetensors and
        tokenizer.json are replaced.
      params: as in `Model.params`.
      config: of the model; its dtype is replaced by `dtype`.
      tokenizer: written beside the weights.
      dtype: of the tensors on disk.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: jnp.asarray(np.ascontiguousarray(array), dtype)
        for name, array in _tensors(params, config).items()
    }
    (path / "model.safetensors").write_bytes(serialized(tensors, metadata={"format": "pt"}))
    fields = dataclasses.replace(config, dtype=dtype).to_dict()
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(path / "tokenizer.json"))
