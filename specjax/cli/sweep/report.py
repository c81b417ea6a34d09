"""Reports a sweep: as a JSON object, as tables and in sentences."""

import numpy as np
from rich.table import Table
from rich.text import Text

from specjax.cli.sweep.choice import Acceptance, Best, standard_errors
from specjax.cli.sweep.measure import StepTimes, Workload
from specjax.file_io import JsonObject

__all__ = ["conclusion", "report_tables", "to_json"]


def to_json(
    workload: Workload,
    provenance: JsonObject,
    acceptance: Acceptance,
    times: list[StepTimes],
    best: Best,
) -> JsonObject:
    """Returns the report of a sweep as plain lists, dicts and numbers.

    Args:
      workload: of the measurement.
      provenance: device, versions, date, command, pair.
      acceptance: of the prompts, at the largest K.
      times: for each K from 0.
      best: the choice, from `choose_best`.

    Returns:
      The object that `--json` prints; times in milliseconds.
    """
    lengths, errors = acceptance.lengths, standard_errors(acceptance)
    rows = []
    for K, one in enumerate(times):
        step = _quartiles([1e3 * seconds for seconds in one.step_seconds])
        rows.append(
            {
                "K": K,
                "compile_seconds": one.compile_seconds,
                "step_ms": step,
                "break_even_length": step["median"] / 1e3 / np.median(times[0].step_seconds),
                "acceptance_length": lengths[K],
                "standard_error": errors[K],
                "tokens_per_second": best.tokens_per_second[K],
                "quartiles": list(best.quartiles[K]),
                "gain": best.gains[K],
                "behind_best": best.gaps_to_best[K],
                "behind_best_error": best.gap_errors[K],
                "synthetic": [
                    {
                        "asked_length": point.expected_length,
                        "length": point.measured_length,
                        "step_ms": _quartiles([1e3 * seconds for seconds in point.step_seconds]),
                        "tokens_per_second": _quartiles(point.tokens_per_second),
                        "closed_form": 1e3
                        * workload.batch_size
                        * point.expected_length
                        / step["median"],
                    }
                    for point in one.points
                ],
            }
        )
    return provenance | {
        "max_speculative_tokens": workload.max_speculative_tokens,
        "batch_size": workload.batch_size,
        "context": workload.context,
        "temperature": workload.temperature,
        "draft_sample_method": workload.draft_sample_method,
        "steps_per_run": workload.num_steps,
        "rounds": workload.num_rounds,
        "acceptance": {
            "num_prompts": len(workload.prompts),
            "num_prompt_tokens": sum(map(len, workload.prompts)),
            "acceptance_length": lengths[-1],
            "standard_error": errors[-1],
            **_acceptance_counts(acceptance),
        },
        "sweep": rows,
        "best": {"K": best.K, "gain": best.gains[best.K], "not_told_apart": best.indistinguishable},
    }


def _acceptance_counts(acceptance: Acceptance) -> JsonObject:
    steps, rates = acceptance.step_counts, acceptance.rates
    return {
        "num_steps": len(steps),
        "num_emitted": len(steps) + sum(steps),
        "num_kept": acceptance.num_accepted,
        "rates": rates,
        "usual_rate": acceptance.usual_rate,
        "conditional_rates": [
            after / before if before else 0.0
            for before, after in zip([1.0, *rates], rates, strict=False)
        ],
    }


def _quartiles(values: list[float]) -> JsonObject:
    lower, middle, upper = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "quartiles": [float(lower), float(upper)], "runs": values}


