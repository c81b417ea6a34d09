"""Makes the tables of full batches from the JSON that the benchmark wrote.

python -m benchmarks.tables.batches benchmarks/results/h100_batches.json
"""

from typing import Any

from benchmarks.tables.decode import kind_rows
from benchmarks.tables.publish import publish_from_json, table

BEGIN, END = "<!-- batches-table -->", "<!-- /batches-table -->"


def _next_to(ours: float, theirs: float | None, digits: int) -> str:
    """Returns three cells: our time, theirs, and theirs over ours."""
    if theirs is None:
        return f"{ours:.{digits}f} | |"
    return f"{ours:.{digits}f} | {theirs:.{digits}f} | {theirs / ours:.2f}"


def batches_table(result: dict[str, Any]) -> str:
    """Returns three tables: times by batch size, an engine's load, steps by kind of kernel."""
    section, peer = result["specjax"], result.get("vllm", {"cases": []})
    theirs = {(case["case"], case.get("B")): case for case in peer["cases"]}
    steps = [case for case in section["cases"] if "prefill_ms" in case]
    rows = []
    for case in steps:
        other = theirs.get((case["case"], case["B"]), {})
        step = _next_to(case["median_ms"], other.get("median_ms"), 2)
        prefill = _next_to(case["prefill_ms"], other.get("prefill_ms"), 0)
        rows.append((case["case"], case["B"], step, prefill))
    head = "| | B | ms a step | vLLM | ratio | ms to read prompts | vLLM | ratio |"
    lines, rows = table(head, rows), []
    for case in section["cases"]:
        if case["case"].startswith("mixed load"):
            seconds = theirs.get((case["case"], None), {}).get("seconds")
            name = f"500 mixed requests, {case['slots']} at a time"
            name += case["case"].removeprefix("mixed load")
            if case.get("step_sizes", case["slots"]) != case["slots"]:
                name += f", steps of {', '.join(map(str, case['step_sizes']))}"
            name += ": seconds"
            rows.append((name, case["chunk"], _next_to(case["seconds"], seconds, 1)))
        if case["case"] == "late prompt":
            name = f"{case['slots'] - 1} requests decode, a prompt of 1000 tokens comes: ms"
            for what, key in (
                ("to its first token", "first_token_ms"),
                ("at most between steps meanwhile", "gap_ms"),
            ):
                rows.append((f"{name} {what}", case["chunk"], _next_to(case[key], None, 1)))
    lines += ["", *table("| an engine, EAGLE-3, K = 3 | chunk | time | vLLM | ratio |", rows)]
    head, rows = kind_rows([case for case in steps if "profile" in case])
    lines += ["", *table(f"| ms of a step | {head} |", rows[:-1])]
    where = section["environment"]
    when = f"{where['date'][:10]} {where['date'][11:16]}"
    places = ["", f"{where['device']}, jax {where['jax']}, {when}: `{where['command']}`"]
    if "environment" in peer:
        where = peer["environment"]
        name = f"vLLM {where['vllm']}, FA3, no FlashInfer, torch {where['torch']}"
        places += ["", f"{name}: {where['gpu']}, {where['date'][11:16]}"]
    return "\n".join([*lines, *places])


if __name__ == "__main__":
    publish_from_json(__doc__, batches_table, BEGIN, END)
