"""The library's public calls as the goldens make them, one function for each kind of call.

A port to other signatures changes this file alone. What calls return becomes a record by the names
of fields, so that neither a type nor the order of its fields is recorded.
"""

import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

import specjax
from specjax.core import rules

RULES = {
    "lenience": rules.lenience(0.5),
    "typical": rules.typical_acceptance(0.3, 0.6),
    "relaxed": rules.relaxed(3, 0.4),
    "ensemble": rules.ensemble(0.5),
}
ORIGINS = {0: "-", 1: "a", 2: "r", 3: "b"}  # None, accepted, recovered, bonus.
FINISH = {0: None, 1: "length", 2: "end_of_sequence", 3: "invalid"}


def verify(kind, draft, target_logits, *, ragged=None, rates=None, **options):
    """One verification. `draft` is the fields of a draft by name.

    ragged: the cumulated numbers of drafted tokens and the largest of them, of rows end to end.
    """
    end = "" if ragged is None else "_ragged"
    if ragged is not None:
        options |= {"cu_num_draft_tokens": ragged[0], "max_draft_tokens": ragged[1]}
    if kind == "coupled":
        function = getattr(specjax, f"coupled_sample{end}")
        return function(
            draft["token_ids"], target_logits, num_tokens=draft.get("num_tokens"), **options
        )
    if kind in RULES:
        options["rule"] = RULES[kind]
    if rates is not None:
        options["conditional_rates"] = rates
    name = "block_rejection_sample" if kind == "block" else "rejection_sample"
    return getattr(specjax, f"{name}{end}")(specjax.Draft(**draft), target_logits, **options)


def verify_tree(tree, target_logits, **options):
    """One verification of trees, of fields by name: token_ids, parents, and of the rows drawn."""
    fields = {name: tree[name] for name in tree if name not in ("token_ids", "parents")}
    return specjax.tree_rejection_sample(
        tree["token_ids"], tree["parents"], target_logits, **fields, **options
    )


def config_of(method, k, **options):
    """The config of a loop by a method: "standard", one of `RULES`, or "synthetic" at a rate."""
    if method in RULES:
        options["rule"] = RULES[method]
        method = "standard"
    return specjax.SpeculativeConfig(k, method, **options)


def decode(door, target, drafter, prompts, *, config, masks=None, folder=None, **options):
    """Whole texts of prompts by one of the doors; returns a function of keys.

    door: "generate", "jit", "steps" by `init` and `step`, "compiled", or "loaded" from a file.
    prompts: token ids [B, L] and lengths [B].
    masks: makes the masks of every step's rows, for "steps".
    """
    if door == "steps":
        return functools.partial(
            decode_steps, target, drafter, prompts, config=config, masks=masks, **options
        )
    if door == "generate":
        call = functools.partial(specjax.generate, target, drafter, *prompts, config=config)
        return lambda keys: {"texts": call(keys=keys, **options)}
    if door == "jit":

        @jax.jit
        def run(target, drafter, ids, lengths, keys):
            return specjax.generate(
                target, drafter, ids, lengths, keys=keys, config=config, **options
            )

        return lambda keys: {"texts": run(target, drafter, *prompts, keys)}
    compiled_in = {"max_length", "prefill_chunk_size", "num_logprobs", "logprobs_mode"}
    fixed = {name: options[name] for name in options if name in compiled_in | {"sampling"}}
    rest = {name: options[name] for name in options if name not in compiled_in}
    programs = []

    def run_compiled(keys):
        if not programs:
            made = specjax.compile_generate(
                target, drafter, batch_size=len(prompts[1]), config=config, **fixed
            )
            if door == "loaded":
                path = pathlib.Path(folder) / "programs"
                made.save(path)
                made = specjax.load_compiled(path)
            programs.append(made)
        return {"texts": programs[0](target, drafter, *prompts, keys=keys, **rest)}

    return run_compiled


