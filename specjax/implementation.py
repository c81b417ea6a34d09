"""Which implementation runs a call, with which kernel sizes and for which GPUs: one frozen value.

`resolve_implementation` turns the argument `implementation` of a public call into an
`Implementation`, once, where the call enters. It is hashable, a static argument of `jit`, and
reaches everything that the call does. A package of kernels defines a frozen dataclass of its sizes
with defaults, and asks for it by `implementation.config(KernelConfig)`.
"""

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Protocol, Self, TypeVar

import jax

# `.ci/run` compares it with the JAX that its second Python installs.
NEWEST_TESTED_JAX = "0.12.0.1"

_MIN_CAPABILITY, _PDL_CAPABILITY = 8.0, 9.0
# GPUs from the first of these to below the second give a program 227 KB of shared memory.
_LARGE_CAPABILITIES = 9.0, 12.0
_DEPRECATED = "The Pallas Triton backend is deprecated"


class _Sizes(Protocol):
    """A frozen dataclass of sizes of kernels."""

    def for_row_invariance(self) -> Self:
        """Returns the sizes with which a row's bits depend on no other row."""


_Config = TypeVar("_Config", bound=_Sizes)


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """Facts about the GPUs that a program is compiled for.

    Attributes:
      capabilities: compute capability of each; empty where there is no GPU.
      has_pallas_triton: whether this JAX can lower Triton kernels.
    """

    capabilities: tuple[float, ...] = ()
    has_pallas_triton: bool = True

    @property
    def supports_pdl(self) -> bool:
        """Whether a kernel can start before the previous one has ended, as from Hopper on."""
        return bool(self.capabilities) and min(self.capabilities) >= _PDL_CAPABILITY

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory that a program may have on every one of the GPUs."""
        low, high = _LARGE_CAPABILITIES
        large = bool(self.capabilities) and all(low <= each < high for each in self.capabilities)
        return (227 if large else 99) * 1024


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation and what its kernels are to use.

    Attributes:
      name: "xla", "triton" or "interpret"; None lets JAX choose. After `resolve_implementation`
        "auto" stands for a choice that is made at lowering.
      configs: sizes of kernels, one frozen dataclass per package. A missing one has its defaults.
      device: facts about the GPUs. None stands for the GPUs that JAX sees.
      row_invariant: whether a row's bits may depend on no other row. Sizes on which they depend
        are then fixed, whatever `configs` gives.
    """

    name: str | None = None
    configs: tuple[Hashable, ...] = ()
    device: DeviceFacts | None = None
    row_invariant: bool = False

    @property
    def interpret(self) -> bool:
        """Whether the kernels run in Pallas' interpreter."""
        return self.name == "interpret"

    def config(self, kind: type[_Config]) -> _Config:
        """Returns the config of class `kind`, or its defaults where none was given."""
        config = kind()
        for given in self.configs:
            if isinstance(given, kind):
                config = given
        return config.for_row_invariance() if self.row_invariant else config

    def device_facts(self) -> DeviceFacts:
        """Returns the facts about the GPUs that were given, or about those that JAX sees."""
        return visible_devices() if self.device is None else self.device


def with_row_invariance(implementation: str | Implementation | None) -> Implementation:
    """Returns an implementation in which a row's bits depend on no other row."""
    if not isinstance(implementation, Implementation):
        implementation = Implementation(implementation)
    return dataclasses.replace(implementation, row_invariant=True)


