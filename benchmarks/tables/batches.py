"""Makes the tables of full batches from the JSON that the benchmark wrote.

python -m benchmarks.tables.batches benchmarks/results/h100_batches.json
"""

from typing import Any

from benchmarks.tables.decode import KINDS, REST, shares
from benchmarks.tables.publish import publish_from_json

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
    lines = [
        "| | B | ms a step | vLLM | ratio | ms to read prompts | vLLM | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in steps:
        other = theirs.get((case["case"], case["B"]), {})
        step = _next_to(case["median_ms"], other.get("median_ms"), 2)
        prefill = _next_to(case["prefill_ms"], other.get("prefill_ms"), 0)
        lines.append(f"| {case['case']} | {case['B']} | {step} | {prefill} |")
    lines += [
        "",
        "| an engine, EAGLE-3, K = 3 | chunk | time | vLLM | ratio |",
        "|---|---|---|---|---|",
    ]
    for case in section["cases"]:
        if case["case"].startswith("mixed load"):
            seconds = theirs.get((case["case"], None), {}).get("seconds")
            name = f"500 mixed requests, {case['slots']} at a time"
            name += case["case"].removeprefix("mixed load")
            if case.get("step_sizes", case["slots"]) != case["slots"]:
                name += f", steps of {', '.join(map(str, case['step_sizes']))}"
            name += ": seconds"
            lines.append(f"| {name} | {case['chunk']} | {_next_to(case['seconds'], seconds, 1)} |")
        if case["case"] == "late prompt":
            name = f"{case['slots'] - 1} requests decode, a prompt of 1000 tokens comes: ms"
            for what, key in (
                ("to its first token", "first_token_ms"),
                ("at most between steps meanwhile", "gap_ms"),
            ):
                lines.append(f"| {name} {what} | {case['chunk']} | {case[key]:.1f} | | |")
    profiled = [case for case in steps if "profile" in case]
    columns = [shares(case["profile"]) for case in profiled]
    head = [f"{case['case']}, B = {case['B']}" for case in profiled]
    lines += ["", f"| ms of a step | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for kind in [*dict.fromkeys(KINDS.values()), REST]:
        shown = [f"{column[kind]:.3f}" if kind in column else "" for column in columns]
        lines.append(f"| {kind} | {' | '.join(shown)} |")
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
