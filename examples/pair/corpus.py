"""Python source of the standard library and of permissively licensed packages, with a record."""

import hashlib
import importlib.metadata
import io
import json
import pathlib
import re
import sys
import sysconfig
import tarfile
from typing import Any, NamedTuple

from pair.overlap import shares_of_windows
from specjax.file_io import replace_file

PACKAGES = (
    "aiohttp",
    "astropy",
    "attrs",
    "babel",
    "black",
    "click",
    "dask",
    "django",
    "flask",
    "flax",
    "ipython",
    "jax",
    "jinja2",
    "matplotlib",
    "mypy",
    "networkx",
    "nltk",
    "numpy",
    "optax",
    "pandas",
    "pydantic",
    "pygments",
    "pytest",
    "requests",
    "rich",
    "scikit-image",
    "scikit-learn",
    "scipy",
    "sphinx",
    "sqlalchemy",
    "statsmodels",
    "sympy",
    "tornado",
    "transformers",
    "twisted",
    "werkzeug",
    "xarray",
)

_PERMISSIVE = (
    "mit",
    "mit license",
    "bsd",
    "bsd license",
    "bsd-2-clause",
    "bsd-3-clause",
    "3-clause bsd license",
    "0bsd",
    "apache-2.0",
    "apache 2.0",
    "apache license 2.0",
    "apache 2.0 license",
    "apache license, version 2.0",
    "apache software license",
    "isc",
    "isc license (iscl)",
    "psf-2.0",
    "python-2.0",
    "python software foundation license",
    "zlib",
    "cc0-1.0",
)
_SKIPPED_FOLDERS = {"_vendor", "vendor", "vendored", "_vendored", "extern", "externals", "test"}
_SKIPPED_FOLDERS |= {"tests", "testing", "site-packages", "__pycache__", "idle_test", "lib2to3"}
_GENERATED = re.compile(r"generated (by|from|automatically)|auto-?generated|do not edit", re.I)
_SHARE_ALLOWED = 0.2


class File(NamedTuple):
    """One source file: where it lies in the archive, its package, its text."""

    path: str
    package: str
    text: bytes


def licence_of(distribution: importlib.metadata.Distribution) -> tuple[str, bool]:
    """What a distribution says of its licence, and whether all of it is permissive."""
    metadata = distribution.metadata
    expression = metadata.get("License-Expression")
    if expression:
        names = [n.strip(" ()") for n in re.split(r"\b(?:AND|OR|WITH)\b", expression)]
        return expression, all(name.lower() in _PERMISSIVE for name in names)
    lines = metadata.get_all("Classifier") or []
    names = [line.split("::")[-1].strip() for line in lines if line.startswith("License ::")]
    names = [name for name in names if name != "OSI Approved"] or [metadata.get("License", "")]
    shown = " AND ".join(names).strip().splitlines()
    return (shown or ["none stated"])[0], all(name.lower() in _PERMISSIVE for name in names)


def is_prose_of_python(text: bytes) -> bool:
    """Whether a file reads as written source: not huge, not generated, not a table of data."""
    if not 400 <= len(text) <= 150_000:
        return False
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    lines = decoded.splitlines()
    if max(map(len, lines)) > 500 or _GENERATED.search("\n".join(lines[:12])):
        return False
    data = sum(character.isdigit() or character in "\\\"',[](){}" for character in decoded)
    letters = sum(character.isascii() for character in decoded)
    return data < 0.25 * len(decoded) and letters > 0.98 * len(decoded)


def _sources(root: pathlib.Path, paths: list[pathlib.Path], package: str) -> list[File]:
    files = []
    for path in sorted(paths):
        inner = path.relative_to(root)
        if path.suffix != ".py" or _SKIPPED_FOLDERS & set(inner.parts) or not path.is_file():
            continue
        text = path.read_bytes().replace(b"\r\n", b"\n")
        if is_prose_of_python(text):
            files.append(File(f"{package}/{inner.as_posix()}", package, text))
    return files


