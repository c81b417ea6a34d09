"""Writes `test_map.md`: what every test that was collected before the rooms is now.

    python tests/repo/map_tests.py ca7ebef

A function is found by its name, in `renamed_tests.csv`, or in GONE below. The script fails where a
function is in none, and where its parameters changed and CHANGED gives no reason.
"""

import collections
import csv
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = ("plain JAX", "interpreter", "GPU", "docstring")

COLLECT = """
import json, pathlib, sys
root = pathlib.Path.cwd()
sys.path[:0] = [str(root / folder) for folder in (".", "tests", "tests/support")]
import machine, pytest
machine.has_gpu = lambda: True  # The GPU's tests are collected, too.
items = []
class Items:
    def pytest_collection_finish(self, session):
        for item in session.items:
            marks = {mark.name for mark in item.iter_markers()}
            kind = (
                3 if type(item).__name__ == "DoctestItem"
                else 2 if "gpu" in marks else 1 if "interpret" in marks else 0
            )
            items.append([item.nodeid, kind])
failed = pytest.main(["--collect-only", "-qqq", "-p", "no:cacheprovider"], plugins=[Items()])
json.dump(items, open(sys.argv[1], "w"))
sys.exit(failed)
"""

# The file of now, the name of before and the name of now.
RENAMED = {
    (file, now): before
    for file, before, now in csv.reader(
        (HERE / "renamed_tests.csv").read_text(encoding="utf-8").splitlines()
    )
}
# A function that is no more, and where what it tests is tested now.
GONE = {
    "test_every_file_has_a_floor": (
        "`test_imports_go_downhill_only` fails for a file without a floor"
    ),
    "test_an_old_gpu_stays_old_under_a_mesh_that_names_it": (
        "`test_triton_on_an_old_gpu_is_refused_by_its_capability`, under a mesh and without one"
    ),
    "test_an_exported_verification_comes_back": (
        "`test_jit_and_vmap_change_nothing`: that program is exported, too"
    ),
    "test_a_mixed_temperature_batch_compiles_once": (
        "`test_jit_and_vmap_change_nothing`: one exported program takes every temperature"
    ),
    "test_sampling_parameters_reach_the_drafts": (
        "`test_what_decoding_drafts_from_is_what_training_unrolls` looks at the cutoff"
    ),
    "predicted_lengths": (
        "`specjax.theory` computes lengths: `tests/theory/test_theory.py` enumerates all outcomes"
    ),
    "test_predicted_lengths_are_those_of_all_outcomes_enumerated": (
        "`test_rates_and_lengths_of_a_step_are_those_of_all_that_it_may_emit`, of `specjax.theory`"
    ),
    "test_parts_for_xla_are_as_many_as_for_the_kernels": (
        "the plain step imitates no parts: `test_decode_step.py` compares it with the kernels"
    ),
}
# A function of now, and why its parameters, or more than its name, are others.
FILE = "one test per file of the package"
MESSAGE = "a parameter is the text of an error"
ALIKE = "cases whose programs differ in nothing that other cases do not have are left out"
ONE_BATCH = "cases are requests of one batch"
ELSEWHERE = "the interpreter meets it in another test"
DRAWS = "fewer draws, of settings whose faults show in fewer"
CHANGED = {
    "test_zero_drafts_emit_one_bonus_token": ONE_BATCH,
    "test_the_bonus_is_what_plain_sampling_draws_at_its_position": ONE_BATCH,
    "test_minus_one_ends_the_drafts_like_num_tokens": ONE_BATCH,
    "test_an_id_outside_the_vocabulary_is_rejected_into_the_residual": ONE_BATCH,
    "test_an_invalid_target_row_emits_nothing_from_there_on": ONE_BATCH,
    "test_an_invalid_draft_row_is_verified_as_one_hot": ONE_BATCH,
    "test_a_draft_row_whose_carried_sum_is_not_finite_is_verified_as_one_hot": ONE_BATCH,
    "test_a_draft_whose_carried_log_q_is_invalid_is_verified_as_one_hot": ONE_BATCH,
    "test_a_draft_of_an_invalid_temperature_is_verified_as_one_hot": ONE_BATCH,
    "test_an_invalid_temperature_emits_nothing": ONE_BATCH,
    "test_a_given_bonus_replaces_the_sampled_one": ONE_BATCH,
    "test_a_given_bonus_outside_the_vocabulary_is_sampled_as_usual": ONE_BATCH,
    "test_a_given_bonus_without_drafts_is_the_only_token": ONE_BATCH,
    "test_an_invalid_row_that_decides_emits_nothing_from_there_on": ONE_BATCH,
    "test_tokens_do_not_depend_on_the_most_drafts_of_the_batch": ELSEWHERE,
    "test_ragged_logits_are_found_through_rows": ELSEWHERE,
    "test_an_exported_draft_comes_back": ELSEWHERE,
    "test_tokens_do_not_depend_on_device_count": ELSEWHERE,
    "test_carried_statistics_change_nothing": ELSEWHERE,
    "test_heads_of_any_size_and_as_many_tokens_as_fit": ALIKE,
    "test_a_batch_under_vmap_is_each_by_itself": "each request is a batch of one, of few requests",
    "test_synthetic_batches_follow_their_rates_and_the_ordinary_residual": (
        "rates of each position are in `test_absent_fields_mean_their_defaults_and_scalars_..`"
    ),
    "test_a_change_of_values_compiles_nothing": "scalars have a test of their own",
    "test_ragged_batches_read_the_map_as_padded_ones_do": "a method for each implementation",
    "test_emitted_tokens_follow_the_enumeration": "lenience is a factor in the standard rule",
    "test_the_kernels_emit_the_reference_s_tokens": "one rule holds two",
    "test_verification_takes_subnormal_logits_for_zero": "each size with one way to accept",
    "test_decisions_are_those_of_numpy": "trees of the larger draft vocabulary have float64 noise",
    "test_tokens_are_the_oracle_s": "sizes of other tests are left to them",
    "test_greedy_speculation_is_plain_greedy_decoding": ALIKE,
    "test_streaming_gives_the_tokens_of_generate": ALIKE,
    "test_steps_through_the_kernels_are_those_of_plain_jax": ALIKE,
    "test_tokens_fed_in_pieces_give_what_they_give_at_once": ALIKE,
    "test_a_ragged_batch_gives_what_each_request_gives_alone": ALIKE,
    "test_a_request_does_not_depend_on_where_padding_stands": ALIKE,
    "test_a_rewind_leaves_no_trace": ALIKE,
    "test_top_logprobs_are_those_of_the_definition": ALIKE,
    "test_zeros_of_both_signs_tie_and_so_do_subnormal_numbers": ALIKE,
    "test_a_draft_holds_the_distribution_it_was_sampled_from": ALIKE,
    "test_logprobs_are_those_of_the_rows_that_decided": ALIKE,
    "test_a_token_the_draft_cannot_draw_is_rejected": (
        "an id past the draft's vocabulary is in `test_rejection_sample.py`"
    ),
    "test_a_masked_token_is_never_sampled_at_either_end": "both ends are rows of one batch",
    "test_one_step_follows_the_target": DRAWS,
    "test_verification_emits_the_reference_s_tokens": "a kind of case also stands for a size",
    "test_a_wrong_sampler_is_seen": MESSAGE,
    "test_imports_go_downhill_only": FILE,
    "test_the_core_imports_jax_and_numpy_alone": FILE,
    "test_files_and_functions_keep_to_their_budgets": FILE,
    "test_no_checker_is_told_to_look_away": FILE,
    "test_all_is_sorted_and_is_what_the_module_defines": FILE,
    "test_every_public_name_is_documented": FILE,
    "test_the_gpu_tables_of_the_documents_are_those_of_the_measurement": "tables of README moved",
    "test_the_tables_of_the_documents_are_those_of_the_measurements": "tables of README moved",
    "test_the_code_in_a_document_runs": "one test per document",
    "test_every_module_that_decides_tokens_has_three_mutations": "one test per module that decides",
    "test_only_a_test_that_fails_kills": "one report more",
    "test_a_mutation_of_nothing_or_of_several_places_is_refused": "a parameter names a function",
    "test_a_template_that_fails_is_refused_by_its_folder": MESSAGE,
    "test_sizes_that_do_not_fit_together_are_refused_by_file": MESSAGE,
    "test_fields_that_no_family_has_are_refused_in_a_sentence": MESSAGE,
    "test_a_git_lfs_pointer_is_named_with_its_remedy": "a parameter names a function",
    "test_a_fault_inside_the_search_is_seen": "a parameter names a function",
    "test_a_program_fits_on_the_least_of_the_gpus": "capabilities are numbers",
    "test_what_a_row_does_not_see_is_not_in_it_and_what_it_sees_is_not_hidden": (
        "parts that a launch of their own combines are a case, too"
    ),
    "test_a_derivative_by_some_weights_is_of_the_step_without_kernels": (
        "a derivative holds no kernel now, so that nothing waits for one"
    ),
    "test_splits_of_a_cache_combine_to_one_softmax": "a case has another name",
    "test_a_matrix_that_does_not_divide_is_left_to_xla": "a parameter names a function",
    "test_only_the_positions_before_the_end_of_a_text_are_counted": "one case more",
    "test_a_tensor_that_is_not_read_is_refused": "a case has another name",
    "test_an_architecture_without_a_head_for_the_next_token_is_refused": "a case has another name",
    "test_an_architecture_that_predicts_tokens_or_is_not_named_passes": "a case has another name",
    "test_wrong_synthetic_numbers_are_refused_in_a_sentence_that_names_them": MESSAGE,
    "test_sampling_lowers_for_cuda": ALIKE,
    "test_a_step_of_decoding_lowers_for_cuda": ALIKE,
    "test_parts_of_a_long_cache_are_put_together_by_a_launch_of_its_own": ALIKE,
    "test_cutoffs_lower_for_cuda": ALIKE,
    "test_verification_lowers_for_cuda": ALIKE,
    "test_ragged_verification_lowers_for_cuda": ALIKE,
    "test_any_vocabulary_lowers_for_cuda": ALIKE,
    "test_any_batch_lowers_for_cuda": ALIKE,
    "test_any_number_of_drafts_lowers_for_cuda": ALIKE,
    "test_verification_lowers_on_a_mesh_of_explicit_axes": ALIKE,
    "test_a_jax_without_pallas_triton_leaves_a_working_library_and_a_sentence": ALIKE,
    "test_cutoffs_are_those_of_a_sort": ALIKE,
    "test_narrow_logits_are_read_exactly": ALIKE,
    "test_none_is_a_filter_that_is_off": ALIKE,
    "test_the_blocks_that_are_gathered_are_those_that_matter": ALIKE,
    "test_samples_are_the_reference_s": ALIKE,
    "test_all_together_are_their_definition": ALIKE,
    "test_one_hot_batches_carry_no_logits": ELSEWHERE,
    "test_any_vocabularies_and_any_number_of_drafts": ELSEWHERE,
    "test_float64_noise_is_the_oracle_s": ELSEWHERE,
    "test_tokens_anywhere_see_what_plain_jax_lets_them_see": "norms of heads are a case's, too",
    "test_a_kernel_starts_early_only_where_one_of_ours_reads": (
        "norms of heads are taken in the kernels of attention"
    ),
    "test_a_wrong_config_is_refused_in_a_sentence_that_names_the_argument": MESSAGE,
    "test_a_wrong_call_is_refused_by_name": MESSAGE,
    "test_what_cannot_be_done_is_refused_in_a_sentence": MESSAGE,
    "test_the_gpu_benchmarks_rehearse_on_a_cpu": "benchmarks have been added",
    "test_a_public_function_names_its_arguments_and_what_it_returns": FILE,
    "test_a_checkpoint_writes_and_its_sibling_drafts": "a head is a sibling, too",
    "test_training_brings_a_head_near_to_the_target": "a kind of head is a parameter",
}


