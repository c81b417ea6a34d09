"""Target and draft of a command: their folders are checked, then their weights loaded.

Their tokenizer encodes prompts and makes the grammar of `--json-schema`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from specjax import models
from specjax.cli.arguments import parse_sampling_options
from specjax.cli.folders.hub_cache import find_model, model_name
from specjax.cli.option_table import suggest
from specjax.cli.processes import load_options
from specjax.config import SpeculativeConfig
from specjax.contrib.grammars import json_schema_grammar, min_tokens_grammar, token_bytes
from specjax.decode.drafters import Drafter, model_drafter, ngram_drafter
from specjax.engine.request import PROGRAM_EXITS
from specjax.file_io import read_file, shorten
from specjax.processing.grammar import Grammar
from specjax.processing.sampling_params import SamplingParams
from specjax.types import Model

_MAX_BYTES = 2**24
# Names of `--draft`, and the folders that ship with specjax.
_EMBEDDED_DRAFTS = {"head": "eagle3", "model": "draft"}
_NAMED_DRAFTS = ("ngram", "none")


class ModelPair(NamedTuple):
    """A target and a draft whose weights are not read yet, and what a command does with them.

    Attributes:
      options: of the command.
      config: how tokens are drafted and verified.
      name: of the pair, for display.
      folder: of the target.
      draft_spec: the folder of a draft model or draft head, "ngram" or "none".
      target_config: the target's `TransformerConfig`.
      tokenizer: of both models.
      draft: metadata of the draft's folder, or None without one.
      warning: a sentence about the draft to print, or None.
      load_target: options of `models.load` for the target, its mesh among them.
      load_draft: options of `models.load` for a draft model.
    """

    options: argparse.Namespace
    config: SpeculativeConfig
    name: str
    folder: str | os.PathLike[str]
    draft_spec: str | os.PathLike[str]
    target_config: Any
    tokenizer: Any
    draft: models.DraftInfo | None = None
    warning: str | None = None
    load_target: Mapping[str, Any] = MappingProxyType({})
    load_draft: Mapping[str, Any] = MappingProxyType({})

    def with_options(self, **values: object) -> "ModelPair":
        """Returns the pair with a copy of the options, some of which have other values."""
        return self._replace(options=argparse.Namespace(**{**vars(self.options), **values}))


def read_pair(options: argparse.Namespace, config: SpeculativeConfig) -> ModelPair:
    """Returns the pair that `--target` and `--draft` name.

    Args:
      options: from `parse_options`.
      config: from `parse_options`.

    Raises:
      ValueError: for an unreadable folder, a draft of another vocabulary or a head of another
        target, and more `--logprobs` than the target has tokens.
    """
    embedded = options.target is None
    embedded_folder = models.pretrained_folder("target")
    folder = embedded_folder if embedded else find_model(options.target, "--target")
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
    elif draft_name not in _NAMED_DRAFTS:
        draft_spec = find_model(draft_name, "--draft")
        hint = suggest(draft_name, (*_EMBEDDED_DRAFTS, *_NAMED_DRAFTS))
        if hint and not os.path.isdir(draft_spec):
            raise ValueError(f"--draft is {draft_name}, which is not a folder.{hint}")
    name = f"target {'embedded' if embedded else options.target} · draft {draft_name}"
    target_config, tokenizer = models.load_config(folder), models.load_tokenizer(folder)
    if options.dtype is not None:
        target_config = dataclasses.replace(target_config, dtype=options.dtype)
    if options.ignore_eos:
        target_config = dataclasses.replace(target_config, eos_token_ids=())
    pair = ModelPair(options, config, name, folder, draft_spec, target_config, tokenizer)
    target_options, draft_options = load_options(options)
    pair = pair._replace(load_target=target_options, load_draft=draft_options)
    if (options.logprobs or 0) > target_config.vocab_size:
        raise ValueError(
            f"--logprobs is {options.logprobs}; the target has {target_config.vocab_size} tokens."
        )
    return pair if draft_spec in _NAMED_DRAFTS else _read_draft(pair)


def _read_draft(pair: ModelPair) -> ModelPair:
    """Returns the pair with its draft's metadata."""
    info = models.read_draft(pair.draft_spec, pair.target_config)
    if info.kind != "model":
        return pair._replace(draft=info, warning=_warn_of_verifier(pair, info.verifier))
    target_vocab = pair.tokenizer.get_vocab()
    # Tokenizers are compared: the models' own vocabulary sizes may differ by padding.
    draft_vocab = models.load_tokenizer(pair.draft_spec).get_vocab()
    if draft_vocab != target_vocab:
        raise ValueError(
            f"the draft {pair.draft_spec} and the target {pair.folder} have different vocabularies "
            f"({len(draft_vocab)} and {len(target_vocab)} tokens); a draft needs the target's "
            "tokenizer, token for token."
        )
    return pair._replace(draft=info)


