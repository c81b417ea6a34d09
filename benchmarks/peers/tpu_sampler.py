"""tpu-inference's rejection sampler, by samples, with the `sample` that draws its bonus tokens.

A few files of the wheel are read unchanged. Stand-ins replace their imports from vLLM and from the
runner, since the wheel's dependencies include all of vLLM for TPUs. Drafts come without
probabilities, as `tpu_runner._sample_from_logits` passes `draft_probs=None`; those with
probabilities call the sampler by its signature.
"""

import dataclasses
import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.inputs import (
    MIXED,
    ROWS,
    Array,
    Kind,
    Rows,
    count_outcomes,
    smallest_rows_of_top_p,
)
from benchmarks.peers.measure import measure

NAME = "tpu-inference"
CALL = "layers.jax.sample.rejection_sampler.RejectionSampler"
BATCH, BATCHES = 2**18, 4
# Set by the command: the folder of the unpacked wheel.
FOLDER = pathlib.Path("build/peers/tpu")


@dataclasses.dataclass
class SamplingMetadata:
    """The fields of `TPUSupportedSamplingMetadata`, whose file imports the runner's batch."""

    temperature: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    _cache_collision_dummy: jax.Array | None = None
    do_sampling: bool = False
    logprobs: bool = False


jax.tree_util.register_dataclass(
    SamplingMetadata,
    data_fields=["temperature", "top_k", "top_p", "_cache_collision_dummy"],
    meta_fields=["do_sampling", "logprobs"],
)


class _Axes:
    ATTN_DATA, MLP_TENSOR = "data", "model"


STAND_INS = {
    "tpu_inference.layers.common.sharding": {"ShardingAxisName": _Axes},
    "tpu_inference.layers.jax.sample.sampling_metadata": {
        "TPUSupportedSamplingMetadata": SamplingMetadata
    },
    "tpu_inference.models.common.compiler_options": {"get_sampling_compiler_options": lambda: None},
    "vllm.config.model": {"PROCESSED_LOGPROBS_MODES": ()},
    "vllm.v1.outputs": {"LogprobsTensors": tuple},
}


def version() -> str:
    return f"tpu-inference {(FOLDER / 'VERSION').read_text().strip()}, jax {jax.__version__}"


def _load(name: str) -> Any:
    """A module of the wheel, with stand-ins for what it imports from elsewhere."""
    package = types.ModuleType("tpu_inference")
    package.__path__ = [str(FOLDER / "tpu_inference")]
    sys.modules.setdefault("tpu_inference", package)
    for other, contents in STAND_INS.items():
        parents = other.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            parent = types.ModuleType(".".join(parents[:depth]))
            parent.__path__ = [str(FOLDER.joinpath(*parents[:depth]))]
            sys.modules.setdefault(parent.__name__, parent)
        module = types.ModuleType(other)
        vars(module).update(contents)
        sys.modules.setdefault(other, module)
    return importlib.import_module(f"tpu_inference.layers.jax.sample.{name}")


