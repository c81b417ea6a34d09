"""Wrong calls of public functions, by the name under which their sentence is recorded.

The large doors are called through `calls`, small functions where they stand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from process_rules import process_rules

import specjax
from frozen.goldens import calls, inputs
from specjax import Grammar, History, SamplingParams, SpeculativeConfig, models, theory
from specjax.core import rules

B, K, V = 2, 2, 5
IDS = np.zeros((B, K), np.int32)
ROWS = np.zeros((B, K + 1, V), np.float32)
LOGITS = ROWS[:, :K]
IN_DRAFT = ROWS[..., :K, 0]
COUNTS, ZEROS = np.array([0, 1, 3], np.int32), np.zeros(3, np.int32)
PROMPTS = (np.array([[1, 2], [3, 0]], np.int32), np.array([2, 1], np.int32))
PARAMS = SamplingParams
TINY_RULE = specjax.Rule(lambda lp, lq, u, row: lp > lq, lambda lp, lq, row: lp)


@functools.cache
def key():
    return jax.random.key(0)


def sentence_of(call):
    """The error of a call: its type and what it says; None if it is not refused."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".replace(__file__, "FILE")
    return None


def verify(kind="standard", rows=ROWS, draft=None, **options):
    draft = {} if draft is None else draft
    draft = {"token_ids": IDS} | draft if isinstance(draft, dict) else draft
    return calls.verify(kind, draft, rows, **{"keys": key(), "positions": 0} | options)


def ragged(kind="standard", ids=ZEROS, counts=COUNTS, most=2, **options):
    rows = options.pop("rows", np.zeros((5, V), np.float32))
    return verify(kind, rows, {"token_ids": ids}, ragged=(counts, most), **options)


def tree(ids=IDS, parents=None, rows=ROWS, **options):
    parents = np.full_like(ids, -1) if parents is None else parents
    fields = {"token_ids": ids, "parents": parents}
    names = ("draft_logits", "draft_cutoff")
    fields |= {name: options.pop(name) for name in names if name in options}
    given = {"max_depth": 2, "keys": key(), "positions": 0}
    return calls.verify_tree(fields, rows, **given | options)


def sample(logits=ROWS[:, 0], **options):
    given = {"keys": key(), "positions": 0, "stream": 0}
    return calls.sample(logits, **given | options)


def propose(ids=IDS[:, 0], **options):
    given = {"num_tokens": 2, "keys": key(), "positions": 1}
    rows = options.pop("rows", ROWS[:, 0])
    return calls.draft_by(lambda carry, fed, at: (rows, carry), (), ids, **given | options)


def process(logits=ROWS, **options):
    return process_rules(logits, **options)


@functools.cache
def target():
    return inputs.model_of("5")


@functools.cache
def by_model():
    return inputs.drafter_of("model", "5", target())


def decode(door="generate", drafter=None, prompts=PROMPTS, model=None, keys=None, **options):
    keys = key() if keys is None else keys
    given = {"config": SpeculativeConfig(2), "max_new_tokens": 3}
    model = target() if model is None else model
    return calls.decode(door, model, drafter, prompts, **given | options)(keys)


def begin(masks=None, is_drafted=False):
    """A state that `init` began."""
    drafter, options = by_model() if is_drafted else None, {"keys": key(), "max_new_tokens": 4}
    config = SpeculativeConfig(2)
    return calls.begin(target(), drafter, PROMPTS, config=config, masks=masks, **options)


def step(config=None, has_masks=False, masks=None):
    """A step of a state, with a drafter where a config is given."""
    is_drafted = config is not None
    drafter = by_model() if is_drafted else None
    state = begin(np.ones((2, 5), bool) if has_masks else None, is_drafted)
    config = SpeculativeConfig(2) if config is None else config
    return calls.advance(target(), drafter, state, config=config, masks=masks)


def engine(drafter=None, config=None, model=None, **options):
    options = {"num_slots": 2, "max_length": 8} | options
    model = target() if model is None else model
    return calls.Server(model, drafter, config, **options)((), ())


