"""What the samplers promise: NumPy, float64, the paper's order; imports nothing that it judges.

Logarithms appear only where the contract draws or compares in them. Every decision is
also taken at both ends of an interval around the exact probabilities, so that a test can
tell a wrong token from a coin that landed on its edge (`certain`).
"""

from typing import NamedTuple

import numpy as np

BLOCK = 128
GREEDY_BELOW = 1e-5
TARGET = 0
SLACK = 2e-5


def accept_stream(index):
    return 2 * index + 1


def draft_stream(index):
    return 2 * index + 2


# Noise by address.


def threefry2x32(k0, k1, x0, x1):
    """Salmon et al., 2011, Threefry-2x32 with 20 rounds, on uint32 arrays."""
    k0, k1, x0, x1 = (np.asarray(a).astype(np.uint32) for a in (k0, k1, x0, x1))
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    with np.errstate(over="ignore"):
        x0, x1 = x0 + keys[0], x1 + keys[1]
        for group in range(5):
            for r in rotations[group % 2]:
                x0 = x0 + x1
                x1 = (x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))
                x1 = x1 ^ x0
            x0 = x0 + keys[(group + 1) % 3]
            x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def fold_in(key, data):
    """`key` is uint32[..., 2]; `data` any integer, taken modulo 2**32."""
    data = (np.asarray(data).astype(np.int64) % 2**32).astype(np.uint32)
    key = np.asarray(key, np.uint32)
    return np.stack(threefry2x32(key[..., 0], key[..., 1], np.uint32(0), data), axis=-1)


def address(key, position, stream):
    return fold_in(fold_in(key, position), stream)


def words(key, index, noise=np.float32):
    """The partitionable `jax.random.bits(key, shape)[index]`, of 32 or of 64 bits."""
    index = np.asarray(index)
    key = np.asarray(key, np.uint32)
    high, low = threefry2x32(key[..., 0], key[..., 1], np.uint32(0), index.astype(np.uint32))
    if np.dtype(noise) == np.float32:
        return high ^ low
    return (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)