def collect(root):
    """The tests of a tree: by function its parameters, each with its kind."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "items.json"
        command = [sys.executable, "-P", "-c", COLLECT, str(out)]
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
        items = json.loads(out.read_text())
    functions = collections.defaultdict(list)
    for name, kind in items:
        function, _, parameters = name.partition("[")
        functions[function].append((parameters.removesuffix("]"), kind))
    return dict(functions)


def collect_commit(commit):
    """The tests of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = pathlib.Path(folder) / "tree.tar"
        subprocess.run(["git", "archive", "-o", str(archive), commit], cwd=ROOT, check=True)
        subprocess.run(["tar", "-xf", str(archive), "-C", folder], check=True)
        archive.unlink()
        return collect(folder)


def file_of(function):
    """A function's file."""
    return function.partition("::")[0]


def short_name(function):
    """A function without its file, a docstring without its module."""
    name = function.partition("::")[2]
    return name.rpartition(".")[2] if function.startswith("specjax") else name


def match(before, after):
    """The function of now for each of before: None where it is gone, "" where nothing says."""
    by_name = collections.defaultdict(list)
    for function in after:
        place = function.partition("::")[0], short_name(function)
        by_name[RENAMED.get(place, place[1])].append(function)
    now, files = {}, collections.defaultdict(collections.Counter)
    for function in before:
        candidates = by_name[short_name(function)]
        if len(candidates) == 1:
            now[function] = candidates[0]
            files[file_of(function)][file_of(candidates[0])] += 1
        elif not candidates and short_name(function) in GONE:
            now[function] = None
    # Where several files hold a test of the name, it is in the file where its neighbours are.
    for function in before:
        if function not in now:
            file = (files[file_of(function)].most_common(1) or [("", 0)])[0][0]
            candidates = [one for one in by_name[short_name(function)] if file_of(one) == file]
            now[function] = candidates[0] if len(candidates) == 1 else ""
    return now


