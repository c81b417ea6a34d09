"""The goldens' scenarios: about fifty, so that every value of every axis appears in some of them.

Each is data. `begin` makes its inputs and returns a function of a seed, which makes its calls, and
one that makes the record of what they gave.
"""

import dataclasses

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
        prompts = inputs.padded(inputs.PROMPTS)
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
SCENARIOS = {
    **{f"verify: {name}": scenario for name, scenario in VERIFICATIONS.items()},
    **{f"generate: {name}": scenario for name, scenario in TEXTS.items()},
}
