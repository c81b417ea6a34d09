"""A process of two that runs what it is asked on standard input, and replies with a line of JSON.

python one_of_two.py COMMAND...     the command's arguments, --process among them
"""

import json
import os
import signal
import sys

import jax
import numpy as np
import tokenizers
from jax.experimental import multihost_utils

import specjax
from specjax.cli import main
from specjax.cli.arguments import parse_options
from specjax.cli.processes import check_same_inputs, collective_errors, join_processes
from specjax.cli.stream_programs import StreamPrograms
from specjax.models import load

PROMPTS, LENGTHS = np.arange(24).reshape(3, 8) * 7, np.array([8, 5, 2])
DRAFTED, PLAIN = ["--num-speculative-tokens", "1"], ["--draft", "none"]
REPLY = "reply: "


def arguments():
    """Those of a call but for the models; one request is greedy."""
    given = dict(
        keys=jax.vmap(jax.random.key)(np.arange(len(PROMPTS), dtype=np.uint32)),
        max_new_tokens=12,
        temperature=np.array([0, 1.0, 0.7], np.float32),
        options=specjax.LoopOptions(max_length=32, prefill_chunk_size=8),
    )
    return (PROMPTS, LENGTHS), given


def read(array):
    """An array whose rows lie on several processes, on each."""
    return multihost_utils.process_allgather(array, tiled=True)


def decode(folder):
    """Texts of `generate`, and of `init` and `step`, with the requests over both processes."""
    target = load(folder, mesh=jax.make_mesh((2,), ("data",)))[0]
    prompts, given = arguments()
    whole = specjax.generate(target, None, prompts, **given)
    state = specjax.init(target, None, prompts, **given)
    while not read(state.finish).all():
        state, _ = specjax.step(target, None, state)
    # The state's last request is a copy of the one before it.
    both = read(whole.token_ids), read(state.token_ids)[: len(prompts[0])]
    return [specjax.unpad(tokens) for tokens in both]


def least_share(model):
    """The least part that a process has of an array."""
    arrays = jax.tree.leaves(model.params)
    return min(x.addressable_shards[0].data.nbytes / x.nbytes for x in arrays)


def refusal_of(function, *args, **options):
    """What a call is refused with."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)


def tokenizer_of(token):
    """A tokenizer of one token."""
    return tokenizers.Tokenizer(tokenizers.models.BPE({token: 0}, []))


def read_but_the_second(options, job):
    """Process 1 refuses what it was given."""
    with collective_errors(options):
        if jax.process_index():
            raise ValueError("a folder is missing")
    check_same_inputs(options, job)


def call(command):
    """What the Python API gives and refuses."""
    options, config = parse_options(command)
    join_processes(options)
    split = load(options.target, mesh=jax.make_mesh((2,), ("model",)))[0]
    job = dict(prompt_ids=[], config=config, models="", sampling=None, tokenizer=tokenizer_of("a"))
    prompt = job | {"prompt_ids": [jax.process_index()]}
    tokenizer = job | {"tokenizer": tokenizer_of("ab"[jax.process_index()])}
    return {
        "texts": decode(options.target),
        "least_share": least_share(split),
        "engine": refusal_of(
            specjax.Engine, split, None, num_slots=1, options=specjax.LoopOptions(max_length=16)
        ),
        "alike": refusal_of(check_same_inputs, options, job),
        "others": [refusal_of(check_same_inputs, options, other) for other in (prompt, tokenizer)],
        "refused": refusal_of(read_but_the_second, options, job),
    }


def lose_the_second(command):
    """The command's exit code where the second process dies in its first step."""
    step = StreamPrograms.step

    def die(*operands):
        if jax.process_index():
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*operands)

    StreamPrograms.step = die
    return main([*command, *PLAIN])


PARTS = {
    "drafted": lambda command: main([*command, *DRAFTED]),
    "plain": lambda command: main([*command, *PLAIN]),
    "call": call,
    "loss": lose_the_second,
}


if __name__ == "__main__":
    for part in sys.stdin:
        answer = PARTS[part.strip()](sys.argv[1:])
        print(REPLY + json.dumps(answer), flush=True)
