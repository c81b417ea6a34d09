"""How much of a text occurs in other texts, by rolling hashes of every 64-byte window."""

import numpy as np

WIDTH = 64
_BASE = 0x9E3779B97F4A7C15  # Odd, so that it has an inverse modulo 2^64.
_SYMBOLS = np.random.default_rng(0).integers(1, 2**63, 256, dtype=np.uint64)
_TABLE_BITS = 24


def _powers(base: int, count: int) -> np.ndarray:
    steps = np.full(count, base, np.uint64)
    steps[:1] = 1
    return np.multiply.accumulate(steps, dtype=np.uint64)


def window_hashes(text: bytes) -> np.ndarray:
    r"""The hash of each window: sum over j of symbol[text[i + j]] * base^j, modulo 2^64.

    With prefix sums P of ``symbol[text[k]] * base^k`` it is ``(P[i + 64] - P[i]) / base^i``.
    """
    symbols = _SYMBOLS[np.frombuffer(text, np.uint8)]
    if len(symbols) < WIDTH:
        return np.zeros(0, np.uint64)
    prefix = np.zeros(len(symbols) + 1, np.uint64)
    np.cumsum(symbols * _powers(_BASE, len(symbols)), out=prefix[1:])
    windows = prefix[WIDTH:] - prefix[:-WIDTH]
    return windows * _powers(pow(_BASE, -1, 2**64), len(windows))


def shares_of_windows(texts: list[bytes], others: list[bytes]) -> list[float]:
    """For each text, the share of its 64-byte windows that occur anywhere in `others`."""
    hashes = [window_hashes(text) for text in texts]
    if not hashes:
        return []
    known = np.unique(np.concatenate(hashes))
    seen = np.zeros(len(known), bool)
    # Most windows of the others are strangers: a table of leading bits turns them away.
    shift = np.uint64(64 - _TABLE_BITS)
    table = np.zeros(2**_TABLE_BITS, bool)
    table[known >> shift] = True
    for other in others:
        found = window_hashes(other)
        found = found[table[found >> shift]]
        places = np.minimum(np.searchsorted(known, found), len(known) - 1)
        seen[places[known[places] == found]] = True
    return [float(seen[np.searchsorted(known, h)].mean()) if len(h) else 0.0 for h in hashes]
