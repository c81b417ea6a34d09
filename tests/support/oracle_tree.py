"""Verification of trees in NumPy, float64: its exact distribution, and its decisions one by one."""

from typing import NamedTuple

import numpy as np
import oracle
from oracle import GREEDY_BELOW, TARGET

# A residual below this share of r counts as empty, as float32 leaves one where p == q.
LEAST = 2.0**-18


def left(r, p, q):
    return np.maximum(r * p - q, 0.0)


def rate(mass, r):
    """r of a node after one more rejected child."""
    total = mass + 1 - r
    return mass / total if total > 0 else 1.0


def without(q, x):
    """q after a sibling took x."""
    rest = np.where(np.arange(len(q)) == x, 0.0, q)
    return rest / rest.sum() if rest.sum() > 0 else rest


def output_distribution(target, draft, fault=None):
    """Exact distribution of the tokens one step emits, as `{tuple of tokens: probability}`.

    `target` maps a path (a tuple of tokens) to a row of probabilities, or to None where the row is
    not a distribution: its node is a leaf, and nothing follows it. `draft` maps a path and the
    tokens of its earlier children to the row that the next one is drawn from before siblings are
    removed, to a token that is one-hot, or to None where no child follows.
    """

    def visit(path, r, is_root):
        """What is emitted if the node is accepted or one below it, and the mass rejected."""
        whole = target(path)
        emitted, rejected = {}, 0.0

        def try_next(mass, siblings, p, taken, r):
            nonlocal rejected
            q = None if p is None else draft(path, siblings)
            if q is None:
                accepted = 1.0 if is_root else r
                ends = (
                    {path: 1.0} if p is None else {(*path, int(y)): p[y] for y in np.flatnonzero(p)}
                )
                for key, share in ends.items():
                    emitted[key] = emitted.get(key, 0.0) + mass * accepted * share
                rejected += mass * (1 - accepted)
                return
            is_drawn = np.ndim(q) > 0
            q = q if is_drawn else np.eye(len(whole))[q]
            for x in taken if is_drawn and fault != "siblings stay in q" else ():
                q = without(q, x)
            drawn = q
            if is_drawn and fault == "siblings are drawn with replacement":
                drawn = draft(path, siblings)
            for x in np.flatnonzero(drawn):
                child, q_x = (*path, int(x)), q[x]
                below = min(1.0, r * p[x] / q_x) if q_x > 0 else 0.0
                inner, lost = visit(child, below, False)
                for key, share in inner.items():
                    emitted[key] = emitted.get(key, 0.0) + mass * drawn[x] * share
                rest = left(1.0 if fault == "r is missing in the residual" else r, p, q)
                after = rest / rest.sum() if rest.sum() > 0 else whole
                left_over = (*taken, int(x)) if is_drawn else taken
                r_after = r if fault == "r stays" else rate(rest.sum(), r)
                if lost > 0:
                    share = mass * drawn[x] * lost
                    try_next(share, (*siblings, int(x)), after, left_over, r_after)

        try_next(1.0, (), whole, (), r)
        return emitted, rejected

    return visit((), 1.0, True)[0]


class Shape(NamedTuple):
    """Where the nodes of one tree are: None and no depth for those of an impossible parent."""

    depths: list
    indices: list
    is_padding: list


def shape_of(token_ids, parents, max_depth):
    depths, indices, is_padding = [], [], []
    for v, parent in enumerate(parents):
        above = -1 if parent == -1 else depths[parent] if 0 <= parent < v else None
        depths.append(None if above is None else above + 1)
        earlier = [u for u in range(v) if depths[u] == depths[v]]
        indices.append(None if above is None else depths[v] + 1024 * len(earlier))
        is_padding.append(
            bool(
                token_ids[v] == -1
                or above is None
                or depths[v] >= max_depth
                or (parent >= 0 and is_padding[parent])
            )
        )
    return Shape(depths, indices, is_padding)


class TreeRequest(NamedTuple):
    """One request: rows [N + 1, V] of the target, [N + 1, V_d] of the draft or None."""

    token_ids: np.ndarray
    parents: np.ndarray
    target_logits: np.ndarray
    key: np.ndarray
    position: int
    temperature: float
    cutoff: np.ndarray
    draft_logits: np.ndarray | None
    draft_temperature: float
    draft_cutoff: np.ndarray
    noise: type
    max_depth: int

    def children(self, shape, node):
        return [
            c
            for c in range(len(self.parents))
            if self.parents[c] == node and not shape.is_padding[c]
        ]