def uniform(word):
    """In (0, 1), as the contract rounds it, returned in float64."""
    word = np.asarray(word)
    if word.dtype == np.uint32:
        scaled = (word.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
        return np.minimum(scaled, np.float32(1 - 2.0**-24)).astype(np.float64)
    scaled = ((word >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.minimum(scaled, 1 - 2.0**-53)


def gumbel(address, level, index, noise=np.float32):
    return -np.log(-np.log1p(-uniform(words(fold_in(address, level), index, noise))))


def coin(address, noise=np.float32):
    return uniform(words(address, 0, noise))


# Exact distributions of one row.


def logsumexp(w):
    top = np.max(w, initial=-np.inf)
    if not np.isfinite(top):
        return top
    return top + np.log(np.sum(np.exp(w - top)))


def kept(logits, cutoff=None):
    """Raw logits in float64, -inf below the cutoff."""
    logits = np.asarray(logits).astype(np.float64)
    if cutoff is None or np.isnan(cutoff):
        return logits
    return np.where(logits < np.float64(cutoff), -np.inf, logits)


def log_softmax(logits, temperature=1.0, cutoff=None):
    """Log-probabilities of a row, or None where it holds a NaN, a +inf, or keeps nothing."""
    w = kept(logits, cutoff) / (temperature if temperature >= GREEDY_BELOW else 1.0)
    top = np.max(w)
    return w - top - np.log(np.sum(np.exp(w - top))) if np.isfinite(top) else None


def target_probs(logits, temperature=1.0, cutoff=None):
    """p of a row: softmax, or all its mass on the first argmax of a greedy request."""
    logp = log_softmax(logits, temperature, cutoff)
    if logp is None:
        return None
    if temperature < GREEDY_BELOW:
        return np.eye(len(logp))[np.argmax(logp)]
    return np.exp(logp)


def draft_probs(logits, temperature, cutoff, vocab_size):
    """q over the target's vocabulary: mass past it counts but is not there; None is one-hot."""
    if logits is None or temperature < GREEDY_BELOW:
        return None
    logq = log_softmax(logits, temperature, cutoff)
    if logq is None:
        return None
    q = np.zeros(vocab_size)
    shared = min(vocab_size, len(logq))
    q[:shared] = np.exp(logq[:shared])
    return q


def acceptance(p, q, ratio=1.0):
    """min(1, p / q) for each token; tokens that the draft cannot draw are not accepted."""
    return np.where(q > 0, np.minimum(1.0, ratio * p / np.where(q > 0, q, 1.0)), 0.0)


def residual(p, q):
    """norm(max(p - q, 0)), or p where nothing is left."""
    left = np.maximum(p - q, 0.0)
    return left / left.sum() if left.sum() > 0 else p


def output_distribution(target, draft, num_tokens, *, token_ids=None, ratio=1.0, rates=None):
    """Exact distribution of the tokens one step emits, as `{tuple of tokens: probability}`.

    `target` and `draft` map a prefix (a tuple of tokens) to a row of probabilities; `draft`
    None is one-hot and needs `token_ids`, the drafts held fixed. `ratio` inflates p / q, a
    fault for tests to see; `rates` are conditional synthetic rates.
    """
    distribution = {}

    def emit(prefix, mass, p):
        for x in np.flatnonzero(p):
            key = (*prefix, int(x))
            distribution[key] = distribution.get(key, 0.0) + mass * p[x]

    def descend(prefix, mass):
        i = len(prefix)
        p = target(prefix)
        if i == num_tokens:
            emit(prefix, mass, p)
            return
        proposal = np.eye(len(p))[token_ids[i]] if token_ids is not None else draft(prefix)
        q = draft(prefix) if draft is not None else proposal
        accept = acceptance(p, q, ratio) if rates is None else np.full(len(p), float(rates[i]))
        rejected = np.sum(proposal * (1 - accept))
        if rejected > 0:
            emit(prefix, mass * rejected, residual(p, q))
        for x in np.flatnonzero(proposal * accept):
            descend((*prefix, int(x)), mass * proposal[x] * accept[x])

    descend((), 1.0)
    return distribution


def steps_distribution(target, draft, num_tokens, length, *, of_step=output_distribution, **fault):
    """Exact distribution of the first `length` tokens of repeated steps, `{tuple: probability}`."""
    distribution = {}

    def descend(prefix, mass):
        step = of_step(
            lambda x: target(prefix + x), lambda x: draft(prefix + x), num_tokens, **fault
        )
        for tokens, share in step.items():
            full = prefix + tokens
            if len(full) < length:
                descend(full, mass * share)
            else:
                distribution[full[:length]] = distribution.get(full[:length], 0.0) + mass * share

    descend((), 1.0)
    return distribution


def joint_distribution(target, length):
    """Exact distribution of the first `length` tokens of plain sampling; a None ends a text."""
    distribution, ended = {(): 1.0}, {}
    for _ in range(length):
        rows = {prefix: target(prefix) for prefix in distribution}
        ended |= {prefix: distribution[prefix] for prefix, p in rows.items() if p is None}
        distribution = {
            (*prefix, int(x)): distribution[prefix] * p[x]
            for prefix, p in rows.items()
            if p is not None
            for x in np.flatnonzero(p)
        }
    return distribution | ended


# Draws, by address.


class Weights(NamedTuple):
    """Log-weights of a row, and the least and the most that rounding may make of them."""

    exact: np.ndarray
    least: np.ndarray
    most: np.ndarray


def _log(x):
    with np.errstate(divide="ignore"):
        return np.log(x)


def row_slack(*rows):
    """Rounding of a float32 log-weight: a floor, and a few units in the largest logit's place."""
    finite = [np.abs(r[np.isfinite(r)]).max(initial=0.0) for r in rows]
    return SLACK + 8 * 2.0**-24 * max(finite)


def plain_weights(logp, slack):
    return Weights(logp, logp - slack, logp + slack)


def residual_weights(p, q, slack):
    def left(up, down):
        return _log(np.maximum(p * np.exp(up) - q * np.exp(down), 0.0))

    return Weights(left(0.0, 0.0), left(-slack, slack), left(slack, -slack))


def _pick(weights, noise, slack):
    winner = int(np.argmax(weights.exact + noise))
    others = np.delete(weights.most + noise, winner)
    clear = weights.least[winner] + noise[winner] > np.max(others, initial=-np.inf) + slack
    return winner, bool(clear)


def two_level(weights, address, noise=np.float32):
    """The token of two-level Gumbel-max and whether rounding could not have changed it."""
    vocab_size = len(weights.exact)
    starts = range(0, vocab_size, BLOCK)
    blocks = Weights(*(np.array([logsumexp(w[s : s + BLOCK]) for s in starts]) for w in weights))
    block, clear = _pick(blocks, gumbel(address, 1, np.arange(len(starts)), noise), SLACK)
    ids = np.arange(block * BLOCK, min((block + 1) * BLOCK, vocab_size))
    inside = Weights(*(w[ids] for w in weights))
    winner, clear_inside = _pick(inside, gumbel(address, 0, ids, noise), SLACK)
    return int(ids[winner]), clear and clear_inside


def request_keys(keys, batch_size):
    """uint32[B, 2]; a single key folds in the row's index."""
    keys = np.asarray(keys, np.uint32)
    return keys if keys.ndim == 2 else fold_in(keys, np.arange(batch_size))


class Draws(NamedTuple):
    token_ids: np.ndarray
    logprobs: np.ndarray
    logsumexp: np.ndarray
    certain: np.ndarray


def sample(logits, *, keys, positions, stream, temperature=1.0, cutoff=None, noise=np.float32):
    """Plain sampling of [B, V], token for token."""
    batch_size = len(logits)
    keys = request_keys(keys, batch_size)
    per_request = [np.broadcast_to(a, batch_size) for a in (positions, temperature)]
    cutoffs = np.broadcast_to(-np.inf if cutoff is None else cutoff, batch_size)
    out = Draws(
        np.full(batch_size, -1),
        np.zeros(batch_size),
        np.zeros(batch_size),
        np.ones(batch_size, bool),
    )
    for b, (position, tau) in enumerate(zip(*per_request, strict=True)):
        logp = log_softmax(logits[b], tau, cutoffs[b]) if tau >= 0 else None
        if logp is None:
            continue
        w = kept(logits[b], cutoffs[b]) / (tau if tau >= GREEDY_BELOW else 1.0)
        out.logsumexp[b] = logsumexp(w)
        if tau < GREEDY_BELOW:
            out.token_ids[b] = np.argmax(logp)
        else:
            weights = plain_weights(logp, row_slack(w))
            at = address(keys[b], position, stream)
            out.token_ids[b], out.certain[b] = two_level(weights, at, noise)
        out.logprobs[b] = logp[out.token_ids[b]]
    return out


class Outcome(NamedTuple):
    token_ids: np.ndarray
    num_accepted: np.ndarray
    num_emitted: np.ndarray
    logprobs: np.ndarray
    certain: np.ndarray


class Request(NamedTuple):
    """One request of a batch, its rows already aligned: `draft_logits` is [K, V_d] or None."""

    token_ids: np.ndarray
    target_logits: np.ndarray
    key: np.ndarray
    position: int
    temperature: float
    cutoff: np.ndarray
    num_tokens: int
    draft_logits: np.ndarray | None
    draft_temperature: float
    draft_cutoff: np.ndarray
    draft_logsumexp: np.ndarray
    rates: np.ndarray | None
    bonus: int
    noise: type


def num_drafted(token_ids, num_tokens):
    """`num_tokens` clipped to [-1, K], and nothing from the first -1 on."""
    limit = min(max(int(num_tokens), -1), len(token_ids))
    stops = np.flatnonzero(np.asarray(token_ids) == -1)
    return min(limit, int(stops[0])) if len(stops) else limit


def draft_row(r, i):
    """(q, its rounding) of drafted row i, or (None, 0) where it is verified as one-hot."""
    if r.draft_logits is None or not np.isfinite(r.draft_logsumexp[i]):
        return None, 0.0
    vocab_size = r.target_logits.shape[1]
    q = draft_probs(r.draft_logits[i], r.draft_temperature, r.draft_cutoff[i], vocab_size)
    if q is None:
        return None, 0.0
    return q, row_slack(kept(r.draft_logits[i], r.draft_cutoff[i]) / r.draft_temperature)


def judge(r, i, p, logp, q, slack):
    """(accepted, certain) of drafted token i."""
    x = int(r.token_ids[i])
    inside = 0 <= x < len(p)
    u = coin(address(r.key, r.position + i, accept_stream(i)), r.noise)
    if r.rates is not None:
        rate = np.float64(r.rates[i])
        return inside and u < rate, abs(u - rate) > 1e-7 or rate in (0.0, 1.0)
    if not inside or p[x] == 0:
        return False, True
    if r.temperature < GREEDY_BELOW:
        return True, True
    if q is None:
        return np.log(u) < logp[x], abs(np.log(u) - logp[x]) > slack
    if q[x] == 0:
        return False, True
    margin = logp[x] - np.log(q[x]) - np.log(u)
    return margin > 0, abs(margin) > slack


def recover(r, i, p, logp, q, slack):
    """(token, certain) in place of drafted token i."""
    if r.temperature < GREEDY_BELOW:
        return int(np.argmax(p)), True
    if q is None:
        spent = np.arange(len(p)) == int(r.token_ids[i])
        left = np.where(spent, -np.inf, logp)
        weights = plain_weights(left if np.any(np.isfinite(left)) else logp, slack)
    elif np.any(p > q):
        weights = residual_weights(p, q, slack)
    else:
        weights = plain_weights(logp, slack)
    return two_level(weights, address(r.key, r.position + i, TARGET), r.noise)


def verify_one(r):
    """(tokens, logprobs, number accepted, certain) of one request."""
    tokens, logprobs, certain = [], [], True
    n = num_drafted(r.token_ids, r.num_tokens)
    if n < 0 or not r.temperature >= 0:
        return tokens, logprobs, 0, certain
    for i in range(n + 1):
        logp = log_softmax(r.target_logits[i], r.temperature, r.cutoff[i])
        if logp is None and i == n and 0 <= r.bonus < r.target_logits.shape[1]:
            return [*tokens, int(r.bonus)], [*logprobs, -np.inf], n, certain
        if logp is None:
            return tokens, logprobs, i, certain
        p = target_probs(r.target_logits[i], r.temperature, r.cutoff[i])
        tau = r.temperature if r.temperature >= GREEDY_BELOW else 1.0
        slack = row_slack(kept(r.target_logits[i], r.cutoff[i]) / tau)
        if i == n:
            break
        q, draft_slack = draft_row(r, i)
        slack += draft_slack
        accepted, clear = judge(r, i, p, logp, q, slack)
        certain = certain and clear
        if not accepted:
            token, clear = recover(r, i, p, logp, q, slack)
            return [*tokens, token], [*logprobs, logp[token]], i, certain and clear
        tokens.append(int(r.token_ids[i]))
        logprobs.append(logp[tokens[-1]])
    if 0 <= r.bonus < len(p):
        token, clear = int(r.bonus), True
    elif r.temperature < GREEDY_BELOW:
        token, clear = int(np.argmax(p)), True
    else:
        at = address(r.key, r.position + n, TARGET)
        token, clear = two_level(plain_weights(logp, slack), at, r.noise)
    return [*tokens, token], [*logprobs, logp[token]], n, certain and clear


def couple_one(r):
    """`verify_one` of coupled sampling: the target's draws, up to the first that differs."""
    tokens, logprobs, certain = [], [], True
    n = num_drafted(r.token_ids, r.num_tokens)
    if n < 0 or not r.temperature >= 0:
        return tokens, logprobs, 0, certain
    for i in range(n + 1):
        logp = log_softmax(r.target_logits[i], r.temperature, r.cutoff[i])
        if i == n and 0 <= r.bonus < r.target_logits.shape[1]:
            given = -np.inf if logp is None else logp[r.bonus]
            return [*tokens, int(r.bonus)], [*logprobs, given], n, certain
        if logp is None:
            return tokens, logprobs, i, certain
        if r.temperature < GREEDY_BELOW:
            token, clear = int(np.argmax(logp)), True
        else:
            w = kept(r.target_logits[i], r.cutoff[i]) / r.temperature
            at = address(r.key, r.position + i, TARGET)
            token, clear = two_level(plain_weights(logp, row_slack(w)), at, r.noise)
        tokens, logprobs, certain = [*tokens, token], [*logprobs, logp[token]], certain and clear
        if i == n or token != r.token_ids[i]:
            return tokens, logprobs, i, certain


def verify(
    token_ids,
    target_logits,
    *,
    keys,
    positions,
    temperature=1.0,
    cutoff=None,
    draft_logits=None,
    draft_temperature=None,
    draft_cutoff=None,
    draft_logsumexp=None,
    num_tokens=None,
    rows=None,
    conditional_rates=None,
    bonus_token_ids=None,
    noise=np.float32,
    one=verify_one,
):
    """Verification of a padded batch, request by request: token by token, or by `one`."""
    token_ids, target_logits = np.asarray(token_ids), np.asarray(target_logits)
    batch_size, num_rows = token_ids.shape

    def each(value, absent, *shape):
        return np.broadcast_to(absent if value is None else value, (batch_size, *shape))

    keys = request_keys(keys, batch_size)
    temperature = each(temperature, 1.0).astype(np.float64)
    draft_temperature = each(draft_temperature, temperature).astype(np.float64)
    rates = conditional_rates
    rates = None if rates is None else each(rates, 0.0, num_rows)
    columns = {
        "position": each(positions, 0),
        "cutoff": each(cutoff, -np.inf, num_rows + 1),
        "num_tokens": each(num_tokens, num_rows),
        "draft_cutoff": each(draft_cutoff, -np.inf, num_rows),
        "draft_logsumexp": each(draft_logsumexp, 0.0, num_rows),
        "bonus": each(bonus_token_ids, -1),
    }
    rows = each(rows, np.arange(batch_size))
    outcome = Outcome(
        np.full((batch_size, num_rows + 1), -1),
        np.zeros(batch_size, int),
        np.zeros(batch_size, int),
        np.zeros((batch_size, num_rows + 1)),
        np.zeros(batch_size, bool),
    )
    for b in range(batch_size):
        request = Request(
            token_ids=token_ids[b],
            target_logits=target_logits[b],
            key=keys[b],
            temperature=temperature[b],
            draft_logits=None if draft_logits is None else np.asarray(draft_logits)[rows[b]],
            draft_temperature=draft_temperature[b],
            rates=None if rates is None else rates[b],
            noise=noise,
            **{name: column[b] for name, column in columns.items()},
        )
        tokens, logprobs, outcome.num_accepted[b], outcome.certain[b] = one(request)
        outcome.token_ids[b, : len(tokens)] = tokens
        outcome.num_emitted[b] = len(tokens)
        outcome.logprobs[b, : len(logprobs)] = logprobs
    return outcome
