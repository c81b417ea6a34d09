"""A server of a small model on loopback, which the tests of this folder share."""

import asyncio
import dataclasses
import importlib.util
import socket
import threading
import types

import pytest
from checkpoints import DRAFT, TEMPLATE, write_checkpoint

_MISSING = [
    name
    for name in ("starlette", "uvicorn", "openai", "httpx", "llguidance")
    if importlib.util.find_spec(name) is None
]
EOS = 0


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a model with a chat template."""
    config = dataclasses.replace(DRAFT, eos_token_ids=(EOS,))
    path = write_checkpoint(tmp_path_factory.mktemp("serve") / "tiny", config)
    refusal = "{% if messages[0].content == 'raise' %}{{ raise_exception('no') }}{% endif %}"
    (path / "chat_template.jinja").write_text(refusal + TEMPLATE)
    return path


def start(service, **options):
    """Serves in a thread; returns the base address and a function that stops the server."""
    import uvicorn

    from specjax.contrib.serve.app import make_app

    app = make_app(service, **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    bound = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()

    def stop():
        server.should_exit = True
        thread.join()

    return f"http://127.0.0.1:{bound.getsockname()[1]}", stop


@pytest.fixture(scope="session")
def make_service(folder):
    """Returns a function that makes a service of the model, with options of the command."""
    if _MISSING:
        pytest.skip(f"{', '.join(_MISSING)} not installed: pip install 'specjax[serve,test]'")
    from specjax.cli.arguments import parse_options
    from specjax.cli.model_pair import read_pair
    from specjax.cli.serve import run_serve

    def make(*arguments):
        options = parse_options(["serve", "--target", str(folder), *arguments])
        return run_serve.make_service(read_pair(*options))

    return make


OPTIONS = (
    *("--max-length", "128", "--num-slots", "4", "--max-logprobs", "5", "--max-waiting", "32"),
    *("--num-speculative-tokens", "3"),
)


@pytest.fixture(scope="module")
def served(make_service):
    """The service, its address, and clients of OpenAI."""
    import httpx
    import openai

    service = make_service(*OPTIONS)
    address, stop = start(service)
    arguments = {"base_url": address + "/v1", "api_key": "none", "max_retries": 0}
    client = openai.OpenAI(**arguments)
    with client, httpx.Client(base_url=address, timeout=60) as http:
        yield types.SimpleNamespace(service=service, address=address, client=client, http=http)
    stop()
    assert service.engine.state == "closed"
