"""Proposals of a draft that knows some of the target's tokens, in an order of its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams, SpeculativeConfig, Stream, rules
from specjax.decode.drafters import Drafter
from specjax.decode.propose import propose_step
from specjax.markov_chain import markov_chain

pytestmark = pytest.mark.once

SIZE, K, VOCAB, DRAFT_VOCAB = 6, 4, 300, 70
# Not in order; from every block of 128 tokens.
TOKEN_MAP = np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB].astype(np.int32)
TABLE = 2 * np.random.default_rng(1).normal(size=(VOCAB, VOCAB)).astype(np.float32)
# What the map stands for: the same logits by target ids.
SCATTERED = np.full_like(TABLE, -np.inf)
SCATTERED[:, TOKEN_MAP] = TABLE[:, TOKEN_MAP]
KEYS = jax.random.split(jax.random.key(2), SIZE)
LAST = np.arange(SIZE, dtype=np.int32)
LENGTHS = np.full(SIZE, 5, np.int32)


@functools.partial(jax.jit, static_argnames=("is_mapped", "draft", "verify"))
def propose(table, token_map, sampling, temperature, *, is_mapped, draft, verify, history=None):
    def step_fn(fed, token_ids, positions):
        return table[token_ids], jnp.concatenate([fed[:, 1:], token_ids[:, None]], axis=1)

    named = {"token_map": token_map, "vocab_size": VOCAB} if is_mapped else {}
    return specjax.propose(
        step_fn,
        jnp.zeros((SIZE, K), jnp.int32),
        jnp.asarray(LAST),
        specjax.DraftInputs(
            KEYS,
            jnp.asarray(LENGTHS),
            temperature=temperature,
            sampling=sampling,
            history=history,
        ),
        num_tokens=K,
        draft_sample_method=draft,
        rule=getattr(rules, verify)(),
        **named,
    )


def proposed(is_mapped, sampling, temperature, draft="probabilistic", verify="standard", **options):
    logits = jnp.asarray(TABLE[:, TOKEN_MAP] if is_mapped else SCATTERED)
    temperature = jnp.full((SIZE,), temperature, jnp.float32)
    named = dict(draft=draft, verify=verify, **options)
    token_map = jnp.asarray(TOKEN_MAP)
    return propose(logits, token_map, sampling, temperature, is_mapped=is_mapped, **named)


def mapped(sampling=None, temperature=1.0, **options):
    """The proposal of the mapped draft, and the tokens that were fed to it."""
    return proposed(True, sampling, temperature, **options)


def scattered(sampling=None, temperature=1.0, **options):
    """The draft of all the target's tokens that the map stands for."""
    return proposed(False, sampling, temperature, **options)[0]


def test_drafts_are_drawn_by_draft_ids_and_fed_back_as_target_ids():
    draft, fed = mapped()
    np.testing.assert_array_equal(draft.token_map, TOKEN_MAP)
    np.testing.assert_array_equal(fed, np.column_stack([LAST, draft.token_ids[:, :-1]]))
    for i in range(K):
        sample = specjax.gumbel_sample(
            jnp.asarray(TABLE[np.asarray(fed[:, i])][:, TOKEN_MAP]),
            keys=KEYS,
            positions=jnp.asarray(LENGTHS + i),
            stream=Stream.draft(i),
        )
        np.testing.assert_array_equal(draft.token_ids[:, i], TOKEN_MAP[sample.token_ids])
        np.testing.assert_allclose(draft.logprobs[:, i], sample.logprobs, atol=1e-5)


def test_coupled_drafts_take_the_noise_of_the_target_s_ids():
    """So they agree with the target's draws as often as a draft of all its tokens does."""
    draft, _ = mapped(verify="coupled")
    chex.assert_trees_all_equal(draft, scattered(verify="coupled"))
    apart, _ = mapped()
    assert np.mean(np.asarray(apart.token_ids) == np.asarray(draft.token_ids)) < 0.5


def test_greedy_drafts_are_the_argmax_by_target_ids():
    draft, _ = mapped(draft="greedy")
    chex.assert_trees_all_equal(draft, scattered(draft="greedy"))
    assert draft.token_map is None


def words(mask):
    """A mask in words of 32 tokens."""
    bits = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % 32)])
    packed = np.packbits(bits, axis=-1, bitorder="little")
    return jnp.asarray(packed.view(np.uint32))


def history_of(rng):
    ids = jnp.asarray(rng.choice(TOKEN_MAP, (SIZE, 8)).astype(np.int32))
    counts = specjax.count_tokens(ids, jnp.asarray(LENGTHS), VOCAB, prompt_lengths=LENGTHS - 2)
    return specjax.History(ids, jnp.asarray(LENGTHS), counts)


def samplings():
    """By name, parameters that a lost map would show in.

    All but two forms of a mask are values of one program: what is not named changes nothing.
    """
    rng = np.random.default_rng(3)
    allowed = rng.random((SIZE, VOCAB)) < 0.5
    best = np.argsort(SCATTERED, axis=1)[:, ::-1]
    # A word of one token, and words that end after tokens that are likely to be drafted.
    pairs = [[int(t), int(best[t][0])] for t in best[LAST, 0]]
    never = [1, 2, 2**20]
    bad = [[int(best[0][0])], *pairs, never]
    off = SamplingParams(
        top_k=np.int32(0),
        top_p=np.float32(1),
        min_p=np.float32(0),
        repetition_penalty=np.float32(1),
        frequency_penalty=np.float32(0),
        presence_penalty=np.float32(0),
        bias=np.zeros(VOCAB, np.float32),
        allowed=words(np.ones_like(allowed)),
        bad_words=specjax.bad_words_array([never] * len(bad)),
    )
    return {
        "bias": off._replace(bias=(6 * rng.normal(size=VOCAB)).astype(np.float32)),
        "mask": SamplingParams(allowed=jnp.asarray(allowed)),
        "packed": off._replace(allowed=words(allowed)),
        "shared": SamplingParams(allowed=words(allowed[0])),
        "penalties": off._replace(
            repetition_penalty=np.float32(1.8),
            frequency_penalty=np.float32(1),
            presence_penalty=np.float32(2.5),
        ),
        "bad words": off._replace(bad_words=specjax.bad_words_array(bad)),
        "cutoffs": off._replace(top_k=np.int32(9), top_p=np.float32(0.8), min_p=np.float32(0.01)),
    }


