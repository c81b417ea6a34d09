"""The conversions of docs/from_vllm.md emit by the probabilities of vLLM's rule, enumerated."""

import collections

import jax
import numpy as np
import pages
import pytest
from scipy import stats

pytestmark = [pytest.mark.lenient, pytest.mark.once]

V, K, COPIES = 5, 2, 4000
COUNTS = (2, 0, 1)
TEMPERATURES = (0.8, 1.0, 1.3)


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines."""
    return pages.define("from_vllm.md")


def enumerate_outputs(p, q, drafted):
    """Probability of every output of a request: vLLM's rule, of rows p and q; q None is one-hot."""
    outputs, reached = collections.defaultdict(float), 1.0
    for i, x in enumerate(drafted):
        one_hot = np.eye(V)[x]
        spent = one_hot if q is None else q[i]
        accepted = min(1.0, p[i][x] / spent[x])
        residual = p[i] * (1 - one_hot) if q is None else np.maximum(p[i] - spent, 0)
        if accepted < 1:
            for token, share in enumerate(residual / residual.sum()):
                outputs[*drafted[:i], token] += reached * (1 - accepted) * share
        reached *= accepted
    for token, share in enumerate(p[len(drafted)]):
        outputs[*drafted, token] += reached * share
    return {output: share for output, share in outputs.items() if share > 0}


def check_outputs(token_ids, expected):
    """A chi-square test of the outputs of one request under many keys."""
    emitted = collections.Counter(tuple(row[row >= 0].tolist()) for row in token_ids)
    assert set(emitted) <= set(expected)
    frequent = [output for output, share in expected.items() if share * COPIES > 5]
    counted = np.array([emitted[output] for output in frequent])
    shares = np.array([expected[output] for output in frequent])
    counted, shares = (
        np.append(counted, COPIES - counted.sum()),
        np.append(shares, 1 - shares.sum()),
    )
    keep = shares * COPIES > 5
    if keep.sum() > 1:
        shares = shares[keep] / shares[keep].sum()
        assert stats.chisquare(counted[keep], shares * counted[keep].sum()).pvalue > 1e-4


@pytest.mark.parametrize("form", ["v1", "v1 without draft_probs", "v2"])
def test_outputs_have_the_probabilities_of_vllms_rule(page, form):
    rng = np.random.default_rng(1)
    size, num_drafts = len(COUNTS), sum(COUNTS)
    ends = np.cumsum(np.array(COUNTS) + 1)
    logits = rng.normal(size=(num_drafts + size, V)).astype(np.float32)
    draft_logits = rng.normal(size=(size, K, V)).astype(np.float32)
    drafted = [[3, 1], [], [0]]
    scaled = draft_logits / np.array(TEMPERATURES, np.float32)[:, None, None]
    q = np.asarray(jax.nn.softmax(scaled))
    flat_q = np.concatenate([q[b, :n] for b, n in enumerate(COUNTS)])
    tokens, many = np.concatenate(drafted).astype(np.int32), np.tile(np.array(COUNTS), COPIES)
    seeds, temperature = np.arange(COPIES * size), np.tile(np.float32(TEMPERATURES), COPIES)
    if form == "v2":
        inputs = np.concatenate([[4, *row] for row in drafted]).astype(np.int32)
        slots = rng.permutation(len(many))
        held = np.argsort(slots)  # the request of each slot
        step = page["verify_v2"](
            np.tile(logits, (COPIES, 1)),
            np.tile(draft_logits, (COPIES, 1, 1))[held],
            np.tile(inputs, COPIES),
            np.concatenate([[0], np.cumsum(many + 1)]),
            np.concatenate([np.arange(n + 1) for n in many]),
            slots,
            temperature[held],
            seeds,
            K,
        )
    else:
        step = page["verify_v1"](
            np.tile(tokens, COPIES),
            many.tolist(),
            np.cumsum(many),
            np.tile(flat_q, (COPIES, 1)) if form == "v1" else None,
            np.tile(logits, (COPIES, 1)),
            temperature,
            seeds,
            np.zeros(len(many), np.int32),
            K,
        )
    outputs = np.asarray(step.token_ids).reshape(COPIES, size, -1)
    for b, end in enumerate(ends):
        rows = logits[end - COUNTS[b] - 1 : end].astype(np.float64) / TEMPERATURES[b]
        p = np.exp(rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True))
        one_hot = form == "v1 without draft_probs"
        check_outputs(outputs[:, b], enumerate_outputs(p, None if one_hot else q[b], drafted[b]))
