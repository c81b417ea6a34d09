"""A folder's JSON files, each of which holds one object, or is refused in a sentence."""

import json
import pathlib
from typing import Any

from specjax.models.hf.folder import read_member

__all__ = ["read_object"]


def read_object(path: pathlib.Path, needed: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
      path: of the file.
      needed: what the object is, for a refusal.

    Raises:
      ValueError: if the file holds anything else, or more than 256 MiB.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "config.json")
      >>> _ = path.write_text('{"vocab_size": 64}')
      >>> read_object(path, "the fields of a configuration")
      {'vocab_size': 64}
    """
    data = read_member(path)
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; it needs {needed}.")
    return found
