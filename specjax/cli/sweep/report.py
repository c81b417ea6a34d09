"""Reports a sweep: as a JSON object, as tables, in sentences and as a plot."""

import io
import pathlib
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from specjax.cli.sweep.choice import Acceptance, Best, standard_errors
from specjax.cli.sweep.measure import Workload
from specjax.decode.step_times import StepTimes
from specjax.file_io import JsonObject, replace_file

# Columns of the tables: headings, and how a row of the report fills a cell.
_SPEED_COLUMNS = (
    ("K", "{K}"),
    ("ms per step", "{step_ms[median]:.3f}"),
    ("quartiles", "{step_ms[quartiles][0]:.3f} - {step_ms[quartiles][1]:.3f}"),
    ("break-even", "{break_even_length:.2f}"),
    ("tokens/step", "{acceptance_length:.2f}"),
    ("tokens/s", "{tokens_per_second:.1f}"),
    ("gain", "{gain:.2f}"),
)
_CERTAINTY_COLUMNS = (
    ("K", "{K}"),
    ("accepted", "{accepted}"),
    ("tokens/step", "{acceptance_length:.2f}"),
    ("± std. error", "{standard_error:.2f}"),
    ("tokens/s below best", "{gap}"),
    ("± std. error", "{gap_error}"),
    ("differs", "{differs}"),
)


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
    options, lengths, errors = workload.options, acceptance.lengths, standard_errors(acceptance)
    columns: dict[str, list[Any]] = {
        "acceptance_length": lengths,
        "standard_error": errors,
        "tokens_per_second": best.tokens_per_second,
        "quartiles": list(map(list, best.quartiles)),
        "gain": best.gains,
        "behind_best": best.gaps_to_best,
        "behind_best_error": best.gap_errors,
    }
    rows = []
    for K, one in enumerate(times):
        step = _quartiles([1e3 * seconds for seconds in one.step_seconds])
        rows.append(
            {
                "K": K,
                "compile_seconds": one.compile_seconds,
                "step_ms": step,
                "break_even_length": step["median"] / 1e3 / np.median(times[0].step_seconds),
                **{name: values[K] for name, values in columns.items()},
            }
        )
    given = ("max_speculative_tokens", "batch_size", "context", "temperature")
    return {
        **provenance,
        **{name: getattr(options, name) for name in (*given, "draft_sample_method")},
        "steps_per_run": options.steps,
        "rounds": options.rounds,
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
    """Returns titled tables: the speed of each K, and its certainty."""
    rows, best, rates = report["sweep"], report["best"], report["acceptance"]["rates"]
    certainty = []
    for row, accepted in zip(rows, ["", *(f"{rate:.2f}" for rate in rates)], strict=True):
        gap, error = f"{row['behind_best']:.1f}", f"{row['behind_best_error']:.1f}"
        differs = "no" if row["K"] in best["not_told_apart"] else "yes"
        cells = ("", "", "best") if row["K"] == best["K"] else (gap, error, differs)
        names = ("gap", "gap_error", "differs")
        certainty.append(row | {"accepted": accepted} | dict(zip(names, cells, strict=True)))
    return [
        (
            "at the pair's acceptance; break-even: tokens per step from which on a K is faster "
            "than K = 0",
            _make_table(_SPEED_COLUMNS, rows, best["K"]),
        ),
        (
            f"certainty, from {_sample_size(report)} at K = {rows[-1]['K']}; accepted: share of "
            "steps that accepted the first K drafted tokens",
            _make_table(_CERTAINTY_COLUMNS, certainty, best["K"]),
        ),
    ]


def _make_table(columns: tuple[tuple[str, str], ...], rows: list[JsonObject], best: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        style = "bold green" if row["K"] == best else ""
        table.add_row(*(Text(cell.format_map(row), style) for _, cell in columns))
    return table


def conditions(report: JsonObject) -> str:
    """Returns a line with the sizes, the device, the version of JAX and the day."""
    return (
        f"B = {report['batch_size']}, context {report['context']}, temperature "
        f"{report['temperature']:g} · {report['device']}, jax {report['jax_version']}, "
        f"{report['date'][:10]}"
    )


def write_plot(report: JsonObject, path: pathlib.Path) -> None:
    """Plots tokens per second against acceptance length: a line for each K, and the pair's points.

    Args:
      report: from `to_json`.
      path: a .png, .svg or .pdf file; an existing one is replaced once the new one is complete.

    Raises:
      OSError: if the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which would touch the figures and the backend of a calling program.
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = map(colormaps["viridis"], np.linspace(0, 0.9, len(report["sweep"])))
    for row, colour in zip(report["sweep"], colours, strict=True):
        lengths = np.array([1.0, row["K"] + 1.0])
        rates = 1e3 * report["batch_size"] * lengths / row["step_ms"]["median"]
        axes.plot(lengths, rates, "o-", ms=3, color=colour, label=f"K = {row['K']}", lw=1.3)
        own_point = (row["acceptance_length"], row["tokens_per_second"])
        bars = np.abs(np.array([row["quartiles"]]).T - own_point[1])
        axes.errorbar(*own_point, bars, color=colour, capsize=2)
        size = 17 if row["K"] == report["best"]["K"] else 9
        axes.plot(*own_point, "*", ms=size, color=colour, mec="black", mew=0.8, zorder=5)
    axes.axhline(report["sweep"][0]["tokens_per_second"], color="0.6", lw=0.8, ls="--", zorder=0)
    axes.set(xlabel="acceptance length (tokens per step)", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    best = report["best"]
    best_line = f"best: K = {best['K']}, {best['gain']:.2f} times plain decoding"
    # matplotlib takes dollar signs for mathematics.
    pair = report["pair"].replace("$", r"\$")
    axes.set_title(f"{pair}\n{conditions(report)}\n{best_line}", fontsize=9)
    axes.grid(alpha=0.3)
    # An empty line: the legend explains the mark once, in grey.
    axes.plot([], [], "*", color="0.8", mec="black", ms=11, label="at the pair's acceptance")
    figure.legend(loc="outside right center", fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format=path.suffix[1:].lower())
    with replace_file(path) as temporary:
        temporary.write_bytes(image.getvalue())
