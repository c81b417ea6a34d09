"""Strictness for the core's tests, and the implementations this machine has."""

import gc
import os
import pathlib

import jax
import pytest
from kernel_tests import kernel_modules, kernel_tests, tests_of
from machine import has_gpu

_HERE = pathlib.Path(__file__).parent
_MODELS = _HERE / "models"
# Where distributions are sampled a hundred thousand times, Pallas' interpreter would take the day.
_TOO_LONG_TO_INTERPRET = ("test_laws.py", "test_mutants.py")
# `make gpu-test` sets the first: then no GPU is a failure. With the second the GPU's tests run at a
# reduced size in Pallas' interpreter, so that they can be written where there is no GPU.
_GPU_IS_NEEDED = "SPECJAX_GPU_TEST" in os.environ
_REHEARSAL = "SPECJAX_GPU_REHEARSAL" in os.environ


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """Mixed dtypes and ranks are errors, except under the mark `lenient` and in models/."""
    if request.node.get_closest_marker("lenient") or _MODELS in request.path.parents:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Frees what a file compiled: a process ends when its programs take its 65530 memory maps."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _launched_kernels(request):
    """A JUnit file says which kernels a test traced, for the interpreter or for CUDA.

    What a test of the file traced before, JAX does not trace again.
    """
    mark = next(filter(request.node.get_closest_marker, ("interpret", "lowering")), None)
    if mark is None:
        yield
        return
    from jax.experimental import pallas

    names, call = set(), pallas.pallas_call

    def record(*arguments, name=None, **options):
        names.add(name or "")
        return call(*arguments, name=name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas, "pallas_call", record)
        yield
    request.node.user_properties.append((mark, " ".join(sorted(names))))


def pytest_addoption(parser):
    parser.addoption("--kernel", help="a kernel file, such as next_token, whose tests alone run")


def pytest_configure(config):
    """A name of no kernel file is refused, rather than that it selects nothing."""
    name = config.getoption("kernel")
    if name and not kernel_modules(name):
        names = sorted({module.rpartition(".")[2] for module in kernel_modules()})
        raise pytest.UsageError(f"{name} is no kernel file or folder: {', '.join(names)}.")


def _keep_tests_of(name, config, items):
    among = kernel_tests(items)
    kept = {id(item) for module in kernel_modules(name) for item in tests_of(module, among)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def pytest_collection_modifyitems(config, items):
    """GPU tests are skipped without a GPU, or refused where they were asked for."""
    if name := config.getoption("kernel"):
        _keep_tests_of(name, config, items)
    if has_gpu():
        return
    if _GPU_IS_NEEDED:
        raise pytest.UsageError("JAX sees no NVIDIA GPU here, and make gpu-test needs one.")
    for item in items:
        if item.get_closest_marker("gpu") and not _REHEARSAL:
            item.add_marker(pytest.mark.skip(reason="JAX sees no NVIDIA GPU here"))


def pytest_generate_tests(metafunc):
    """Parametrizes `implementation` with each one that this machine can run."""
    if "implementation" not in metafunc.fixturenames:
        return
    names = ["xla"]
    elsewhere = metafunc.definition.get_closest_marker("interpreted_elsewhere")
    if not elsewhere and metafunc.definition.path.name not in _TOO_LONG_TO_INTERPRET:
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
        # Tests of 8 requests meet the schedule of a small batch, those of more that of a large one.
        max_small_programs=100,
        buffer_search=tile,
        row_search=tile,
        # Of rows this short, too, some are searched where they were buffered, and some by a team.
        num_search_programs=2,
        num_register_logits=64,
        small_reread_chunk=4,
        large_reread_chunk=8,
        max_reread=60,
    )
    return Implementation(request.param, (config,))
