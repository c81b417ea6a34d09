"""Files on a disk that is full: what was there before stays."""

import contextlib
import errno
import os
import resource

import pytest
from test_command import TARGET, write_model

from specjax.file_io import replace_file
from specjax.models import load, load_tokenizer, save

pytestmark = pytest.mark.lenient


@contextlib.contextmanager
def limit_file_size(num_bytes):
    """A write beyond so many bytes fails half way, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path, link = tmp_path / ("a" * 250), tmp_path / "link"
    link.symlink_to(path)
    for before in (None, b"old"):
        if before is not None:
            path.write_bytes(before)
            path.chmod(0o640)
        with (
            limit_file_size(1000),
            pytest.raises(OSError, match=os.strerror(errno.EFBIG)),
            replace_file(link) as spare,
        ):
            spare.write_bytes(bytes(2000))
        assert (path.read_bytes() if path.exists() else None) == before
        assert (
            os.listdir(tmp_path) == ["link"] if before is None else len(os.listdir(tmp_path)) == 2
        )
    with replace_file(link) as spare:
        spare.write_bytes(b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, "link"])


def test_a_new_file_has_the_mode_that_any_other_has(tmp_path):
    with replace_file(tmp_path / "a") as spare:
        spare.write_bytes(b"")
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    for folder in (tmp_path / "absent", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match=r"No such file|Not a directory") as caught:
            replace_file(folder / "a.txt").__enter__()
        assert caught.value.filename == str(folder)


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    link = tmp_path / "a.png"
    link.symlink_to(os.devnull)
    with replace_file(link) as spare:
        assert not spare.is_file()
        spare.write_bytes(b"x")
    assert not os.path.isfile(os.devnull)
    assert os.listdir(tmp_path) == ["a.png"]


def test_a_model_that_cannot_be_saved_leaves_the_one_that_was_there(tmp_path):
    folder = tmp_path / "model"
    write_model(folder, TARGET, 0)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model, config = load(folder)
    with limit_file_size(5000), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        save(folder, model.params, config, load_tokenizer(folder), dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
