"""Bias, penalties, masks: each from its definition, each row after its own tokens alone."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import processed
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from process_rules import process_rules

import specjax
from specjax import History, SamplingParams
from specjax.processing.logit_rules import apply_rules
from specjax.processing.sampling_params import FIELDS

SIZE, K = 3, 3
NUMBERS = ("repetition_penalty", "frequency_penalty", "presence_penalty")
MIN_RESIDUAL_MASS = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class Case:
    """A batch with ragged prompts and texts, tokens drafted after them, and every rule."""

    def __init__(self, vocab_size, seed=0, dtype="float32"):
        rng = np.random.default_rng(seed)
        self.vocab_size, self.dtype = vocab_size, dtype
        self.prompts = [rng.integers(0, vocab_size, n).tolist() for n in (1, 4, 2)]
        self.generated = [rng.integers(0, vocab_size, n).tolist() for n in (5, 0, 3)]
        self.drafted = rng.integers(0, vocab_size, (SIZE, K)).astype(np.int32)
        self.drafted[2, 1:] = -1
        logits = 3 * rng.normal(size=(SIZE, K + 1, vocab_size))
        self.logits = jnp.asarray(logits, jnp.float32).astype(dtype)
        words = [[self.past(b, r)[-n:] for b in range(SIZE) for r in range(K)] for n in (1, 2)]
        self.words = [[0], *({tuple(word) for word in words[0]}), *words[1]][: 2 * vocab_size]
        self.words = [list(word) for word in self.words if word and word[-1] != 1]
        self.rules = {
            "bias": rng.normal(size=(SIZE, vocab_size)).astype(np.float32),
            "repetition_penalty": np.array([1.5, 1.0, 0.7], np.float32),
            "frequency_penalty": np.array([0.0, 0.4, -0.3], np.float32),
            "presence_penalty": np.array([0.6, -0.2, 0.0], np.float32),
            "allowed": rng.random((SIZE, vocab_size)) < 0.7,
            "bad_words": self.words,
        }

    def past(self, b, row):
        return [*self.prompts[b], *self.generated[b], *self.before(b, row)]

    def before(self, b, row):
        return [int(token) for token in self.drafted[b, :row] if token >= 0]

    def history(self):
        texts = [p + g for p, g in zip(self.prompts, self.generated, strict=True)]
        ids = np.full((SIZE, 9), 0, np.int32)
        for b, text in enumerate(texts):
            ids[b, : len(text)] = text
        lengths = np.array([len(text) for text in texts], np.int32)
        prompt_lengths = np.array([len(prompt) for prompt in self.prompts], np.int32)
        counts = specjax.count_tokens(ids, lengths, self.vocab_size, prompt_lengths=prompt_lengths)
        return History(jnp.asarray(ids), jnp.asarray(lengths), counts)

    def run(self, names, **change):
        rules = {name: self.rules[name] for name in names} | change
        words = rules.get("bad_words")
        if isinstance(words, list):
            # Of every seed as many, some twice, in one program.
            same = [words[i % len(words)] for i in range(2 * SIZE * K + 1)] if words else words
            rules["bad_words"] = specjax.bad_words_array(same)
        return process_rules(
            self.logits, history=self.history(), drafted_token_ids=self.drafted, **rules
        )

    def expect(self, names):
        def own(name, b):
            return self.rules[name] if name == "bad_words" else self.rules[name][b]

        rows = [
            processed.process(
                np.asarray(self.logits[b, r], np.float32),
                self.prompts[b],
                self.generated[b] + self.before(b, r),
                **{name: own(name, b) for name in names},
            )
            for b in range(SIZE)
            for r in range(K + 1)
        ]
        return np.reshape(rows, self.logits.shape)

    def check(self, names, **change):
        found = self.run(names, **change)
        assert found.dtype == self.dtype
        want = self.expect(names)
        found = np.asarray(found, np.float32)
        np.testing.assert_array_equal(np.isneginf(found), np.isneginf(want))
        np.testing.assert_allclose(found, want, rtol=MIN_RESIDUAL_MASS[self.dtype], atol=2e-6)


RULES = tuple(Case(5).rules)


@pytest.mark.once
@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_its_definition(name):
    Case(5).check([name])


@pytest.mark.once
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "float32"), (5, "bfloat16"), (129, "float32"), (129, "float16")],
)
def test_all_together_are_their_definition(vocab_size, dtype):
    for seed in range(3):
        case = Case(vocab_size, seed, dtype)
        case.check(RULES)


@pytest.mark.lenient
def test_x64_changes_nothing():
    with jax.enable_x64(True):
        case = Case(5)
        case.check(RULES)
        case.rules["repetition_penalty"] = case.rules["repetition_penalty"].astype(np.float64)
        case.check(RULES)


@pytest.mark.once
@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 129])
def test_a_packed_mask_is_the_mask(vocab_size, dtype):
    case = Case(vocab_size)
    words = processed.pack(case.rules["allowed"]).view(dtype)
    np.testing.assert_array_equal(case.run([], allowed=words), case.run(["allowed"]))
    np.testing.assert_array_equal(
        case.run([], allowed=jnp.asarray(words[1])), case.run([], allowed=case.rules["allowed"][1])
    )


@pytest.mark.once
def test_a_mask_of_each_row_is_taken():
    """As a grammar gives it: what is allowed depends on the tokens before."""
    case = Case(70)
    allowed = np.random.default_rng(5).random((SIZE, K + 1, 70)) < 0.5
    found = case.run([], allowed=processed.pack(allowed))
    np.testing.assert_array_equal(found, np.where(allowed, case.logits, -np.inf))


@pytest.mark.once
def test_a_row_without_allowed_tokens_is_minus_infinity():
    case = Case(5)
    case.rules["allowed"][1] = False
    found = np.asarray(case.run(RULES))
    assert np.all(found[1] == -np.inf)
    assert not np.isnan(found).any()


@pytest.mark.once
def test_one_bias_and_one_set_of_bad_words_serve_all_requests_or_each_its_own():
    case = Case(5)
    bias = specjax.bias_array({2: -4.0, 0: 1.0}, 5)
    one = case.run([], bias=bias)
    np.testing.assert_array_equal(one, case.run([], bias=np.stack([bias] * SIZE)))
    words = [[[1], [2, 3]], [], [[4]]]
    own = np.asarray(case.run([], bad_words=specjax.bad_words_array(words)))
    for b in range(SIZE):
        case.rules["bad_words"] = words[b]
        np.testing.assert_array_equal(own[b], np.float32(case.expect(["bad_words"]))[b])


@pytest.mark.once
def test_a_bad_word_may_begin_before_the_drafts_and_before_the_row_it_ends_in():
    history = History(jnp.array([[1, 2, 0]]), jnp.array([2]))
    logits = jnp.zeros((1, 4, 6))
    # The last begins before the text does.
    words = [[1, 2, 3, 4, 5], [2, 3, 0], [9, 1], [1, 2, 3, 4, 5, 1], [1, 1, 2, 2]]
    words = specjax.bad_words_array(words)
    found = process_rules(
        logits, bad_words=words, history=history, drafted_token_ids=jnp.array([[3, 4, 5]])
    )
    forbidden = [(int(row), int(token)) for _, row, token in np.argwhere(np.isinf(found))]
    assert forbidden == [(1, 0), (2, 5), (3, 1)]
    for i in range(4):
        step = process_rules(
            logits[:, i],
            bad_words=words,
            history=history,
            drafted_token_ids=jnp.array([[3, 4, 5]]),
            first_row=i,
        )
        np.testing.assert_array_equal(step, found[:, i])


@pytest.mark.once
@pytest.mark.parametrize("dtype", MIN_RESIDUAL_MASS)
def test_a_request_with_rules_off_keeps_its_bits(dtype):
    case = Case(129, dtype=dtype)
    logits = np.asarray(case.logits).copy()
    logits[0, 0, :4] = [-0.0, 0.0, -np.inf, 1e-3]
    case.logits = jnp.asarray(logits)
    off = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    rules = {name: np.array([value, 1.7, value], np.float32) for name, value in off.items()}
    rules |= {"bias": np.zeros(129, np.float32), "allowed": np.ones(129, bool)}
    found = np.asarray(case.run([], bad_words=np.full((2, 3), -1), **rules))
    unsigned = {2: np.uint16, 4: np.uint32}[found.dtype.itemsize]
    same = found.view(unsigned) == logits.view(unsigned)
    # Adding a bias of 0 makes -0 of a CPU's choosing; the value is the same.
    same |= (found == 0) & (logits == 0)
    assert same[[0, 2]].all()
    assert not same[1].all()


@pytest.mark.once
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_invalid_penalty_makes_its_request_invalid_and_no_other(name, value):
    case = Case(5)
    usual = case.run(RULES)
    penalty = case.rules[name].copy()
    penalty[1] = value
    found = np.asarray(case.run(RULES, **{name: penalty}))
    assert np.isnan(found[1]).any(-1).all()
    np.testing.assert_array_equal(found[[0, 2]], np.asarray(usual)[[0, 2]])


@pytest.mark.once
@pytest.mark.parametrize("value", [0.0, -1.5])
def test_a_repetition_penalty_of_zero_or_less_is_invalid(value):
    case = Case(5)
    assert np.isnan(case.run([], repetition_penalty=value)).all()


@pytest.mark.once
def test_a_row_of_a_draft_step_is_that_row_of_a_verification():
    """`first_row`: step i reads the tokens drafted before it and no later ones."""
    case = Case(5)
    rules = case.rules | {"bad_words": specjax.bad_words_array(case.words)}
    whole = case.run(RULES)
    for i in range(K):
        row = process_rules(
            case.logits[:, i],
            **rules,
            history=case.history(),
            drafted_token_ids=case.drafted,
            first_row=i,
        )
        np.testing.assert_array_equal(row, whole[:, i])


@pytest.mark.once
def test_counts_grow_by_what_is_emitted():
    case = Case(7)
    rng = np.random.default_rng(3)
    emitted, num = rng.integers(-1, 9, (SIZE, 4)).astype(np.int32), np.array([4, 0, 2], np.int32)
    grown = specjax.update_counts(case.history().counts, emitted, num)
    for b in range(SIZE):
        text = case.generated[b] + emitted[b, : num[b]].tolist()
        want = [text.count(v) for v in range(7)]
        np.testing.assert_array_equal(grown.generated[b], want)
        np.testing.assert_array_equal(grown.prompt[b], [v in case.prompts[b] for v in range(7)])


def test_values_never_recompile():
    Case(5).run(RULES)
    compiled = apply_rules._cache_size()
    Case(5, seed=4).run(RULES)
    assert apply_rules._cache_size() == compiled


def buffers_of(function, *arguments, size):
    """Dtypes of the arrays of `size` elements that a compiled program writes to memory."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    # Instructions of the entry alone: those inside a fusion write nothing.
    entry = text[text.index("ENTRY") :].splitlines()[1:]
    made = [re.search(r" = (\w+)\[([\d,]+)\]", line) for line in entry if "parameter(" not in line]
    return {m[1] for m in made if m and np.prod([int(d) for d in m[2].split(",")]) >= size}