def gather(names: list[str], folder: str | None) -> tuple[list[File], list[dict[str, Any]]]:
    """Reads the standard library and the named packages.

    Args:
      names: distributions; those not installed or not permissive are recorded as left out.
      folder: a site-packages folder to find them in; None is the running interpreter's.

    Returns:
      The files, and one record per package.
    """
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = _sources(library, list(library.rglob("*.py")), "python")
    version = ".".join(map(str, sys.version_info[:3]))
    packages = [{"name": "python", "version": version, "licence": "PSF-2.0", "used": True}]
    where = {"path": [folder]} if folder else {}
    found = {d.metadata["Name"].lower(): d for d in importlib.metadata.distributions(**where)}
    for name in sorted(set(names)):
        distribution = found.get(name.lower())
        if distribution is None:
            packages.append({"name": name, "used": False, "reason": "not installed"})
            continue
        licence, permissive = licence_of(distribution)
        record = {"name": name, "version": distribution.version, "licence": licence}
        packages.append(record | {"used": permissive})
        if permissive:
            root = pathlib.Path(str(distribution.locate_file("")))
            paths = [pathlib.Path(str(p.locate())) for p in distribution.files or []]
            inside = [path for path in paths if path.is_relative_to(root)]
            files += _sources(root, inside, name)
    return files, packages


def split(files: list[File], parts_per_thousand: int) -> tuple[list[File], list[dict[str, Any]]]:
    """Removes identical files and decides each file's side by its hash.

    A held-out file of whose 64-byte windows more than a fifth occur in the training
    files is dropped from both sides.

    Returns:
      The files without duplicates, and a record of each with its side.
    """
    unique = {hashlib.sha256(file.text).hexdigest(): file for file in reversed(files)}
    pairs = sorted(unique.items(), key=lambda pair: pair[1].path)
    held = [int(digest[:8], 16) % 1000 < parts_per_thousand for digest, _ in pairs]
    shares = iter(
        shares_of_windows(
            [file.text for (_, file), side in zip(pairs, held, strict=True) if side],
            [file.text for (_, file), side in zip(pairs, held, strict=True) if not side],
        )
    )
    records = []
    for (digest, file), side in zip(pairs, held, strict=True):
        record = {"path": file.path, "sha256": digest, "bytes": len(file.text), "split": "train"}
        if side:
            share = next(shares)
            kept = share <= _SHARE_ALLOWED
            record |= {"split": "heldout" if kept else "dropped", "shared": round(share, 4)}
        records.append(record)
    return [file for _, file in pairs], records


def collect(
    names: list[str], folder: str | None, parts_per_thousand: int
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The corpus: the text of each file by its path, and the record of where all came from."""
    files, packages = gather(names, folder)
    kept, records = split(files, parts_per_thousand)
    sides = {record["path"]: record["split"] for record in records}
    texts = {file.path: file.text for file in kept if sides[file.path] != "dropped"}
    return texts, {"packages": packages, "files": records}


def texts_of(corpus: tuple[dict[str, bytes], dict[str, Any]], side: str) -> list[bytes]:
    """The texts on one side of the split, "train" or "heldout", in the order of the record."""
    texts, record = corpus
    return [texts[file["path"]] for file in record["files"] if file["split"] == side]


def write_archive(
    path: pathlib.Path,
    corpus: tuple[dict[str, bytes], dict[str, Any]],
    sides: tuple[str, ...] = ("train", "heldout"),
) -> None:
    """Writes the record and the files of the given sides as one compressed archive."""
    texts, record = corpus
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as spare, tarfile.open(spare, "w:xz", preset=9) as archive:
        for name, text in [("record.json", json.dumps(record, indent=0).encode())] + [
            (file["path"], texts[file["path"]])
            for file in record["files"]
            if file["split"] in sides
        ]:
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))


def read_archive(path: pathlib.Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Reads what `write_archive` wrote."""
    with tarfile.open(path) as archive:
        texts = {entry.name: archive.extractfile(entry).read() for entry in archive}
    record = json.loads(texts.pop("record.json"))
    return texts, record
