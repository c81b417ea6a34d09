"""How far the target's logits over devices are from one device's, next to its dtype's own error.

JAX_NUM_CPU_DEVICES=4 python -m benchmarks.pair.mesh_error
"""

import argparse
import platform

import jax
import numpy as np

from benchmarks.pair.heldout import HELDOUT, logits_of, read_heldout
from specjax.models import load, pretrained_folder

FOLDER = pretrained_folder("target")


def read_tokens(num_texts: int, length: int) -> np.ndarray:
    """The first tokens of held-out files that are long enough, i32[num_texts, length]."""
    rows = read_heldout(HELDOUT, FOLDER, start=None).rows
    return np.stack([row[:length] for row in rows if len(row) >= length][:num_texts])


def compute_logits(dtype: str, devices: int, token_ids: np.ndarray) -> np.ndarray:
    """Logits f64[B, L, V] of whole texts, by a target whose weights lie over so many devices."""
    mesh = jax.make_mesh((devices,), ("model",), devices=jax.devices()[:devices])
    target, _ = load(FOLDER, dtype, **({} if devices == 1 else {"mesh": mesh}))
    return np.asarray(jax.jit(logits_of)(target, token_ids), np.float64)


def describe(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Cells of a table: the greatest and the rms difference, and tokens that are the likeliest of
    one alone, with the most that `theirs` prefers its own by."""
    error, best = abs(ours - theirs), ours.argmax(-1)
    gap = theirs.max(-1) - np.take_along_axis(theirs, best[..., None], -1)[..., 0]
    others = int((best != theirs.argmax(-1)).sum())
    rms = np.sqrt(np.mean(error**2))
    return f"{error.max():.2g} | {rms:.2g} | {others} of {best.size} | {gap.max():.2g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens of each text")
    args = parser.parse_args()
    token_ids = read_tokens(args.texts, args.length)
    exact = compute_logits("float32", 1, token_ids)
    size = np.sqrt(np.mean((exact - exact.mean(-1, keepdims=True)) ** 2))
    print(
        f"{token_ids.size} rows of logits with a standard deviation of {size:.2g}; "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, Python {platform.python_version()}"
    )
    print("| logits | next to | greatest | rms | other token | its gap at most |")
    print("|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        one = compute_logits(dtype, 1, token_ids)
        if dtype != "float32":
            print(f"| {dtype}, one device | float32 | {describe(one, exact)}")
        for devices in args.devices:
            ours = compute_logits(dtype, devices, token_ids)
            print(f"| {dtype}, {devices} devices | one device | {describe(ours, one)}")
            if dtype != "float32":
                print(f"| {dtype}, {devices} devices | float32 | {describe(ours, exact)}")


if __name__ == "__main__":
    main()
