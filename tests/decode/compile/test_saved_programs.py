"""Files of programs: what was saved, or a sentence, whatever happened to a file meanwhile."""

import hashlib
import json
import os

import pytest

from specjax.decode.compile import saved_programs
from specjax.decode.compile.saved_programs import SavedProgram, read_programs, write_programs

PROGRAMS = [SavedProgram(b"first", 3, 1), SavedProgram(b"", 0, 0), SavedProgram(b"third\n", 1, 2)]
DESCRIPTION = {"options": {"batch_size": 2}, "arguments": {"target": "float32[3]"}}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_programs, "describe_process", lambda: {"jax": "0.1", "device": "a"})
    path = tmp_path / "programs"
    write_programs(path, DESCRIPTION, PROGRAMS)
    return path


def refusal(path, data):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^{path} .*[.]$") as caught:
        read_programs(path)
    return str(caught.value).removeprefix(f"{path} ")


def test_programs_are_read_as_they_were_written(path):
    assert read_programs(path) == (DESCRIPTION, PROGRAMS)


def test_a_file_that_was_cut_or_changed_anywhere_is_a_sentence(path):
    whole = path.read_bytes()
    assert refusal(path, whole[:40]) == "has no whole first line; save it again."
    short = "has not as many bytes as its first line says; save it again."
    assert {refusal(path, whole[:-1]), refusal(path, whole + b"?")} == {short}
    other = "holds other bytes than were saved; save it again."
    for old, new in [(b"first", b"First"), (b'"batch_size": 2', b'"batch_size": 3')]:
        assert refusal(path, whole.replace(old, new)) == other
    first, second = b"[5, 3, 1]", b"[6, 1, 2]"
    swapped = whole.replace(first, b"?").replace(second, first).replace(b"?", second)
    assert refusal(path, swapped) == other
    for n in range(len(whole)):
        refusal(path, whole[:n])
        refusal(path, whole[:n] + bytes([whole[n] ^ 1 << n % 8]) + whole[n + 1 :])


def test_a_file_that_grew_beyond_the_memory_is_not_read(path):
    os.truncate(path, 2**40)
    with pytest.raises(ValueError, match="has not as many bytes"):
        read_programs(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"programs": programs} for programs in (None, {}, [[]], [["a", 1, 1]], [[11, 1]])),
        *({"programs": [[size, 1, 1]]} for size in (2**62, 1e30, -1, [1])),
        *({"made_by": made_by} for made_by in (None, ["jax"], {})),
        {"format": []},
    ],
)
def test_a_first_line_of_another_form_is_a_sentence_also_where_the_digest_holds(change, path):
    line, rest = path.read_bytes()[:-32].split(b"\n", 1)
    content = json.dumps(json.loads(line) | change).encode() + b"\n" + rest
    refusal(path, content + hashlib.sha256(content).digest())


def test_a_first_line_of_megabytes_is_a_short_sentence(path):
    line = json.loads(path.read_bytes().split(b"\n", 1)[0])
    line["made_by"]["jax"] = "1" * 10**7
    words = refusal(path, json.dumps(line).encode() + b"\n")
    assert words.startswith("was compiled with jax '111")
    assert len(words) < 300
