"""The training of the embedded pair, in toy sizes: from the corpus to two folders that load."""

import collections
import importlib
import itertools
import json
import math
import pathlib
import pickle
import re
import sysconfig
import tarfile
import types

import jax
import numpy as np
import pytest
from scripts import run_script

from specjax.models import TransformerConfig, load, load_tokenizer, pretrained_folder

pytestmark = pytest.mark.once

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
TINY = TransformerConfig(64, 16, 32, 1, 4, 2, 4)


@pytest.fixture
def import_pair(monkeypatch):
    """Gives a module of the training by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return lambda name: importlib.import_module(f"pair.{name}")


def sources(*names):
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return {f"python/{name}": (library / name).read_bytes() for name in names}


def brute_force_share(text, others):
    def windows(text):
        return [text[i : i + 64] for i in range(len(text) - 63)]

    windows_of_others = set(itertools.chain.from_iterable(map(windows, others)))
    matches = [window in windows_of_others for window in windows(text)]
    return sum(matches) / len(matches) if matches else 0.0


@pytest.mark.checks
def test_the_script_trains_a_pair_that_loads(import_pair, tmp_path, monkeypatch, capsys):
    texts = sources("csv.py", "shlex.py", "textwrap.py", "bisect.py")
    sides = {path: "heldout" if "bisect" in path else "train" for path in texts}
    record = {"packages": [], "files": [{"path": p, "split": s} for p, s in sides.items()]}
    archive, out = tmp_path / "corpus.tar.xz", tmp_path / "out"
    import_pair("corpus").write_archive(archive, (texts, record))
    sizes = "--tiny --target-steps 7 --draft-steps 4 --batch 4 --length 32 --steps-per-call 2"
    options = ("--from-archive", archive, "--out", out, *sizes.split())
    run_script(monkeypatch, EXAMPLES / "train_pair.py", *options, cwd=tmp_path)
    printed = capsys.readouterr().out

    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    for name, steps in (("target", 8), ("draft", 4)):
        assert report[name]["steps"] == steps
        assert [step for step, _ in report[name]["curve"]] == list(range(2, steps + 1, 2))
        saved = pickle.loads((out / "checkpoints" / f"{name}.checkpoint").read_bytes())
        model, config = load(out / name, "bfloat16")
        assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (512, 32, 1)
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), b.astype(a.dtype)),
            model.params,
            saved["state"][0],
        )
    losses = [loss for _, loss in report["target"]["curve"]]
    assert losses[-1] < losses[0] < 1.1 * math.log(512)

    text = texts["python/bisect.py"]
    tokenizer = load_tokenizer(out / "target")
    ids = tokenizer.encode(text.decode()).ids
    assert tokenizer.decode(ids) == text.decode()
    assert tokenizer.to_str() == load_tokenizer(out / "draft").to_str()
    heldout = report["heldout"]
    assert heldout["heldout_bytes"] == len(text)
    # The end of the text is judged too.
    assert heldout["heldout_tokens"] == len(ids) + 1
    for name in ("target", "draft"):
        assert heldout[f"{name}_bits_per_byte"] * len(text) < math.log2(512) * (len(ids) + 1)
    assert 0 < heldout["acceptance"] <= 1
    assert f"{heldout['acceptance']:.4f}" in printed
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_that_was_stopped_and_continued_gives_the_same_weights(
    import_pair, tmp_path, monkeypatch
):
    training, losses = import_pair("training"), import_pair("losses")
    recipe = training.Recipe(
        steps=6,
        minutes=0.0,
        batch=2,
        length=16,
        peak_rate=1e-2,
        steps_per_call=2,
        seed=3,
        attention="xla",
        dtype="float32",
    )
    data = jax.random.randint(jax.random.key(0), (500,), 0, TINY.vocab_size)
    loss = losses.next_token(TINY, recipe)

    def train(folder):
        folder.mkdir(exist_ok=True)
        return training.train("toy", TINY, recipe, loss, data, folder)

    uninterrupted, log = train(tmp_path / "straight")
    save = training._save

    def save_and_stop(path, content):
        save(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        minutes = itertools.count(0, 100)
        patch.setattr(training, "time", types.SimpleNamespace(perf_counter=minutes.__next__))
        patch.setattr(training, "_save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "stopped")
    saved = pickle.loads((tmp_path / "stopped" / "toy.checkpoint").read_bytes())
    assert saved["done"] == 2
    continued, continued_log = train(tmp_path / "stopped")
    jax.tree.map(np.testing.assert_array_equal, continued, uninterrupted)
    assert continued_log["curve"] == log["curve"]
    assert json.loads(json.dumps(continued_log))["steps"] == 6
    assert [step for step, _ in log["curve"]] == [2, 4, 6]
    first_weights = saved["state"][0]["embedding"]
    assert np.abs(first_weights - np.asarray(uninterrupted["embedding"])).max() > 1e-3

    repeated, _ = train(tmp_path / "stopped")
    jax.tree.map(np.testing.assert_array_equal, repeated, uninterrupted)


def test_the_share_of_windows_is_that_of_brute_force(import_pair):
    rng = np.random.default_rng(0)
    pieces = [
        rng.integers(97, 100, size, dtype=np.uint8).tobytes() for size in (200, 90, 64, 30, 0)
    ]
    a, b, c, d, _ = pieces
    # Few windows, repeated within a text.
    periodic = [b"ab" * 50, b"ba" * 40, bytes(100), bytes(64)]
    texts = [*pieces, a[:100] + b, c + a[37:150], b"x" + c, c + b"x", d + a[:63], *periodic]
    others = [a, b"y" + c + b"y", d * 3, b[:63], b"ab" * 33, bytes(70), b""]
    shares = import_pair("overlap").shares_of_windows(texts, others)
    expected = [brute_force_share(text, others) for text in texts]
    assert shares == pytest.approx(expected, abs=1e-12)
    assert {0.0, 1.0} < set(expected)
    assert import_pair("overlap").shares_of_windows([], others) == []
    assert import_pair("overlap").shares_of_windows(texts, []) == [0.0] * len(texts)


def test_a_held_out_file_of_which_more_than_a_fifth_is_known_is_dropped(import_pair):
    corpus, rng = import_pair("corpus"), np.random.default_rng(1)

    def text_of(size):
        return rng.integers(32, 127, size, dtype=np.uint8).tobytes()

    shared = text_of(400)
    # Of 500 windows, 99, 100 and 101 are those of the shared text, if it is on the other side.
    texts = [shared[: n + 63] + text_of(500 - n) for n in (99, 100, 101) for _ in range(24)]
    texts += [shared, *(text_of(600) for _ in range(8))]
    files = [corpus.File(f"p/{i:03}.py", "p", text) for i, text in enumerate(texts)]
    unique, records = corpus.split([*files, files[5]._replace(path="p/copy.py")], 500)
    assert len(unique) == len(records) == len(files)
    sides = [corpus.texts_of(({f.path: f.text for f in unique}, {"files": records}), "train")]
    for file, record in zip(unique, records, strict=True):
        assert record["path"] == file.path
        if record["split"] == "train":
            continue
        share = brute_force_share(file.text, sides[0])
        assert record["shared"] == round(share, 4)
        assert record["split"] == ("heldout" if share <= 0.2 else "dropped")
    splits = {record["shared"]: record["split"] for record in records if "shared" in record}
    assert {splits[0.198], splits[0.2]} == {"heldout"}
    assert splits[0.202] == "dropped"


def test_an_archive_is_read_back_and_may_hold_one_side(import_pair, tmp_path):
    corpus = import_pair("corpus")
    texts = {"python/a.py": b"a = 1\n", "python/b.py": b"b = 2\n"}
    files = [{"path": "python/a.py", "split": "train"}, {"path": "python/b.py", "split": "heldout"}]
    whole = (texts, {"packages": [], "files": files})
    corpus.write_archive(tmp_path / "all.tar.xz", whole)
    assert corpus.read_archive(tmp_path / "all.tar.xz") == whole
    corpus.write_archive(tmp_path / "heldout.tar.xz", whole, ("heldout",))
    heldout = corpus.read_archive(tmp_path / "heldout.tar.xz")
    assert heldout == ({"python/b.py": b"b = 2\n"}, whole[1])
    assert corpus.texts_of(heldout, "heldout") == [b"b = 2\n"]


def test_the_card_names_the_packages_of_the_record():
    card = EXAMPLES.parent / "MODEL_CARD.md"
    if not card.exists():
        pytest.skip("The card is not in a source distribution.")
    text = card.read_text(encoding="utf-8")
    with tarfile.open(pretrained_folder("target").parent / "data" / "heldout.tar.xz") as archive:
        record = json.load(archive.extractfile("record.json"))
    used = [entry["name"] for entry in record["packages"] if entry["used"]]
    sides = collections.Counter(entry["split"] for entry in record["files"])
    words = " ".join(text.split())
    assert f"{len(used) - 1} packages" in words  # Python's own library is not one of them
    assert f"{sides['train']:,} files" in words
    assert f"the {sides['heldout']} held-out files" in words
    table = text.split("licence, as the package states it")[1].split("\n\n")[0]
    assert [name for name in used if not re.search(rf"[ |]{name}[, ]", table)] == ["python"]
