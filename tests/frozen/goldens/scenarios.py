"""The goldens' scenarios: about fifty, so that every value of every axis appears in some of them.

Each is data. `begin` makes its inputs and returns a function of a seed, which makes its calls, and
one that makes the record of what they gave.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from frozen.goldens import calls, inputs
from specjax import SamplingParams

B, K, V = inputs.BATCH, inputs.K, inputs.VOCAB


@dataclasses.dataclass(frozen=True)
class Verify:
    """One verification of a batch.

    Attributes:
      kind: "standard", "block", "coupled", "synthetic" at `rates`, or a rule.
      draft: "one-hot", "sampled", "mapped" or "everything".
      is_ragged: whether the requests are laid end to end.
      given: what else is given of "cutoff", "masked" and "bonus".
      mesh: devices over which the vocabulary lies, and requests, or None.
      is_double: whether noise is float64.
    """

    kind: str = "standard"
    draft: str = "sampled"
    is_ragged: bool = False
    given: tuple = ()
    rates: tuple | None = None
    mesh: tuple | None = None
    dtype: str = "float32"
    is_double: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    def begin(self, folder):
        arrays = inputs.batch(vocab=200 if self.mesh else V)
        lay = inputs.end_to_end if self.is_ragged else lambda rows, extra=0: rows
        draft = inputs.draft_of(self.draft, arrays, self.is_ragged)
        target = lay(arrays["masked_logits" if "masked" in self.given else "target_logits"], 1)
        options = self.options | {"temperature": inputs.TEMPERATURE, "implementation": "xla"}
        if "cutoff" in self.given:
            options["cutoff"] = lay(arrays["cutoff"], 1)
        if "bonus" in self.given:
            options["bonus_token_ids"] = arrays["bonus_token_ids"]
        if self.is_ragged:
            counts = np.concatenate([[0], np.cumsum(inputs.RAGGED)]).astype(np.int32)
            options["ragged"] = (counts, K)
        if self.rates is not None:
            options["rates"] = np.array(self.rates, np.float32)
        draft = {name: self._lay(name, values) for name, values in draft.items()}
        target = self._lay("logits", target)
        keys = [inputs.keys_of(B, seed) for seed in range(2)]
        positions = [np.arange(B, dtype=np.int32) * 5 + seed for seed in range(2)]

        def call(seed):
            with jax.enable_x64(self.is_double):
                doubled = {"noise_dtype": jnp.float64} if self.is_double else {}
                given = {"keys": keys[seed], "positions": positions[seed]}
                return calls.verify(self.kind, draft, target, **given, **options, **doubled)

        return call, calls.record_verification

    def _lay(self, name, values):
        if name != "logits":
            return jnp.asarray(values)
        rows = jnp.asarray(values, self.dtype)
        if self.mesh is None:
            return rows
        requests = None if self.mesh[0] == 1 or self.is_ragged else "data"
        spec = PartitionSpec(requests, *(None,) * (rows.ndim - 2), "model")
        return jax.device_put(rows, NamedSharding(inputs.mesh_of(self.mesh), spec))


@dataclasses.dataclass(frozen=True)
class Tree:
    """One verification of trees: "one-hot", "sampled", or "everything" with cutoffs."""

    draft: str = "sampled"
    is_double: bool = False

    def begin(self, folder):
        tree, target = inputs.tree_of()
        options = {"max_depth": 3, "temperature": inputs.TEMPERATURE}
        if self.draft == "everything":
            options["cutoff"] = tree["draft_cutoff"][:, ::-1].copy()
            tree["draft_temperature"] = np.float32(0.9)
        else:
            tree.pop("draft_cutoff")
        if self.draft == "one-hot":
            tree.pop("draft_logits")
        keys = [inputs.keys_of(B, seed) for seed in range(2)]

        def call(seed):
            with jax.enable_x64(self.is_double):
                doubled = {"noise_dtype": jnp.float64} if self.is_double else {}
                return calls.verify_tree(
                    tree, target, keys=keys[seed], positions=np.int32(9), **options, **doubled
                )

        return call, calls.record_verification


@dataclasses.dataclass(frozen=True)
class Decode:
    """Whole texts of three prompts.

    Attributes:
      door: as in `calls.decode`.
      model: as in `inputs.model_of`.
      drafter: as in `inputs.drafter_of`.
      method: as in `calls.config_of`, and `k`.
      sampling: fields of `SamplingParams`.
      config: options of the config.
      options: options of the door.
      has_masks: whether a host masks the rows of each step.
      mesh: over which the model lies, or None.
    """

    door: str = "generate"
    model: str = "24"
    drafter: str | None = "model"
    method: str = "standard"
    k: object = 3
    sampling: dict = dataclasses.field(default_factory=dict)
    config: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)
    has_masks: bool = False
    mesh: tuple | None = None
    is_double: bool = False

    def begin(self, folder):
        target = inputs.model_of(self.model, 0, self.mesh)
        drafter = inputs.drafter_of(self.drafter, self.model, target, self.mesh)
        prompts = inputs.padded(inputs.CYCLES if self.model == "cyclic" else inputs.PROMPTS)
        options = {
            "config": calls.config_of(self.method, self.k, **self.config),
            "max_new_tokens": np.array([12, 9, 14], np.int32),
            "max_length": 32,
            "prefill_chunk_size": 4,
            "temperature": np.array([0.0, 0.7, 1.2], np.float32),
        } | self.options
        if self.sampling:
            options["sampling"] = SamplingParams(**self.sampling)
        if self.has_masks:
            options["masks"] = lambda: inputs.row_masks(prompts[1])
        keys = [inputs.keys_of(3, seed) for seed in range(2)]
        with jax.enable_x64(self.is_double):
            decode = calls.decode(self.door, target, drafter, prompts, folder=folder, **options)

        def call(seed):
            with jax.enable_x64(self.is_double):
                return decode(keys[seed])

        return call, lambda found: calls.record_texts(prompts, found)


@dataclasses.dataclass(frozen=True)
class Serve:
    """Requests of an engine, as a script says.

    Attributes:
      requests: options of each request besides those of `REQUESTS`, by its index there.
      script: actions of `calls.Server`; an integer submits that request. None submits all of
        `REQUESTS` and runs.
      engine: options of the engine.
    """

    model: str = "24"
    drafter: str | None = "model"
    method: str = "standard"
    k: object = 3
    config: dict = dataclasses.field(default_factory=dict)
    sampling: dict = dataclasses.field(default_factory=dict)
    requests: dict = dataclasses.field(default_factory=dict)
    script: tuple | None = None
    engine: dict = dataclasses.field(default_factory=dict)
    mesh: tuple | None = None

    def begin(self, folder):
        target = inputs.model_of(self.model, 0, self.mesh)
        drafter = inputs.drafter_of(self.drafter, self.model, target, self.mesh)
        config = calls.config_of(self.method, self.k, **self.config)
        options = {"num_slots": 2, "max_length": 32, "prefill_chunk_size": 4} | self.engine
        if self.sampling:
            options["sampling"] = SamplingParams(**self.sampling)
        server = calls.Server(target, drafter, config, **options)
        script = (*range(len(REQUESTS)), ("run",)) if self.script is None else self.script
        script = [self._submit(x) if isinstance(x, int) else x for x in script]
        keys = [inputs.keys_of(9, seed) for seed in range(2)]
        keys = [[keys[seed][i] for i in range(9)] for seed in range(2)]
        return lambda seed: server(script, keys[seed]), calls.record_requests

    def _submit(self, index):
        options = REQUESTS[index] | self.requests.get(index, {})
        if "sampling" in options:
            options["sampling"] = SamplingParams(**options["sampling"])
        return "submit", options


REQUESTS = (
    {"prompt": [1, 2, 3, 1, 2, 3, 1], "temperature": 0.0, "max_new_tokens": 9},
    {"prompt": [4], "temperature": 0.7, "max_new_tokens": 12},
    {"prompt": [0, 2, 4, 0, 2], "max_new_tokens": 7},
    {"prompt": [3, 3, 2], "temperature": 1.3, "max_new_tokens": 10},
    {"prompt": [], "max_new_tokens": 3},
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A call of a loop's parts, by its name in `calls`."""

    name: str
    options: dict = dataclasses.field(default_factory=dict)
    is_double: bool = False

    def begin(self, folder):
        rng, lengths = np.random.default_rng(2), np.array([9, 4, 7, 5, 8, 6], np.int32)
        history = rng.integers(0, V, (B, 14)).astype(np.int32)
        history[np.arange(14) >= lengths[:, None]] = -1
        arrays = inputs.batch() | {"history": history, "lengths": lengths}
        arrays |= {"temperature": inputs.TEMPERATURE}
        arrays = {name: jnp.asarray(values) for name, values in arrays.items()}
        keys = [inputs.keys_of(B, seed) for seed in range(2)]
        doubled = {"noise_dtype": jnp.float64} if self.is_double else {}
        part = jax.jit(functools.partial(getattr(calls, self.name), **self.options, **doubled))

        def call(seed):
            with jax.enable_x64(self.is_double):
                return part(arrays, keys[seed])

        return call, calls.record_leaves


