"""Block verification in NumPy, float64: its exact distribution, and its decisions one by one."""

import itertools

import numpy as np
import oracle
from oracle import GREEDY_BELOW, SLACK, TARGET


def cap(log_rho, p, q, fault=None):
    """log rho after one more token of probabilities p and q."""
    if not p > 0 or not q > 0:
        return -np.inf
    uncapped = log_rho + np.log(p) - np.log(q)
    return uncapped if fault == "rho is not capped" else min(0.0, uncapped)


def left(rho, p, q):
    return np.maximum(rho * p - q, 0.0)


def threshold(rho, p, q):
    """h of a prefix that is not the whole draft."""
    mass = left(rho, p, q).sum()
    total = mass + 1 - min(rho, 1.0)
    return mass / total if total > 0 else 1.0


def outcomes(target, draft, num_tokens, fault=None):
    """Yields (drafted tokens, tau, probability, rho of the prefix) of one step.

    A row that is not a distribution is None: of the draft, any token is drafted, and is one-hot;
    of the target, it ends the drafts.
    """
    size = len(target(()))
    for x in itertools.product(range(size), repeat=num_tokens):
        p, q = ([row(x[:i]) for i in range(num_tokens)] for row in (target, draft))
        drawn = [1 / size if row is None else row[x[i]] for i, row in enumerate(q)]
        end = next((i for i, row in enumerate(p) if row is None), num_tokens)
        of_target = [p[i][x[i]] for i in range(end)]
        of_draft = [1.0 if q[i] is None else q[i][x[i]] for i in range(end)]
        mass, log_rhos = np.prod(drawn), [0.0]
        if not mass > 0:
            continue
        if all(row is None for row in q):
            for tau in range(end + 1):
                rejected = 1 - of_target[tau] if tau < end else 1.0
                yield x, tau, mass * np.prod(of_target[:tau]) * rejected, 1.0
            continue
        for a, b in zip(of_target, of_draft, strict=True):
            log_rhos.append(cap(log_rhos[-1], a, b, fault))
        rhos = np.exp(log_rhos)
        for tau in range(end, -1, -1):
            if tau == 0:
                h = 1.0
            elif tau == end:
                h = min(rhos[tau], 1.0)
            else:
                h = min(threshold(rhos[tau], p[tau], _row_of(q[tau], x[tau], size)), rhos[tau])
            if h > 0:
                yield x, tau, mass * h, rhos[tau]
            mass *= 1 - h


def output_distribution(target, draft, num_tokens, fault=None):
    """Exact distribution of the tokens one step emits, as `{tuple of tokens: probability}`."""
    distribution = {}

    def emit(tokens, mass):
        distribution[tokens] = distribution.get(tokens, 0.0) + mass

    for x, tau, mass, rho in outcomes(target, draft, num_tokens, fault):
        prefix = x[:tau]
        p = target(prefix)
        if p is None:
            emit(prefix, mass)
            continue
        if tau < num_tokens:
            q = _row_of(draft(prefix), x[tau], len(p))
            rest = left(1.0 if fault == "rho is missing in the residual" else rho, p, q)
            p = rest / rest.sum() if rest.sum() > 0 else p
        for token in np.flatnonzero(p):
            emit((*prefix, int(token)), mass * p[token])
    return distribution


def mean_acceptance(target, draft, num_tokens):
    """Expected number of accepted tokens: of a block, and token by token."""
    block = sum(tau * mass for _, tau, mass, _ in outcomes(target, draft, num_tokens))
    tokens = oracle.output_distribution(target, draft, num_tokens)
    return block, sum((len(key) - 1) * mass for key, mass in tokens.items())


def verify_one(r):
    """`oracle.verify_one` of block verification."""
    n = oracle.num_drafted(r.token_ids, r.num_tokens)
    drafts = [oracle.draft_row(r, i) for i in range(max(n, 0))]
    is_greedy = not r.temperature >= GREEDY_BELOW
    if n < 0 or is_greedy or all(q is None for q, _ in drafts):
        return oracle.verify_one(r)
    rows, log_rhos, slacks = [], [0.0], [SLACK]
    for i in range(n + 1):
        logp = oracle.log_softmax(r.target_logits[i], r.temperature, r.cutoff[i])
        rows.append(logp)
        if logp is None or i == n:
            break
        x, (q, draft_slack) = int(r.token_ids[i]), drafts[i]
        inside = 0 <= x < len(logp)
        p = np.exp(logp[x]) if inside else 0.0
        log_rhos.append(cap(log_rhos[-1], p, 1.0 if q is None else (q[x] if inside else 0.0)))
        w = oracle.kept(r.target_logits[i], r.cutoff[i]) / r.temperature
        slacks.append(slacks[-1] + oracle.row_slack(w) + draft_slack)
    end, certain, tau = len(log_rhos) - 1, True, 0
    for j in range(end, 0, -1):
        u = oracle.coin(
            oracle.address(r.key, r.position + j - 1, oracle.accept_stream(j - 1)), r.noise
        )
        rho = np.exp(log_rhos[j])
        accepted = np.log(u) < log_rhos[j]
        certain &= bool(np.isinf(log_rhos[j]) or abs(np.log(u) - log_rhos[j]) > slacks[j])
        if accepted and j < end:
            h = threshold(rho, np.exp(rows[j]), _draft_probs(r, drafts, j))
            accepted = u < h
            certain &= bool(abs(u - h) > 8 * slacks[j])
        if accepted:
            tau = j
            break
    tokens = [int(x) for x in r.token_ids[:tau]]
    logprobs = [rows[i][x] for i, x in enumerate(tokens)]
    logp = rows[tau]
    if tau == n and 0 <= r.bonus < r.target_logits.shape[1]:
        given = -np.inf if logp is None else logp[r.bonus]
        return [*tokens, int(r.bonus)], [*logprobs, given], tau, certain
    if logp is None:
        return tokens, logprobs, tau, certain
    w = oracle.kept(r.target_logits[tau], r.cutoff[tau]) / r.temperature
    slack = oracle.row_slack(w) + slacks[tau]
    weights = oracle.plain_weights(logp, slack)
    if tau < n:
        q = _draft_probs(r, drafts, tau)
        p = np.exp(logp + log_rhos[tau])
        if np.any(p > q):
            weights = oracle.residual_weights(p, q, slack + drafts[tau][1])
    at = oracle.address(r.key, r.position + tau, TARGET)
    token, clear = oracle.two_level(weights, at, r.noise)
    return [*tokens, token], [*logprobs, logp[token]], tau, certain and clear


def _draft_probs(r, drafts, i):
    return _row_of(drafts[i][0], int(r.token_ids[i]), r.target_logits.shape[1])


def _row_of(q, token, size):
    """A draft row; 1 at its token where it is not a distribution."""
    return (np.arange(size) == token).astype(float) if q is None else q
