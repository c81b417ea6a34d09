"""Programs that were kept run without a trace, and only where they would be traced alike."""

import bigrams
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import specjax
from specjax import SpeculativeConfig
from specjax.cli import program_store
from specjax.cli.program_store import program_path
from specjax.cli.stream_programs import StreamPrograms
from specjax.decode.request_batch import RequestArguments, check_arguments

TARGET, DRAFT = bigrams.pair(4, seed=1)
MODEL, DRAFTER = bigrams.model(TARGET), specjax.model_drafter(bigrams.model(DRAFT))
CONFIG = SpeculativeConfig(3)
DATA = {
    "keys": bigrams.keys(2),
    "max_new_tokens": 20,
    "temperature": np.array([0.7, 1.0], np.float32),
}


PARTS = {"begin_prefill", "read_prompt_chunk", "compute_rows", "_commit_rows", "run_draft"}


@pytest.fixture(autouse=True)
def _no_cache_of_jax():
    """JAX's cache is off, as in the command: XLA saves a program from there without its code."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def stream(folder, prompts, drafter=DRAFTER):
    """The tokens of a text, and the programs that were traced for it."""
    traced = []

    def listen(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.append(fun_name)

    arguments = check_arguments(MODEL, drafter, RequestArguments(prompts, **DATA), CONFIG)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        programs = StreamPrograms(MODEL, drafter, *arguments, program_path(folder, "a pair"))
        state = programs.read_prompt(MODEL, drafter)
        while not np.all(state.finish):
            state = programs.step(MODEL, drafter, state)
        programs._pool.shutdown()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return np.asarray(state.token_ids), PARTS & set(traced)


def test_what_was_kept_is_not_traced_and_gives_the_same_text(tmp_path):
    ids, traced = stream(tmp_path, [[1, 2, 3], [0, 1]])
    assert traced == PARTS
    again, traced = stream(tmp_path, [[1, 2, 3], [0, 1]])
    np.testing.assert_array_equal(again, ids)
    assert not traced
    # A file that was cut or changed is as good as none.
    (path,) = tmp_path.iterdir()
    for damaged in (path.read_bytes()[:-1] + b"x", b""):
        path.write_bytes(damaged)
        again, traced = stream(tmp_path, [[1, 2, 3], [0, 1]])
        np.testing.assert_array_equal(again, ids)
        assert traced == PARTS


@pytest.mark.once
def test_a_file_with_a_program_that_cannot_be_loaded_is_written_anew(tmp_path, monkeypatch):
    ids, _ = stream(tmp_path, [[1, 2, 3], [0, 1]])
    (path,) = tmp_path.iterdir()
    load, numbers = program_store.load_program, iter(range(100))

    def fail_once(*operands):
        if next(numbers) == 1:
            raise jax.errors.JaxRuntimeError("no such instruction")
        return load(*operands)

    with monkeypatch.context() as patch:
        patch.setattr(program_store, "load_program", fail_once)
        again, traced = stream(tmp_path, [[1, 2, 3], [0, 1]])
    np.testing.assert_array_equal(again, ids)
    assert len(traced) == 1
    assert not path.exists()
    assert stream(tmp_path, [[1, 2, 3], [0, 1]])[1] == PARTS
    assert path.exists()


@pytest.mark.parametrize("change", ["kind", "source", "variable", "setting", "x64"])
def test_programs_that_would_be_traced_otherwise_have_another_name(tmp_path, change, monkeypatch):
    def path(kind="a pair"):
        return program_path(tmp_path, kind)

    before = path()
    assert path() == before
    if change == "kind":
        assert path("another") != before
    elif change == "source":
        (tmp_path / "module.py").write_text("a = 1\n")
        monkeypatch.setattr(program_store, "_ROOT", tmp_path)
        first = path()
        (tmp_path / "module.py").write_text("a = 2\n")
        assert len({before, first, path()}) == 3
    elif change == "variable":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_thunk_runtime")
        assert path() != before
    elif change == "setting":
        precision = jax.config.jax_default_matmul_precision
        jax.config.update("jax_default_matmul_precision", "highest")
        assert path() != before
        jax.config.update("jax_default_matmul_precision", precision)
    else:
        with jax.enable_x64(True):
            assert path() != before


@pytest.mark.once
def test_a_folder_that_cannot_be_written_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    _, traced = stream(tmp_path / "file", [[1, 2, 3], [0, 1]])
    assert "_commit_rows" in traced