class Bounds(NamedTuple):
    """A number, or a row of them, with the least and the most that rounding makes of it."""

    least: np.ndarray
    exact: np.ndarray
    most: np.ndarray


def walk(r, shape):
    """(nodes, last token or None, its row's log p, certain) of the target's own draws."""
    node, nodes, certain = -1, [], True
    while True:
        logp = oracle.log_softmax(r.target_logits[node + 1], r.temperature, r.cutoff[node + 1])
        if logp is None:
            return nodes, None, certain
        if r.temperature < GREEDY_BELOW:
            token = int(np.argmax(logp))
        else:
            w = oracle.kept(r.target_logits[node + 1], r.cutoff[node + 1]) / r.temperature
            at = oracle.address(r.key, r.position + len(nodes), TARGET)
            weights = oracle.plain_weights(logp, oracle.row_slack(w))
            token, clear = oracle.two_level(weights, at, r.noise)
            certain &= clear
        match = [c for c in r.children(shape, node) if r.token_ids[c] == token]
        if not match:
            return nodes, token, certain
        node = match[0]
        nodes.append(node)


def bounded(logits, temperature, cutoff, size):
    """Probabilities over `size` ids, or None of a row that is not a distribution."""
    logp = oracle.log_softmax(logits, temperature, cutoff)
    if logp is None:
        return None
    slack = oracle.row_slack(oracle.kept(logits, cutoff) / temperature)
    p = np.pad(np.exp(logp), (0, size - len(logp)))
    return Bounds(p * np.exp(-slack), p, p * np.exp(slack))


def after_rejection(p, q, r, whole, least):
    """(p, r, clear) after a rejected child; residuals of at most `least` r are empty."""
    m = Bounds(left(r.least, p.least, q.most), left(r.exact, p.exact, q.exact), None)
    m = m._replace(most=left(r.most, p.most, q.least))
    z = Bounds(*(x.sum() for x in m))
    r_after = Bounds(*(min(rate(a, b), b) for a, b in zip(z, r, strict=True)))
    if z.exact <= least * r.exact:
        return whole, r_after, bool(z.most <= least * r.least or z.most == 0)
    clear = z.least > least * r.most
    with np.errstate(divide="ignore", invalid="ignore"):
        p = Bounds(m.least / z.most, m.exact / z.exact, np.nan_to_num(m.most / z.least, nan=0.0))
    return p, r_after, bool(clear)


def traverse(r, shape):
    """`walk` of traversal verification."""
    vocab_size = r.target_logits.shape[1]
    wide = max(vocab_size, r.draft_logits.shape[1])
    certain = True

    def coin_is_below(node, bound):
        nonlocal certain
        at = oracle.address(
            r.key,
            r.position + shape.depths[node],
            oracle.accept_stream(shape.indices[node]),
        )
        u = oracle.coin(at, r.noise)
        # A rate of exactly 0 or 1 decides whatever the uniform is.
        sure = bound.most == 0 or bound.least >= 1 - 1e-9
        certain &= bool(sure or not bound.least * (1 - 1e-5) <= u <= bound.most * (1 + 1e-5))
        return u < bound.exact

    def visit(node, rate_bounds):
        """(nodes below the path here, last token or None), or None of a rejected node."""
        nonlocal certain
        row = node + 1
        p = bounded(r.target_logits[row], r.temperature, r.cutoff[row], wide)
        q = bounded(r.draft_logits[row], r.draft_temperature, r.draft_cutoff[row], wide)
        whole, is_drawn = p, q is not None
        for c in r.children(shape, node) if p is not None else ():
            x = int(r.token_ids[c])
            inside = 0 <= x < vocab_size
            if not is_drawn:
                one = (np.arange(wide) == x).astype(float)
                q = Bounds(one, one, one)
            if inside and q.exact[x] == 0:
                continue
            zero = Bounds(0.0, 0.0, 0.0)
            below = zero
            if inside and p.exact[x] > 0:
                below = Bounds(
                    *(
                        min(1.0, a * b / d)
                        for a, b, d in (
                            (rate_bounds.least, p.least[x], q.most[x]),
                            (rate_bounds.exact, p.exact[x], q.exact[x]),
                            (rate_bounds.most, p.most[x], q.least[x]),
                        )
                    )
                )
            elif inside and p.most[x] > 0:
                certain = False
            result = visit(c, below) if below.exact > 0 else None
            if result is not None:
                return [c, *result[0]], result[1]
            least = LEAST if is_drawn else 0.0
            p, rate_bounds, clear = after_rejection(p, q, rate_bounds, whole, least)
            certain &= clear
            if is_drawn:
                q = Bounds(*(np.where(np.arange(wide) == x, 0.0, y) for y in q))
                total = q.exact.sum()
                q = Bounds(*(y / total if total > 0 else y for y in q))
        if node >= 0 and not coin_is_below(node, rate_bounds):
            return None
        if p is None:
            return [], None
        with np.errstate(divide="ignore"):
            weights = oracle.Weights(*(np.log(x[:vocab_size]) for x in (p[1], p[0], p[2])))
        depth = -1 if node < 0 else shape.depths[node]
        at = oracle.address(r.key, r.position + depth + 1, TARGET)
        token, clear = oracle.two_level(weights, at, r.noise)
        certain &= clear
        return [], token

    one = Bounds(1.0, 1.0, 1.0)
    nodes, token = visit(-1, one)
    return nodes, token, certain


