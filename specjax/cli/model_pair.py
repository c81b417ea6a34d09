"""Target and draft of a command: their folders are checked, then their weights loaded."""

import argparse
import os
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax import models
from specjax.cli.processes import load_options
from specjax.decode.drafters import Drafter, model_drafter, ngram_drafter
from specjax.engine.request import PROGRAM_EXITS
from specjax.file_io import shorten
from specjax.types import Model

__all__ = [
    "CheckedDraft",
    "ModelPair",
    "check_draft",
    "check_logprobs",
    "describe_configs",
    "encode_prompt",
    "encode_text",
    "load_pair",
    "pair_shapes",
    "read_pair",
]

# Names of `--draft`, and the folders that ship with specjax.
_EMBEDDED_DRAFTS = {"head": "eagle3", "model": "draft"}


class ModelPair(NamedTuple):
    """A target and a draft whose weights are not read yet.

    Attributes:
      name: of the pair, for display.
      folder: of the target.
      draft_spec: the folder of a draft model or draft head, "ngram" or "none".
      target_config: the target's `TransformerConfig`.
      tokenizer: of both models.
      load_target: options of `models.load` for the target, its mesh among them.
      load_draft: options of `models.load` for a draft model.
    """

    name: str
    folder: str | os.PathLike[str]
    draft_spec: str | os.PathLike[str]
    target_config: Any
    tokenizer: Any
    load_target: Mapping[str, Any] = MappingProxyType({})
    load_draft: Mapping[str, Any] = MappingProxyType({})


def read_pair(options: argparse.Namespace) -> ModelPair:
    """Returns the pair that `--target` and `--draft` name; refuses an unreadable folder."""
    embedded = options.target is None
    folder = models.pretrained_folder("target") if embedded else options.target
    default = "head" if embedded else "ngram"
    draft_name = default if options.draft is None else options.draft
    draft_spec = draft_name
    if embedded and draft_name in _EMBEDDED_DRAFTS:
        draft_spec = models.pretrained_folder(_EMBEDDED_DRAFTS[draft_name])
    elif draft_name in _EMBEDDED_DRAFTS and not os.path.isdir(draft_name):
        kind = "draft head" if draft_name == "head" else "draft model"
        raise ValueError(
            f"--draft {draft_name} is the {kind} that ships with specjax, trained for the default "
            f"target; with --target, give the folder of a {kind} for that target."
        )
    name = f"target {'embedded' if embedded else folder} · draft {draft_name}"
    configs = models.load_config(folder), models.load_tokenizer(folder)
    return ModelPair(name, folder, draft_spec, *configs, *load_options(options))


class CheckedDraft(NamedTuple):
    """Metadata of a draft that fits its target.

    Attributes:
      num_speculative_tokens: K that it was trained for, or None.
      warning: a sentence to print, or None.
      max_speculative_tokens: the largest K that it drafts, or None.
      step_costs: for K = "auto", or None.
      usual_acceptance_rate: for K = "auto" of a file of prompts, or None.
    """

    num_speculative_tokens: int | None = None
    warning: str | None = None
    max_speculative_tokens: int | None = None
    step_costs: tuple[float, ...] | None = None
    usual_acceptance_rate: float | None = None

    def check_k(self, k: int, option: str) -> None:
        """Refuses a K larger than the draft's maximum."""
        most = self.max_speculative_tokens
        if most is not None and k > most:
            raise ValueError(
                f"{option} is {k}; the draft head drafts at most {most} tokens a step."
            )


def check_draft(pair: ModelPair) -> CheckedDraft:
    """Returns the metadata of a draft; refuses another vocabulary, or a head of another target."""
    if pair.draft_spec in ("ngram", "none"):
        return CheckedDraft()
    info = models.read_draft(pair.draft_spec, pair.target_config)
    auto = info.step_costs, info.usual_acceptance_rate
    if info.kind != "model":
        warning = _warn_of_verifier(pair, info.verifier)
        most = info.max_speculative_tokens
        return CheckedDraft(info.num_speculative_tokens, warning, most, *auto)
    target_vocab = pair.tokenizer.get_vocab()
    # Tokenizers are compared: the models' own vocabulary sizes may differ by padding.
    draft_vocab = models.load_tokenizer(pair.draft_spec).get_vocab()
    if draft_vocab != target_vocab:
        raise ValueError(
            f"the draft {pair.draft_spec} and the target {pair.folder} have different vocabularies "
            f"({len(draft_vocab)} and {len(target_vocab)} tokens); a draft needs the target's "
            "tokenizer, token for token."
        )
    return CheckedDraft(None, None, None, *auto)