def test_bfloat16_logits_are_processed_without_a_copy_in_float32():
    case = Case(640, dtype="bfloat16")
    history, rules = case.history(), case.rules | {"bad_words": np.array([[3, 4]], np.int32)}

    def run(logits, rules, history):
        return process_rules(logits, **rules, history=history, drafted_token_ids=case.drafted)

    def copying(logits):
        return jnp.cumsum(logits.astype(jnp.float32), axis=1)

    size = case.logits.size
    assert buffers_of(run, case.logits, rules, history, size=size) <= {"bf16", "u16"}
    assert "f32" in buffers_of(copying, case.logits, size=size)


def test_a_rule_that_is_not_given_is_not_in_the_program():
    case = Case(5)
    text = str(jax.make_jaxpr(lambda x: process_rules(x, bias=np.ones(5)))(case.logits))
    for absent in ("select_n", "scatter", "gather", "is_finite", "eq", "div"):
        assert absent not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": np.zeros(4)}, r"bias has shape \(4,\)"),
        ({"bias": {1: 2.0}}, "specjax.bias_array"),
        ({"allowed": np.ones((3, 1), np.int64)}, "int32 or uint32"),
        ({"allowed": np.ones((3, 2), np.uint32)}, r"allowed has shape \(3, 2\)"),
        ({"allowed": np.ones((3, 9, 5), bool)}, r"\[3, 4, V\]"),
        ({"bad_words": [[1], [2, 3]]}, "specjax.bad_words_array"),
        ({"bad_words": np.array([1, 2])}, r"\[N, M\] or \[3, N, M\]"),
        ({"repetition_penalty": np.ones(2)}, "repetition_penalty has shape"),
        ({"presence_penalty": 1.0, "history": None}, "history.counts"),
        ({"bad_words": np.ones((1, 2), np.int32), "history": None}, "history no token_ids"),
        ({"presence_penalty": 1.0, "drafted_token_ids": None}, "drafted_token_ids is None"),
        ({"drafted_token_ids": np.zeros((3, 2), np.int32)}, "D >= 3"),
        ({"presence_penalty": 1.0, "drafted_token_ids": None, "first_row": 1}, "past the first"),
        ({"logits": np.zeros((3, 4, 5), np.int32)}, "logits are bfloat16"),
        ({"logits": np.zeros(5, np.float32)}, r"needs \[B, R, V\]"),
        ({"allowed": np.ones(5, np.int32)}, "words of 32 tokens are 1 wide"),
        ({"presence_penalty": 1.0, "history": np.ones((3, 5))}, "specjax.History"),
        (
            {"presence_penalty": 1.0, "history": History(counts=np.ones((3, 5)))},
            "history.counts is ndarray",
        ),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence(change, words):
    case = Case(5)
    usual = {"logits": case.logits, "history": case.history(), "drafted_token_ids": case.drafted}
    arguments = usual | change
    with pytest.raises(ValueError, match=words):
        process_rules(arguments.pop("logits"), **arguments)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_penalty_that_reads_the_prompt_needs_it_and_is_named(name, monkeypatch):
    for each in NUMBERS:
        monkeypatch.setitem(FIELDS, each, FIELDS[each]._replace(reads_prompt=each == name))
    counts = specjax.TokenCounts(jnp.zeros((1, 2), jnp.int32))
    penalties = dict.fromkeys(NUMBERS, 2.0)
    with pytest.raises(ValueError, match=f"^{name} is given .*prompt is None"):
        process_rules(jnp.zeros((1, 2)), **penalties, history=History(counts=counts))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: specjax.bias_array({7: 1.0}, 5), "token 7"),
        (lambda: specjax.bias_array({"a": 1.0}, 5), "token 'a'"),
        (lambda: specjax.bias_array({1.5: 1.0}, 5), "token 1.5"),
        (lambda: specjax.bad_words_array([[1], []]), "empty sequence"),
        (lambda: specjax.bad_words_array([[1, -1]]), "negative id"),
        (lambda: specjax.bad_words_array([1, 2]), "single token"),
        (lambda: specjax.bad_words_array([["a"]]), "no integer"),
        (lambda: specjax.update_counts(np.zeros((1, 5)), [[1]], [1]), "specjax.TokenCounts"),
        (lambda: specjax.update_counts(specjax.count_tokens([[1]], [1], 5), [1], [1]), r"\[1, n\]"),
        (lambda: specjax.apply_sampling(np.zeros((1, 5)), {"top_k": 1}), "specjax.SamplingParams"),
    ],
)
def test_helpers_refuse_in_a_sentence(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_words_may_be_arrays(make):
    words = [make([5]), make([7, 2])]
    assert specjax.bad_words_array(words).tolist() == [[5, -1], [7, 2]]
    assert specjax.bad_words_array([words, []]).tolist() == [[[5, -1], [7, 2]], [[-1, -1]] * 2]
    assert specjax.bias_array({np.int64(1): 2.0}, 2).tolist() == [0.0, 2.0]


def test_no_words_and_no_requests_change_nothing():
    case = Case(5)
    none = specjax.bad_words_array([])
    np.testing.assert_array_equal(case.run([], bad_words=none), case.logits)
    counts = specjax.count_tokens(np.zeros((0, 3), np.int32), np.zeros(0, np.int32), 5)
    empty = process_rules(
        jnp.zeros((0, 5)), presence_penalty=1.0, bad_words=[[1]], history=History(counts=counts)
    )
    assert empty.shape == (0, 5)


@pytest.mark.parametrize("jit", [False, True])
def test_a_batch_on_a_mesh_of_explicit_axes_gives_the_same(jit):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(4, 3, 40)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 40, (4, 6)), jnp.int32)
    rules = {
        "bias": jnp.asarray(rng.normal(size=40), jnp.float32),
        "repetition_penalty": jnp.float32(1.3),
        "frequency_penalty": jnp.array([0.1, 0.2, 0.0, 0.3]),
        "allowed": jnp.asarray(rng.random((4, 40)) < 0.7),
        "bad_words": jnp.array([[3, 4], [5, -1]]),
    }
    batch = (logits, ids, jnp.array([3, 6, 1, 2]), ids[:, :2], rules)

    @jax.jit
    def count(ids, lengths, drafted):
        return specjax.update_counts(specjax.count_tokens(ids, lengths, 40), drafted, lengths)

    def run(logits, ids, lengths, drafted, rules):
        history = History(ids, lengths, count(ids, lengths, drafted))
        x = process_rules(logits, **rules, history=history, drafted_token_ids=drafted)
        return x, specjax.top_logprobs(x, ids[:, :3], 2)

    want = jax.jit(run)(*batch)
    mesh = jax.make_mesh((2,), ("batch",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec("batch"))

        def move(x):
            return jax.device_put(x, split) if x.ndim and x.shape[0] == 4 else x

        found = (jax.jit(run) if jit else run)(*jax.tree.map(move, batch))
    assert found[0].sharding.spec[0] == "batch"
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(want), atol=1e-6)


def test_parameters_travel_through_an_export():
    params = SamplingParams(repetition_penalty=jnp.ones(SIZE), bias=jnp.zeros(5))
    history = Case(5).history()._replace(token_ids=None, lengths=None)

    def run(logits, params, history):
        return process_rules(
            logits,
            bias=params.bias,
            repetition_penalty=params.repetition_penalty,
            history=history,
        )

    logits = jnp.ones((SIZE, 5))
    exported = jax.export.export(jax.jit(run))(logits, params, history)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(logits, params, history), logits)