class TreeOutcome(NamedTuple):
    token_ids: np.ndarray
    num_accepted: np.ndarray
    num_emitted: np.ndarray
    logprobs: np.ndarray
    nodes: np.ndarray
    certain: np.ndarray


def verify_one(r):
    """(nodes, last token or None, certain) of one request; nothing of an invalid one."""
    if not r.temperature >= 0 or not np.isfinite(r.temperature):
        return None
    shape = shape_of(r.token_ids, r.parents, r.max_depth)
    is_drawn = r.draft_temperature >= GREEDY_BELOW and np.isfinite(r.draft_temperature)
    if r.draft_logits is None or not is_drawn or r.temperature < GREEDY_BELOW:
        return walk(r, shape)
    return traverse(r, shape)


def verify(
    token_ids,
    parents,
    target_logits,
    *,
    max_depth,
    keys,
    positions,
    temperature=1.0,
    cutoff=None,
    draft_logits=None,
    draft_temperature=None,
    draft_cutoff=None,
    noise=np.float32,
):
    """Verification of a batch of trees, request by request."""
    token_ids, parents = np.asarray(token_ids), np.asarray(parents)
    target_logits = np.asarray(target_logits)
    size, num_rows = target_logits.shape[:2]

    def each(value, absent, *shape):
        return np.broadcast_to(absent if value is None else value, (size, *shape))

    temperature = each(temperature, 1.0).astype(np.float64)
    draft_temperature = each(draft_temperature, temperature).astype(np.float64)
    positions, keys = each(positions, 0), oracle.request_keys(keys, size)
    cutoff = each(cutoff, -np.inf, num_rows)
    draft_cutoff = each(draft_cutoff, -np.inf, num_rows)
    out = TreeOutcome(
        np.full((size, max_depth + 1), -1),
        np.zeros(size, int),
        np.zeros(size, int),
        np.zeros((size, max_depth + 1)),
        np.full((size, max_depth), -1),
        np.ones(size, bool),
    )
    for b in range(size):
        draft = None if draft_logits is None else np.asarray(draft_logits)[b]
        r = TreeRequest(
            token_ids=token_ids[b],
            parents=parents[b],
            target_logits=target_logits[b],
            key=keys[b],
            position=positions[b],
            temperature=temperature[b],
            cutoff=cutoff[b],
            draft_logits=draft,
            draft_temperature=draft_temperature[b],
            draft_cutoff=draft_cutoff[b],
            noise=noise,
            max_depth=max_depth,
        )
        outcome = verify_one(r)
        if outcome is None:
            continue
        nodes, token, out.certain[b] = outcome
        tokens = [int(r.token_ids[v]) for v in nodes] + ([] if token is None else [token])
        for depth, x in enumerate(tokens):
            row = 0 if depth == 0 else nodes[depth - 1] + 1
            logp = oracle.log_softmax(r.target_logits[row], r.temperature, r.cutoff[row])
            out.logprobs[b, depth] = logp[x]
        out.token_ids[b, : len(tokens)] = tokens
        out.nodes[b, : len(nodes)] = nodes
        out.num_accepted[b], out.num_emitted[b] = len(nodes), len(tokens)
    return out
