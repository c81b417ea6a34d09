"""What tests and examples in docstrings share: fake devices, short compilations, names to use."""

import contextlib
import gc
import importlib.util
import os
import re
import sys
import tempfile
import time
import types

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from machine import has_gpu
from slow_tests import name_of, read_list

import specjax

# Without the extra `serve` their imports fail.
_OF_SERVE = ("contrib/serve/app.py", "contrib/serve/answers.py", "cli/serve/run_serve.py")
if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
    collect_ignore = [f"specjax/{name}" for name in _OF_SERVE]

# A trace makes millions of objects that live on: the collector, which looks through all of them
# again and again, takes a seventh of the time of what traces most.
gc.set_threshold(200_000, 20, 100)
# For each of Triton's operations MLIR imports the module of its dialect, by a name that jaxlib does
# not have, and searches sys.path thrice. An empty module of that name halves a kernel's lowering.
_TRITON_DIALECT = "jaxlib.mlir.dialects.tt"
if importlib.util.find_spec(_TRITON_DIALECT) is None:
    sys.modules[_TRITON_DIALECT] = types.ModuleType(_TRITON_DIALECT)
# Nothing here reads from which lines an operation comes; XLA carries them through every pass.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
jax.config.update("jax_traceback_in_locations_limit", 0)
# Before the first use of a backend. They share the cores: one device is no slower for it.
jax.config.update("jax_num_cpu_devices", 8)
# Most of the tests' time is compilation. Two fifths of that are passes that shorten loops until
# nothing changes, a third of the rest XLA's newer way to emit fusions, which later versions cannot
# leave out. LLVM is given each program as one module, where many cost more, and operations are not
# put in an order for several cores. A GPU's programs are compiled with all passes.
_FLAGS = os.environ.get("XLA_FLAGS", "")
_PASSES = (
    "simplify-while-loops,while-loop-invariant-code-motion,while-loop-constant-sinking,"
    "while-loop-trip-count-annotator,reshape-mover,constant_folding"
)
if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    fusions = "--xla_cpu_use_fusion_emitters=false" if jaxlib.__version__ < "0.11" else ""
    modules = (
        "--xla_cpu_parallel_codegen_split_count=1 "
        "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    os.environ["XLA_FLAGS"] = f"{_FLAGS} --xla_disable_hlo_passes={_PASSES} {fusions} {modules}"


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np, specjax=specjax)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """XLA's optimisations are left out but of what is `optimised`, unless the environment says.

    Most tests, and most processes that they start, compile for longer than they run. The flags of
    this process are read once, so that what is `optimised` has its own in processes alone.
    """
    item.stash[_BEGAN] = _cpu_seconds()
    kept = item.get_closest_marker("optimised")
    if kept and not kept.kwargs.get("interpreter", True) and item.get_closest_marker("interpret"):
        kept = None
    if kept:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", _FLAGS)
            return (yield)
    with _few_optimisations():
        return (yield)


_BEGAN = pytest.StashKey[float]()


