"""One step of verification, number by number: printed, and drawn with --out.

python examples/one_step.py --out docs/one_step.svg

Four requests continue "the cat" over a vocabulary of five words. Their models and their two drafted
tokens are equal; their keys and kinds are not.
"""

import argparse
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot
import numpy as np

import specjax
from specjax.core.noise import address, key_words, uniform
from specjax.core.residual import residual_probs
from specjax.file_io import replace_file

matplotlib.use("Agg")

WORDS = ("sat", "ran", "on", "the", ".")
K = 2
POSITION = 2  # "the" and "cat" stand at 0 and 1
# What follows "the cat", then "the cat sat", then, of the target alone, "the cat sat on".
Q = np.array([[0.60, 0.25, 0.04, 0.03, 0.08], [0.02, 0.03, 0.60, 0.05, 0.30]], np.float32)
P = np.array(
    [
        [0.45, 0.38, 0.07, 0.02, 0.08],
        [0.01, 0.05, 0.36, 0.08, 0.50],
        [0.02, 0.03, 0.05, 0.86, 0.04],
    ],
    np.float32,
)
KINDS = ("sampled draft", "sampled draft", "one-hot draft", "greedy request")
SEEDS = (18, 56, 42, 22)  # by which every request drafts "sat on", and their ends differ
TEMPERATURE = (1.0, 1.0, 1.0, 0.0)
# 1: drawn from q. 0: the likeliest tokens of q, without a draw, so that q is one-hot.
DRAFT_TEMPERATURE = (1.0, 1.0, 0.0, 0.0)


class Judged(NamedTuple):
    """A drafted token and what decided it; greedy requests draw no uniform."""

    token: int
    p: float
    q: float
    uniform: float | None
    accepted: bool


class Step(NamedTuple):
    """Judged tokens of a request, the next token, and the distribution that it is drawn from."""

    judged: list[Judged]
    weights: np.ndarray  # before they are divided by their sum
    token: int
    is_bonus: bool


def verify() -> tuple[specjax.Draft, specjax.Verification, jax.Array]:
    """Drafts and verifies the batch, as a decode loop does; returns its keys, too."""
    size = len(KINDS)
    keys = jnp.stack([jax.random.key(seed) for seed in SEEDS])
    draft_logits = jnp.broadcast_to(jnp.log(Q), (size, *Q.shape))
    target_logits = jnp.broadcast_to(jnp.log(P), (size, *P.shape))
    draft_temperature = jnp.array(DRAFT_TEMPERATURE)
    drafted = [
        specjax.gumbel_sample(
            draft_logits[:, i],
            keys=keys,
            positions=POSITION + i,
            stream=specjax.Stream.draft(i),
            temperature=draft_temperature,
        ).token_ids
        for i in range(K)
    ]
    draft = specjax.Draft(jnp.stack(drafted, axis=1), draft_logits, temperature=draft_temperature)
    outcome = specjax.rejection_sample(
        draft, target_logits, keys=keys, positions=POSITION, temperature=jnp.array(TEMPERATURE)
    )
    return draft, outcome, keys


def explain(b: int, draft: specjax.Draft, outcome: specjax.Verification, key: jax.Array) -> Step:
    """Computes what decided request `b`, and checks that it is what `rejection_sample` decided."""
    num_accepted, greedy = int(outcome.num_accepted[b]), TEMPERATURE[b] == 0
    judged = []
    for i in range(min(num_accepted + 1, K)):
        x = int(draft.token_ids[b, i])
        q = float(Q[i, x]) if DRAFT_TEMPERATURE[b] else 1.0
        u = None
        if not greedy:
            at = address(key_words(key), POSITION + i, specjax.Stream.accept(i))
            u = float(uniform(at, jnp.uint32(0)))
        accepted = x == P[i].argmax() if u is None else u < P[i, x] / q
        judged.append(Judged(x, float(P[i, x]), q, u, bool(accepted)))
        assert accepted == (i < num_accepted)

    row, is_bonus = P[num_accepted], num_accepted == K
    if greedy:
        weights = row * (row == row.max())
    elif is_bonus:
        weights = row
    else:
        one_hot = np.eye(len(WORDS), dtype=np.float32)[judged[-1].token]
        q_row = Q[num_accepted] if DRAFT_TEMPERATURE[b] else one_hot
        # Of a one-hot draft max(p - q, 0) is p without the drafted token.
        weights = np.asarray(residual_probs(jnp.log(row), jnp.log(q_row)))
    token = int(outcome.token_ids[b, num_accepted])
    assert weights[token] > 0
    return Step(judged, weights, token, is_bonus)


