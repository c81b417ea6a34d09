"""Makes the tables of models over several GPUs: measured steps, and a cost model.

python -m benchmarks.tables.mesh benchmarks/results/h200_mesh.json --readme docs/measurements.md

    step_ms(N) = bytes / N / BANDWIDTH + products * PRODUCT + L * LAYER + sums * SUM

The four constants come from plain steps on one and two H200s. The formula leaves out the cost of
more rows: more of a cache, and slower products.
"""

import dataclasses
from typing import Any

from benchmarks.gpu.decode import DRAFT, TARGET, K
from benchmarks.gpu.mesh import LARGE
from benchmarks.tables.publish import publish_from_json, table
from specjax.models import TransformerConfig

BEGIN, END = "<!-- mesh-table -->", "<!-- /mesh-table -->"

# The sizes of Llama 3.1 405B; 810 GB.
LARGEST = dataclasses.replace(
    LARGE,
    hidden_size=16384,
    intermediate_size=53248,
    num_hidden_layers=126,
    num_attention_heads=128,
)
# Bytes per us; us of a product besides its bytes; us of what else a layer launches, on one GPU and
# on several, where no launch overlaps with a sum; us of a sum over two GPUs, by NCCL in a graph; us
# of verification and sampling.
BANDWIDTH, PRODUCT, LAYER, SPLIT_LAYER, SUM, REST = 4.46e6, 2.3, 11.2, 13.0, 7.5, 100.0


def weight_bytes(config: TransformerConfig) -> int:
    """Bytes that a step reads of a model in bfloat16; embeddings are looked up."""
    width = config.head_dim * (config.num_attention_heads + 2 * config.num_key_value_heads)
    attention = config.hidden_size * (width + config.head_dim * config.num_attention_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return 2 * (config.num_hidden_layers * layer + config.vocab_size * config.hidden_size)


def step_ms(config: TransformerConfig, devices: int, sum_us: float = SUM) -> float:
    """Milliseconds of a step of a few rows on so many GPUs, by the cost model."""
    layers = config.num_hidden_layers
    us = weight_bytes(config) / devices / BANDWIDTH + PRODUCT * (4 * layers + 1) + REST
    if devices == 1:
        return (us + LAYER * layers) / 1e3
    return (us + SPLIT_LAYER * layers + sum_us * (2 * layers + 1)) / 1e3


def mesh_table(result: dict[str, Any]) -> str:
    """Both tables, as markdown."""
    return "\n".join([*measured(result), "", *predicted()])


def measured(result: dict[str, Any]) -> list[str]:
    """Lines of the times of one and two GPUs, next to the model's."""
    one, two, large = (
        {(case["case"], case["B"]): case for case in cases if case["devices"] == devices}
        for cases, devices in (
            (result["one pair"]["cases"], 1),
            (result["one pair"]["cases"], 2),
            (result["large"]["cases"], 2),
        )
    )
    rows = []
    for (name, batch), case in two.items():
        whole, split = one[name.split(",")[0], batch]["median_ms"], case["median_ms"]
        cells = [name, batch, f"{whole:.2f}", f"{split:.2f}", f"{whole / split:.2f}"]
        cells += [f"{case['profile']['collectives_us'] / 1e3:.2f}", f"{model_ms(name):.2f}"]
        rows.append(cells)
    for (name, batch), case in large.items():
        ms, sums = case["median_ms"], case["profile"]["collectives_us"] / 1e3
        cells = [f"70B: {name.removeprefix('large, ')}", batch, "", f"{ms:.2f}", ""]
        rows.append([*cells, f"{sums:.2f}", f"{step_ms(LARGE, 2):.2f}"])
    head = "| | B | one GPU, ms | two GPUs, ms | times as fast | of it sums | cost model, ms |"
    return table(head, rows)


def model_ms(name: str) -> float:
    """Milliseconds of a case on two GPUs, by the cost model."""
    drafts = {"speculative step, draft split": 2, "speculative step, draft whole": 1}
    step = step_ms(TARGET, 2)
    return step + K * step_ms(DRAFT, drafts[name]) if name in drafts else step


def predicted() -> list[str]:
    """Lines of what the model says of more GPUs."""
    rows = []
    for name, config in {"8B": TARGET, "70B": LARGE, "405B": LARGEST}.items():
        size = weight_bytes(config) / 1e9
        cells = [name, f"{size:.0f}"]
        for devices in (2, 4, 8):
            fits = size / devices < 130
            low, high = (step_ms(config, devices, sum_us) for sum_us in (SUM, 2 * SUM))
            cells.append(f"{low:.1f} to {high:.1f}" if fits else "too large")
        sums = (2 * config.num_hidden_layers + 1) * SUM / 1e3
        rows.append([*cells, f"{sums:.1f} to {2 * sums:.1f}"])
    head = "| plain step, ms | GB of weights | 2 GPUs | 4 GPUs | 8 GPUs | of it sums |"
    return table(head, rows)


if __name__ == "__main__":
    publish_from_json(__doc__, mesh_table, BEGIN, END)
