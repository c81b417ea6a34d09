"""`SpecRollout`: the rollouts of google-tunix's training loops, decoded with speculation."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from specjax.config import SpeculativeConfig
from specjax.contrib.tunix.group_lookup import group_lookup_drafter
from specjax.contrib.tunix.model import make_model, name_arrays, split_transformer
from specjax.contrib.tunix.values import (
    cut_kept,
    cut_texts,
    read_filters,
    read_key,
    read_prompts,
    read_temperature,
)
from specjax.decode.drafters import Drafter, model_drafter
from specjax.decode.generate import generate
from specjax.decode.metrics import Metrics
from specjax.decode.options import LoopOptions
from specjax.processing.kept_tokens import KeptTokens
from specjax.types import Model

# Tunix's cluster requires its `BaseRollout`.
_BaseRollout: Any = object
if importlib.util.find_spec("tunix") is not None:
    _BaseRollout = importlib.import_module("tunix.rl.rollout.base_rollout").BaseRollout
_DRAFTS = ("previous_policy", "group_lookup")


class SpecRollout(_BaseRollout):
    """A rollout engine of google-tunix 0.1.7 that decodes with speculation.

    ``ClusterConfig(rollout_engine=functools.partial(SpecRollout, drafter=...))`` uses it instead of
    "vanilla". Prompts, outputs and their padding are as in tunix's own sampler. Text follows the
    policy's distribution exactly, whatever drafts. Parameters are arguments of the compiled
    programs: new ones compile nothing.

    Call number i of `generate` draws with the key of `rollout_config.seed`, or 0, and i folded in.
    So training steps have different noise, and a run with one seed is repeatable.

    Args:
      rollout_actor: the policy, a transformer of `tunix_model`. Every call reads its arrays again,
        until `update_params` replaces them: a trainer that shares it sends nothing.
      tokenizer: tunix's, with `encode`, `decode`, `bos_id`, `eos_id` and `pad_id`.
      mesh: of rollouts. Arrays on other devices are copied there. None leaves them in place.
      rollout_config: of training. `get_per_token_logps` uses its temperature.
      drafter: a `Drafter`, or a function that returns one from the policy as a `Model`, for example
        with a draft head. "previous_policy" drafts with the policy before the last change of its
        parameters. "group_lookup" is `group_lookup_drafter` over equal prompts of a call. None is
        plain decoding.
      config: a `SpeculativeConfig`. None is the default one.
      max_kept_tokens: as in `LoopOptions`: most ids of the kept set of each token. None lists none.

    Attributes:
      mesh: of the argument.
      metrics: `Metrics` of the last `generate`, None before it.
      kept_tokens: `KeptTokens` [B, L] of the last `generate`, of L = `max_tokens_to_generate`
        tokens, padded as tunix pads completions. `kept_logprobs` takes them in a trainer's loss.
        None if none are listed.

    Raises:
      ImportError: if tunix is not installed.
      ValueError: for a transformer that `tunix_model` refuses, or an unknown drafter.

    Example:
      With tunix installed::

        engine = functools.partial(SpecRollout, drafter="group_lookup")
        ClusterConfig(rollout_engine=engine, ...)
    """

    def __init__(
        self,
        *,
        rollout_actor: Any,
        tokenizer: Any,
        rollout_config: Any,
        mesh: Any = None,
        drafter: Drafter | Callable[[Model], Drafter] | str | None = None,
        config: SpeculativeConfig | None = None,
        max_kept_tokens: int | None = None,
    ) -> None:
        if _BaseRollout is object:
            raise ImportError("google-tunix is not installed: pip install 'specjax[tunix]'.")
        if isinstance(drafter, str) and drafter not in _DRAFTS:
            raise ValueError(
                f"drafter is {drafter!r}; it needs to be {' or '.join(map(repr, _DRAFTS))}, a "
                "specjax.Drafter, a function of a Model that returns one, or None."
            )
        adapter = importlib.import_module("tunix.generate.tokenizer_adapter").TokenizerAdapter
        self._tokenizer = tokenizer if isinstance(tokenizer, adapter) else adapter(tokenizer)
        self._graph, arrays = split_transformer(rollout_actor)
        self._placements = {name: _place(array, mesh) for name, array in arrays.items()}
        self._actor = rollout_actor
        if any(array.sharding != self._placements[name] for name, array in arrays.items()):
            self._actor = self._graph.build(self._put(arrays))
        self._temperature = read_temperature(rollout_config)
        self._drafter, self._config = drafter, config
        self._max_kept_tokens = max_kept_tokens
        self._policy: dict[str, Any] = {}
        self._previous: dict[str, Any] = {}
        self._num_calls = 0
        self.mesh = mesh
        self.metrics: Metrics | None = None
        self.kept_tokens: KeptTokens | None = None

    def generate(self, prompts: str | Sequence[str], rollout_config: Any, **options: Any) -> Any:
        """Returns tunix's `RolloutOutput` of one text for each prompt.

        Buffers have room for `max_prompt_length` and `max_tokens_to_generate`, so prompts of other
        lengths compile nothing. `top_p` None is greedy, as in tunix's sampler.

        Args:
          prompts: strings. Equal ones form a group.
          rollout_config: tunix's `RolloutConfig`: `max_tokens_to_generate`, `max_prompt_length`,
            `temperature`, `top_p`, `top_k`, `seed`, `eos_tokens` and `return_logprobs` are read.
          **options: ignored.

        Returns:
          `tokens` without the token that ended a text, `left_padded_prompt_tokens`, `text` and
          `logprobs`. These are of the distribution that each token was sampled from, after
          temperature, top-k and top-p. `logits` is empty. The kept sets of the tokens are in the
          attribute `kept_tokens`: tunix's output has no field of them.

        Raises:
          ValueError: if a row of the policy's logits is NaN or +inf, and for what
            `specjax.generate` refuses.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        read = read_prompts(self._tokenizer, texts, rollout_config.max_prompt_length)
        eos = rollout_config.eos_tokens or [self.eos_id()]
        target = self._next_policy()
        key = jax.random.fold_in(read_key(rollout_config.seed), self._num_calls)
        self._num_calls += 1
        max_length = read.token_ids.shape[1] + rollout_config.max_tokens_to_generate
        output = generate(
            target,
            self._make_drafter(target, texts),
            (read.token_ids, read.lengths),
            keys=key,
            max_new_tokens=rollout_config.max_tokens_to_generate,
            temperature=read_temperature(rollout_config),
            eos_token_ids=np.array(eos, np.int32),
            sampling=read_filters(rollout_config),
            config=self._config,
            options=LoopOptions(max_length=max_length, max_kept_tokens=self._max_kept_tokens),
        )
        output = jax.device_get(output)
        self.metrics = output.metrics
        tokens, logprobs = cut_texts(output, read.lengths, eos)
        self.kept_tokens = cut_kept(
            output.kept_tokens, read.lengths, tokens, rollout_config.max_tokens_to_generate
        )
        base = importlib.import_module("tunix.rl.rollout.base_rollout")
        return base.RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=read.left_padded,
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Returns f32[B, L], log-probabilities of completions by the policy.

        They are at the training temperature and without top-k or top-p, like the trainer's own.

        Args:
          prompt_tokens: i32[B, P], left-padded.
          completion_tokens: i32[B, L], right-padded.
        """
        graph, arrays = self._graph, self._put(self._arrays())
        leaves = [arrays[name] for name in graph.names]
        common = importlib.import_module("tunix.rl.common")
        logprobs: jax.Array = common.compute_per_token_logps(
            graph.graphdef,
            jax.tree.unflatten(graph.treedef, leaves),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
            temperature=self._temperature or 1.0,
        )
        return logprobs

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes new parameters, in the dtypes and on the devices of the policy's.

        Args:
          params: a state of Flax NNX, or nested dicts of arrays; some of the parameters, such as
            those of LoRA, or all.
          filter_types: the filter of `params`; ignored.

        Raises:
          ValueError: for a parameter that the policy does not have.
        """
        arrays = self._arrays()
        new_arrays = name_arrays(params)
        unknown = sorted(new_arrays.keys() - arrays.keys())
        if unknown:
            raise ValueError(f"params has {unknown[0]}, which the policy does not have.")
        if all(array is arrays[name] for name, array in new_arrays.items()):
            return
        cast = {name: array.astype(arrays[name].dtype) for name, array in new_arrays.items()}
        self._actor = self._graph.build(arrays | self._put(cast))

    def pad_id(self) -> int:
        """Returns the id of padding."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Returns the id that ends a text."""
        return int(self._tokenizer.eos_id())

    def model(self) -> Any:
        """Returns the policy, a transformer of tunix."""
        return self._actor

    def _arrays(self) -> dict[str, Any]:
        """Returns the policy's arrays by name, without intermediates of a trainer's calls."""
        arrays = name_arrays(nnx.state(self._actor))
        return {name: arrays[name] for name in self._graph.names}

    def _put(self, arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Returns arrays on the policy's first devices: elsewhere programs compile again."""
        return {
            name: jax.device_put(array, self._placements[name]) for name, array in arrays.items()
        }

    def _next_policy(self) -> Model:
        """Returns the policy, and keeps the previous one if that drafts."""
        arrays = self._arrays()
        if self._drafter == "previous_policy":
            last = self._policy or arrays
            if not self._previous or any(array is not last[name] for name, array in arrays.items()):
                self._previous = last
            self._policy = arrays
        return make_model(self._graph, self._put(arrays))

    def _make_drafter(self, target: Model, prompts: list[str]) -> Drafter | None:
        if self._drafter == "previous_policy":
            previous = make_model(self._graph, self._put(self._previous))
            return model_drafter(previous)
        if self._drafter == "group_lookup":
            numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
            return group_lookup_drafter(np.array([numbers[prompt] for prompt in prompts], np.int32))
        if self._drafter is None or isinstance(self._drafter, Drafter):
            return self._drafter
        assert not isinstance(self._drafter, str)
        return self._drafter(target)


def _place(array: jax.Array, mesh: Any) -> Any:
    """Returns the sharding of a policy's array: its own, if that is on the mesh."""
    sharding = array.sharding
    if mesh is None or sharding.device_set == set(mesh.devices.flat):
        return sharding
    spec = getattr(sharding, "spec", jax.sharding.PartitionSpec())
    axes = {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    if not axes <= {None, *mesh.axis_names}:
        spec = jax.sharding.PartitionSpec()
    return jax.sharding.NamedSharding(mesh, spec)
