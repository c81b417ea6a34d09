r"""Makes the table of cutoffs on a GPU from the JSON that the benchmark wrote.

python -m benchmarks.tables.cutoff benchmarks/results/h200_cutoff.json \
    --readme docs/measurements.md
python -m benchmarks.tables.cutoff benchmarks/results/h200_cutoff.json \
    --brief --readme docs/speed.md
"""

from typing import Any

from benchmarks.tables.publish import is_one_session, origin, publish_from_json, table

BEGIN, END = "<!-- cutoff-table -->", "<!-- /cutoff-table -->"

# What a case is called in the table, where its own name does not say all. A case that is not here
# is called by that name, so that a new one is never left out.
LABELS = {
    "one read (XLA max)": "one read of the logits (the largest of each row, by XLA)",
    "gumbel_sample": "`gumbel_sample` of the same rows",
    "top-p 0.9": "top-p 0.9 at T = 0.7",
    "top-p 0.9, spread": "top-p 0.9 at T = 1: thousands of tokens are kept",
    "top-p 0.9, flat": "top-p 0.9 at T = 30: most tokens are kept",
    "all three": "top-k 50, top-p 0.9 and min-p 0.05",
    "sort (XLA)": "sort, softmax, cumsum, by XLA",
    "jax.lax.top_k 50": "`jax.lax.top_k`, k = 50",
    "softmax": "what every way from probabilities begins with",
}
# What the names of cases of rows like a language model's begin with.
RANKED = "ranked: "

Column = tuple[str, int, int]


def cutoff_table(result: dict[str, Any]) -> str:
    """The table, with the inputs above it, its kernels and its birthplace below, as markdown."""
    cases = [case for case in result["cases"] if "median_us" in case]
    main = cases[0]["dtype"]
    columns = sorted({column_of(case) for case in cases}, key=lambda c: (c[0] != main, *c))
    times = {(case["case"], column_of(case)): case["median_us"] for case in cases}
    widest = max(V for _, V, _ in columns)

    def head(column: Column) -> str:
        dtype, V, B = column
        more = [f"V = {V}"] * (widest != V) + [dtype] * (dtype != main)
        return ", ".join([f"B = {B}", *more])

    rows = []
    for name in dict.fromkeys(case["case"] for case in cases):
        cells = [times.get((name, column)) for column in columns]
        rows.append((label_of(name), *("" if us is None else f"{us:.1f}" for us in cells)))
    lines = [
        f"{rows_of(cases)}, V = {widest}, {main}, parameters per request; microseconds per call.",
        "",
        *table(f"| | {' | '.join(map(head, columns))} |", rows),
    ]
    own = kernels(column_of(cases[0]), cases)
    rest = [*verification(result), *filters(result), *samplers(result)]
    return "\n".join([*lines, "", *own, origin(result["environment"]), *rest])


def label_of(name: str) -> str:
    """What a case is called in the tables; * for rows like a language model's."""
    of_normal = name.removeprefix(RANKED)
    return LABELS.get(of_normal, of_normal) + " *" * (of_normal != name)


def rows_of(cases: list[dict[str, Any]]) -> str:
    """The rows of the cases, in words."""
    if not any(case["case"].startswith(RANKED) for case in cases):
        return "Rows 3 N(0, 1)"
    return "Rows 3 N(0, 1), or where marked * -1.3 log(1 + rank), as a language model's"


def brief_table(result: dict[str, Any]) -> str:
    """The cases of the first shape and what reads those rows; in brackets vLLM and FlashInfer."""
    main = result["cases"][0]
    cases = [case for case in result["cases"] if column_of(case)[:2] == column_of(main)[:2]]
    sizes = sorted({case["B"] for case in cases if case["case"] == main["case"]})[:2]
    times = {(case["case"], case["B"]): case["median_us"] for case in cases}
    theirs = {(case["case"], case["B"]): case["median_us"] for case in peer_of(result, "vllm")}
    fastest = fastest_of(peer_of(result, "flashinfer"))
    peers = ", in brackets vLLM, its float32 copy included" if theirs else ""
    peers += "; FlashInfer by its fastest function for that case" if fastest else ""
    heads = [f"B = {size}" for size in sizes]
    heads += [f"FlashInfer, B = {size}" for size in sizes if fastest]
    rows = []
    for name in dict.fromkeys(case["case"] for case in cases):
        if (name, sizes[0]) in times:
            shown = [f"{times[name, size]:.1f}" for size in sizes]
            shown = [
                f"{ours} ({theirs[name, size]:.0f})" if (name, size) in theirs else ours
                for ours, size in zip(shown, sizes, strict=True)
            ]
            found = [fastest.get((name, size)) for size in sizes if fastest]
            shown += ["" if us is None else f"{us:.0f}" for us in found]
            rows.append((label_of(name), *shown))
    lines = [
        f"{rows_of(cases)}, V = {main['V']}, {main['dtype']}, parameters per request; "
        f"microseconds per call{peers}.",
        "",
        *table(f"| `logit_cutoff` | {' | '.join(heads)} |", rows),
    ]
    where = result["environment"]
    return "\n".join([*lines, "", f"{where['device']}, jax {where['jax']}, {where['date'][:10]}."])


