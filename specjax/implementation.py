"""Which implementation runs: what a name means, and what None chooses at lowering."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["by_implementation", "read_implementation"]

_MIN_CAPABILITY = 8.0


def read_implementation(implementation: str | None) -> str:
    """What is to run: "xla", "triton", "interpret", or "choose" at lowering; or a refusal."""
    if implementation not in (None, "xla", "triton", "interpret"):
        raise ValueError(
            f"implementation is {implementation!r}; it is None, 'xla', 'triton' or 'interpret'."
        )
    if implementation is None:
        return "xla" if _why_no_kernels() else "choose"
    if implementation in ("triton", "interpret") and not _has_pallas_triton():
        raise ValueError(
            f"implementation={implementation!r} names the Pallas Triton kernels, and JAX "
            f"{jax.__version__} has no Pallas Triton; use None or 'xla', or an older JAX."
        )
    if implementation == "triton" and (reason := _why_no_kernels()):
        raise ValueError(
            f"implementation='triton' needs an NVIDIA GPU of compute capability 8.0 or newer, and "
            f"{reason}; None chooses what this machine can run, 'interpret' tests the kernels."
        )
    return implementation


def by_implementation(
    implementation: str, xla: Callable[..., Any], kernels: Callable[..., Any], *operands: Any
) -> Any:
    """Runs one of two functions of the same arrays.

    Args:
      implementation: what `read_implementation` returned.
      xla: the reference.
      kernels: of the same arrays and a keyword, `interpret`.
      *operands: pytrees of arrays.

    Returns:
      What the function returns.
    """
    if implementation == "xla":
        return xla(*operands)
    run = functools.partial(kernels, interpret=implementation == "interpret")
    if implementation == "choose":
        return jax.lax.platform_dependent(*operands, cuda=run, default=xla)
    return run(*operands)


@functools.cache
def _has_pallas_triton() -> bool:
    try:
        return importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    except ImportError:
        return False


def _why_no_kernels() -> str | None:
    """Why the kernels cannot be lowered here; None where they can."""
    if not _has_pallas_triton():
        return f"JAX {jax.__version__} has no Pallas Triton"
    # Under an abstract mesh with a device the caller compiles for that one.
    aim = jax.sharding.get_abstract_mesh().abstract_device
    if aim is not None and aim.platform in ("gpu", "cuda"):
        return None
    return _why_no_gpu()


@functools.cache
def _why_no_gpu() -> str | None:
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return "JAX sees none here"
    capability = min(float(device.compute_capability) for device in devices)
    if capability < _MIN_CAPABILITY:
        return f"JAX sees one of {capability}"
    return None
