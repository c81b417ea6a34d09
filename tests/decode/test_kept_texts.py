"""Kept sets of generated tokens are those of plain decoding's rows, by every exact rule."""

import functools

import automata
import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import processed
import pytest

import specjax
from specjax import SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.once

V, NEW = automata.V, 9
# Multiples of 1/2: logits tie with one another, and with cutoffs.
TARGET, DRAFT = (np.round(2 * table) / 2 for table in bigrams.pair(V, seed=4))
PROMPTS = [[1, 2, 3], [3], [0, 1], [2, 2, 2, 0, 1]]
STATES = np.array([0, -1, 2, 3], np.int32)
TEMPERATURE = np.array([0.9, 1.1, 0.0, 1.4], np.float32)
FILTERS = {"top_k": [3, 2, 0, 4], "top_p": [0.83, 1.0, 0.6, 0.971], "min_p": [0.02, 0.0, 0.3, 0.0]}
PENALTIES = {
    "repetition_penalty": [1.3, 1.0, 0.8, 1.6],
    "frequency_penalty": [0.2, 0.0, -0.1, 0.5],
    "presence_penalty": [0.0, 0.0, 0.4, -0.3],
}
BIAS = np.random.default_rng(5).normal(size=(4, V)).astype(np.float32) * [[1], [0], [1], [0.5]]
ALLOWED = np.ones((4, V), bool)
ALLOWED[[1, 3], [4, 3]] = False
NUMBERS = {name: np.array(value) for name, value in (FILTERS | PENALTIES).items()}
EACH = SamplingParams(
    **NUMBERS,
    bias=BIAS,
    allowed=processed.pack(ALLOWED),
    grammar=specjax.Grammar(*automata.tables()),
    grammar_state=STATES,
)
DRAFTERS = {
    "model": specjax.model_drafter(bigrams.model(DRAFT)),
    "ngram": specjax.ngram_drafter(),
    "none": None,
}


def run(rule="standard", drafter="model", sampling=EACH, max_kept=4, **options):
    return specjax.generate(
        bigrams.model(TARGET),
        DRAFTERS[drafter],
        PROMPTS,
        keys=bigrams.keys(4),
        config=SpeculativeConfig(num_speculative_tokens=3, rejection_sample_method=rule),
        max_new_tokens=NEW,
        temperature=TEMPERATURE,
        sampling=sampling,
        options=specjax.LoopOptions(max_kept_tokens=max_kept, **options),
    )


def set_after(b, generated):
    """The tokens that may follow what request b generated, in float64 from the definitions."""
    past = [0, *PROMPTS[b], *generated]
    rules = {name: values[b] for name, values in PENALTIES.items()}
    allowed = ALLOWED[b] & automata.allowed_after(STATES[b], generated)
    raw = np.float32(TARGET[past[-2], past[-1]])
    row = processed.process(raw, PROMPTS[b], generated, bias=BIAS[b], allowed=allowed, **rules)
    if not TEMPERATURE[b]:
        return [int(np.argmax(row))]
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    filters = {name: FILTERS[name][b] for name in off if FILTERS[name][b] != off[name]}
    return np.flatnonzero(processed.truncate(row, TEMPERATURE[b], **filters)).tolist()


def sets_of(output):
    """For each request the kept set of each generated token; the rest of the buffers is empty."""
    kept = jax.tree.map(np.asarray, output.kept_tokens)
    found = []
    for b, (start, end) in enumerate(zip(map(len, PROMPTS), output.lengths.tolist(), strict=True)):
        is_generated = (np.arange(kept.num_kept.shape[1]) >= start) & (
            np.arange(kept.num_kept.shape[1]) < end
        )
        assert ((kept.num_kept[b] > 0) == is_generated).all()
        assert (kept.token_ids[b][~is_generated] == -1).all()
        found.append([[v for v in row if v >= 0] for row in kept.token_ids[b, start:end].tolist()])
        assert kept.num_kept[b, start:end].tolist() == list(map(len, found[-1]))
    return found


