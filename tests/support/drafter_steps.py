"""A drafter that reads taps, driven as the decode loop drives it, over texts of any tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax

NUM_REQUESTS, SLOTS = 3, 32
# How many tokens each request commits in a step of 3 drafts: from none at all to all and one more.
STEPS = ([1, 4, 2], [4, 1, 3], [0, 2, 1], None)


def drafted_steps(drafter, *, vocab_size, width, num_drafted=3, seed=5):
    """Yields text, features of all its tokens but the last, drafted tokens and their logits.

    A ragged batch, whose prompts are read in chunks. After each step the text goes on by tokens
    that were not drafted. What stands in a chunk after its tokens is NaN.

    width: of the features.
    """
    rng, size = np.random.default_rng(seed), NUM_REQUESTS
    config = specjax.SpeculativeConfig(num_speculative_tokens=num_drafted)
    propose = functools.partial(drafter.propose, config=config, implementation=None)
    extend, propose = jax.jit(drafter.extend), jax.jit(propose)
    text = rng.integers(0, vocab_size, (size, SLOTS)).astype(np.int32)
    features = rng.normal(size=(size, SLOTS, width)).astype(np.float32)

    def read(state, first, counts, num_columns):
        """Gives the drafter tokens of the text from `first` on."""
        place = np.arange(num_columns)[None]
        index, inside = first[:, None] + place, place < counts[:, None]
        ids = np.take_along_axis(text, index, axis=1)
        given = np.take_along_axis(features, index[..., None], axis=1)
        given = np.where(inside[..., None], given, np.nan)
        return extend(drafter.params, state, ids, np.where(inside, index, -1), given)

    state, lengths = drafter.init(drafter.params, size, SLOTS), np.array([7, 3, 2])
    state = read(state, np.zeros(size, int), np.minimum(lengths - 1, 4), 4)
    state = read(state, np.full(size, 4), np.clip(lengths - 5, 0, None), 4)
    for committed in STEPS:
        inputs = specjax.DraftInputs(
            keys=jax.random.split(jax.random.key(int(lengths.sum())), size),
            positions=jnp.asarray(lengths, jnp.int32),
            num_tokens=jnp.full((size,), num_drafted, jnp.int32),
            temperature=jnp.ones((size,)),
        )
        draft, state = propose(drafter.params, state, text, jnp.zeros((size, 1)), inputs)
        for b, length in enumerate(lengths):
            read_features = features[b, : length - 1]
            yield text[b, :length], read_features, np.asarray(draft.token_ids[b]), draft.logits[b]
        if committed is not None:
            state = read(state, lengths - 1, np.array(committed), num_drafted + 1)
            lengths = lengths + committed


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Acceptance:
    """How many drafts were accepted at each position of a step, and how many sum min(p, q) expects.

    num_drafted: K.
    """

    def __init__(self, num_drafted):
        self.num_accepted, self.expected, self.variance = np.zeros((3, num_drafted))

    def add(self, p, q, num_accepted):
        """One request's step: p and q [n, V] of its drafted tokens, each given those before.

        What follows the first rejection is not read.
        """
        judged = slice(min(num_accepted + 1, len(p)))
        overlap = np.minimum(p, q).sum(-1)[judged]
        self.num_accepted[:num_accepted] += 1
        self.expected[judged] += overlap
        self.variance[judged] += overlap * (1 - overlap)

    def check(self, at_least):
        """Fails if a position is more than four standard errors off, or if too few are accepted."""
        assert self.num_accepted.sum() > at_least, self.num_accepted
        off = np.append(self.num_accepted, self.num_accepted.sum())
        off -= np.append(self.expected, self.expected.sum())
        deviation = np.append(self.variance, self.variance.sum()) ** 0.5
        # Nothing was judged where no draft came so far.
        z = np.divide(off, deviation, out=np.zeros_like(off), where=deviation > 0)
        assert (abs(z) < 4).all(), f"off by {z} standard errors, the last of all positions"


def generated_steps(target, drafter, prompts, lengths, *, temperature, num_drafted, max_new_tokens):
    """Yields a request's text, the length before a step of `generate`, and its accepted drafts.

    And how many drafts the step could judge: those that have room.
    """
    output = specjax.generate(
        target,
        drafter,
        (prompts, lengths),
        keys=jax.random.key(3),
        config=specjax.SpeculativeConfig(num_speculative_tokens=num_drafted),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )
    for ids, origins, prompt, end in zip(
        *map(np.asarray, (output.token_ids, output.origins, lengths, output.lengths)), strict=True
    ):
        # The token after the prompt ends no step, but one begins after it.
        begin = prompt + 1
        while (num_judged := min(num_drafted, end - begin - 1)) > 0:
            is_draft = origins[begin : begin + num_judged] == specjax.Origin.ACCEPTED
            num_accepted = int(np.cumprod(is_draft).sum())
            yield ids[:end], int(begin), num_accepted, int(num_judged)
            begin += num_accepted + 1


def accepted_steps(target, drafter, prompts, lengths, *, temperature, num_drafted, num_steps):
    """Yields a request's text with its drafts, its length, draft logits, and how many it accepted.

    Steps of the decode loop, each request's apart.
    """
    config = specjax.SpeculativeConfig(num_speculative_tokens=num_drafted)
    options = {"keys": jax.random.key(2), "config": config, "max_new_tokens": 20}
    options |= {"temperature": temperature, "options": specjax.LoopOptions(prefill_chunk_size=3)}
    state = specjax.init(target, drafter, (prompts, lengths), **options)
    for _ in range(num_steps):
        lengths, pending = np.asarray(state.lengths), jax.device_get(state.draft)
        text = np.maximum(np.asarray(state.token_ids), 0)
        state, info = specjax.step(target, drafter, state, config=config)
        for b, length in enumerate(lengths):
            text[b, length : length + num_drafted] = pending.token_ids[b]
            accepted = int(info.verification.num_accepted[b])
            yield text[b], int(length), pending.logits[b], accepted


def check_greedy_texts(whole_forward, target, output, lengths):
    """Asserts that each written token is the likeliest of the target's logits after those before.

    whole_forward: of the target and a text, all of one length; what follows a token is not seen.
    """
    for row, length, end in zip(output.token_ids, lengths, output.lengths.tolist(), strict=True):
        text, written = np.maximum(row, 0), np.arange(length, end)
        logits = np.asarray(whole_forward(target, text)[0])
        np.testing.assert_array_equal(logits[written - 1].argmax(-1), text[written])
    assert (output.lengths > np.array(lengths)).all()