@functools.cache
def server():
    """An engine that takes matchers and top-k, for requests that are refused."""
    options = {"num_slots": 1, "max_length": 8, "sampling": PARAMS(top_k=0)}
    return calls.Server(target(), None, SpeculativeConfig(2), **options)


def submit(prompt=(1, 2), keys=None, **options):
    found = server()([("submit", {"prompt": prompt} | options)], [key() if keys is None else keys])
    raise RuntimeError(found["requests"][0].error)


def samples(num_samples, **options):
    return server()([("samples", num_samples, {"prompt": [1]} | options)], [key()])


def closed():
    options = specjax.LoopOptions(max_length=4)
    with specjax.Engine(target(), None, num_slots=1, options=options) as opened:
        pass
    return opened.submit([0], key=key())


def params(fields, door=decode):
    return door(sampling=PARAMS(**fields))


def configure(*values, **options):
    return lambda: SpeculativeConfig(*values, **options)


def taps_without_features():
    return dataclasses.replace(by_model(), taps=(1,))


def commit(ids=IDS, lengths=COUNTS[:2], **options):
    step = specjax.Verification(ROWS[..., 0].astype(np.int32), COUNTS[:2], COUNTS[1:], ROWS[..., 0])
    return specjax.commit(ids, lengths, step, **options)


def mesh(shape=(1, 2), names=("data", "model")):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, devices=devices)


def split(shape, **changes):
    config = dataclasses.replace(inputs.TINY, **changes)
    return models.split_model(config, None, mesh=mesh(shape))


def layer(**changes):
    return dataclasses.replace(inputs.LAYER, **changes)


def headless(**changes):
    """An engine or a text of a head that another target was trained for."""
    return models.dflash_drafter(inputs.model_of("tiny"), inputs.DFLASH, {}, **changes)