class _Batch:
    """One step of many requests, the kinds in turn, laid end to end as the sampler takes them.

    `padding` rows follow the last request: each drafts what its row of the target does not like.
    """

    def __init__(
        self, rows: Rows, kinds: list[Kind], with_probs: bool, size: int = BATCH, padding: int = 0
    ) -> None:
        self.rows, self.kinds, self.with_probs = rows, kinds, with_probs
        self.size, self.padding = size, padding
        each = np.arange(size) % len(kinds)
        lengths = [rows.k if kind.num_tokens is None else kind.num_tokens for kind in kinds]
        self.lengths = np.array(lengths)[each]
        self.start = np.concatenate([[0], np.cumsum(self.lengths)])
        # Indices [request, k] of the drafted tokens that exist.
        place = np.arange(rows.k)
        self.is_drafted = place < self.lengths[:, None]
        self.place = np.broadcast_to(place, self.is_drafted.shape)[self.is_drafted]
        self.place = np.concatenate([self.place, np.zeros(padding, int)])
        greedy = -1.0  # As `input_batch.py` has it for greedy requests.
        self.temperature = np.array([k.temperature or greedy for k in kinds], np.float32)[each]
        self.top_p = np.array([kind.top_p for kind in kinds], np.float32)[each]
        self.is_greedy = all(kind.temperature == 0 for kind in kinds)

    def step(self, sampler: Any, sample: Any, mesh: Any, key: jax.Array) -> Array:
        """Tokens [N, K + 1] of a step, -1 where there is none."""
        rows = self.rows
        draft_key, bonus_key, key = jax.random.split(key, 3)
        logits = jnp.asarray(rows.draft)
        drafted = jnp.argmax(logits, axis=-1)[self.place]
        if self.with_probs:
            drafted = jax.random.categorical(draft_key, logits[self.place])
        if self.padding:
            drafted = drafted.at[-self.padding :].set(int(rows.target[0].argmin()))
        metadata = SamplingMetadata(
            temperature=jnp.asarray(self.temperature),
            top_k=jnp.zeros(self.size, jnp.int32),
            top_p=jnp.asarray(self.top_p),
            do_sampling=not self.is_greedy,
        )
        bonus, _ = sample(bonus_key, mesh, jnp.asarray(rows.target)[self.lengths], metadata)
        found = sampler(
            draft_token_ids=drafted.astype(jnp.int32),
            num_draft_tokens=jnp.asarray(self.lengths, jnp.int32),
            draft_probs=jax.nn.softmax(logits)[self.place] if self.with_probs else None,
            target_logits=jnp.asarray(rows.target)[self.place],
            bonus_token_ids=bonus,
            sampling_metadata=metadata,
            key=key,
        )
        return self.parse(np.asarray(found))

    def parse(self, found: Array) -> Array:
        """Parses the outputs of all requests at once; the sampler's `parse_output` takes one."""
        tokens = np.full((self.size, self.rows.k + 1), -1)
        tokens[:, :-1][self.is_drafted] = found[: self.start[-1]]
        bonus = found[len(self.place) :]
        tokens[np.arange(self.size), self.lengths] = bonus
        # What is -1 in between is left out, so that the bonus follows the last accepted token.
        order = np.argsort(tokens < 0, axis=1, kind="stable")
        return np.take_along_axis(tokens, order, axis=1)


def cases() -> Iterator[dict[str, Any]]:
    sampler_module, sampling = _load("rejection_sampler"), _load("sampling")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    sampler = sampler_module.RejectionSampler(mesh)

    def run(case: str, rows: Rows, kinds: dict[str, Kind], with_probs: bool, size: str) -> Any:
        batch = _Batch(rows, list(kinds.values()), with_probs)
        counts: list[Any] = [0.0] * len(kinds)
        for number in range(BATCHES if size == "usual" else 1):
            tokens = batch.step(sampler, sampling.sample, mesh, jax.random.key(number))
            for i in range(len(kinds)):
                counts[i] = counts[i] + count_outcomes(tokens[i :: len(kinds)], rows.vocab_size)
        for (name, kind), outcomes in zip(kinds.items(), counts, strict=True):
            number = int(outcomes.sum())
            title = f"{case}{': ' if name else ''}{name}"
            yield measure(title, CALL, outcomes, rows, kind, size=size, num_samples=number)

    for size, make in ROWS.items():
        rows = make()
        yield from run("argmax, without probabilities", rows, {"": Kind()}, False, size)
        yield from run("sampled, with probabilities", rows, {"": Kind()}, True, size)
        yield from run("greedy", rows, {"": Kind(0.0)}, False, size)
        of_top_p = rows if size == "usual" else smallest_rows_of_top_p()
        yield from run("argmax, T = 0.7, top-p 0.8", of_top_p, {"": Kind(0.7, 0.8)}, False, size)
        yield from run("argmax, top-p 0.8", rows, {"": Kind(1.0, 0.8)}, False, size)
        if size == "usual":
            yield from run("mixed batch, argmax drafts", rows, MIXED, False, size)
        else:
            two = {"T = 1": Kind(), "greedy": Kind(0.0)}
            yield from run("mixed batch, argmax drafts", rows, two, False, size)
    # Nothing of it is drawn: every draft is the argmax of the target.
    rows = ROWS["usual"]()
    rows = Rows(rows.target, rows.target[:-1])
    for padding in (0, 2):
        batch = _Batch(rows, [Kind(0.0)], False, size=1, padding=padding)
        tokens = batch.step(sampler, sampling.sample, mesh, jax.random.key(0))
        outcomes = count_outcomes(tokens, rows.vocab_size)
        case = f"greedy, one request whose drafts are right, {padding} rows of padding after it"
        yield measure(case, CALL, outcomes, rows, Kind(0.0), size="usual")
