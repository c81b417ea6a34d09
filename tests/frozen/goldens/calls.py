"""The library's public calls as the goldens make them, one function for each kind of call.

A port to other signatures changes this file alone. What calls return becomes a record by the names
of fields, so that neither a type nor the order of its fields is recorded.
"""

import collections
import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from process_rules import process_rules

import specjax
from specjax.core import rules

RULES = {
    "lenience": rules.lenience(0.5),
    "typical": rules.typical_acceptance(0.3, 0.6),
    "relaxed": rules.relaxed(3, 0.4),
    "ensemble": rules.ensemble(0.5),
}
ORIGINS = {0: "-", 1: "a", 2: "r", 3: "b"}  # None, accepted, recovered, bonus.
# Name of a leaf or a metric -> its name in the record, where a port gave it another.
NAMES_IN_RECORD: dict[str, str] = {}
FINISH = {0: None, 1: "length", 2: "end_of_sequence", 3: "invalid"}


def run_by(options):
    """The options of a sampler or verifier, of which those that are compiled in are one value."""
    names = ("noise_dtype", "implementation", "axis_name", "vocab_size")
    static = {name: options[name] for name in names if name in options}
    rest = {name: options[name] for name in options if name not in names}
    return rest | {"options": specjax.Options(**static)}


def rule_of(kind, rates):
    """The rule of a verification: a kind, or synthetic acceptance at rates."""
    if rates is not None:
        return rules.synthetic(rates)
    return RULES[kind] if kind in RULES else getattr(rules, kind)()


def verify(kind, draft, target_logits, *, ragged=None, rates=None, **options):
    """One verification. `draft` is the fields of a draft by name.

    ragged: the cumulated numbers of drafted tokens and the largest of them, of rows end to end.
    """
    if isinstance(draft, dict) and kind == "coupled":
        draft = {name: draft.get(name) for name in ("token_ids", "num_tokens")}
    if ragged is not None:
        starts = {"cu_num_draft_tokens": ragged[0], "max_draft_tokens": ragged[1]}
        draft = specjax.RaggedDraft(**draft, **starts)
    elif isinstance(draft, dict):
        draft = specjax.Draft(**draft)
    options.setdefault("rule", rule_of(kind, rates))
    return specjax.rejection_sample(draft, target_logits, **run_by(options))


def small_verification():
    """An eager verification of one-hot drafts, of arrays that lie on the device."""
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(4, 4, 64)), jnp.float32)
    draft = specjax.Draft(jnp.asarray(rng.integers(0, 64, (4, 3)), jnp.int32))
    keys, positions = jax.random.split(jax.random.key(0), 4), jnp.arange(4, dtype=jnp.int32)
    return lambda: specjax.rejection_sample(draft, rows, keys=keys, positions=positions)


def verify_tree(tree, target_logits, **options):
    """One verification of trees, of fields by name: token_ids, parents, and of the rows drawn."""
    given = tree | options
    fields = {name: given.pop(name) for name in ("token_ids", "parents", "max_depth")}
    for name in ("logits", "temperature", "cutoff"):
        fields[name] = given.pop(f"draft_{name}", None)
    return specjax.tree_rejection_sample(
        specjax.TreeDraft(**fields), target_logits, **run_by(given)
    )


def sample(logits, *, stream, **options):
    """One draw from each row."""
    return specjax.gumbel_sample(logits, stream=stream, **run_by(options))


def draft_by(step_fn, carry, token_ids, **options):
    """What `propose` returns: a draft, and the carry after it."""
    names = ("keys", "positions", "temperature", "sampling", "history")
    inputs = specjax.DraftInputs(**{name: options.pop(name) for name in names if name in options})
    method = options.pop("rejection_sample_method", "standard")
    known = {"standard": rules.standard(), "coupled": rules.coupled()}
    options["rule"] = known.get(method, method)
    width = {"vocab_size": options.pop("vocab_size")} if "vocab_size" in options else {}
    return specjax.propose(step_fn, carry, token_ids, inputs, **run_by(options), **width)