SAMPLINGS = samplings()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampling_parameters_go_through_the_map(name):
    """Argmax chains, so that both drafts follow one path, and draws with the target's noise."""
    sampling, history = SAMPLINGS[name], history_of(np.random.default_rng(4))
    wide = scattered(sampling, temperature=0.0, history=history)
    draft, _ = mapped(sampling, temperature=0.0, history=history)
    np.testing.assert_array_equal(draft.token_ids, wide.token_ids)
    np.testing.assert_array_equal(draft.logits, wide.logits[..., TOKEN_MAP])
    if name == "cutoffs":
        np.testing.assert_array_equal(draft.cutoff, wide.cutoff)
    bare, _ = mapped(temperature=0.0)
    is_changed = np.asarray(bare.logits) != np.asarray(draft.logits)
    assert is_changed.any() or name == "cutoffs"
    if name in ("mask", "shared"):
        # Forms of the packed mask, which draws with the target's noise below.
        return
    coupled = dict(verify="coupled", history=history)
    draft, _ = mapped(sampling, 0.8, **coupled)
    np.testing.assert_array_equal(draft.token_ids, scattered(sampling, 0.8, **coupled).token_ids)


def propose_from_table(params, state, token_ids, hidden, inputs, **options):
    table, token_map = params
    last = jnp.take_along_axis(token_ids, inputs.positions[:, None] - 1, axis=1)[:, 0]
    return propose_step(
        lambda carry, ids, at: (table[ids], carry),
        state,
        last,
        inputs,
        token_map=token_map,
        vocab_size=VOCAB,
        **options,
    )


def begin(params, batch_size, max_length):
    return ()


def read(params, state, *chunk):
    return state


@pytest.mark.parametrize("method", ["standard", "coupled"])
def test_a_decode_loop_carries_the_map(method):
    """Drafts are the target's own rows without the tokens outside the map."""
    table = TABLE.copy()
    table[:, TOKEN_MAP] += 6
    target = markov_chain(np.asarray(jax.nn.softmax(table)))
    params = (jnp.asarray(table[:, TOKEN_MAP]), jnp.asarray(TOKEN_MAP))
    drafter = Drafter(params, begin, read, propose_from_table)
    prompts = [[TOKEN_MAP[0]] * 2] * SIZE
    options = dict(keys=KEYS, max_new_tokens=24)
    config = SpeculativeConfig(num_speculative_tokens=3, rejection_sample_method=method)
    ours = specjax.generate(target, drafter, prompts, config=config, **options)
    # p is q but for the few percent that lie outside the map.
    assert ours.metrics.draft_acceptance_rate > 0.8
    assert np.all(np.asarray(ours.finish) == specjax.Finish.LENGTH)
    if method == "coupled":
        plain = specjax.generate(target, None, prompts, config=config, **options)
        np.testing.assert_array_equal(ours.token_ids, plain.token_ids)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"token_map": TOKEN_MAP}, "vocab_size is None"),
        ({"vocab_size": VOCAB}, "vocab_size is 300 without a token_map"),
        ({"token_map": TOKEN_MAP, "vocab_size": 100}, r"each of its entries .* \[0, 100\)"),
        ({"token_map": np.zeros(2, np.int32), "vocab_size": VOCAB}, "holds the id 0 2 times"),
        ({"token_map": TOKEN_MAP[None], "vocab_size": VOCAB}, r"it needs \[V_d\]"),
        ({"token_map": TOKEN_MAP[:9], "vocab_size": VOCAB}, r"logits has shape \(6, 70\)"),
    ],
)
def test_maps_that_do_not_fit_are_refused(options, sentence):
    logits = jnp.zeros((SIZE, DRAFT_VOCAB), jnp.float32)
    with pytest.raises(ValueError, match=sentence):
        specjax.propose(
            lambda carry, ids, at: (logits, carry),
            (),
            jnp.asarray(LAST),
            specjax.DraftInputs(KEYS, positions=0),
            num_tokens=1,
            **options,
        )


def test_an_id_below_0_that_only_a_device_knows_is_a_token_that_no_vocabulary_holds():
    """As -1 it would end the drafts because of what was drawn, which biases the output.

    A row that is no distribution draws -1, which stays and does end them.
    """

    @jax.jit
    def one(token_map, best):
        logits = jnp.stack([0 * best, best])[None]
        return specjax.propose(
            lambda carry, ids, at: (logits, carry),
            (),
            jnp.zeros(1, jnp.int32),
            specjax.DraftInputs(KEYS[:1], positions=0, temperature=0.0),
            num_tokens=1,
            token_map=token_map,
            vocab_size=VOCAB,
        )[0]

    token_map = jnp.array([3, -1], jnp.int32)
    assert one(token_map, jnp.float32(9)).token_ids.tolist() == [[2**31 - 1]]
    assert one(token_map, jnp.float32(jnp.nan)).token_ids.tolist() == [[-1]]