def peer_of(result: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The cases of another library, if they were measured in the session of ours."""
    peer = result.get(name)
    if peer is None or not is_one_session(result["environment"], peer["environment"]):
        return []
    return peer["cases"]


def verification(result: dict[str, Any]) -> list[str]:
    """A call of verification with and without filters, kernel by kernel, and its memory."""
    section = result.get("verification")
    if section is None:
        return []
    cases = section["cases"]
    names = dict.fromkeys(
        name for case in cases for name in case["kernels"] if name.endswith("_kernel")
    )
    heads = [name.removesuffix("_kernel") for name in names]
    first = cases[0]
    head = (
        f"| verification at B = {first['B']}, K = {first['K']}, T = {first['temperature']}, drafts "
        f"filtered alike | us | {' | '.join(heads)} | temporary arrays, MB |"
    )
    rows = []
    for case in cases:
        kernels = [case["kernels"].get(name) for name in names]
        shown = ["" if kernel is None else f"{kernel['us']:.1f}" for kernel in kernels]
        total, room = f"{case['median_us']:.1f}", f"{case['temporary_mb']:.1f}"
        rows.append((label_of(case["case"]), total, *shown, room))
    whole = f"All {first['K'] + 1} rows of a request in float32 would be"
    place = f"{first['float32_rows_mb']:.0f} MB. {origin(section['environment'])}"
    return ["", *table(head, rows), "", f"{whole} {place}"]


def filters(result: dict[str, Any]) -> list[str]:
    """vLLM's filters on the same rows, as a table of its own: they do not do the same."""
    cases = peer_of(result, "vllm")
    if not cases:
        return []
    where = result["vllm"]["environment"]
    sizes = sorted({case["B"] for case in cases})
    times = {(case["case"], case["B"]): case for case in cases}
    head = (
        f"| {where['vllm'].replace('vllm', 'vLLM')}, top-k and top-p in Triton (of that the "
        f"float32 copy) | {' | '.join(f'B = {size}' for size in sizes)} |"
    )
    rows = []
    for name in dict.fromkeys(case["case"] for case in cases):
        found = [times[name, size] for size in sizes]
        shown = [f"{case['median_us']:.0f} ({case['copy_us']:.0f})" for case in found]
        rows.append((label_of(name), *shown))
    versions = f"torch {where['torch']}, triton {where['triton']}"
    place = f"{where['device']}, {versions}, {where['date'][:10]}: `{where['command']}`"
    return ["", *table(head, rows), "", place]


def fastest_of(cases: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """By case and batch size, the least of FlashInfer's ways with parameters per request."""
    least: dict[tuple[str, int], float] = {}
    for case in cases:
        if case["per_request"]:
            key = case["case"], case["B"]
            least[key] = min(case["median_us"], least.get(key, case["median_us"]))
    return least


def samplers(result: dict[str, Any]) -> list[str]:
    """FlashInfer's ways through the same cases: tokens, or what is kept of the rows."""
    cases = peer_of(result, "flashinfer")
    if not cases:
        return []
    where = result["flashinfer"]["environment"]
    sizes = sorted({case["B"] for case in cases})
    times = {(case["case"], case["call"], case["B"]): case for case in cases}
    head = (
        f"| {where['flashinfer'].replace('flashinfer', 'FlashInfer')} (without `softmax` and its "
        f"float32 copy) | | {' | '.join(f'B = {size}' for size in sizes)} |"
    )
    rows, above = [], None
    for name, call in dict.fromkeys((case["case"], case["call"]) for case in cases):
        found = [times.get((name, call, size)) for size in sizes]
        label = "" if name == above else label_of(name)
        rows.append((label, code(call), *map(both_times, found)))
        above = name
    place = f"{where['device']}, torch {where['torch']}, {where['date'][:10]}: `{where['command']}`"
    return ["", *table(head, rows), "", place]


def code(call: str) -> str:
    """Names of functions as code, and words between them as they are."""
    return ", ".join(f"`{word}`" if word.isidentifier() else word for word in call.split(", "))


def both_times(case: dict[str, Any] | None) -> str:
    """Microseconds from logits and, in brackets, from probabilities."""
    if case is None:
        return ""
    alone = f" ({case['alone_us']:.0f})" if "alone_us" in case else ""
    return f"{case['median_us']:.0f}{alone}"


def column_of(case: dict[str, Any]) -> Column:
    """The dtype, vocabulary and batch size that a case was measured at."""
    return case["dtype"], case["V"], case["B"]


def kernels(main: Column, cases: list[dict[str, Any]]) -> list[str]:
    """What the cutoffs' own kernels take of that at one shape, as a second table."""
    own: dict[str, dict[str, float]] = {}
    for case in cases:
        # `gumbel_sample` has kernels, too, and they are not these.
        if column_of(case) == main and case["case"] != "gumbel_sample":
            own[label_of(case["case"])] = {
                name.removesuffix("_kernel"): kernel["us"]
                for name, kernel in case["kernels"].items()
                if name.endswith("_kernel")
            }
    own = {label: kernel for label, kernel in own.items() if kernel}
    names = list(dict.fromkeys(name for kernel in own.values() for name in kernel))
    if not names:
        return []
    rows = (
        (label, *(f"{kernel[name]:.1f}" if name in kernel else "" for name in names))
        for label, kernel in own.items()
    )
    return [*table(f"| of that at B = {main[2]} | {' | '.join(names)} |", rows), ""]


if __name__ == "__main__":
    publish_from_json(__doc__, cutoff_table, BEGIN, END, brief_table)
