"""The target and the draft that a command was asked for, refused before weights are read."""

import argparse
import os
from typing import Any, NamedTuple

from specjax import models
from specjax.decode.drafters import model_drafter, ngram_drafter
from specjax.typing import Drafter, Model

__all__ = ["Pair", "check_draft", "encode", "load_pair", "read_pair"]


class Pair(NamedTuple):
    """Two models as folders, of which no weights are read yet.

    Attributes:
      name: for people.
      folder: of the target.
      choice: the folder of a draft or of a head, "ngram" or "none".
      made: the target's `TransformerConfig`.
      tokenizer: of both.
    """

    name: str
    folder: str | os.PathLike[str]
    choice: str | os.PathLike[str]
    made: Any
    tokenizer: Any


def read_pair(options: argparse.Namespace) -> Pair:
    """The pair that `--target` and `--draft` name; a `ValueError` if a folder cannot be read."""
    embedded = options.target is None
    folder = models.pretrained_folder("target") if embedded else options.target
    choice, draft = options.draft, options.draft
    if draft is None:
        choice = models.pretrained_folder("draft") if embedded else "ngram"
        draft = "embedded" if embedded else "ngram"
    elif draft == "head" and embedded:
        choice = models.pretrained_folder("head")
    elif draft == "head" and not os.path.isdir(draft):
        raise ValueError(
            "--draft is head, which is the embedded one, and --target names another target than "
            "it was trained for; it needs the folder of a head of its own."
        )
    name = f"target {'embedded' if embedded else folder} · draft {draft}"
    return Pair(name, folder, choice, models.load_config(folder), models.load_tokenizer(folder))


def check_draft(pair: Pair) -> None:
    """Refuses a draft model that does not have the target's tokens."""
    if pair.choice in ("ngram", "none"):
        return
    if models.is_head(pair.choice):
        models.check_head(models.load_head_config(pair.choice), pair.made.hidden_size)
        return
    models.load_config(pair.choice)
    words = pair.tokenizer.get_vocab()
    # The heads may be padded to different sizes; what they have in common is what is spoken.
    own = models.load_tokenizer(pair.choice).get_vocab()
    if own != words:
        raise ValueError(
            f"the draft {pair.choice} and the target {pair.folder} have different vocabularies "
            f"({len(own)} and {len(words)} tokens); a draft needs the target's tokenizer, token "
            "for token."
        )


def load_pair(pair: Pair) -> tuple[Model, Drafter | None]:
    """Reads the weights, with a bar if that takes long."""
    target = models.load(pair.folder)[0]
    if pair.choice == "none":
        return target, None
    if pair.choice == "ngram":
        return target, ngram_drafter()
    if models.is_head(pair.choice):
        params, config = models.load_head(pair.choice)
        return target, models.head_drafter(target, config, params)
    return target, model_drafter(models.load(pair.choice)[0])


def encode(pair: Pair, text: str, *, chat: bool, room: int, asked: str) -> list[int]:
    """The tokens of a prompt, for which the target has room.

    Args:
      pair: whose tokenizer reads.
      text: the prompt.
      chat: whether it came of a chat template.
      room: tokens that have to fit behind it.
      asked: the option that asked for them.

    Raises:
      ValueError: in a sentence.
    """
    try:
        # A chat template has written the tokens that begin a text.
        ids: list[int] = pair.tokenizer.encode(text, add_special_tokens=not chat).ids
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"the target's tokenizer cannot read the prompt ({error}).") from None
    longest = pair.made.max_position_embeddings
    if not ids:
        raise ValueError("the prompt is empty in the target's tokens.")
    if len(ids) + room > longest:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and {asked} is {room}; "
            f"the target has room for {longest} together."
        )
    if max(ids) >= pair.made.vocab_size:
        raise ValueError(
            f"the prompt has token {max(ids)}, and config.json of the target a vocabulary of "
            f"{pair.made.vocab_size}; tokenizer.json belongs to another model."
        )
    return ids
