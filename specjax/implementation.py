"""Which implementation runs: what a name means, and what None chooses at lowering."""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["by_implementation", "has_early_starts", "read_implementation", "shared_memory"]

_MIN_CAPABILITY, _EARLY_CAPABILITY = 8.0, 9.0
# From the first of these to below the other, GPUs give a program 227 KB of shared memory.
_LARGE_CAPABILITIES = 9.0, 12.0
_NO_GPU = "JAX sees none here"
_DEPRECATED = "The Pallas Triton backend is deprecated"


def read_implementation(implementation: str | None) -> str:
    """What is to run: "xla", "triton", "interpret", or "choose" at lowering; or a refusal."""
    if implementation not in (None, "xla", "triton", "interpret"):
        raise ValueError(
            f"implementation is {implementation!r}; it is None, 'xla', 'triton' or 'interpret'."
        )
    if implementation is None:
        implementation = "xla" if _why_no_kernels() else "choose"
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
    if implementation in ("choose", "triton"):
        _silence_deprecation()
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
    reason = _why_no_gpu()
    if reason == _NO_GPU:
        # Under an abstract mesh with a device the caller compiles for that one. A mesh of devices
        # that are here names one too, of unknown capability.
        aim = jax.sharding.get_abstract_mesh().abstract_device
        if aim is not None and aim.platform in ("gpu", "cuda"):
            return None
    return reason


def _why_no_gpu() -> str | None:
    capabilities = _capabilities()
    if not capabilities:
        return _NO_GPU
    if (least := min(capabilities)) < _MIN_CAPABILITY:
        return f"JAX sees one of {least}"
    return None


def has_early_starts() -> bool:
    """Whether GPUs here can start a kernel before the one in front has ended, as Hopper does."""
    capabilities = _capabilities()
    return bool(capabilities) and min(capabilities) >= _EARLY_CAPABILITY


def shared_memory() -> int:
    """Bytes that a program may have on every GPU here: the least are those of consumers' GPUs."""
    least, beyond = _LARGE_CAPABILITIES
    capabilities = _capabilities()
    large = bool(capabilities) and all(least <= each < beyond for each in capabilities)
    return (227 if large else 99) * 1024


@functools.cache
def _capabilities() -> tuple[float, ...]:
    """Of the GPUs that JAX sees."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return ()
    return tuple(float(device.compute_capability) for device in devices)


def _silence_deprecation() -> None:
    """Keeps JAX >= 0.11 from warning whoever lowers the kernels: it is for us to act on.

    At every call of the door and not where kernels are traced: JAX warns as it lowers, maybe an
    older trace, after somebody has put the filters back. Only if ours is not the first, because
    Python shows what it shows once again after any change of filters.
    """
    first = warnings.filters[0] if warnings.filters else None
    if first is None or getattr(first[1], "pattern", None) != _DEPRECATED:
        warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)