def resolve_implementation(implementation: str | Implementation | None) -> Implementation:
    """Returns the implementation that is to run, or refuses one that cannot.

    Args:
      implementation: None, "xla", "triton" or "interpret", or an `Implementation` of that name.

    Returns:
      `Implementation` named "xla", "triton", "interpret" or "auto".

    Raises:
      ValueError: for an unknown name, or kernels that cannot be lowered here.
    """
    if not isinstance(implementation, Implementation):
        implementation = Implementation(implementation)
    elif implementation.name == "auto":
        return implementation
    name = implementation.name
    if name not in (None, "xla", "triton", "interpret"):
        raise ValueError(f"implementation is {name!r}; it is None, 'xla', 'triton' or 'interpret'.")
    if name == "xla":
        return implementation
    device = implementation.device_facts()
    why_no_gpu = _why_no_gpu(device)
    if name is None:
        name = "auto" if why_no_gpu is None else "xla"
        if name == "auto" and not device.has_pallas_triton:
            name = "xla"
            _warn_of_plain_jax()
    if name in ("triton", "interpret") and not device.has_pallas_triton:
        raise ValueError(
            f"implementation={name!r} names the Pallas Triton kernels, and JAX "
            f"{jax.__version__} has no Pallas Triton; use None or 'xla', or an older JAX."
        )
    if name == "triton" and why_no_gpu is not None:
        raise ValueError(
            f"implementation='triton' needs an NVIDIA GPU of compute capability 8.0 or newer, and "
            f"{why_no_gpu}; None chooses what this machine can run, 'interpret' tests the kernels."
        )
    if name in ("auto", "triton"):
        _silence_deprecation()
    return dataclasses.replace(implementation, name=name)


def choose_implementation(
    implementation: Implementation, xla: Callable[..., Any], kernels: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the function to call: `xla`, `kernels`, or one that JAX chooses at lowering.

    A function is returned, not called, so that no frame stands between a call and its kernels.

    Args:
      implementation: a resolved one.
      xla: the reference, a function of arrays.
      kernels: a function of these arrays, too.
    """
    if implementation.name == "xla":
        return xla
    if implementation.name == "auto":
        return functools.partial(jax.lax.platform_dependent, cuda=kernels, default=xla)
    return kernels


def is_for_cpu_alone(implementation: Implementation) -> bool:
    """Returns whether what is traced runs on a CPU: JAX sees nothing else, no mesh names another.

    Then plain JAX for other devices is not traced. An export for one from here is right, but slow.

    Args:
      implementation: a resolved one.
    """
    target = jax.sharding.get_abstract_mesh().abstract_device
    is_elsewhere = target is not None and target.platform != "cpu"
    has_gpu = bool(implementation.device_facts().capabilities)
    return not (has_gpu or is_elsewhere) and jax.default_backend() == "cpu"


@functools.cache
def visible_devices() -> DeviceFacts:
    """Returns the facts about the GPUs that JAX sees."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        devices = []
    try:
        has_triton = importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    except ImportError:
        has_triton = False
    return DeviceFacts(tuple(float(each.compute_capability) for each in devices), has_triton)


def _why_no_gpu(device: DeviceFacts) -> str | None:
    """Returns the reason why there is no GPU for the kernels; None where there is one."""
    if not device.capabilities:
        # Under an abstract mesh with a device the caller compiles for that one. A mesh of visible
        # devices names one too, of unknown capability.
        target = jax.sharding.get_abstract_mesh().abstract_device
        is_gpu = target is not None and target.platform in ("gpu", "cuda")
        return None if is_gpu else "JAX sees none here"
    if (lowest := min(device.capabilities)) < _MIN_CAPABILITY:
        return f"JAX sees one of {lowest}"
    return None


@functools.cache
def _warn_of_plain_jax() -> None:
    """Warns once a process that a GPU runs plain JAX, for want of Pallas Triton."""
    warnings.warn(
        f"specjax runs plain JAX on this GPU, ten to twenty times slower than its kernels: JAX "
        f"{jax.__version__} has no Pallas Triton. The newest JAX that specjax was tested with is "
        f"{NEWEST_TESTED_JAX}.",
        stacklevel=2,
    )


def _silence_deprecation() -> None:
    """Keeps JAX >= 0.11 from warning callers about Pallas Triton: the warning is for specjax.

    It runs at every public call, not where kernels are traced. JAX warns as it lowers, perhaps an
    older trace, after the caller has put the filters back. Filters change only if this one is not
    the first, because after any change Python shows once more what it has shown.
    """
    first = warnings.filters[0] if warnings.filters else None
    if first is None or getattr(first[1], "pattern", None) != _DEPRECATED:
        warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)