def shares(weights: np.ndarray) -> str:
    return ", ".join(f"{w} {x:.2f}" for w, x in zip(WORDS, weights, strict=True) if x > 0)


def describe(kind: str, step: Step) -> str:
    """Returns the numbers of one request, as lines of text."""
    lines = [f'{kind}: "{" ".join(WORDS[one.token] for one in step.judged)}"']
    for one in step.judged:
        verdict = "accepted" if one.accepted else "rejected"
        if one.uniform is None:
            why = f"p {one.p:.2f} is {'' if one.accepted else 'not '}the row's largest"
        else:
            why = f"p {one.p:.2f} / q {one.q:.2f} = {one.p / one.q:.2f}, uniform {one.uniform:.2f}"
        lines.append(f"  {WORDS[one.token]:4} {why}: {verdict}")
    total = float(step.weights.sum())
    if step.is_bonus:
        lines.append(f'  bonus "{WORDS[step.token]}", drawn from p: {shares(step.weights)}')
    elif step.judged[-1].uniform is None:
        lines.append(f'  instead "{WORDS[step.token]}", the row\'s largest')
    else:
        lines.append(f"  residual max(p - q, 0): {shares(step.weights)}; sum {total:.2f}")
        drawn = f"drawn from the residual over its sum: {shares(step.weights / total)}"
        lines.append(f'  recovered "{WORDS[step.token]}", {drawn}')
    words = [WORDS[one.token] for one in step.judged if one.accepted] + [WORDS[step.token]]
    return "\n".join([*lines, f"  emitted: {' '.join(words)}"])


# The picture -------------------------------------------------------------------------------------

FIRST_LINE = (
    'The text is "the cat". The draft model proposes "sat on"; u is drawn uniformly from (0, 1).'
)
INK, MUTED, CARD = "#1f2328", "#59636e", "#f6f8fa"
P_COLOR, Q_COLOR, R_COLOR = "#0969da", "#f0a04b", "#8250df"
GOOD, BAD = "#1a7f37", "#cf222e"
STYLE = {
    "svg.fonttype": "path",  # letters are outlines: no viewer needs the font
    "svg.hashsalt": "specjax",  # equal runs write equal files
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "legend.fontsize": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": INK,
    "ytick.color": MUTED,
    "axes.facecolor": CARD,
    "figure.facecolor": CARD,  # a card of its own: readable on light and on dark pages
}


def draw_bars(axes, rows, chosen: int) -> None:
    """Draws one or two distributions over the words; the chosen token's word is framed."""
    width = 0.8 / len(rows)
    for n, (name, values, color) in enumerate(rows):
        places = np.arange(len(WORDS)) + (n - (len(rows) - 1) / 2) * width
        bars = axes.bar(places, values, width, color=color, label=name)
        axes.bar_label(bars, [f"{x:.2f}"[1:] if 0 < x < 1 else "" for x in values], fontsize=7)
    axes.set(ylim=(0, 0.95), yticks=[], xticks=range(len(WORDS)), xticklabels=WORDS)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    label = axes.get_xticklabels()[chosen]
    label.set(fontweight="bold", bbox={"boxstyle": "round,pad=0.25", "fc": "none", "ec": INK})