VERIFICATIONS = {
    "a draft of another type": lambda: specjax.rejection_sample(
        None, ROWS, keys=key(), positions=0
    ),
    "token_ids of one axis": lambda: verify(draft={"token_ids": IDS[0]}),
    "token_ids out of range": lambda: verify(draft={"token_ids": IDS + np.int64(2**32)}),
    "token_ids that are no integers": lambda: verify(draft={"token_ids": IDS + 0.5}),
    "draft logits of other requests": lambda: verify(draft={"logits": np.zeros((3, 2, 5), "f4")}),
    "draft logits of one row": lambda: verify(draft={"logits": ROWS[:, 0]}),
    "statistics without logits": lambda: verify(draft={"logprobs": IN_DRAFT}),
    "a draft's cutoff of another shape": lambda: verify(
        draft={"logits": LOGITS, "cutoff": IN_DRAFT[:1]}
    ),
    "a draft's num_tokens of another shape": lambda: verify(draft={"num_tokens": COUNTS}),
    "a token map with an id twice": lambda: verify(
        draft={"logits": LOGITS[..., :2], "token_map": np.array([1, 1])}
    ),
    "a token map past the vocabulary": lambda: verify(
        draft={"logits": LOGITS[..., :2], "token_map": np.array([1, 9])}
    ),
    "a token map of another length": lambda: verify(
        draft={"logits": LOGITS, "token_map": np.array([1, 2])}
    ),
    "rows for another K": lambda: verify(rows=ROWS[:, :2]),
    "rows of two axes": lambda: verify(rows=ROWS[0]),
    "rows of integers": lambda: verify(rows=IDS[..., None].repeat(5, -1)),
    "rows without a vocabulary": lambda: verify(rows=ROWS[..., :0]),
    "keys of integers": lambda: verify(keys=IDS[:, 0]),
    "keys of another implementation": lambda: verify(keys=jax.random.key(0, impl="rbg")),
    "keys of another number": lambda: verify(keys=jax.random.split(key(), 3)),
    "positions that are no integers": lambda: verify(positions=jnp.array(1.5, jnp.bfloat16)),
    "positions out of range": lambda: verify(positions=2**40),
    "temperature of another shape": lambda: verify(temperature=np.ones(3)),
    "cutoff of another shape": lambda: verify(cutoff=IN_DRAFT),
    "bonus_token_ids of another shape": lambda: verify(bonus_token_ids=COUNTS),
    "greedy_logprobs 0": lambda: verify(greedy_logprobs=0),
    "noise_dtype foo": lambda: verify(noise_dtype="foo"),
    "noise_dtype int32": lambda: verify(noise_dtype=jnp.int32),
    "noise_dtype float64 without x64": lambda: verify(noise_dtype=jnp.float64),
    "an unknown implementation": lambda: verify(implementation="cuda"),
    "triton without a GPU": lambda: verify(implementation="triton"),
    "rates above 1": lambda: verify("synthetic", rates=[1.5, 0.1]),
    "rates of another number": lambda: verify("synthetic", rates=[0.5, 0.1, 0.1]),
    "a rule of another type": lambda: verify(rule="lenience"),
    "vocab_size of whole rows": lambda: verify(vocab_size=4),
    "an axis that is not there": lambda: verify(axis_name="model"),
    "block: rows for another K": lambda: verify("block", ROWS[:, :2]),
    "coupled: token_ids of one axis": lambda: verify("coupled", draft={"token_ids": IDS[0]}),
    "coupled: rows for another K": lambda: verify("coupled", ROWS[:, :2]),
    "ragged: counts that fall": lambda: ragged(counts=np.array([0, 2, 1], np.int32)),
    "ragged: counts that end beyond": lambda: ragged(counts=np.array([0, 2, 4], np.int32)),
    "ragged: counts of another shape": lambda: ragged(counts=np.zeros(5, np.int32)),
    "ragged: a most of -1": lambda: ragged(most=-1),
    "ragged: token_ids of two axes": lambda: ragged(ids=IDS),
    "ragged: coupled of two axes": lambda: ragged("coupled", ids=IDS),
    "ragged: block, rows of three axes": lambda: ragged("block", rows=ROWS),
    "tree: token_ids of one axis": lambda: tree(IDS[0]),
    "tree: parents of another shape": lambda: tree(parents=IDS[:1]),
    "tree: rows for other nodes": lambda: tree(rows=ROWS[:, :2]),
    "tree: a depth of 0": lambda: tree(max_depth=0),
    "tree: a depth of 2000": lambda: tree(max_depth=2000),
    "tree: a cutoff without logits": lambda: tree(draft_cutoff=ROWS[..., 0]),
    "tree: the kernels": lambda: tree(implementation="interpret"),
    "sample: logits of three axes": lambda: sample(ROWS),
    "sample: a stream that is no integer": lambda: sample(stream=0.5),
}
PIECES = {
    "gather_drafts: ids of two axes": lambda: specjax.gather_drafts(
        specjax.Draft(IDS), COUNTS[:2], IDS, COUNTS[:2]
    ),
    "gather_drafts: another number of slots": lambda: specjax.gather_drafts(
        specjax.Draft(IDS), COUNTS, COUNTS[:2], COUNTS[:2]
    ),
    "draft_from_probs: one row": lambda: specjax.draft_from_probs(IDS, ROWS[:, 0]),
    "propose: token_ids of two axes": lambda: propose(IDS),
    "propose: no tokens": lambda: propose(num_tokens=0),
    "propose: another draft method": lambda: propose(draft_sample_method="gumbel"),
    "propose: another method": lambda: propose(rejection_sample_method="synthetic"),
    "propose: logits of one axis": lambda: propose(rows=ROWS[0, 0]),
    "propose: vocab_size without a map": lambda: propose(vocab_size=5),
    "propose: a map of two axes": lambda: propose(token_map=IDS, vocab_size=5),
    "commit: lengths of another shape": lambda: commit(lengths=COUNTS),
    "commit: eos_token_ids of floats": lambda: commit(eos_token_ids=(2.7,)),
    "commit: token_ids of one axis": lambda: commit(IDS[0]),
    "metrics of other requests": lambda: specjax.update_metrics(
        specjax.init_metrics(3, 2),
        COUNTS[:2],
        specjax.Verification(IDS, COUNTS[:2], COUNTS[:2], IN_DRAFT),
    ),
    "logit_cutoff: a scalar": lambda: specjax.logit_cutoff(1.0, temperature=1, top_k=2),
    "logit_cutoff: top_k of another shape": lambda: specjax.logit_cutoff(
        ROWS, temperature=1.0, top_k=COUNTS
    ),
    "top_logprobs: more than the vocabulary": lambda: specjax.top_logprobs(
        ROWS[:, 0], IDS[:, 0], 6
    ),
    "process_logits: a penalty without counts": lambda: process(presence_penalty=0.5),
    "process_logits: another history": lambda: process(presence_penalty=0.5, history={}),
    "process_logits: drafted tokens missing": lambda: process(
        presence_penalty=0.5, history=History(counts=specjax.count_tokens(IDS, COUNTS[:2], V))
    ),
    "process_logits: words without a history": lambda: process(bad_words=[[1, 2]]),
    "process_logits: bias of a mapping": lambda: process(bias={1: 0.5}),
    "process_logits: bias of another width": lambda: process(bias=np.zeros(4)),
    "process_logits: allowed of floats": lambda: process(allowed=np.zeros(5)),
    "process_logits: allowed of another width": lambda: process(allowed=np.ones(4, bool)),
    "count_tokens: one axis": lambda: specjax.count_tokens(IDS[0], COUNTS[:2], V),
    "bias_array: a token past the vocabulary": lambda: specjax.bias_array({7: 1.0}, 5),
    "bad_words_array: a token": lambda: specjax.bad_words_array([3]),
    "bad_words_array: an empty word": lambda: specjax.bad_words_array([[]]),
    "ngram_drafter(1, 2)": lambda: specjax.ngram_drafter(1, 2),
    "Rule: an unknown statistic": lambda: specjax.Rule(len, len, ("variance",)),
    "Rule: no function": lambda: specjax.Rule(1, len),
    "rules.lenience(0)": lambda: rules.lenience(0),
    "rules.relaxed(0, 0.5)": lambda: rules.relaxed(0, 0.5),
    "geometric_rates(2, 3)": lambda: specjax.geometric_rates(2, 3),
    "conditional_rates that rise": lambda: specjax.conditional_rates(np.array([0.5, 0.6])),
    "rates_for_length(5, 3)": lambda: specjax.rates_for_length(5, 3),
    "theory: logits for probabilities": lambda: theory.acceptance_rate(p=ROWS[0, 0], q=ROWS[0, 0]),
    "theory.best_k of other steps": lambda: theory.best_k([1.0, 1.5], [1.0]),
    "enable_compilation_cache: seconds": lambda: specjax.enable_compilation_cache(
        "unused", min_compile_seconds="1"
    ),
}
CONFIGS = {
    "K of 0": configure(0),
    "K of 99": configure(99),
    "K of 2.5": configure(2.5),
    "another method": configure(3, "greedy"),
    "draft method gumbel": configure(3, draft_sample_method="gumbel"),
    "another draft method": configure(3, draft_sample_method="best"),
    "fp64 of 1": configure(3, use_fp64_gumbel=1),
    "a rate without synthetic": configure(3, synthetic_acceptance_rate=0.5),
    "synthetic without a rate": configure(3, "synthetic"),
    "synthetic with two": configure(
        3, "synthetic", synthetic_acceptance_rate=0.5, synthetic_acceptance_length=2
    ),
    "synthetic rates that rise": configure(2, "synthetic", synthetic_acceptance_rates=(0.5, 0.6)),
    "synthetic rates of another number": configure(
        2, "synthetic", synthetic_acceptance_rates=(0.5,)
    ),
    "a synthetic length of 9": configure(2, "synthetic", synthetic_acceptance_length=9),
    "auto and synthetic": configure("auto", "synthetic", synthetic_acceptance_rate=0.5),
    "costs without auto": configure(3, step_costs=(1, 2, 3, 4)),
    "a usual rate without auto": configure(3, usual_acceptance_rate=0.5),
    "costs of one number": configure("auto", step_costs=(1,)),
    "costs of 0": configure("auto", step_costs=(1, 0)),
    "a rule of another type": configure(3, rule=len),
    "a rule and block": configure(3, "block", rule=TINY_RULE),
}
GRAMMAR = Grammar(IDS, IDS[0], IDS.astype(np.uint32))
TEXTS = {
    "a target of another type": lambda: decode(model="target"),
    "a drafter of another type": lambda: decode(drafter=target()),
    "taps without features": lambda: decode(drafter=taps_without_features()),
    "a config of another type": lambda: decode(config=3),
    "an empty prompt": lambda: decode(prompts=(PROMPTS[0], np.array([0, 1]))),
    "prompts of one axis": lambda: decode(prompts=PROMPTS[0][0].tolist()),
    "a length past the prompt": lambda: decode(prompts=(PROMPTS[0], np.array([2, 3]))),
    "a token past the vocabulary": lambda: decode(prompts=(PROMPTS[0] + 4, PROMPTS[1])),
    "keys of another number": lambda: decode(keys=jax.random.split(key(), 3)),
    "no new tokens": lambda: decode(max_new_tokens=0),
    "max_new_tokens of another shape": lambda: decode(max_new_tokens=np.array([1, 2, 3])),
    "a max_length too small": lambda: decode(max_length=4),
    "max_new_tokens traced": lambda: jax.jit(lambda n: decode(max_new_tokens=n))(3),
    "a chunk of 0": lambda: decode(prefill_chunk_size=0),
    "a temperature of another shape": lambda: decode(temperature=np.ones(3)),
    "eos_token_ids of floats": lambda: decode(eos_token_ids=1.5),
    "log-probabilities of -1 tokens": lambda: decode(num_logprobs=-1),
    "log-probabilities of 6 tokens": lambda: decode(num_logprobs=6),
    "another logprobs_mode": lambda: decode(logprobs_mode="all"),
    "sampling of another type": lambda: decode(sampling={"top_k": 2}),
    "top_k of another shape": lambda: params({"top_k": COUNTS}),
    "top_k of floats": lambda: params({"top_k": 0.5}),
    "bias of another width": lambda: params({"bias": np.zeros(4)}),
    "bias of other requests": lambda: params({"bias": np.zeros((3, 5))}),
    "allowed of a row of each step": lambda: params({"allowed": np.ones((2, 3, 5), bool)}),
    "bad_words of one axis": lambda: params({"bad_words": COUNTS}),
    "a grammar of another type": lambda: params({"grammar": "json"}),
    "a grammar of other shapes": lambda: params({"grammar": GRAMMAR}),
    "a state without a grammar": lambda: params({"grammar_state": 1}),
    "an unknown implementation": lambda: decode(implementation="cuda"),
    "another K of a step": lambda: step(SpeculativeConfig(3)),
    "auto of a step": lambda: step(SpeculativeConfig("auto")),
    "synthetic of a step": lambda: step(
        SpeculativeConfig(2, "synthetic", synthetic_acceptance_rate=0.5)
    ),
    "masks of a step alone": lambda: step(masks=np.ones((2, 1, 5), bool)),
    "no masks of a step": lambda: step(has_masks=True),
    "masks of a step, two axes": lambda: step(has_masks=True, masks=np.ones((2, 5), bool)),
    "masks of a step, of other rows": lambda: step(has_masks=True, masks=np.ones((2, 3, 5), bool)),
    "masks of a first token, one axis": lambda: begin(np.ones(5, bool)),
    "compiled: more tokens than it holds": lambda: decode(
        "compiled", max_length=8, max_new_tokens=9
    ),
    "compiled: no capacity for a prompt": lambda: decode("compiled", max_length=1),
    "saved: a rule": lambda: decode(
        "loaded", config=calls.config_of("lenience", 2), max_length=8, folder="unused"
    ),
    "loaded: no such kind of file": lambda: specjax.load_compiled(__file__),
    "a head of another target": headless,
    "K beyond a DFlash block": lambda: decode(
        drafter=inputs.drafter_of("DFlash", "headed", inputs.model_of("headed")),
        model=inputs.model_of("headed"),
        config=SpeculativeConfig(9),
    ),
    "a head on a target without taps": lambda: decode(
        drafter=inputs.drafter_of("DFlash", "headed", inputs.model_of("headed")),
        model=dataclasses.replace(target(), apply_with_taps=None),
    ),
    "masks of other matchers": lambda: inputs.row_masks(np.array([1, 2])),
    "a mesh of another type": lambda: models.split_model(inputs.TINY, None, mesh=4),
    "a mesh of other axes": lambda: models.split_model(
        inputs.TINY, None, mesh=mesh(names=("a", "b"))
    ),
    "heads that a mesh does not divide": lambda: split((1, 3)),
    "an odd head_dim": lambda: layer(head_dim=7),
    "another activation": lambda: layer(hidden_act="relu6"),
    "EAGLE-3: few tokens without an lm_head": lambda: models.Eagle3Config(
        inputs.LAYER, 24, 30, taps=(0,), has_lm_head=False
    ),
    "DFlash: a block of 1": lambda: dataclasses.replace(inputs.DFLASH, block_size=1),
}
SERVED = {
    "no slots": lambda: engine(num_slots=0),
    "a max_length of 1": lambda: engine(max_length=1),
    "max_waiting of 0": lambda: engine(max_waiting=0),
    "k_by_load of a fixed K": lambda: engine(by_model(), SpeculativeConfig(2), k_by_load=True),
    "k_by_load of 1": lambda: engine(k_by_load=1),
    "matchers and a mask": lambda: engine(
        takes_matchers=True, sampling=PARAMS(allowed=np.ones(5, bool))
    ),
    "a mesh of several rows": lambda: engine(model=inputs.model_of("tiny", mesh=(2, 2))),
    "a key of another shape": lambda: submit(keys=jax.random.split(key(), 2)),
    "a key of integers": lambda: submit(keys=np.zeros(2, np.uint32)),
    "no new tokens": lambda: submit(max_new_tokens=0),
    "a negative temperature": lambda: submit(temperature=-1),
    "a temperature of nan": lambda: submit(temperature=float("nan")),
    "a stop without a tokenizer": lambda: submit(stop="a"),
    "an empty stop": lambda: submit(stop=[""]),
    "seventeen stop ids": lambda: submit(eos_token_ids=range(17)),
    "a prompt of two axes": lambda: submit([[1, 2]]),
    "a prompt of floats": lambda: submit([1.5]),
    "an empty prompt": lambda: submit([]),
    "a prompt past the vocabulary": lambda: submit([1, 7]),
    "a prompt too long": lambda: submit([1] * 8),
    "a prompt and too many new tokens": lambda: submit([1, 2], max_new_tokens=7),
    "a field that the engine has not": lambda: submit(sampling=PARAMS(top_p=0.5)),
    "a field of another shape": lambda: submit(sampling=PARAMS(top_k=np.array([1, 2]))),
    "sampling of another type": lambda: submit(sampling={}),
    "a grammar of a request": lambda: submit(sampling=PARAMS(grammar=GRAMMAR)),
    "a matcher": lambda: submit(matcher=inputs.matcher_of),
    "no samples": lambda: samples(0),
    "an option that is not": lambda: submit(top_k=2),
    "a closed engine": closed,
}
REFUSALS = {
    **{f"verify: {name}": call for name, call in VERIFICATIONS.items()},
    **{f"part: {name}": call for name, call in PIECES.items()},
    **{f"config: {name}": call for name, call in CONFIGS.items()},
    **{f"decode: {name}": call for name, call in TEXTS.items()},
    **{f"engine: {name}": call for name, call in SERVED.items()},
}