def check(before, after, found):
    """Sentences on functions that are not mapped and on parameters that nothing explains."""
    for function, now in found.items():
        if now == "":
            yield f"{function} is not found"
        elif now and is_changed(before[function], after[now]) and short_name(now) not in CHANGED:
            yield f"{now} has other parameters: {difference(before[function], after[now])}"
    taken = collections.Counter(now for now in found.values() if now)
    for now, count in taken.items():
        if count > 1:
            yield f"{now} is what {count} functions became"


def is_changed(before, after):
    """Whether parameters or their kinds are others."""
    return sorted(before) != sorted(after)


def difference(before, after):
    """Parameters that are no more and those that are new, as text."""
    left, new = (sorted(set(one) - set(other)) for one, other in ((before, after), (after, before)))
    return f"-{[name for name, _ in left][:8]} +{[name for name, _ in new][:8]}"


def count_kinds(functions):
    """How many tests of each kind, and in all."""
    counts = collections.Counter(kind for tests in functions.values() for _, kind in tests)
    return [counts[kind] for kind in range(len(KINDS))] + [sum(counts.values())]


def row(*cells):
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(head, rows):
    """A table of Markdown."""
    return [row(*head), row(*["---"] * len(head)), *rows, ""]


def write(commit, before, after, found):
    """Writes the page."""
    files = collections.defaultdict(lambda: [0, 0])
    others = []
    for function, now in found.items():
        if now is None:
            continue
        changed = is_changed(before[function], after[now])
        if not changed and short_name(now) == short_name(function):
            counts = files[file_of(function), file_of(now)]
            counts[0] += 1
            counts[1] += len(before[function])
        else:
            why = CHANGED.get(short_name(now), "renamed")
            cells = f"`{function}`", len(before[function]), f"`{now}`", len(after[now]), why
            others.append(row(*cells))
    gone = [function for function, now in found.items() if now is None]
    added = set(after) - set(found.values())
    lines = [
        "# What every test became",
        "",
        f"From {commit}, before the rooms, to {datetime.date.today()}, with the GPU's tests.",
        f"`python tests/repo/map_tests.py {commit}` writes it and fails where a test is missing.",
        "",
        *table(
            ("tests", *KINDS, "all"),
            [row("before", *count_kinds(before)), row("now", *count_kinds(after))],
        ),
        "## Functions with their names and their parameters",
        "",
        *table(
            ("before", "now", "functions", "tests"),
            [row(f"`{a}`", f"`{b}`", *counts) for (a, b), counts in sorted(files.items())],
        ),
        "## Functions with another name or other parameters",
        "",
        *table(("before", "tests", "now", "tests", "why"), others),
        "## Functions that are no more",
        "",
        *table(
            ("before", "tests", "where it is tested now"),
            [row(f"`{one}`", len(before[one]), GONE[short_name(one)]) for one in gone],
        ),
        "## New functions",
        "",
        *table(
            ("now", "tests"),
            [row(f"`{one}`", len(after[one])) for one in sorted(added)],
        ),
    ]
    (HERE / "test_map.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def main(commit):
    """Writes the page, or says what is not mapped."""
    before, after = collect_commit(commit), collect(ROOT)
    found = match(before, after)
    faults = list(check(before, after, found))
    if faults:
        sys.exit("\n".join(faults))
    write(commit, before, after, found)


if __name__ == "__main__":
    main(sys.argv[1])
