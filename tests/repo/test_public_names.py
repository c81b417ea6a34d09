"""What `specjax` shows: public names, rooms that are imported when they are named, a version."""

import importlib.metadata
import pathlib
import subprocess
import sys
import tomllib
import types
import typing

import public_names
import pytest

import specjax
from specjax import config, version

ROOT = pathlib.Path(__file__).parents[2]


def test_dir_shows_public_names_alone():
    shown = {name: getattr(specjax, name) for name in dir(specjax)}
    rooms = {name for name, value in shown.items() if isinstance(value, types.ModuleType)}
    assert rooms == {"contrib", "models", "rules", "theory"}
    assert set(shown) == {*specjax.__all__, "contrib", "models", "__version__"}


@pytest.mark.parametrize("name", ["draft", "model", "sample", "verification", "nothing"])
def test_nothing_private_stands_where_a_function_is_looked_for(name):
    with pytest.raises(AttributeError, match=f"module 'specjax' has no attribute '{name}'"):
        getattr(specjax, name)


def test_rooms_are_there_without_an_import_and_cost_none_until_then():
    program = """
import importlib, sys, specjax
assert "flax" not in sys.modules
specjax.models.build, specjax.contrib.__doc__
importlib.reload(specjax)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_version_is_written_once_and_the_installation_has_it():
    assert specjax.__version__ == version.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"] == {"path": "specjax/version.py"}
    # `make` installs anew after a change of that file.
    assert specjax.__version__ == importlib.metadata.version("specjax")


def test_the_types_of_a_config_name_the_methods_that_it_takes():
    types_of = typing.get_type_hints(specjax.SpeculativeConfig)
    for field in ("rejection_sample_method", "draft_sample_method"):
        names = typing.get_args(types_of[field])
        assert getattr(specjax.SpeculativeConfig(), field) == names[0]
        for name in set(names) - {"synthetic"}:
            specjax.SpeculativeConfig(**{field: name})
    methods = typing.get_args(types_of["rejection_sample_method"])
    assert methods == config.REJECTION_SAMPLE_METHODS
    assert methods == ("standard", "block", "coupled", "synthetic")


def test_public_names_and_signatures_are_those_of_the_snapshot_each_with_a_reason():
    known = public_names.read()
    signatures = {name: signature for name, (signature, _) in known.items()}
    assert public_names.signatures() == signatures, f"see {public_names.__file__}"
    assert not [name for name, (_, why) in known.items() if len(why.split()) < 3]