def check_k(pair: ModelPair, k: int, option: str) -> None:
    """Refuses a K larger than the draft's maximum."""
    most = None if pair.draft is None else pair.draft.max_speculative_tokens
    if most is not None and k > most:
        raise ValueError(f"{option} is {k}; the draft head drafts at most {most} tokens a step.")


def with_trained_k(pair: ModelPair) -> ModelPair:
    """Returns the pair with the K that a head was trained for, if no option sets another.

    For K = "auto" the step costs and the usual rate are those of the head's folder, if no option
    sets them.
    """
    if pair.draft is None:
        return pair
    options, config = pair.options, pair.config
    names, k = ("step_costs", "usual_acceptance_rate"), pair.draft.num_speculative_tokens
    if config.adaptive_k:
        values = {x: getattr(pair.draft, x) for x in names if getattr(options, x) is None}
        config = dataclasses.replace(config, **{x: y for x, y in values.items() if y is not None})
    option_values = [getattr(options, name) for name in ("num_speculative_tokens", *names)]
    if k is None or option_values != [None] * 3 or options.rejection_sample_method == "synthetic":
        check_k(pair, config.num_speculative_tokens, "--num-speculative-tokens")
        return pair._replace(config=config)
    config = dataclasses.replace(
        config, num_speculative_tokens=k, step_costs=None, usual_acceptance_rate=None
    )
    return pair._replace(config=config)


def _warn_of_verifier(pair: ModelPair, verifier: str | None) -> str | None:
    """Returns a warning if a head names another target than the folder's, or None."""
    folder = model_name(pair.folder)
    if verifier is None or pathlib.PurePath(verifier).name.lower() == folder.lower():
        return None
    return (
        f"the head {pair.draft_spec} was trained for {shorten(verifier)}, and the target is "
        f"{pair.folder}; if they differ, few of its drafts are accepted."
    )


def describe_configs(pair: ModelPair) -> str:
    """Returns the cache key of the models' programs: configurations alone, equal for equal ones."""
    draft = pair.draft_spec if pair.draft is None else repr(pair.draft.config)
    kind = " row_invariant" if "row_invariant" in pair.load_target else ""
    return f"{pair.target_config} {draft}{kind}"


def pair_shapes(pair: ModelPair) -> tuple[Model, Drafter | None] | None:
    """Returns target and drafter with shapes for weights; None with a head or a mesh."""
    has_head = pair.draft is not None and pair.draft.kind != "model"
    return None if has_head or "mesh" in pair.load_target else _make_pair(pair, models.load_shapes)


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
    if pair.draft is not None and pair.draft.kind == "model":
        return target, model_drafter(load(pair.draft_spec, **pair.load_draft)[0])
    return target, models.load_drafter(pair.draft_spec, target)


