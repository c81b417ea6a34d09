"""The margin by which an exact verification decides, in float32 ulps.

NumPy in float64 on the oracle's pieces. Two right implementations may differ where a coin falls
within a few roundings of its ratio, or the best two scores of a draw within a few of each other.
"""

import numpy as np
import oracle


def ulps(gap, *numbers):
    """A gap in units of the float32 spacing at the largest of what was added up."""
    return abs(gap) / np.spacing(np.float32(max(map(abs, numbers))))


def best(weights, noise, conditions=None):
    """The index of the largest score, and its margin, divided by the condition number if given."""
    scores = weights + noise
    first = int(np.argmax(scores))
    others = np.delete(scores, first)
    if not np.any(np.isfinite(others)):
        return first, np.inf
    second = int(np.argmax(others))
    margin = ulps(scores[first] - others[second], weights[first], noise[first], scores[first])
    if conditions is not None:
        margin /= max(conditions[first], np.delete(conditions, first)[second], 1.0)
    return first, margin


def draw(mass, at, noise, gross=None):
    """(token, margin) of two-level Gumbel-max by masses, which are differences of sums `gross`."""
    gross = mass if gross is None else np.where(mass > 0, gross, 0.0)
    starts = np.arange(0, len(mass), oracle.BLOCK)
    masses, grosses = np.add.reduceat(mass, starts), np.add.reduceat(gross, starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights, conditions = np.log(masses), np.nan_to_num(grosses / masses)
        block, coarse = best(
            weights, oracle.gumbel(at, 1, np.arange(len(starts)), noise), conditions
        )
        ids = np.arange(starts[block], min(starts[block] + oracle.BLOCK, len(mass)))
        weights, conditions = np.log(mass[ids]), np.nan_to_num(gross[ids] / mass[ids])
        place, fine = best(weights, oracle.gumbel(at, 0, ids, noise), conditions)
    return int(ids[place]), min(coarse, fine)


def judge(r, i, logp, q):
    """(accepted, margin) of drafted token i."""
    x = int(r.token_ids[i])
    inside = 0 <= x < len(logp)
    u = oracle.coin(oracle.address(r.key, r.position + i, oracle.accept_stream(i)), r.noise)
    if r.rates is not None:
        return inside and u < r.rates[i], ulps(u - r.rates[i], u, r.rates[i])
    if r.temperature < oracle.GREEDY_BELOW:
        return x == int(np.argmax(logp)), np.inf
    if not inside or logp[x] == -np.inf or (q is not None and q[x] == 0):
        return False, np.inf
    logq = 0.0 if q is None else np.log(q[x])
    gap = logp[x] - logq - np.log(u)
    return gap > 0, ulps(gap, logp[x], logq, np.log(u))


def recover(r, i, p, q):
    """(token, margin) in place of drafted token i."""
    at = oracle.address(r.key, r.position + i, oracle.TARGET)
    if q is None:
        left = np.where(np.arange(len(p)) == int(r.token_ids[i]), 0.0, p)
        return draw(left if np.any(left) else p, at, r.noise)
    left = np.maximum(p - q, 0.0)
    return draw(left, at, r.noise, p + q) if np.any(left) else draw(p, at, r.noise)


def closest_call(r):
    """Tokens that an `oracle.Request` emits, and the least margin on the way."""
    n = oracle.num_drafted(r.token_ids, r.num_tokens)
    tokens, least = [], np.inf
    if n < 0 or not r.temperature >= 0:
        return tokens, least
    greedy = r.temperature < oracle.GREEDY_BELOW
    for i in range(n + 1):
        logp = oracle.log_softmax(r.target_logits[i], r.temperature, r.cutoff[i])
        if logp is None:
            return tokens, least
        if i == n and 0 <= r.bonus < len(logp):
            return [*tokens, int(r.bonus)], least
        q = None
        if i < n:
            q, _ = oracle.draft_row(r, i)
            accepted, margin = judge(r, i, logp, q)
            least = min(least, margin)
            if accepted:
                tokens.append(int(r.token_ids[i]))
                continue
        if greedy:
            return [*tokens, int(np.argmax(logp))], least
        p = np.exp(logp)
        if i == n:
            at = oracle.address(r.key, r.position + i, oracle.TARGET)
            token, margin = draw(p, at, r.noise)
        else:
            token, margin = recover(r, i, p, q)
        return [*tokens, token], min(least, margin)
