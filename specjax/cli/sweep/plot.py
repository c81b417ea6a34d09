"""Plots a sweep: tokens per second against acceptance length."""

import io
import pathlib
from typing import Any

import numpy as np

from specjax.file_io import JsonObject, replace_file

__all__ = ["write_plot"]


def write_plot(report: JsonObject, path: pathlib.Path) -> None:
    """Plots tokens per second against acceptance length: per K a line and measured points.

    Args:
      report: from `to_json`.
      path: a .png, .svg or .pdf file; an existing one is replaced once the new one is complete.

    Raises:
      OSError: if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot, which would touch the figures and the backend of a calling program.
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = _line_colours(len(report["sweep"]))
    for row, colour in zip(report["sweep"], colours, strict=True):
        points = row["synthetic"]
        lengths = np.array([point["length"] for point in points])
        rates = np.array([point["tokens_per_second"]["median"] for point in points])
        quartiles = np.array([point["tokens_per_second"]["quartiles"] for point in points]).T
        line = np.array([1.0, row["K"] + 1.0]) if row["K"] else lengths
        closed = 1e3 * report["batch_size"] * line / row["step_ms"]["median"]
        axes.plot(line, closed, "-", color=colour, label=f"K = {row['K']}", lw=1.3)
        bars = np.abs(quartiles - rates)
        axes.errorbar(lengths, rates, bars, fmt="o", ms=4, color=colour, capsize=2)
        own_point = (row["acceptance_length"], row["tokens_per_second"])
        best = row["K"] == report["best"]["K"]
        axes.plot(
            *own_point, "*", ms=17 if best else 9, color=colour, mec="black", mew=0.8, zorder=5
        )
    axes.axhline(report["sweep"][0]["tokens_per_second"], color="0.6", lw=0.8, ls="--", zorder=0)
    axes.set(xlabel="acceptance length (tokens per step)", ylabel="tokens per second")
    axes.set_ylim(bottom=0)
    axes.set_title(_plot_title(report), fontsize=9)
    axes.grid(alpha=0.3)
    # Empty lines: the legend explains the marks once, in grey.
    axes.plot([], [], "-", color="0.4", label="closed form")
    axes.plot([], [], "o", color="0.4", ms=4, label="measured, quartiles")
    axes.plot([], [], "*", color="0.8", mec="black", ms=11, label="at the pair's acceptance")
    figure.legend(loc="outside right center", fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format=path.suffix[1:].lower())
    with replace_file(path) as temporary:
        temporary.write_bytes(image.getvalue())


def _line_colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](position) for position in np.linspace(0, 0.9, count)]


def _plot_title(report: JsonObject) -> str:
    best = report["best"]
    # matplotlib takes dollar signs for mathematics.
    pair = report["pair"].replace("$", r"\$")
    return (
        f"{pair}\nB = {report['batch_size']}, context {report['context']}, temperature "
        f"{report['temperature']:g} · {report['device']}, jax {report['jax_version']}, "
        f"{report['date'][:10]}\nbest: K = {best['K']}, {best['gain']:.2f} times plain decoding"
    )
