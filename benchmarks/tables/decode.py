"""Makes the tables of decoding at real size from the JSON that the benchmark wrote.

python -m benchmarks.tables.decode benchmarks/results/h200_decode.json --readme docs/measurements.md
"""

from typing import Any

from benchmarks.tables.publish import origin, publish_from_json, table

BEGIN, END = "<!-- decode-table -->", "<!-- /decode-table -->"

# What a kernel's name says it does; a prefix of it.
KINDS = {
    "gemm": "products",
    "nvjet": "products",
    "fused_attention_kernel": "attention",
    "prepare_qkv_kernel": "attention",
    "combine_kernel": "attention",
    "attention_kernel": "attention",
    "add_rms_norm_kernel": "sums and norms",
    "split_k_matmul_kernel": "products",
    "fused_glu_kernel": "products",
    "glu_activation_kernel": "sums and norms",
    # Names of before: until 23 November 2026, and until October of that year.
    "qkv_kernel": "attention",
    "see": "attention",
    "look": "attention",
    "place": "attention",
    "finish": "attention",
    "join": "sums and norms",
    "multiply": "products",
    "gate": "products",
    "memcpy": "copies",
    "Memcpy": "copies",
}
REST = "everything else: lookups, positions, sampling, verification, commit"


def decode_table(result: dict[str, Any]) -> str:
    """Times against the weights' bytes, and where they go, as markdown."""
    head = (
        "| | B | ms (quartiles) | ms between steps | times the weights | tokens a step "
        "| tokens/s of a request | launches |"
    )
    rows = []
    cases = [(case, section["read_ms"]) for section in result.values() for case in section["cases"]]
    for case, read_ms in cases:
        floor = floor_ms(case["case"], read_ms)
        rate = ["", ""]
        if "tokens_per_s" in case:
            rate = [f"{case['tokens_per_step']:.2f}", f"{case['tokens_per_s']:.0f}"]
        cells = [
            case["case"],
            case["B"],
            f"{case['median_ms']:.3f} ({' to '.join(f'{x:.3f}' for x in case['quartiles_ms'])})",
            f"{case['profile']['between']['median_us'] / 1e3:.3f}",
            f"{case['median_ms'] / floor:.2f}",
            *rate,
            f"{case['profile']['num_events']:.0f}",
        ]
        rows.append(cells)
    places = [f"{name}: {origin(section['environment'])}" for name, section in result.items()]
    kinds, kind_cells = kind_rows([case for case, _ in cases])
    profiles = table(f"| | {kinds} |", kind_cells)
    return "\n".join([*table(head, rows), "", *profiles, "", "\n\n".join(places)])


def floor_ms(case: str, read_ms: dict[str, float]) -> float:
    """Milliseconds to read the weights that a case needs, each as often as it does."""
    if case.startswith("draft"):
        return read_ms["draft"]
    drafts = 5 if case.startswith("speculative") else 0
    return read_ms["target"] + drafts * read_ms["draft"]


def kind_rows(cases: list[dict[str, Any]]) -> tuple[str, list[list[str]]]:
    """Names of the cases, and rows of their milliseconds by what their kernels do; last of all."""
    columns = [shares(case["profile"]) for case in cases]
    rows = [
        [kind, *(f"{column[kind]:.3f}" if kind in column else "" for column in columns)]
        for kind in [*dict.fromkeys(KINDS.values()), REST]
    ]
    total = [f"{case['profile']['kernels_us'] / 1e3:.3f}" for case in cases]
    names = " | ".join(f"{case['case']}, B = {case['B']}" for case in cases)
    return names, [*rows, ["all kernels", *total]]


def shares(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by kind; what the profile does not name is of the rest."""
    found: dict[str, float] = {}
    for name, kernel in profile["kernels"].items():
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), REST)
        found[kind] = found.get(kind, 0.0) + kernel["us"] / 1e3
    unnamed = profile["kernels_us"] / 1e3 - sum(found.values())
    return found | {REST: found.get(REST, 0.0) + unnamed}


if __name__ == "__main__":
    publish_from_json(__doc__, decode_table, BEGIN, END)
