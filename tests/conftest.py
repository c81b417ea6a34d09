"""Strictness for the core's tests, fake devices, and the implementations this machine has."""

import gc
import importlib.util
import os
import pathlib
import tempfile

import jax
import jaxlib
import pytest
from machine import has_gpu

# Before the first use of a backend. They share the cores: one device is no slower for it.
jax.config.update("jax_num_cpu_devices", 4)
# Most of the tests' time is compilation. Two fifths of that are passes that shorten loops until
# nothing changes, a third of the rest XLA's newer way to emit fusions, which later versions cannot
# leave out. A GPU's programs are compiled with all passes.
_FLAGS = os.environ.get("XLA_FLAGS", "")
_PASSES = (
    "simplify-while-loops,while-loop-invariant-code-motion,while-loop-constant-sinking,"
    "while-loop-trip-count-annotator,reshape-mover,constant_folding"
)
if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    fusions = "--xla_cpu_use_fusion_emitters=false" if jaxlib.__version__ < "0.11" else ""
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_disable_hlo_passes={_PASSES} {fusions}"

_HERE = pathlib.Path(__file__).parent
_MODELS = _HERE / "models"
# Where laws are drawn a hundred thousand times, Pallas' interpreter would take the day.
_TOO_LONG_TO_INTERPRET = ("test_laws.py", "test_mutants.py")
# `make gpu-test` sets the first: then no GPU is a failure. With the second the GPU's tests run at a
# reduced size in Pallas' interpreter, so that they can be written where there is no GPU.
_GPU_IS_NEEDED = "SPECJAX_GPU_TEST" in os.environ
_REHEARSAL = "SPECJAX_GPU_REHEARSAL" in os.environ


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """Mixed dtypes and ranks are errors, but for what is marked `lenient` or stands in models/."""
    if request.node.get_closest_marker("lenient") or _MODELS in request.path.parents:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """XLA's optimisations are left out but of what is `optimised`, unless the environment says.

    Most tests, and most processes that they start, compile for longer than they run. The flags of
    this process are read once, so that what is `optimised` has its own in processes alone.
    """
    name = "jax_disable_most_optimizations"
    kept = item.get_closest_marker("optimised")
    if kept and not kept.kwargs.get("interpreter", True) and item.get_closest_marker("interpret"):
        kept = None
    if kept:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", _FLAGS)
            return (yield)
    if name.upper() in os.environ or has_gpu():
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "1")
        jax.config.update(name, True)
        try:
            return (yield)
        finally:
            jax.config.update(name, False)


@pytest.fixture(scope="session", autouse=True)
def _kept_compilations():
    """What one file compiles is read by the next, and by the commands that run as processes.

    Most of the tests' time is compilation. JAX writes without a lock: each worker keeps its own,
    unless JAX_COMPILATION_CACHE_DIR names a folder, which then outlives the session.
    """
    if has_gpu():
        yield
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR", folder)
        for name, value in [
            ("jax_compilation_cache_dir", folder),
            ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ]:
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        yield


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Frees what a file compiled: a process ends when its programs take its 65530 memory maps."""
    yield
    jax.clear_caches()
    gc.collect()


def pytest_collection_modifyitems(config, items):
    """GPU tests are skipped without a GPU, or refused where they were asked for."""
    if has_gpu():
        return
    if _GPU_IS_NEEDED:
        raise pytest.UsageError("JAX sees no NVIDIA GPU here, and make gpu-test needs one.")
    for item in items:
        if item.get_closest_marker("gpu") and not _REHEARSAL:
            item.add_marker(pytest.mark.skip(reason="JAX sees no NVIDIA GPU here"))


def pytest_generate_tests(metafunc):
    """Each implementation of the samplers that this machine can run, to whoever asks for one."""
    if "implementation" not in metafunc.fixturenames:
        return
    names = ["xla"]
    if metafunc.definition.path.name not in _TOO_LONG_TO_INTERPRET:
        names.append(pytest.param("interpret", marks=pytest.mark.interpret))
    if has_gpu():
        names.append(pytest.param("triton", marks=pytest.mark.gpu))
    metafunc.parametrize("implementation", names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def implementation(request):
    """An implementation; its kernels cut rows into the smallest tiles of two blocks."""
    if request.param == "xla":
        return request.param
    from specjax.implementation import Implementation
    from specjax.pallas.kernel_config import KernelConfig, Tile

    tile = Tile(256, 4)
    config = KernelConfig(
        row=tile,
        target=tile,
        residual=tile,
        search=tile,
        whole_search=tile,
        # Of rows this short, too, some are searched where they were buffered, and some are not.
        num_register_logits=64,
        small_reread=4,
        large_reread=8,
        max_reread=60,
    )
    return Implementation(request.param, (config,))
