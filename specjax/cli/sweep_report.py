"""What a sweep found, as one object, as tables, and as a plot."""

import io
import pathlib
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from specjax.cli.sweep_choice import Acceptance, Best, predicted_lengths, standard_errors
from specjax.cli.sweep_measure import StepTimes, Workload
from specjax.files import replacing

__all__ = ["plot", "tables", "to_object", "verdict"]


def to_object(
    work: Workload,
    birthplace: dict[str, Any],
    acceptance: Acceptance,
    times: list[StepTimes],
    best: Best,
) -> dict[str, Any]:
    """All of it, as JSON can hold it.

    Args:
      work: what was measured.
      birthplace: device, versions, date, command, pair.
      acceptance: of the prompts, at the largest K.
      times: of each K.
      best: what follows from both.

    Returns:
      Plain lists, dicts and numbers; times in milliseconds, `spread` as quartiles.
    """
    lengths, errors = predicted_lengths(acceptance.rates), standard_errors(acceptance)
    rows = []
    for K, one in enumerate(times):
        step = _spread([1e3 * seconds for seconds in one.step_seconds])
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
                "behind_best": best.leads[K],
                "behind_best_error": best.lead_errors[K],
                "synthetic": [
                    {
                        "asked_length": point.asked,
                        "length": point.length,
                        "step_ms": _spread([1e3 * seconds for seconds in point.step_seconds]),
                        "tokens_per_second": _spread(point.tokens_per_second),
                        "closed_form": 1e3 * work.batch_size * point.asked / step["median"],
                    }
                    for point in one.points
                ],
            }
        )
    return birthplace | {
        "max_speculative_tokens": work.max_speculative_tokens,
        "batch_size": work.batch_size,
        "context": work.context,
        "temperature": work.temperature,
        "draft_sample_method": work.draft_sample_method,
        "steps_per_run": work.num_steps,
        "rounds": work.num_rounds,
        "acceptance": {
            "num_prompts": len(work.prompts),
            "num_prompt_tokens": sum(map(len, work.prompts)),
            "acceptance_length": lengths[-1],
            "standard_error": errors[-1],
            **_counted(acceptance),
        },
        "sweep": rows,
        "best": {"K": best.K, "gain": best.gains[best.K], "not_told_apart": best.ties},
    }


def _counted(acceptance: Acceptance) -> dict[str, Any]:
    steps, rates = acceptance.steps, acceptance.rates
    return {
        "num_steps": len(steps),
        "num_emitted": len(steps) + sum(steps),
        "num_kept": acceptance.kept,
        "rates": rates,
        "conditional_rates": [
            after / before if before else 0.0
            for before, after in zip([1.0, *rates], rates, strict=False)
        ],
    }


def _spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "quartiles": [float(low), float(high)], "runs": values}


def verdict(found: dict[str, Any]) -> list[str]:
    """Which K is best, and how sure that is, in sentences."""
    best, rows = found["best"], found["sweep"]
    row, plain = rows[best["K"]], rows[0]["tokens_per_second"]
    measured, length = _measured(found), _with_error(row["acceptance_length"], row)
    said = [
        f"K = {best['K']} is best: {row['tokens_per_second']:.1f} tokens/s at {length} tokens per "
        f"step, {best['gain']:.2f} times as fast as plain decoding ({plain:.1f})."
    ]
    if best["K"] == 0:
        said = [
            f"K = 0 is best: plain decoding's {plain:.1f} tokens/s; no number of drafts paid for "
            "itself here."
        ]
    if best["not_told_apart"]:
        *others, last = map(str, best["not_told_apart"])
        named = f"{', '.join(others)} and {last}" if others else last
        said.append(
            f"It is not told from K = {named}: the acceptance, measured over {measured}, and the "
            "quartiles of the step times leave that open. More prompts and --max-new-tokens make "
            "the one surer, more --rounds the other."
        )
    else:
        said.append(
            f"Measured over {measured}: every other K is slower by more than the acceptance's "
            "error and the quartiles of the step times explain."
        )
    decoded = best.get("decoded_acceptance_length")
    if decoded is not None:
        error = best["decoded_standard_error"]
        said.append(
            f"Decoding the prompts at K = {best['K']} gave {decoded:.2f} ± {error:.2f} tokens per "
            f"step; {length} was predicted of K = {found['max_speculative_tokens']} (± is a "
            "standard error)."
        )
    return said


def _with_error(value: float, row: dict[str, Any]) -> str:
    return f"{value:.2f} ± {row['standard_error']:.2f}"


def _measured(found: dict[str, Any]) -> str:
    seen = found["acceptance"]
    return f"{_count(seen['num_steps'], 'step')} of {_count(seen['num_prompts'], 'prompt')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tables(found: dict[str, Any]) -> list[tuple[str, Table]]:
    """By title: of each K what it achieves, how sure that is, and what it does if it is told."""
    largest = found["max_speculative_tokens"]
    return [
        ("at the pair's own acceptance; a K pays from so many tokens per step on", _own(found)),
        (
            f"how sure that is, of {_measured(found)} at K = {largest}; kept: the part that kept "
            "K drafts",
            _surety(found),
        ),
        (
            "at synthetic acceptance; closed form: expected tokens over the median step",
            _synthetic(found),
        ),
    ]