def config_of(method, k, **options):
    """The config of a loop by a method: "standard", one of `RULES`, or "synthetic" at a rate."""
    if method in RULES:
        options["rule"] = RULES[method]
        method = "standard"
    return specjax.SpeculativeConfig(k, method, **options)


def compiled_in(options):
    """The options of a call, of which those that are compiled in are one value."""
    names = ("max_length", "prefill_chunk_size", "num_logprobs", "logprobs_mode", "implementation")
    static = {name: options[name] for name in names if name in options}
    rest = {name: options[name] for name in options if name not in names}
    return rest | {"options": specjax.LoopOptions(**static)}


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
    options = compiled_in(options)
    if door == "generate":
        call = functools.partial(specjax.generate, target, drafter, prompts, config=config)
        return lambda keys: {"texts": call(keys=keys, **options)}
    if door == "jit":

        @jax.jit
        def run(target, drafter, ids, lengths, keys):
            return specjax.generate(
                target, drafter, (ids, lengths), keys=keys, config=config, **options
            )

        return lambda keys: {"texts": run(target, drafter, *prompts, keys)}
    fixed = {name: options[name] for name in options if name in ("sampling", "options")}
    rest = {name: options[name] for name in options if name != "options"}
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
        return {"texts": programs[0](target, drafter, prompts, keys=keys, **rest)}

    return run_compiled


def begin(target, drafter, prompts, *, config, masks=None, **options):
    """The state that `init` begins; `masks` are those of the first tokens."""
    if masks is not None:
        sampling = options.get("sampling", specjax.SamplingParams())
        masks = masks[..., None, :] if masks.ndim < 3 else masks
        options["sampling"] = sampling._replace(allowed=masks)
    return specjax.init(target, drafter, prompts, config=config, **compiled_in(options))


def advance(target, drafter, state, *, config, masks=None):
    """The state and the information that `step` returns; `masks` are those of its rows."""
    options = {} if masks is None else {"allowed": masks}
    return specjax.step(target, drafter, state, config=config, **options)


def decode_steps(target, drafter, prompts, keys, *, config, masks, **options):
    """Texts by `init` and `step`, what was drafted in each, and the carry after two steps."""
    masks = None if masks is None else masks()
    models = target, drafter
    first = None if masks is None else masks.first()
    state = begin(*models, prompts, keys=keys, config=config, masks=first, **options)
    steps, carry = [], None
    while not np.all(np.asarray(state.finish)):
        rows = None if masks is None else masks.of_rows(state)
        drafted = np.asarray(state.draft.token_ids)
        state, info = advance(*models, state, config=config, masks=rows)
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


