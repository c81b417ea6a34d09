"""Wrong versions of a command as one of several processes."""

from ..mutation import Mutation
from .tests import processes

_LATE = processes("test_processes_that_do_not_come_are_given_up_in_a_sentence")
_LOST = processes("test_a_lost_process_ends_the_other_within_a_minute_and_says_so")
_REFUSED = processes("test_calls_give_every_process_the_tokens_of_one_device_or_a_refusal")
_WRITTEN = processes("test_a_text_of_two_processes_is_that_of_one_device_and_the_first_writes_it")

MUTATIONS = (
    Mutation(
        "specjax.cli.processes.is_rank_zero",
        "options.process[0] == 0",
        "options.process[0] >= 0",
        _WRITTEN,
        "every process writes the text",
    ),
    Mutation(
        "specjax.cli.processes.join_processes",
        "heartbeat_timeout_seconds=HEARTBEAT_SECONDS",
        "heartbeat_timeout_seconds=100",
        _LOST,
        "the others wait for a lost process as long as JAX does",
    ),
    Mutation(
        "specjax.cli.processes.join_processes",
        'cluster_detection_method="deactivate"',
        "cluster_detection_method=None",
        _WRITTEN,
        "a cluster says which devices a process has",
    ),
    Mutation(
        "specjax.cli.processes.join_processes",
        "timer.start()",
        "timer.cancel()",
        _LATE,
        "a process that waits for others crashes",
    ),
    Mutation(
        "specjax.cli.processes.check_same_inputs",
        "_name_processes((digests == _NO_DIGEST).all(axis=-1))",
        '""',
        _REFUSED,
        "what another process refused is called a difference",
    ),
    Mutation(
        "specjax.cli.processes._digest",
        'config, job["prompt_ids"], job',
        "config, job",
        _REFUSED,
        "processes of different prompts decode together",
    ),
    Mutation(
        "specjax.cli.processes._digest",
        'job["tokenizer"].to_str()',
        '""',
        _REFUSED,
        "one process may see a stop string that another does not",
    ),
    Mutation(
        "specjax.devices.placement.Placement.num_processes",
        "device.process_index for",
        "0 for",
        _REFUSED,
        "an engine begins on devices of several processes",
    ),
)