def _own(found: dict[str, Any]) -> Table:
    own = _table("K", "ms per step", "quartiles", "pays from", "tokens/step", "tokens/s", "gain")
    for row in found["sweep"]:
        step, best = row["step_ms"], row["K"] == found["best"]["K"]
        cells = (
            f"{row['K']}",
            f"{step['median']:.3f}",
            "{:.3f} - {:.3f}".format(*step["quartiles"]),
            f"{row['break_even_length']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['gain']:.2f}",
        )
        own.add_row(*(Text(cell, "bold green" if best else "") for cell in cells))
    return own


def _surety(found: dict[str, Any]) -> Table:
    surety = _table(
        "K", "kept", "tokens/step", "± std. error", "tokens/s behind", "± std. error", "told"
    )
    best = found["best"]
    for K, row in enumerate(found["sweep"]):
        cells = [
            f"{K}",
            f"{found['acceptance']['rates'][K - 1]:.2f}" if K else "",
            f"{row['acceptance_length']:.2f}",
            f"{row['standard_error']:.2f}",
        ]
        if best["K"] == K:
            cells += ["", "", "best"]
        else:
            told = "no" if K in best["not_told_apart"] else "yes"
            cells += [f"{row['behind_best']:.1f}", f"{row['behind_best_error']:.1f}", told]
        surety.add_row(*(Text(cell, "bold green" if best["K"] == K else "") for cell in cells))
    return surety


def _synthetic(found: dict[str, Any]) -> Table:
    synthetic = _table("K", "asked for", "tokens/step", "tokens/s", "quartiles", "closed form")
    for row in found["sweep"]:
        for place, point in enumerate(row["synthetic"]):
            rate = point["tokens_per_second"]
            synthetic.add_row(
                "" if place else f"{row['K']}",
                f"{point['asked_length']:.2f}",
                f"{point['length']:.2f}",
                f"{rate['median']:.1f}",
                "{:.1f} - {:.1f}".format(*rate["quartiles"]),
                f"{point['closed_form']:.1f}",
            )
    return synthetic


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
    """Tokens per second against acceptance length, a line and its measured points per K.

    Args:
      found: of `to_object`.
      path: of a .png, .svg or .pdf, which is replaced once the new one is written whole.

    Raises:
      OSError: if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: whoever calls this may have a figure and a backend of their own.
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = _colours(len(found["sweep"]))
    for row, colour in zip(found["sweep"], colours, strict=True):
        points = row["synthetic"]
        lengths = np.array([point["length"] for point in points])
        rates = np.array([point["tokens_per_second"]["median"] for point in points])
        quartiles = np.array([point["tokens_per_second"]["quartiles"] for point in points]).T
        line = np.array([1.0, row["K"] + 1.0]) if row["K"] else lengths
        closed = 1e3 * found["batch_size"] * line / row["step_ms"]["median"]
        axes.plot(line, closed, "-", color=colour, label=f"K = {row['K']}", lw=1.3)
        bars = np.abs(quartiles - rates)
        axes.errorbar(lengths, rates, bars, fmt="o", ms=4, color=colour, capsize=2)
        own = (row["acceptance_length"], row["tokens_per_second"])
        best = row["K"] == found["best"]["K"]
        axes.plot(*own, "*", ms=17 if best else 9, color=colour, mec="black", mew=0.8, zorder=5)
    axes.axhline(found["sweep"][0]["tokens_per_second"], color="0.6", lw=0.8, ls="--", zorder=0)
    axes.set(xlabel="acceptance length (tokens per step)", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.set_title(_title(found), fontsize=9)
    axes.grid(alpha=0.3)
    # What the marks are, once, in no K's colour.
    axes.plot([], [], "-", color="0.4", label="closed form")
    axes.plot([], [], "o", color="0.4", ms=4, label="measured, quartiles")
    axes.plot([], [], "*", color="0.8", mec="black", ms=11, label="the pair's own")
    figure.legend(loc="outside right center", fontsize=8)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format=path.suffix[1:].lower())
    with replacing(path) as spare:
        spare.write_bytes(drawn.getvalue())


def _colours(number: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](place) for place in np.linspace(0, 0.9, number)]


def _title(found: dict[str, Any]) -> str:
    best = found["best"]
    # A folder's name may hold what matplotlib takes for mathematics.
    pair = found["pair"].replace("$", r"\$")
    return (
        f"{pair}\nB = {found['batch_size']}, context {found['context']}, temperature "
        f"{found['temperature']:g} · {found['device']}, jax {found['jax_version']}, "
        f"{found['date'][:10]}\nbest: K = {best['K']}, {best['gain']:.2f} times plain decoding"
    )