def encode_text(tokenizer: Any, text: str, *, chat: bool) -> tuple[list[int], str | None]:
    """Returns the tokens of a text, and a warning if the text has the tokenizer's first tokens.

    Special tokens that the tokenizer adds before a text, such as "<s>", then occur only once.

    Args:
      tokenizer: of the target.
      text: the prompt.
      chat: whether a chat template made it, which writes all special tokens itself.

    Raises:
      ValueError: if the tokenizer fails.
    """
    try:
        encoding = tokenizer.encode(text, add_special_tokens=not chat)
    except BaseException as error:  # The library raises a bare Exception, or panics.
        if isinstance(error, PROGRAM_EXITS):
            raise
        reason = shorten(error)
        raise ValueError(f"the target's tokenizer cannot read the prompt ({reason}).") from None
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
    ids, warning = encode_text(pair.tokenizer, text, chat=chat)
    max_length = pair.target_config.max_position_embeddings
    if not ids:
        raise ValueError("the prompt has no tokens; give a longer one.")
    if len(ids) + num_new_tokens > max_length:
        raise ValueError(
            f"the prompt has {len(ids)} tokens and {option} is {num_new_tokens}; "
            f"together they may be at most {max_length}, the target's longest sequence."
        )
    check_vocabulary(pair, ids)
    return ids, warning


def check_vocabulary(pair: ModelPair, ids: Sequence[int]) -> None:
    """Refuses tokens of a prompt that are not in the target's vocabulary."""
    if max(ids) >= pair.target_config.vocab_size:
        raise ValueError(
            f"the prompt has token {max(ids)}, but the target's config.json has vocab_size "
            f"{pair.target_config.vocab_size}; tokenizer.json belongs to another model."
        )


def render_chat(pair: ModelPair, messages: Sequence[Mapping[str, object]], **how: Any) -> str:
    """Returns the prompt of messages by the target's chat template, with the options' variables.

    Args:
      pair: gives the folder and the options. `--system` is the first message where that is no
        system message.
      messages: as in `models.chat_prompt`.
      how: `strftime_now` of `models.chat_prompt`.
    """
    options, first = pair.options, messages[0] if messages else None
    has_system = isinstance(first, Mapping) and first.get("role") == "system"
    if options.system is not None and not has_system:
        messages = [{"role": "system", "content": options.system}, *messages]
    return models.chat_prompt(pair.folder, messages, variables=dict(options.template_arg), **how)


def read_sampling(pair: ModelPair) -> SamplingParams | None:
    """Returns the sampling options and the grammar of `read_grammar`, or None without any."""
    sampling, grammar = parse_sampling_options(pair.options), read_grammar(pair)
    if grammar is None:
        return sampling
    return (sampling or SamplingParams())._replace(grammar=grammar)


def count_grammar(pair: ModelPair, min_tokens: int) -> Grammar | None:
    """Returns the grammar of texts of at least `min_tokens` tokens; None if every text is one."""
    if not (min_tokens and pair.target_config.eos_token_ids):
        return None
    config = pair.target_config
    return min_tokens_grammar(min_tokens, config.vocab_size, config.eos_token_ids)


def read_grammar(pair: ModelPair) -> Grammar | None:
    """Returns the grammar of `--json-schema` or `--min-tokens`, or None without both.

    Raises:
      ValueError: if the file is not a JSON object, its schema is refused or nested too deeply, or
        no token ends a text.
      OSError: if it cannot be read.
    """
    path = pair.options.json_schema
    if path is None:
        return count_grammar(pair, pair.options.min_tokens or 0)
    data, config = read_file(path, _MAX_BYTES), pair.target_config
    try:
        try:
            schema = json.loads(data.decode())
        except ValueError as error:  # Of an integer with too many digits, too.
            raise ValueError(f"--json-schema {path} is not JSON: {error}.") from None
        if not isinstance(schema, dict):
            raise ValueError(f"--json-schema {path} holds no JSON object.")
        if not config.eos_token_ids:
            raise ValueError(
                f"{pair.folder} names no end-of-sequence token, and a text of --json-schema has to "
                "end."
            )
        vocabulary = token_bytes(pair.tokenizer, config.vocab_size)
        return json_schema_grammar(schema, vocabulary, config.eos_token_ids)
    except RecursionError:
        raise ValueError(
            f"--json-schema {path} is nested too deeply; it needs fewer levels."
        ) from None