def check_logprobs(options: argparse.Namespace, pair: ModelPair) -> None:
    """Refuses `--logprobs` for more tokens than the target has."""
    vocab_size = pair.target_config.vocab_size
    if (options.logprobs or 0) > vocab_size:
        raise ValueError(f"--logprobs is {options.logprobs}; the target has {vocab_size} tokens.")


def _warn_of_verifier(pair: ModelPair, verifier: str | None) -> str | None:
    """Returns a warning if a head names another target than the folder's, or None."""
    folder = pathlib.Path(pair.folder).resolve().name
    if verifier is None or pathlib.PurePath(verifier).name.lower() == folder.lower():
        return None
    return (
        f"the head {pair.draft_spec} was trained for {shorten(verifier)}, and the target is "
        f"{pair.folder}; if they differ, few of its drafts are accepted."
    )


def describe_configs(pair: ModelPair) -> str:
    """Returns the cache key of the models' programs: configurations alone, equal for equal ones."""
    draft = pair.draft_spec
    if draft not in ("none", "ngram"):
        draft = repr(models.read_draft(draft, pair.target_config).config)
    return f"{pair.target_config} {draft}"


def pair_shapes(pair: ModelPair) -> tuple[Model, Drafter | None] | None:
    """Returns target and drafter with shapes for weights; None with a head or a mesh."""
    has_head = pair.draft_spec not in ("none", "ngram") and not _is_model(pair)
    return None if has_head or pair.load_target else _make_pair(pair, models.load_shapes)


def _is_model(pair: ModelPair) -> bool:
    return models.draft_kind(pair.draft_spec) == "model"


def load_pair(pair: ModelPair) -> tuple[Model, Drafter | None]:
    """Reads the weights and returns target and drafter (None for plain decoding)."""
    return _make_pair(pair, models.load)


def _make_pair(
    pair: ModelPair, load: Callable[..., tuple[Model, Any]]
) -> tuple[Model, Drafter | None]:
    target = load(pair.folder, **pair.load_target)[0]
    if pair.draft_spec == "none":
        return target, None
    if pair.draft_spec == "ngram":
        return target, ngram_drafter()
    if _is_model(pair):
        return target, model_drafter(load(pair.draft_spec, **pair.load_draft)[0])
    return target, models.load_drafter(pair.draft_spec, target)


def encode_text(tokenizer: Any, text: str, *, chat: bool) -> tuple[list[int], str | None]:
    """Returns the tokens of a text, and a warning if the text has the tokenizer's first tokens.

    Special tokens that the tokenizer adds before a text, such as "<s>", then occur only once.

    Args:
      tokenizer: of the target.
      text: the prompt.
      chat: whether a chat template made it, which writes all special tokens itself.
    """
    encoding = tokenizer.encode(text, add_special_tokens=not chat)
    ids: list[int] = encoding.ids
    # The mask is 0 for a special token in the text itself.
    num_added = next((i for i, added in enumerate(encoding.special_tokens_mask) if not added), 0)
    begin = ids[:num_added]
    if not begin or ids[num_added : 2 * num_added] != begin:
        return ids, None
    name = "".join(tokenizer.id_to_token(token_id) for token_id in begin)
    return ids[num_added:], (
        f"the prompt begins with {name}, which the tokenizer would add; it is not added again."
    )


def encode_prompt(
    pair: ModelPair, text: str, *, chat: bool, num_new_tokens: int, option: str
) -> tuple[list[int], str | None]:
    """Returns the tokens of a prompt, and a warning of `encode_text` or None.

    Args:
      pair: gives the tokenizer and the longest sequence.
      text: the prompt.
      chat: whether a chat template made it.
      num_new_tokens: tokens that must fit after it.
      option: names `num_new_tokens` in an error.

    Raises:
      ValueError: if the prompt is empty, too long, or not in the target's vocabulary.
    """
    try:
        ids, warning = encode_text(pair.tokenizer, text, chat=chat)
    except BaseException as error:  # The library raises a bare Exception, or panics.
        if isinstance(error, PROGRAM_EXITS):
            raise
        raise ValueError(
            f"the target's tokenizer cannot read the prompt ({shorten(error)})."
        ) from None
    max_length = pair.target_config.max_position_embeddings
    if not ids:
        raise ValueError("the prompt has no tokens; give a longer one.")
    if len(ids) + num_new_tokens > max_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and {option} is {num_new_tokens}; "
            f"together they may be at most {max_length}, the target's longest sequence."
        )
    if max(ids) >= pair.target_config.vocab_size:
        raise ValueError(
            f"the prompt has token {max(ids)}, but the target's config.json has vocab_size "
            f"{pair.target_config.vocab_size}; tokenizer.json belongs to another model."
        )
    return ids, warning