@functools.cache
def found_by(rule, drafter):
    output = run(rule, drafter)
    return output, sets_of(output)


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [("standard", "model"), ("block", "model"), ("coupled", "model"), ("standard", "none")],
)
def test_each_set_is_that_of_the_row_after_the_text_before_it(rule, drafter):
    """Ties, penalties, a bias, masks, a grammar, filters and a greedy request, all together."""
    output, found = found_by(rule, drafter)
    for b, sets in enumerate(found):
        text = output.token_ids[b, len(PROMPTS[b]) : output.lengths[b]].tolist()
        assert sets == [set_after(b, text[:i]) for i in range(len(text))]
        assert all(token in kept for token, kept in zip(text, sets, strict=True))
    if drafter == "model":
        assert output.metrics.num_accepted.sum() > 0


def test_coupled_texts_have_the_sets_of_plain_decoding():
    coupled, plain = (found_by(*of)[0] for of in (("coupled", "model"), ("standard", "none")))
    np.testing.assert_array_equal(coupled.token_ids, plain.token_ids)
    jax.tree.map(np.testing.assert_array_equal, coupled.kept_tokens, plain.kept_tokens)


def test_without_a_cut_a_set_is_the_vocabulary_and_lists_no_ids():
    output = run("standard", "ngram", sampling=None, max_kept=1)
    start, num_kept = len(PROMPTS[0]), np.asarray(output.kept_tokens.num_kept)
    assert (num_kept[0, start : output.lengths[0]] == V).all()
    assert (output.kept_tokens.token_ids[0] == -1).all()
    greedy = slice(len(PROMPTS[2]), int(output.lengths[2]))
    assert (num_kept[2, greedy] == 1).all()
    ids = output.kept_tokens.token_ids[2, greedy, 0]
    np.testing.assert_array_equal(ids, output.token_ids[2, greedy])


def test_log_probabilities_over_the_sets_are_those_that_generate_reports():
    """The ratio of a trainer whose parameters are those of the rollout is 1."""
    filters = SamplingParams(**{name: np.array(value) for name, value in FILTERS.items()})
    output = run("block", "model", sampling=filters)
    ids = np.asarray(output.token_ids)
    past = np.concatenate([np.zeros((4, 1), int), ids], axis=1)
    rows = jnp.asarray(TARGET, jnp.float32)[past[:, :-2], past[:, 1:-1]]
    kept = jax.tree.map(lambda x: x[:, 1:], output.kept_tokens)
    is_generated = np.asarray(kept.num_kept) > 0
    drawn = np.where(is_generated, ids[:, 1:], -1)
    found = specjax.kept_logprobs(rows, drawn, kept, temperature=TEMPERATURE)
    sampled = np.arange(4) != 2  # Greedy tokens are reported at temperature 1, over all tokens.
    np.testing.assert_allclose(found[sampled], output.logprobs[sampled, 1:], atol=1e-5)
    assert not np.asarray(found)[2].any()


def test_a_set_that_does_not_fit_is_refused_with_its_size():
    with pytest.raises(ValueError, match="is 1, and a token was drawn from 3 kept ones; it needs"):
        run("standard", "none", max_kept=1)
    with pytest.raises(ValueError, match=r"max_kept_tokens is 6 for a vocabulary of 5"):
        run("standard", "none", max_kept=6)
    with pytest.raises(ValueError, match=r"max_kept_tokens is 0; it needs a Python int >= 1"):
        run("standard", "none", max_kept=0)


LOSSY = SpeculativeConfig(3, rule=specjax.rules.lenience(0.5))
SYNTHETIC = SpeculativeConfig(3, rejection_sample_method="synthetic", synthetic_acceptance_rate=0.5)


@pytest.mark.parametrize(("config", "name"), [(LOSSY, "a rule"), (SYNTHETIC, "'synthetic'")])
def test_rules_that_are_not_exact_refuse_kept_sets(config, name):
    call = dict(keys=bigrams.keys(1), max_new_tokens=3)
    options = specjax.LoopOptions(max_length=8, max_kept_tokens=2)
    models = bigrams.model(TARGET), DRAFTERS["ngram"]
    with pytest.raises(ValueError, match=rf"max_kept_tokens is 2, and config has .*{name}; what"):
        specjax.generate(*models, [[1]], config=config, options=options, **call)
    with pytest.raises(ValueError, match="does not follow the target's row"):
        specjax.Engine(*models, num_slots=1, config=config, options=options)
    if config.rule is not None:
        state = specjax.init(*models, [[1]], config=SpeculativeConfig(3), options=options, **call)
        with pytest.raises(ValueError, match="does not follow the target's row"):
            specjax.step(*models, state, config=config)