def conclusion(report: JsonObject) -> list[str]:
    """Returns sentences about the best K and its certainty."""
    best, rows = report["best"], report["sweep"]
    row, plain = rows[best["K"]], rows[0]["tokens_per_second"]
    measured, length = _sample_size(report), _with_error(row["acceptance_length"], row)
    sentences = [
        f"K = {best['K']} is best: {row['tokens_per_second']:.1f} tokens/s at {length} tokens per "
        f"step, {best['gain']:.2f} times as fast as plain decoding ({plain:.1f})."
    ]
    if best["K"] == 0:
        sentences = [
            f"K = 0 is best: plain decoding reaches {plain:.1f} tokens/s, and no number of drafted "
            "tokens is faster here."
        ]
    if best["not_told_apart"]:
        *others, last = map(str, best["not_told_apart"])
        listed = f"{', '.join(others)} and {last}" if others else last
        sentences.append(
            f"K = {listed} may be as fast: the difference is within the error of the acceptance, "
            f"measured over {measured}, and of the step times. More prompts or --max-new-tokens "
            "make the first error smaller, more --rounds the second."
        )
    else:
        sentences.append(
            f"Every other K is slower, by more than the error of the acceptance, measured over "
            f"{measured}, and of the step times."
        )
    decoded = best.get("decoded_acceptance_length")
    if decoded is not None:
        error = best["decoded_standard_error"]
        sentences.append(
            f"Decoding the prompts at K = {best['K']} gave {decoded:.2f} ± {error:.2f} tokens per "
            f"step; predicted from K = {report['max_speculative_tokens']}: {length} (± is a "
            "standard error)."
        )
    if "step_costs" in report:
        costs = ",".join(f"{cost:g}" for cost in report["step_costs"])
        sentences.append(
            f"--step-costs {costs} lets `specjax generate` choose by these times; "
            f"with --input add --usual-acceptance-rate {report['acceptance']['usual_rate']:.2f}."
        )
    return sentences


def _with_error(value: float, row: JsonObject) -> str:
    return f"{value:.2f} ± {row['standard_error']:.2f}"


def _sample_size(report: JsonObject) -> str:
    acceptance = report["acceptance"]
    steps = _count_noun(acceptance["num_steps"], "step")
    return f"{steps} of {_count_noun(acceptance['num_prompts'], 'prompt')}"


def _count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def report_tables(report: JsonObject) -> list[tuple[str, Table]]:
    """Returns titled tables: speed of each K, its certainty, speed at synthetic acceptance."""
    largest = report["max_speculative_tokens"]
    return [
        (
            "at the pair's acceptance; break-even: tokens per step from which on a K is faster "
            "than K = 0",
            _acceptance_table(report),
        ),
        (
            f"certainty, from {_sample_size(report)} at K = {largest}; accepted: share of steps "
            "that accepted the first K drafted tokens",
            _confidence_table(report),
        ),
        (
            "at synthetic acceptance; closed form: expected tokens / median step time",
            _synthetic_table(report),
        ),
    ]


def _acceptance_table(report: JsonObject) -> Table:
    table = _new_table(
        "K", "ms per step", "quartiles", "break-even", "tokens/step", "tokens/s", "gain"
    )
    for row in report["sweep"]:
        step, best = row["step_ms"], row["K"] == report["best"]["K"]
        cells = (
            f"{row['K']}",
            f"{step['median']:.3f}",
            "{:.3f} - {:.3f}".format(*step["quartiles"]),
            f"{row['break_even_length']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['gain']:.2f}",
        )
        table.add_row(*(Text(cell, "bold green" if best else "") for cell in cells))
    return table


def _confidence_table(report: JsonObject) -> Table:
    table = _new_table(
        "K",
        "accepted",
        "tokens/step",
        "± std. error",
        "tokens/s below best",
        "± std. error",
        "differs",
    )
    best = report["best"]
    for K, row in enumerate(report["sweep"]):
        cells = [
            f"{K}",
            f"{report['acceptance']['rates'][K - 1]:.2f}" if K else "",
            f"{row['acceptance_length']:.2f}",
            f"{row['standard_error']:.2f}",
        ]
        if best["K"] == K:
            cells += ["", "", "best"]
        else:
            differs = "no" if K in best["not_told_apart"] else "yes"
            cells += [
                f"{row['behind_best']:.1f}",
                f"{row['behind_best_error']:.1f}",
                differs,
            ]
        table.add_row(*(Text(cell, "bold green" if best["K"] == K else "") for cell in cells))
    return table


def _synthetic_table(report: JsonObject) -> Table:
    table = _new_table("K", "expected", "tokens/step", "tokens/s", "quartiles", "closed form")
    for row in report["sweep"]:
        for position, point in enumerate(row["synthetic"]):
            rate = point["tokens_per_second"]
            table.add_row(
                "" if position else f"{row['K']}",
                f"{point['asked_length']:.2f}",
                f"{point['length']:.2f}",
                f"{rate['median']:.1f}",
                "{:.1f} - {:.1f}".format(*rate["quartiles"]),
                f"{point['closed_form']:.1f}",
            )
    return table


def _new_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
