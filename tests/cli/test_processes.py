"""Two processes of a device each: the tokens of one, one that writes, and an end if one is lost."""

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time

import one_of_two
import pytest
from test_command import TARGET, write_model

import specjax
from specjax.cli import main
from specjax.cli.arguments import parse_options
from specjax.cli.processes import join_processes
from specjax.models import load

pytestmark = pytest.mark.lenient

ROOT = pathlib.Path(__file__).parents[2]
SECONDS_TO_END, SECONDS_OF_ALL = 60, 400


def documented_commands():
    """The arguments of the commands of docs/scaling.md, the first process's first."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$ specjax (generate .*--process ./2)", text, re.MULTILINE)
    return sorted(map(shlex.split, lines), key=lambda words: words[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a draft of slightly other weights."""
    folder = tmp_path_factory.mktemp("pair")
    return tuple(write_model(folder / str(scale), TARGET, 0, scale) for scale in (12.0, 10.0))


def options_of(folders):
    """What is added to the documented commands: another pair, and a text of its tokens."""
    pair = ["--target", folders[0], "--draft", folders[1]]
    return [*pair, "--max-new-tokens", "20", "--json"]


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


class Pair:
    """Two processes, which are started when they are asked first, or after one was lost.

    Attributes:
      running: the processes.
      errors: files of what they wrote on standard error.
    """

    def __init__(self, folders, folder):
        self.running, self.errors = [], [folder / "first", folder / "second"]
        self._folders, self._stack = folders, contextlib.ExitStack()

    def _start(self):
        address = f"localhost:{free_port()}"
        # JAX warns of proxies, which it asks for other hosts.
        kept = {name: x for name, x in os.environ.items() if "_proxy" not in name.lower()}
        changes = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_PLATFORMS": "cpu",
            # JAX would ask this cluster which devices are whose, and warn that it cannot.
            "KUBERNETES_SERVICE_HOST": "localhost",
        }
        for command, errors in zip(documented_commands(), self.errors, strict=True):
            words = [*command, *options_of(self._folders), "--coordinator", address]
            process = subprocess.Popen(
                [sys.executable, one_of_two.__file__, *words],
                env=kept | changes,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stack.enter_context(errors.open("w")),
                text=True,
            )
            self.running.append(self._stack.enter_context(process))
            self._stack.callback(process.kill)
            # What hangs is ended, and the test that reads from it fails.
            timer = threading.Timer(SECONDS_OF_ALL, process.kill)
            self._stack.callback(timer.cancel)
            timer.start()

    def tell(self, part):
        """Has both run a part."""
        if not self.running:
            self._start()
        for process in self.running:
            # Where one has ended, `read_reply` says why.
            with contextlib.suppress(BrokenPipeError):
                print(part, file=process.stdin, flush=True)

    def read_reply(self, number):
        """What a process wrote, and what it replied."""
        lines = []
        for line in self.running[number].stdout:
            if line.startswith(one_of_two.REPLY):
                return "".join(lines), json.loads(line.removeprefix(one_of_two.REPLY))
            lines.append(line)
        raise AssertionError(f"there is no reply: {self.errors[number].read_text()}")

    def ask(self, part):
        """What each process wrote and replied."""
        self.tell(part)
        return [self.read_reply(number) for number in range(2)]

    def stop(self):
        """Ends both."""
        self.running = []
        self._stack.close()


@pytest.fixture(scope="module")
def pair(folders, tmp_path_factory):
    started = Pair(folders, tmp_path_factory.mktemp("errors"))
    yield started
    started.stop()


def check_text(pair, part, command, capsys):
    """Checks a text with that of one device, and that the second process is silent."""
    (text, code), second = pair.ask(part)
    assert (code, *second) == (0, "", 0)
    assert pair.errors[1].read_text() == ""
    assert main(command) == 0
    ours, one = json.loads(text), json.loads(capsys.readouterr().out)
    assert ours["token_ids"] == one["token_ids"]
    assert len(set(one["token_ids"])) > 9
    assert ours["metrics"] == one["metrics"]
    return one["metrics"]


def test_a_text_of_two_processes_is_that_of_one_device_and_the_first_writes_it(
    pair, folders, capsys
):
    command = ["generate", "def fibonacci(n):", *options_of(folders), *one_of_two.PLAIN]
    check_text(pair, "plain", command, capsys)


