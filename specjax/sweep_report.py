"""What a sweep found, as one object, as tables, and as a plot."""

import pathlib
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from specjax.sweep import Acceptance, StepTimes, Workload
from specjax.sweep_choice import Best, predicted_lengths

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
    lengths = predicted_lengths(acceptance.rates)
    rows = []
    for K, (one, length) in enumerate(zip(times, lengths, strict=True)):
        step = _spread([1e3 * seconds for seconds in one.step_seconds])
        rows.append(
            {
                "K": K,
                "compile_seconds": one.compile_seconds,
                "step_ms": step,
                "break_even_length": step["median"] / 1e3 / np.median(times[0].step_seconds),
                "acceptance_length": length,
                "tokens_per_second": best.tokens_per_second[K],
                "quartiles": list(best.quartiles[K]),
                "gain": best.gains[K],
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
    conditional = [
        after / before if before else 0.0
        for before, after in zip([1.0, *acceptance.rates], acceptance.rates, strict=False)
    ]
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
            "num_steps": acceptance.num_steps,
            "num_emitted": acceptance.num_emitted,
            "acceptance_length": lengths[-1],
            "rates": list(acceptance.rates),
            "conditional_rates": conditional,
        },
        "sweep": rows,
        "best": {"K": best.K, "gain": best.gains[best.K], "not_told_apart": best.ties},
    }


def _spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "quartiles": [float(low), float(high)], "runs": values}


def verdict(found: dict[str, Any]) -> list[str]:
    """Which K is best, and how sure that is, in sentences."""
    best, rows = found["best"], found["sweep"]
    row, plain = rows[best["K"]], rows[0]["tokens_per_second"]
    seen, largest = found["acceptance"], found["max_speculative_tokens"]
    said = [
        f"K = {best['K']} is best: {row['tokens_per_second']:.1f} tokens/s at "
        f"{row['acceptance_length']:.2f} tokens per step, {best['gain']:.2f} times as fast as "
        f"plain decoding ({plain:.1f})."
    ]
    if best["K"] == 0:
        said = [
            f"K = 0 is best: plain decoding's {plain:.1f} tokens/s; no number of drafts pays for "
            "itself here."
        ]
    if best["not_told_apart"]:
        others = " and ".join(map(str, best["not_told_apart"]))
        said.append(f"The quartiles of the step times do not tell it from K = {others}.")
    decoded = best.get("decoded_acceptance_length")
    if decoded is not None:
        said.append(
            f"Decoding the prompts at K = {best['K']} gave {decoded:.2f} tokens per step; "
            f"{row['acceptance_length']:.2f} was predicted of K = {largest}."
        )
    said.append(
        f"Of {seen['num_steps']} steps on {seen['num_prompts']} prompts at K = {largest}, drafts "
        "were kept up to each position in "
        + ", ".join(f"{rate:.2f}" for rate in seen["rates"])
        + " of them."
    )
    return said


def tables(found: dict[str, Any]) -> list[tuple[str, Table]]:
    """By title: a row per K at the pair's acceptance, and per K and synthetic acceptance."""
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
    return [
        ("at the pair's own acceptance; a K pays from so many tokens per step on", own),
        ("at synthetic acceptance; closed form: expected tokens over the median step", synthetic),
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def plot(found: dict[str, Any], path: pathlib.Path) -> None:
    """Tokens per second against acceptance length, a line and its measured points per K.

    Args:
      found: of `to_object`.
      path: of a .png, .svg or .pdf, which is replaced.
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
    figure.savefig(path, dpi=130)


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