class Letters:
    """A tokenizer: token i is the letter i of the alphabet."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(ord("a") + i) for i in ids)


class Server:
    """An engine, and what it is told: to submit, step, run, abort and preempt, in this order.

    A call does all of the script; a second one has other keys and the same engine.
    """

    def __init__(self, target, drafter, config, *, has_text=False, **options):
        tokenizer = Letters() if has_text else None
        make = functools.partial(specjax.Engine, target, drafter, config=config)
        options = compiled_in(options)
        self._make, self._engine = functools.partial(make, tokenizer=tokenizer, **options), None

    def __call__(self, script, keys):
        if self._engine is None:
            self._engine = self._make()
        engine, requests, said = self._engine, [], []
        for action, *arguments in script:
            if action == "submit":
                options = dict(arguments[0])
                prompt, make = options.pop("prompt"), options.pop("matcher", None)
                options |= {} if make is None else {"matcher": make()}
                requests.append(engine.submit(prompt, key=keys[len(requests)], **options))
            elif action == "samples":
                options = dict(arguments[1])
                prompt, key = options.pop("prompt"), keys[len(requests)]
                requests += engine.submit_samples(arguments[0], prompt, key=key, **options)
            elif action == "step":
                said += [engine.step() for _ in range(arguments[0])][-1:]
            elif action == "preempt":
                index, drops_cache = arguments
                said.append(engine.preempt(requests[index], drops_cache=drops_cache))
            elif action == "abort":
                engine.abort(requests[arguments[0]])
            elif action == "pieces":
                said.append([piece.token_ids for piece in requests[arguments[0]]])
            else:
                assert action == "run", action
                engine.run()
        return {"requests": requests, "said": said, "num_steps": engine.num_steps}


def draw(arrays, keys, **options):
    """`gumbel_sample` below a cutoff of `logit_cutoff`."""
    logits, temperature = arrays["target_logits"][:, 0], arrays["temperature"]
    few = {"top_k": np.array([0, 5, 9, 50, 1, 0], np.int32), "top_p": np.float32(0.9)}
    cutoff = specjax.logit_cutoff(
        logits, temperature=temperature, min_p=np.float32(0.01), implementation="xla", **few
    )
    given = {"keys": keys, "positions": np.int32(8), "temperature": temperature}
    given |= {"implementation": "xla"} | options
    return {
        "cutoff": cutoff,
        "target": sample(logits, stream=0, cutoff=cutoff, **given),
        "draft": sample(logits, stream=specjax.Stream.draft(1), **given),
    }


def history_of(arrays, vocab_size):
    """The committed tokens of requests, and their counts."""
    ids, lengths = arrays["history"], arrays["lengths"]
    counts = specjax.count_tokens(ids, lengths, vocab_size, prompt_lengths=lengths // 2)
    return specjax.History(ids, lengths, counts)


def process(arrays, keys, sampling):
    """`apply_sampling`, `process_logits` and `top_logprobs` of the rows of a step."""
    logits, history = arrays["target_logits"], history_of(arrays, arrays["target_logits"].shape[-1])
    temperature, drafted = arrays["temperature"], arrays["token_ids"]
    params = specjax.SamplingParams(**sampling)
    rules = {name: x for name, x in sampling.items() if name not in ("top_k", "top_p", "min_p")}
    given = {"history": history, "drafted_token_ids": drafted}
    rows, cutoff = specjax.apply_sampling(logits, params, temperature=temperature, **given)
    top = specjax.top_logprobs(
        rows[:, 0], drafted[:, 0], 3, temperature=temperature, cutoff=cutoff[:, 0]
    )
    processed = process_rules(logits, **rules, **given)
    return {"rows": rows, "cutoff": cutoff, "processed": processed, "top": top}


def propose(arrays, keys, sampling, token_map=None, **options):
    """`propose` with a table of logits by the last token, and the carry that it returns."""
    table = jnp.asarray(arrays["draft_logits"].reshape(-1, arrays["draft_logits"].shape[-1]))
    vocab_size = arrays["target_logits"].shape[-1]
    if token_map is not None:
        options |= {"token_map": token_map, "vocab_size": vocab_size}
        table = table[:, : len(token_map)]
    draft, carry = draft_by(
        lambda carry, ids, positions: (table[ids % len(table)], carry + ids),
        jnp.zeros(len(table[:6]), jnp.int32),
        arrays["token_ids"][:, 0],
        num_tokens=3,
        keys=keys,
        positions=arrays["lengths"],
        temperature=arrays["temperature"],
        sampling=None if sampling is None else specjax.SamplingParams(**sampling),
        history=history_of(arrays, vocab_size),
        implementation="xla",
        **options,
    )
    fields = {name: x for name, x in vars(draft).items() if name != "on_target_stream"}
    return {"draft": fields, "carry": carry}


def reorder(arrays, keys):
    """`gather_drafts` of a batch that moved, and drafts `draft_from_probs`, both verified."""
    cached, asked = np.array([4, 9, 2, 7, -1, 3]), np.array([2, 3, 8, 4, 9, 7])
    fields = {"temperature": arrays["temperature"]}
    draft = specjax.Draft(arrays["token_ids"], arrays["draft_logits"], **fields)
    numbers = np.array([3, 2, 3, -1, 1, 3], np.int32)
    gathered = specjax.gather_drafts(draft, cached, asked, numbers)
    given = {"keys": keys, "positions": arrays["lengths"]}
    given["options"] = specjax.Options(implementation="xla")
    steps = [specjax.rejection_sample(gathered, arrays["target_logits"], **given)]
    probs = jax.nn.softmax(arrays["draft_logits"])
    made = specjax.draft_from_probs(arrays["token_ids"], probs)
    steps.append(
        specjax.rejection_sample(made, arrays["target_logits"], rule=rules.block(), **given)
    )
    return {"gathered": gathered.replace(logits=None), "steps": steps}


def commit(arrays, keys):
    """`commit`, `update_metrics` and `update_counts` of a step."""
    ids, lengths, numbers = arrays["history"], arrays["lengths"], arrays["num_tokens"]
    step = specjax.rejection_sample(
        specjax.Draft(arrays["token_ids"], num_tokens=numbers),
        arrays["target_logits"],
        keys=keys,
        positions=lengths,
        options=specjax.Options(implementation="xla"),
    )
    ends = {"eos_token_ids": (3, 7), "max_lengths": lengths + np.int32(3)}
    token_ids, after, finish = specjax.commit(ids, lengths, step, **ends)
    metrics = specjax.update_metrics(
        specjax.init_metrics(len(ids), 3), numbers, step, num_committed=after - lengths
    )
    counts = history_of(arrays, arrays["target_logits"].shape[-1]).counts
    counts = specjax.update_counts(counts, step.token_ids, after - lengths)
    found = {"token_ids": token_ids, "lengths": after, "finish": finish, "counts": counts}
    return found | {"metrics": metrics}


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
    """The hash of the leaves by the names of the fields that lead to them.

    Leaves that only an index tells apart, such as those of layers, have one hash in any order.
    """
    found = collections.defaultdict(list)
    for path, leaf in jax.tree.leaves_with_path(tree):
        parts = keystr(path, simple=True, separator=".").split(".")
        found[_recorded(part for part in parts if not part.isdigit())].append(hash_leaf(leaf))
    return {name: found[name][0] if len(found[name]) == 1 else _hash(found[name]) for name in found}


def _recorded(parts):
    name = ".".join(parts)
    return NAMES_IN_RECORD.get(name, name)


def _hash(hashes):
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:8]


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
    return {_recorded([name]): np.asarray(counts).tolist() for name, counts in fields}


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


def record_requests(found):
    """What each request of an engine got, and what the engine said."""
    record = {"token_ids": [], "origins": [], "finish": [], "metrics": [], "logprobs": []}
    texts, errors, tops = [], [], []
    for request in found["requests"]:
        metrics = request.metrics
        record["token_ids"].append(request.token_ids)
        record["origins"].append("".join(ORIGINS[origin] for origin in request.origins))
        record["finish"].append(request.finish_reason)
        record["metrics"].append(None if metrics is None else record_metrics(metrics))
        record["logprobs"].append(bits(request.logprobs))
        texts.append(request.text)
        errors.append(request.error)
        tops.append([record_top(top) for top in request.top_logprobs])
    for name, values in (("text", texts), ("error", errors), ("top_logprobs", tops)):
        record |= {name: values} if any(values) else {}
    return record | {"said": found["said"], "num_steps": found["num_steps"]}


def record_leaves(tree):
    """Whole numbers by the names of their fields, and the bits of the others."""
    record = {"values": {}, "bits": {}}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name, array = _recorded([keystr(path, simple=True, separator=".")]), np.asarray(leaf)
        is_whole, is_small = not jnp.issubdtype(array.dtype, np.floating), array.size <= 30
        shown = array.tolist() if is_whole and is_small else hash_leaf(array)
        record["values" if is_whole else "bits"][name] = shown
    return record
