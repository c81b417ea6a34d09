"""What a cutoff promises: NumPy, float64, a sort; imports nothing that it judges.

Every edge that rounding could move is taken at both of its ends, so that a test can tell a
wrong cutoff from a probability that landed on its threshold.
"""

import numpy as np

GREEDY_BELOW = 1e-5
TINY = float(np.finfo(np.float32).tiny)
# Of a mass in float32, relative; of an exponent, relative to its size.
MASS_SLACK, EXPONENT_SLACK = 2e-5, 1e-6


def flush(x):
    """Subnormal float32 numbers as zeros, as some machines take them."""
    x = np.asarray(x).astype(np.float64)
    return np.where(np.abs(x) < TINY, 0.0, x)


def is_cut(row, temperature, top_k, top_p, min_p):
    """Whether any filter asks anything of a valid row."""
    asks = (0 < top_k < len(row)) or top_p < 1 or min_p > 0
    return bool(asks and GREEDY_BELOW <= temperature < np.inf and np.isfinite(np.max(row)))


def cutoff(row, temperature, *, top_k, top_p, min_p, slack=0.0):
    """The smallest logit kept; with a positive slack, of sets kept at least, else at most.

    Hugging Face's order: top-k, top-p over what is left and renormalised, min-p. Ties at every
    edge are kept. The row is valid.
    """
    ranked = np.sort(row[row > -np.inf])[::-1]
    if 0 < top_k < len(row) and top_k < len(ranked):
        ranked = ranked[ranked >= ranked[top_k - 1]]
    if top_p < 1:
        mass = np.cumsum(np.exp((ranked - ranked[0]) / temperature))
        wanted = max(top_p, 0.0) * mass[-1] * (1 + slack * MASS_SLACK)
        last = min(int(np.searchsorted(mass, wanted)), len(ranked) - 1)
        ranked = ranked[ranked >= ranked[last]]
    if min_p > 0:
        edge = np.log(min(min_p, 1.0))
        edge -= slack * EXPONENT_SLACK * abs(edge)
        ranked = ranked[(ranked - ranked[0]) / temperature >= edge]
    return ranked[-1]


def check(row, got, temperature, *, top_k=0, top_p=1.0, min_p=0.0):
    """Fails unless `got` is the row's cutoff; says whether rounding could not have moved it."""
    row, got = flush(row), float(flush(got))
    if np.isnan(top_p) or np.isnan(min_p):
        assert got == np.inf
        return True
    if not is_cut(row, temperature, top_k, top_p, min_p):
        assert got == -np.inf
        return True
    filters = dict(top_k=int(top_k), top_p=float(top_p), min_p=float(min_p))
    exact, most, least = (
        cutoff(row, float(temperature), **filters, slack=slack) for slack in (0.0, 1.0, -1.0)
    )
    message = f"{got} is not {exact}, at T = {temperature} and {filters}"
    assert got in row, message
    assert most <= got <= least, message
    return most == least