@pytest.mark.once
def test_the_documented_commands_give_a_drafted_text(pair, folders, capsys):
    [first, second] = documented_commands()
    at = first.index("--mesh")
    assert (first[:-1], second[-1]) == (second[:-1], "1/2")
    assert first[at + 1] == "2"
    command = [*first[:at], *options_of(folders), *one_of_two.DRAFTED]
    metrics = check_text(pair, "drafted", command, capsys)
    assert 0 < sum(metrics["num_accepted"]) < sum(metrics["num_drafted"])


@pytest.mark.once
def test_calls_give_every_process_the_tokens_of_one_device_or_a_refusal(pair, folders):
    prompts, given = one_of_two.arguments()
    one = specjax.generate(load(folders[0])[0], None, prompts, **given)
    replies = [seen for _, seen in pair.ask("call")]
    for seen in replies:
        assert seen["texts"] == [specjax.unpad(one.token_ids)] * 2
        assert seen["least_share"] == 0.5
        assert "an engine runs in one process" in seen["engine"]
        assert seen["alike"] is None
        for said in seen["others"]:
            assert said.startswith("process 1 and process 0 were given different ")
    others = "process 1 refused what was given there, and said why."
    assert [seen["refused"] for seen in replies] == [others, "a folder is missing"]


def test_a_lost_process_ends_the_other_within_a_minute_and_says_so(pair):
    """The command ends at once, where its step fails; by heartbeats, what waits for nothing."""
    pair.tell("loss")
    first, second = pair.running
    assert second.wait() == -signal.SIGKILL
    start = time.monotonic()
    assert pair.read_reply(0) == ("", 1)
    assert first.wait(SECONDS_TO_END) not in (0, -signal.SIGKILL)
    assert time.monotonic() - start < SECONDS_TO_END
    pair.stop()
    said = pair.errors[0].read_text()
    assert said.startswith("specjax: another process of the run may be lost: ")
    assert "(stopped sending heartbeats):\n1\n" in said


PROCESS = ["--process", "0/2", "--coordinator", "localhost:1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--process", "0/2"], "--process is given without --coordinator; "),
        (["--coordinator", "localhost:1"], "--coordinator is given without --process; "),
        (["--process", "2/2"], "'2/2' is no process I/N with 0 <= I < N; the first of two is 0/2"),
        (PROCESS, "--process is given without --mesh, the devices of all processes."),
        ([*PROCESS, "--mesh", "2", "--coordinator", "1"], "--coordinator is '1'; it needs to be"),
        ([*PROCESS, "--mesh", "2", "--input", "x", "--output", "y"], "--process is given and --i"),
    ],
)
def test_wrong_options_of_processes_are_refused(capsys, options, message):
    assert main(["generate", "x", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_port_on_which_another_program_listens_is_refused(capsys):
    with socket.create_server(("", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"
        options = ["--mesh", "2", "--process", "0/2", "--coordinator", address]
        assert main(["generate", "x", *options]) == 2
    assert "process 0 cannot listen on that port of this host" in capsys.readouterr().err


def test_processes_that_do_not_come_are_given_up_in_a_sentence(capsys, monkeypatch):
    """JAX would crash, and waits without looking at what Python asks: an interrupt, for one."""
    given_up, codes, threads = threading.Event(), [], []

    def wait(*_, **__):
        threads.append(threading.current_thread())
        given_up.wait(20)

    monkeypatch.setattr("specjax.cli.processes.JOIN_SECONDS", 0.05)
    monkeypatch.setattr("os._exit", lambda code: (codes.append(code), given_up.set()))
    monkeypatch.setattr("jax.distributed.initialize", wait)
    options = ["--mesh", "2", "--process", "1/2", "--coordinator", "localhost:1"]
    join_processes(parse_options(["generate", "x", *options])[0])
    assert codes == [2]
    assert threads != [threading.main_thread()]
    assert "the 2 processes were not all at localhost:1 in 0.05 s" in capsys.readouterr().err


def test_one_process_of_one_waits_for_none(monkeypatch):
    """Else gloo would say on standard output that it found no other."""
    monkeypatch.setattr("jax.distributed.initialize", None)
    options = ["--mesh", "2", "--process", "0/1", "--coordinator", "localhost:1"]
    join_processes(parse_options(["generate", "x", *options])[0])