def draw_uniform(axes, one: Judged) -> None:
    """Draws the unit interval, the part of it that accepts, and the uniform."""
    ratio, color = min(1.0, one.p / one.q), GOOD if one.accepted else BAD
    axes.barh(0, ratio, 0.5, color=GOOD, alpha=0.35)
    axes.barh(0, 1 - ratio, 0.5, left=ratio, color=BAD, alpha=0.25)
    axes.plot([one.uniform] * 2, [-0.5, 0.5], color=INK, linewidth=2)
    verdict = f"u = {one.uniform:.2f} {'<' if one.accepted else '≥'} {ratio:.2f}:"
    axes.text(0, -0.9, f"p / q = {one.p:.2f} / {one.q:.2f} = {ratio:.2f}", va="center")
    axes.text(0, -1.75, verdict, va="center")
    word = "accepted" if one.accepted else "rejected"
    axes.text(1, -1.75, word, va="center", ha="right", color=color, fontweight="bold")
    axes.set(xlim=(0, 1), ylim=(-2.5, 0.6))
    axes.set_axis_off()


def draw_request(figure, cells, step: Step) -> None:
    """Draws a request into [2, 3] cells: two drafted tokens, then the recovered or bonus token."""
    for i, one in enumerate(step.judged):
        bars = figure.add_subplot(cells[0][i])
        draw_bars(bars, [("target p", P[i], P_COLOR), ("draft q", Q[i], Q_COLOR)], one.token)
        bars.set_title(f'{i + 1}. drafted "{WORDS[one.token]}"', loc="left")
        draw_uniform(figure.add_subplot(cells[1][i]), one)
        if i == 0:
            bars.legend(loc="upper right", frameon=False, borderaxespad=0)
    name, label, color, source = (
        ("bonus", "target p", P_COLOR, "drawn from the target's next row")
        if step.is_bonus
        else ("recovered", "residual", R_COLOR, "drawn from max(p - q, 0), divided\nby its sum")
    )
    bars, strip = (figure.add_subplot(row[K]) for row in cells)
    draw_bars(bars, [(label, step.weights / step.weights.sum(), color)], step.token)
    bars.set_title(f'3. {name} "{WORDS[step.token]}"', loc="left")
    bars.legend(loc="upper left", frameon=False, borderaxespad=0)
    strip.text(0, 0.35, source, va="top")
    words = [WORDS[one.token] for one in step.judged if one.accepted]
    emitted = f"emitted: {' '.join([*words, WORDS[step.token]])}"
    strip.text(0, -1.75, emitted, va="center", fontweight="bold")
    strip.set(xlim=(0, 1), ylim=(-2.5, 0.6))
    strip.set_axis_off()


def draw(steps: list[Step], description: str, path: pathlib.Path) -> None:
    """Draws a request that rejects its second drafted token, and one that accepts both."""
    with matplotlib.pyplot.rc_context(STYLE):
        figure = matplotlib.pyplot.figure(figsize=(8, 6))
        titles = ("Key A: the second token is rejected", "Key B: both are accepted")
        for title, step, top in zip(titles, steps, (0.845, 0.385), strict=True):
            figure.text(0.03, top + 0.06, title, fontsize=10.5, fontweight="bold")
            grid = figure.add_gridspec(
                2,
                3,
                height_ratios=(5, 3),
                left=0.03,
                right=0.97,
                wspace=0.12,
                hspace=0.18,
                top=top,
                bottom=top - 0.37,
            )
            draw_request(figure, [[grid[n, i] for i in range(3)] for n in range(2)], step)
        figure.text(0.03, 0.957, FIRST_LINE, fontsize=10.5)
        metadata = {"Date": None, "Title": "One step of verification", "Description": description}
        with replace_file(path) as spare:
            figure.savefig(spare, format="svg", metadata=metadata)
        matplotlib.pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="an SVG of the first two requests")
    out = parser.parse_args().out

    draft, outcome, keys = verify()
    steps = [explain(b, draft, outcome, keys[b]) for b in range(len(KINDS))]
    text = "\n".join(describe(kind, step) for kind, step in zip(KINDS, steps, strict=True))
    print(text)
    if out is not None:
        draw(steps[:2], text, out)
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
