"""Options of `specjax serve`, and their checks."""

import argparse
import importlib.util
import math
from collections.abc import Mapping

from specjax.cli.option_table import Command, Option, flag
from specjax.cli.processes import MESH_OPTIONS
from specjax.cli.speculation_arguments import SPECULATION_OPTIONS

_PACKAGES = ("starlette", "uvicorn")
_SERVER_OPTIONS = {
    "host": Option(
        *(str, "HOST"),
        "address to listen on; others than this machine reach 0.0.0.0, and SPECJAX_API_KEY in the "
        "environment is the key that they then should need",
        default="127.0.0.1",
    ),
    "port": Option(int, "PORT", "port to listen on; 0 is any that is free", (0, 65535), 8000),
    "model_name": Option(str, "NAME", "the model's name; default: that of the target's folder"),
    "timeout": Option(
        float, "SECONDS", "most seconds of a request, its time in the queue included", (1, 1e6), 600
    ),
    "max_body_bytes": Option(int, "N", "most bytes of a request's body", (1, 2**30), 2**20),
}
_ENGINE_OPTIONS = {
    "num_slots": Option(int, "B", "requests that are decoded at once", (1, 4096), 16),
    "max_length": Option(
        *(int, "S"),
        "most tokens of a prompt and its text together; default: the target's longest sequence, at "
        "most 4096",
        (2, math.inf),
    ),
    "max_waiting": Option(
        int, "N", "requests that wait for a slot before others get 429", (1, 2**20), 1024
    ),
    "max_logprobs": Option(
        *(int, "N"),
        "likeliest tokens that requests may have listed for each token, by logprobs and "
        "top_logprobs; each step lists them. Default: none, and log-probabilities of the tokens "
        "themselves cost nothing",
        (0, math.inf),
    ),
    "no_penalties": flag("requests cannot set penalties, for which each slot counts its tokens"),
    "no_schemas": flag("requests cannot set a JSON schema, for which each step reads masks"),
}


def serve_command(pair_options: Mapping[str, Option]) -> Command:
    """Returns `specjax serve`.

    Args:
      pair_options: that name the target and the draft.
    """
    return Command(
        "serve a pair in OpenAI's protocol",
        "Serves /v1/completions and /v1/chat/completions, by whose protocol OpenAI's clients and "
        "lm-eval speak. SIGTERM ends the server when what runs has ended.",
        {
            "server": _SERVER_OPTIONS,
            "models": {**pair_options, **MESH_OPTIONS},
            "engine": _ENGINE_OPTIONS,
            "speculation": SPECULATION_OPTIONS,
        },
    )


def check_serve_options(options: argparse.Namespace) -> None:
    """Refuses to serve without the packages of the extra `serve`, or of what options ask for."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} is missing; pip install 'specjax[serve]'.")
    if not options.no_schemas and importlib.util.find_spec("llguidance") is None:
        raise ValueError(
            "llguidance is missing, which reads JSON schemas; pip install 'specjax[grammar]', or "
            "give --no-schemas."
        )