PENALTIES = {
    "repetition_penalty": np.array([1.3, 1.0, 0.8], np.float32),
    "frequency_penalty": np.array([0.0, 0.4, 0.2], np.float32),
    "presence_penalty": np.float32(0.3),
}
CUTOFFS = {
    "top_k": np.array([0, 6, 9], np.int32),
    "top_p": np.array([1.0, 0.9, 0.8], np.float32),
    "min_p": np.float32(0.02),
}
GRAMMAR = {"grammar": inputs.grammar_of(), "grammar_state": np.array([0, -1, 2], np.int32)}
WORDS = {
    "bias": np.linspace(-0.5, 0.5, 24).astype(np.float32),
    "allowed": np.arange(24) % 11 != 10,
    "bad_words": np.array([[7, -1], [3, 4]], np.int32),
}
PACKED = {"allowed": np.array([0x00FFFFDF], np.uint32), "top_k": np.int32(12)}
COSTS = {"step_costs": (1.0, 1.1, 1.2, 1.3, 1.4)}
RAW, PROCESSED = (
    {"num_logprobs": 2},
    {"num_logprobs": 3, "logprobs_mode": "processed"},
)

VERIFICATIONS = {
    "standard, one-hot": Verify(draft="one-hot"),
    "standard, everything": Verify(draft="everything", given=("cutoff", "masked", "bonus")),
    "standard, sampled, ragged": Verify(is_ragged=True, given=("bonus",)),
    "standard, everything, ragged": Verify(
        draft="everything", is_ragged=True, given=("cutoff", "masked")
    ),
    "standard, mapped": Verify(draft="mapped", given=("masked",)),
    "standard, float64 noise": Verify(is_double=True),
    "block, everything": Verify("block", "everything", given=("cutoff", "bonus")),
    "block, sampled, ragged, bfloat16": Verify("block", is_ragged=True, dtype="bfloat16"),
    "block, one-hot, no greedy log-probabilities": Verify(
        "block", "one-hot", options={"greedy_logprobs": False}
    ),
    "coupled, everything": Verify("coupled", "everything", given=("cutoff", "masked", "bonus")),
    "coupled, one-hot": Verify("coupled", "one-hot", given=("cutoff",)),
    "coupled, ragged": Verify("coupled", "one-hot", is_ragged=True, given=("bonus",)),
    "synthetic, rates": Verify("synthetic", "one-hot", rates=(0.9, 0.6, 0.5)),
    "synthetic, rates of each request, ragged": Verify(
        "synthetic", "everything", is_ragged=True, rates=((0.9, 0.5, 0.3),) * 3 + ((1, 1, 0),) * 3
    ),
    "lenience": Verify("lenience", given=("cutoff",)),
    "relaxed, mapped, ragged": Verify("relaxed", "mapped", is_ragged=True),
    "typical, everything": Verify("typical", "everything", given=("bonus",)),
    "ensemble, ragged": Verify("ensemble", is_ragged=True, options={"greedy_logprobs": False}),
    "tree, one-hot": Tree("one-hot"),
    "tree, everything": Tree("everything"),
    "tree, float64 noise": Tree(is_double=True),
    "standard, 1 x 2 devices": Verify(mesh=(1, 2), given=("masked",)),
    "block, 2 x 4 devices": Verify("block", mesh=(2, 4)),
    "coupled, ragged, 1 x 2 devices": Verify("coupled", "one-hot", is_ragged=True, mesh=(1, 2)),
    "lenience, 2 x 4 devices": Verify("lenience", mesh=(2, 4)),
}
TEXTS = {
    "no drafter": Decode(drafter=None, options={"eos_token_ids": (3,)}),
    "model, standard": Decode(options={"eos_token_ids": (3, 9)}),
    "model, block, cutoffs": Decode(method="block", k=4, sampling=CUTOFFS),
    "model, coupled, raw log-probabilities": Decode(method="coupled", options=RAW),
    "n-gram, standard, auto, penalties": Decode(
        model="cyclic", drafter="n-gram", k="auto", config=COSTS, sampling=PENALTIES
    ),
    "n-gram, coupled, processed log-probabilities": Decode(
        model="cyclic", drafter="n-gram", method="coupled", k=2, sampling=CUTOFFS, options=PROCESSED
    ),
    "model, synthetic": Decode(
        method="synthetic", config={"synthetic_acceptance_rate": 0.6}, sampling=PENALTIES
    ),
    "whole prompt, relaxed, bias and masks": Decode(
        model="cyclic", drafter="whole prompt", method="relaxed", sampling=WORDS
    ),
    "model, greedy drafts, float64 noise": Decode(
        k=2,
        config={"draft_sample_method": "greedy", "use_fp64_gumbel": True},
        is_double=True,
    ),
    "invalid logits": Decode(model="invalid", method="block"),
    "under jit, n-gram": Decode(
        "jit", model="cyclic", drafter="n-gram", method="typical", sampling=PACKED
    ),
    "decoder, model, standard": Decode(model="tiny", options=RAW),
}
STEPS = {
    "model, standard, auto, grammar": Decode(
        "steps", "5", k="auto", config=COSTS, sampling=GRAMMAR
    ),
    "model, lenience, penalties": Decode("steps", method="lenience", k=2, sampling=PENALTIES),
    "n-gram, block, a host's masks": Decode(
        "steps", "5", drafter="n-gram", method="block", has_masks=True
    ),
    "no drafter, a host's masks, cutoffs": Decode(
        "steps", "5", drafter=None, has_masks=True, sampling={"top_p": np.float32(0.9)}
    ),
    "whole prompt, coupled, raw log-probabilities": Decode(
        "steps", "cyclic", drafter="whole prompt", method="coupled", options=RAW
    ),
    "EAGLE-3, standard": Decode("steps", "headed", drafter="EAGLE-3"),
    "DFlash, coupled": Decode(
        "steps", "headed", drafter="DFlash", method="coupled", k=4, options={"eos_token_ids": 5}
    ),
    "decoder, model, block, 2 x 4 devices": Decode(
        "steps", "tiny", method="block", mesh=(2, 4), sampling={"top_k": np.int32(20)}
    ),
}
PROGRAMS = {
    "compiled: model, standard, cutoffs and penalties": Decode(
        "compiled", sampling=CUTOFFS | PENALTIES, options={"eos_token_ids": (3,)}
    ),
    "compiled: EAGLE-3, ensemble": Decode("compiled", "headed", "EAGLE-3", "ensemble", k=2),
    "compiled: decoder, n-gram, 1 x 2 devices": Decode(
        "compiled", "tiny", drafter="n-gram", k=2, mesh=(1, 2), options=PROCESSED
    ),
    "loaded: n-gram, synthetic, grammar": Decode(
        "loaded",
        "5",
        drafter="n-gram",
        method="synthetic",
        config={"synthetic_acceptance_length": 2.5},
        sampling=GRAMMAR,
    ),
    "loaded: model, coupled, auto": Decode("loaded", method="coupled", k="auto", config=COSTS),
    "loaded: no drafter, bias and masks": Decode("loaded", drafter=None, sampling=WORDS),
    "generate: EAGLE-3, block, auto": Decode(
        model="headed", drafter="EAGLE-3", method="block", k="auto", config=COSTS
    ),
    "generate: DFlash, standard, cutoffs": Decode(
        model="headed", drafter="DFlash", k=4, sampling={"min_p": np.float32(0.05)}
    ),
}
SERVED = {
    "model, standard, samples and stops": Serve(
        requests={1: {"stop": ["xy", "lr"]}, 3: {"eos_token_ids": [2, 16]}},
        script=(0, 1, ("samples", 3, REQUESTS[2]), 3, 4, ("run",)),
        engine={"has_text": True, "num_slots": 3},
    ),
    "model, block, auto, preempted and aborted": Serve(
        method="block",
        k="auto",
        config=COSTS,
        script=(
            *(0, 1, 2, ("step", 2), ("preempt", 0, False), ("step", 1)),
            *(3, ("preempt", 1, True), ("abort", 2), ("step", 2), 4, ("abort", 1), ("run",)),
        ),
    ),
    "n-gram, coupled, grammar, log-probabilities": Serve(
        "5",
        "n-gram",
        "coupled",
        sampling={"grammar": inputs.grammar_of(), "grammar_state": np.int32(-1)},
        requests={0: {"sampling": {"grammar_state": 0}}, 2: {"sampling": {"grammar_state": 2}}},
        engine=RAW,
    ),
    "no drafter, a host's matcher": Serve(
        "5",
        None,
        sampling={"top_k": 0, "repetition_penalty": 1.0},
        requests={
            0: {"matcher": inputs.matcher_of, "sampling": {"repetition_penalty": 1.4}},
            3: {"sampling": {"top_k": 2}},
        },
        script=(0, 1, 3, ("pieces", 1), ("run",)),
        engine={"takes_matchers": True},
    ),
    "whole prompt, lenience": Serve(
        "cyclic",
        "whole prompt",
        "lenience",
        k=2,
        requests={i: {"prompt": prompt} for i, prompt in enumerate(inputs.CYCLES)},
    ),
    "model, standard, K by load": Serve(
        k="auto", config=COSTS, engine={"k_by_load": True, "num_slots": 3}
    ),
    "DFlash, synthetic": Serve(
        "headed", "DFlash", "synthetic", config={"synthetic_acceptance_rates": (0.9, 0.5, 0.2)}
    ),
    "EAGLE-3, coupled, preempted": Serve(
        "headed",
        "EAGLE-3",
        "coupled",
        script=(0, 1, ("step", 3), ("preempt", 0, True), ("step", 1), 3, ("run",)),
    ),
    "decoder, model, 1 x 2 devices": Serve("tiny", mesh=(1, 2), script=(0, 1, 3, ("run",))),
}
FEW = {"top_k": np.array([0, 5, 9, 20, 0, 3], np.int32), "top_p": np.float32(0.9)}
FINES = {
    "repetition_penalty": np.float32(1.2),
    "presence_penalty": np.linspace(0, 1, B).astype(np.float32),
    "bias": np.linspace(-1, 1, V).astype(np.float32),
    "allowed": np.arange(V) % 9 != 4,
    "bad_words": np.array([[17, -1], [2, 4]], np.int32),
}
MAP = np.random.default_rng(5).permutation(V)[: inputs.DRAFT_VOCAB].astype(np.int32)
PARTS = {
    "draws below cutoffs": Part("draw"),
    "draws, float64 noise": Part("draw", is_double=True),
    "rules of logits": Part("process", {"sampling": FEW | FINES}),
    "propose": Part("propose", {"sampling": FEW | FINES}),
    "propose, coupled, mapped": Part(
        "propose",
        {"sampling": FEW, "token_map": MAP, "rejection_sample_method": "coupled"},
    ),
    "propose, greedy, mapped": Part(
        "propose",
        {"sampling": FINES, "token_map": MAP, "draft_sample_method": "greedy"},
    ),
    "drafts of a moved batch": Part("reorder"),
    "commit": Part("commit"),
}
SCENARIOS = {
    **{f"verify: {name}": scenario for name, scenario in VERIFICATIONS.items()},
    **{f"part: {name}": scenario for name, scenario in PARTS.items()},
    **{f"generate: {name}": scenario for name, scenario in TEXTS.items()},
    **{f"steps: {name}": scenario for name, scenario in STEPS.items()},
    **PROGRAMS,
    **{f"engine: {name}": scenario for name, scenario in SERVED.items()},
}