def _cpu_seconds():
    """Seconds of a processor that this process and those that it waited for have taken."""
    return time.process_time() + sum(os.times()[2:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A JUnit file says as `cpu_seconds` what a test took, with what it set up and took down."""
    if call.when == "teardown":
        item.user_properties.append(("cpu_seconds", f"{_cpu_seconds() - item.stash[_BEGAN]:.4f}"))
    return (yield)


@contextlib.contextmanager
def _few_optimisations():
    name = "jax_disable_most_optimizations"
    if name.upper() in os.environ or has_gpu():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "1")
        jax.config.update(name, True)
        try:
            yield
        finally:
            jax.config.update(name, False)


_EXAMPLES_ONCE = ("specjax/models/", "specjax/contrib/")
_ONCE_IN_WHOLE = re.compile(r"^pytestmark = .*\bpytest\.mark\.once\b", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """A file that is `once` as a whole is not imported where `once` is left out."""
    words = re.split(r"\band\b", config.option.markexpr)
    if collection_path.suffix != ".py" or "not once" not in map(str.strip, words):
        return None
    return bool(_ONCE_IN_WHOLE.search(collection_path.read_text(encoding="utf-8"))) or None


_SLOW = read_list()
# The repository's own rules, and distributions and mutants.
_CHECKS = ("tests/repo/", "tests/laws/")
_KERNELS = ("tests/pallas/", "tests/models/")


def pytest_itemcollected(item):
    """Marks examples of models as `once`, what CI measured as slow, and folders of `checks`.

    Examples of other rooms show the same of JAX in less time. `tests/pallas` compares the kernels
    with plain JAX; that every room finds the same through them is one of the `checks`, as are the
    lowerings of further dtypes and sizes, which are `once`.
    """
    if isinstance(item, pytest.DoctestItem) and item.nodeid.startswith(_EXAMPLES_ONCE):
        item.add_marker(pytest.mark.once)
    if name_of(item.nodeid) in _SLOW:
        item.add_marker(pytest.mark.slow)
    marks = {mark.name for mark in item.iter_markers()}
    of_a_room = "interpret" in marks and not item.nodeid.startswith(_KERNELS)
    if item.nodeid.startswith(_CHECKS) or of_a_room or marks >= {"lowering", "once"}:
        item.add_marker(pytest.mark.checks)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Each worker compiles what files of tests compute as they are imported."""
    with _few_optimisations():
        return (yield)


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
        # For another number of devices a program is compiled anew.
        patch.setenv("JAX_NUM_CPU_DEVICES", str(jax.config.jax_num_cpu_devices))
        yield


# Files of tests by their seconds of a processor, longest first. If one began last, the other
# workers would wait for it; files of a few seconds, and docstrings, fill what is left.
_LONGEST_FILES = (
    "tests/models/decoder/test_decode_step.py",
    "tests/pallas/test_verify.py",
    "tests/pallas/test_lowering.py",
    "tests/repo/test_house.py",
    "tests/processing/test_cutoff.py",
    "tests/repo/test_benchmarks.py",
    "tests/repo/test_frozen.py",
    "tests/decode/test_generate.py",
    "tests/samplers/test_edges.py",
    "tests/cli/test_processes.py",
    "tests/repo/test_examples.py",
    "tests/decode/test_sampling_params.py",
    "tests/cli/test_command.py",
    "tests/decode/test_coupled.py",
    "tests/samplers/test_tree_rejection_sample.py",
    "tests/samplers/test_token_map.py",
    "tests/samplers/test_block_rule.py",
    "tests/models/test_dflash.py",
    "tests/samplers/test_transforms.py",
    "tests/models/test_eagle3.py",
    "tests/samplers/test_rejection_sample.py",
    "tests/cli/test_sweep.py",
    "tests/laws/test_sampling_laws.py",
    "tests/decode/test_drafts.py",
    "tests/laws/test_mutants.py",
    "tests/decode/test_adaptive_k.py",
    "tests/engine/test_engine.py",
    "tests/samplers/test_rules.py",
    "tests/cli/test_batch.py",
    "tests/decode/test_draft_vocabulary.py",
    "tests/decode/test_capacity.py",
    "tests/models/test_sharding.py",
    "tests/repo/test_readme.py",
    "tests/pallas/test_split.py",
    "tests/laws/test_laws.py",
    "tests/samplers/test_ragged.py",
    "tests/samplers/test_gumbel_sample.py",
    "tests/core/test_subnormal.py",
    "tests/samplers/test_coupled_rule.py",
    "tests/laws/test_block_laws.py",
    "tests/laws/test_tree_laws.py",
    "tests/samplers/test_greedy_logprobs.py",
    "tests/pallas/test_named_implementation.py",
    "tests/cli/test_stream_programs.py",
    "tests/contrib/grammars/test_json_schema.py",
    "tests/pallas/test_cutoff_team.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Sorts the longest files first where workers share them; `--dist loadfile` keeps the order."""
    if not hasattr(config, "workerinput"):
        return
    absent = [file for file in _LONGEST_FILES if not (config.rootpath / file).exists()]
    assert not absent, f"conftest.py names {absent} among the longest files of tests."
    rank = {file: number for number, file in enumerate(_LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """The collector leaves out what the imports made, a third of a million objects.

    They live as long as the process. Looking through them took a quarter of a second, after each
    file of tests at least.
    """
    gc.collect()
    gc.freeze()
