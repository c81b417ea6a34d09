"""The cache of compiled programs: which folder is used, and that it is read and written."""

import math
import os
import stat

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import specjax


@pytest.fixture
def no_folder(monkeypatch):
    """JAX uses no folder, as in a process of a user; afterwards the tests' folder again."""
    names = ("enable_compilation_cache", "compilation_cache_dir")
    names = (*names, "persistent_cache_min_compile_time_secs")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_another(number):
    jax.block_until_ready(jax.jit(lambda x: x * number)(jnp.float32(1)))


def test_programs_are_kept_in_the_folder_that_was_named_last(no_folder, tmp_path):
    compile_another(3)
    for name in ("first", "second"):
        folder = tmp_path / "absent" / name
        assert specjax.enable_compilation_cache(folder, min_compile_seconds=0) == folder
        compile_another(len(name))
        assert list(folder.iterdir())
    # A call without a folder keeps the one in use, and its threshold.
    assert specjax.enable_compilation_cache() == folder
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_the_default_is_a_folder_of_this_host_by_the_rules_of_xdg(no_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    roots = {str(tmp_path / "xdg"): tmp_path / "xdg", "": tmp_path / "home" / ".cache"}
    roots["relative"] = roots[""]
    for value, root in roots.items():
        jax.config.update("jax_compilation_cache_dir", None)
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        folder = specjax.enable_compilation_cache()
        assert folder.is_dir()
        assert folder.parent == root / "specjax"
        assert folder.name.startswith(os.uname().nodename)
        assert jax.config.jax_compilation_cache_dir == str(folder)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.2


def test_a_folder_of_the_environment_is_left_to_jax(no_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert specjax.enable_compilation_cache() == tmp_path
    assert jax.config.jax_compilation_cache_dir is None


def test_a_cache_that_is_off_or_cannot_be_written_is_none_and_a_folder_asked_for_an_error(
    no_folder, tmp_path, monkeypatch
):
    (tmp_path / "file").touch(stat.S_IRUSR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert specjax.enable_compilation_cache() is None
    with pytest.raises(OSError, match="file"):
        specjax.enable_compilation_cache(tmp_path / "file")
    for seconds, came in ((-1, "-1"), ("0.5", "'0.5'"), (None, "None"), (math.nan, "nan")):
        sentence = f"min_compile_seconds is {came}; it needs to be a number >= 0"
        with pytest.raises(ValueError, match=sentence):
            specjax.enable_compilation_cache(tmp_path, min_compile_seconds=seconds)
    jax.config.update("jax_enable_compilation_cache", False)
    assert specjax.enable_compilation_cache(tmp_path) is None
    assert jax.config.jax_compilation_cache_dir is None
