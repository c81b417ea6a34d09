"""The target and the draft that a command was asked for, refused before weights are read."""

import argparse
import os
from typing import Any, NamedTuple

from specjax import models
from specjax.decode.drafters import model_drafter, ngram_drafter
from specjax.typing import Drafter, Model

__all__ = ["ModelPair", "check_draft", "encode_prompt", "load_pair", "read_pair"]


class ModelPair(NamedTuple):
    """Two models as folders, of which no weights are read yet.

    Attributes:
      name: for people.
      folder: of the target.
      draft_spec: the folder of a draft or of a head, "ngram" or "none".
      target_config: the target's `TransformerConfig`.
      tokenizer: of both.
    """

    name: str
    folder: str | os.PathLike[str]
    draft_spec: str | os.PathLike[str]
    target_config: Any
    tokenizer: Any


def read_pair(options: argparse.Namespace) -> ModelPair:
    """The pair that `--target` and `--draft` name; a `ValueError` if a folder cannot be read."""
    embedded = options.target is None
    folder = models.pretrained_folder("target") if embedded else options.target
    draft_spec, draft_name = options.draft, options.draft
    if draft_name is None:
        draft_spec = models.pretrained_folder("draft") if embedded else "ngram"
        draft_name = "embedded" if embedded else "ngram"
    elif draft_name == "head" and embedded:
        draft_spec = models.pretrained_folder("head")
    elif draft_name == "head" and not os.path.isdir(draft_name):
        raise ValueError(
            "--draft is head, which is the embedded one, and --target names another target than "
            "it was trained for; it needs the folder of a head of its own."
        )
    name = f"target {'embedded' if embedded else folder} · draft {draft_name}"
    return ModelPair(
        name, folder, draft_spec, models.load_config(folder), models.load_tokenizer(folder)
    )


def check_draft(pair: ModelPair) -> None:
    """Refuses a draft model that does not have the target's tokens."""
    if pair.draft_spec in ("ngram", "none"):
        return
    if models.is_head(pair.draft_spec):
        models.check_head(models.load_head_config(pair.draft_spec), pair.target_config.hidden_size)
        return
    models.load_config(pair.draft_spec)
    target_vocab = pair.tokenizer.get_vocab()
    # The heads may be padded to different sizes; what they have in common is what is spoken.
    draft_vocab = models.load_tokenizer(pair.draft_spec).get_vocab()
    if draft_vocab != target_vocab:
        raise ValueError(
            f"the draft {pair.draft_spec} and the target {pair.folder} have different vocabularies "
            f"({len(draft_vocab)} and {len(target_vocab)} tokens); a draft needs the target's "
            "tokenizer, token for token."
        )


def load_pair(pair: ModelPair) -> tuple[Model, Drafter | None]:
    """Reads the weights, with a bar if that takes long."""
    target = models.load(pair.folder)[0]
    if pair.draft_spec == "none":
        return target, None
    if pair.draft_spec == "ngram":
        return target, ngram_drafter()
    if models.is_head(pair.draft_spec):
        params, config = models.load_head(pair.draft_spec)
        return target, models.head_drafter(target, config, params)
    return target, model_drafter(models.load(pair.draft_spec)[0])


def encode_prompt(
    pair: ModelPair, text: str, *, chat: bool, num_new_tokens: int, option: str
) -> list[int]:
    """The tokens of a prompt, for which the target has room.

    Args:
      pair: whose tokenizer reads.
      text: the prompt.
      chat: whether it came of a chat template.
      num_new_tokens: tokens that have to fit behind it.
      option: the option that asked for them.

    Raises:
      ValueError: in a sentence.
    """
    try:
        # A chat template has written the tokens that begin a text.
        ids: list[int] = pair.tokenizer.encode(text, add_special_tokens=not chat).ids
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"the target's tokenizer cannot read the prompt ({error}).") from None
    max_length = pair.target_config.max_position_embeddings
    if not ids:
        raise ValueError("the prompt is empty in the target's tokens.")
    if len(ids) + num_new_tokens > max_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and {option} is {num_new_tokens}; "
            f"the target has room for {max_length} together."
        )
    if max(ids) >= pair.target_config.vocab_size:
        raise ValueError(
            f"the prompt has token {max(ids)}, and config.json of the target a vocabulary of "
            f"{pair.target_config.vocab_size}; tokenizer.json belongs to another model."
        )
    return ids