def decode_steps(target, drafter, prompts, keys, *, config, masks, **options):
    """Texts by `init` and `step`, what was drafted in each, and the carry after two steps."""
    masks = None if masks is None else masks()
    first = {} if masks is None else {"allowed": masks.first()}
    state = specjax.init(target, drafter, *prompts, keys=keys, config=config, **first, **options)
    steps, carry = [], None
    while not np.all(np.asarray(state.finish)):
        rows = {} if masks is None else {"allowed": masks.of_rows(state)}
        drafted = np.asarray(state.draft.token_ids)
        state, info = specjax.step(target, drafter, state, config=config, **rows)
        counts, accepted = info.num_drafted, info.verification.num_accepted
        steps.append(
            [
                [token_ids[: max(n, 0)].tolist(), int(num_accepted) if n >= 0 else -1]
                for token_ids, n, num_accepted in zip(
                    drafted, np.asarray(counts), np.asarray(accepted), strict=True
                )
            ]
        )
        carry = state if len(steps) == 2 else carry
    return {"texts": state, "steps": steps, "carry": carry}


def bits(values):
    """The bits of float32 numbers, eight hexadecimal digits each."""
    return np.ascontiguousarray(values, np.float32).astype(">f4").tobytes().hex()


def hash_leaf(leaf):
    """A hash of an array's dtype, shape and bytes."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    facts = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(facts + np.ascontiguousarray(array).tobytes()).hexdigest()[:8]


def hash_leaves(tree):
    """The hash of each leaf by its name: the names of the fields that lead to it."""
    leaves = jax.tree.leaves_with_path(tree)
    return {keystr(path, simple=True, separator="."): hash_leaf(leaf) for path, leaf in leaves}


def record_verification(step):
    """What a verification of any kind emits."""
    record = {
        name: np.asarray(getattr(step, name)).tolist()
        for name in ("token_ids", "num_accepted", "num_emitted")
    }
    if hasattr(step, "nodes"):
        record["nodes"] = np.asarray(step.nodes).tolist()
    return record | {"logprobs": [bits(row) for row in np.asarray(step.logprobs)]}


def record_sample(sample):
    """What a draw gives."""
    return {
        "token_ids": np.asarray(sample.token_ids).tolist(),
        "logprobs": bits(sample.logprobs),
        "logsumexp": bits(sample.logsumexp),
    }


def record_metrics(metrics):
    fields = metrics._asdict().items()
    return {name: np.asarray(counts).tolist() for name, counts in fields}


def record_top(top):
    """Listed log-probabilities: ids and ranks as they are, numbers as their bits."""
    return {
        "ids": np.asarray(top.token_ids).tolist(),
        "rank": np.asarray(top.rank).tolist(),
        "logprobs": bits(top.logprobs),
        "logprob": bits(top.logprob),
    }


def record_texts(prompts, found):
    """What each request got, and that its prompt and its padding are as they were."""
    texts = found["texts"]
    names = ("token_ids", "lengths", "logprobs", "origins", "finish")
    ids, ends, logprobs, origins, finish = (np.asarray(getattr(texts, name)) for name in names)
    top, record = texts.top_logprobs, {"token_ids": [], "origins": [], "finish": []}
    record |= {"metrics": record_metrics(texts.metrics), "logprobs": []}
    record |= {} if top is None else {"top_logprobs": []}
    for b, (prompt, begin) in enumerate(zip(*map(np.asarray, prompts), strict=True)):
        end = ends[b]
        own = slice(begin, end)
        assert (ids[b, :begin] == prompt[:begin]).all(), "a prompt changed"
        assert (ids[b, end:] == -1).all(), "something follows the end of a text"
        assert not logprobs[b, :begin].any(), "a prompt has log-probabilities"
        assert not origins[b, end:].any(), "something has an origin after the end of a text"
        record["token_ids"].append(ids[b, own].tolist())
        record["origins"].append("".join(ORIGINS[int(x)] for x in origins[b, own]))
        record["finish"].append(FINISH[int(finish[b])])
        record["logprobs"].append(bits(logprobs[b, own]))
        if top is not None:
            listed = jax.tree.map(lambda x, b=b, own=own: np.asarray(x)[b, own], top)
            record["top_logprobs"].append(record_top(listed))
    if found.get("steps") is not None:
        record["drafted"] = found["steps"]
    if found.get("carry") is not None:
        record["carry"] = hash_leaves(found["carry"])
    return record
