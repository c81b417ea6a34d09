"""Wrong versions of what is read from files and written to them."""

from ..mutation import Mutation
from .tests import batches, commands, saved_programs

_LOCKED = batches("test_an_output_to_which_another_run_writes_is_refused_until_that_ends")
_MADE = batches("test_of_two_runs_that_make_one_output_the_later_is_refused")
_DATE = batches(
    "test_a_file_of_conversations_goes_on_on_another_day_with_the_date_of_the_first_run"
)
_DAMAGED = saved_programs("test_a_file_that_was_cut_or_changed_anywhere_is_a_sentence")
_OUTPUT = "specjax.cli.batch.output_file."
_RUN = "specjax.cli.batch.run_batch."

MUTATIONS = (
    Mutation(
        f"{_OUTPUT}_lock",
        "fcntl.LOCK_EX",
        "fcntl.LOCK_SH",
        _LOCKED,
        "two runs lock one output",
    ),
    Mutation(
        f"{_OUTPUT}OutputFile.prepare",
        "> self._num_read",
        "< self._num_read",
        _MADE,
        "a run does not see that another has made and written its output meanwhile",
    ),
    Mutation(
        f"{_OUTPUT}OutputFile.prepare",
        "file.truncate(self._size)",
        "file.truncate(self._num_read)",
        _LOCKED,
        "a line is appended to the rest of one that was cut off",
    ),
    Mutation(
        f"{_OUTPUT}OutputFile.append",
        "self._file.truncate(self._size)",
        "self._file.truncate()",
        batches("test_a_line_that_finds_no_room_is_a_sentence_and_leaves_whole_lines"),
        "a full disk leaves a part of a line",
    ),
    Mutation(
        f"{_OUTPUT}OutputFile.__init__",
        "if_refused.callback(self.close)",
        "if_refused.callback(str)",
        batches("test_a_run_that_is_refused_frees_its_output"),
        "a refused output stays locked as long as its error is kept",
    ),
    Mutation(
        f"{_RUN}_Clock.__init__",
        "first or datetime",
        "datetime",
        _DATE,
        "conversations go on with another day's date",
    ),
    Mutation(
        f"{_RUN}_output_of",
        '"date": job.date',
        '"date": None',
        _DATE,
        "the date of a run is lost",
    ),
    Mutation(
        f"{_RUN}_read_input",
        "_MAX_BYTES if os.path.isfile(options.input) else _MAX_BYTES_OF_STREAM",
        "_MAX_BYTES",
        batches("test_an_input_that_has_no_end_is_refused_after_as_much_as_a_stream_may_hold"),
        "four gigabytes of a device are read before it is refused",
    ),
    Mutation(
        "specjax.decode.compile.saved_programs.read_programs",
        "if hashlib.sha256(line + data).digest() != digest:",
        "if not digest:",
        _DAMAGED,
        "a damaged file is unpickled",
    ),
    Mutation(
        "specjax.decode.compile.saved_programs.read_programs",
        "size != num_bytes",
        "size < num_bytes",
        saved_programs("test_a_file_that_grew_beyond_the_memory_is_not_read"),
        "a file is read beyond what its first line says",
    ),
    Mutation(
        "specjax.cli.command._run_command",
        "except (ValueError, OSError, RuntimeError, MemoryError) as error",
        "except (ValueError, OSError, RuntimeError) as error",
        commands("test_memory_or_levels_that_end_while_files_are_read_are_a_sentence"),
        "an end of memory while weights are read is a traceback",
    ),
)
