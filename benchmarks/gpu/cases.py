"""Cases of the GPU benchmarks by name: the call, its compilation, and its data."""

from typing import NamedTuple


class Program(NamedTuple):
    """One compilation; cases that differ in data alone share it.

    Attributes:
      kind: "verify", "block", "couple", "sample", "sample with scalars" or "categorical".
      implementation: None for the kernels, or "xla".
      one_hot: drafts without logits.
      synthetic: given rates.
      noise: "float32" or "float64".
      graphs: traced with command buffers left on.
      greedy_logprobs: of verification.
    """

    kind: str
    implementation: str | None = None
    one_hot: bool = False
    synthetic: bool = False
    noise: str = "float32"
    graphs: bool = False
    greedy_logprobs: bool = True


class Case(NamedTuple):
    """A program and its data; `rates` are those of another case, or one number for all."""

    program: str
    temperature: float = 0.7
    rates: str | float | None = None


PROGRAMS = {
    "drawn": Program("verify"),
    "onehot": Program("verify", one_hot=True),
    "without_logprobs": Program("verify", greedy_logprobs=False),
    "synthetic": Program("verify", synthetic=True),
    "block": Program("block"),
    "coupled": Program("couple", one_hot=True),
    "gumbel_fp32": Program("sample"),
    "gumbel_fp64": Program("sample", noise="float64"),
    "gumbel_scalars": Program("sample with scalars"),
    "drawn_graphs": Program("verify", graphs=True),
    "gumbel_graphs": Program("sample", graphs=True),
    "xla_drawn": Program("verify", "xla"),
    "xla_gumbel": Program("sample", "xla"),
    "categorical": Program("categorical", "xla"),
}
CASES = {
    "drawn_0.7": Case("drawn"),
    "drawn_1": Case("drawn", temperature=1.0),
    "onehot_0.7": Case("onehot"),
    "onehot_1": Case("onehot", temperature=1.0),
    "greedy": Case("drawn", temperature=0.0),
    "greedy_without_logprobs": Case("without_logprobs", temperature=0.0),
    "greedy_onehot": Case("onehot", temperature=0.0),
    "synthetic_as_drawn_0.7": Case("synthetic", rates="drawn_0.7"),
    "synthetic_0.9": Case("synthetic", rates=0.9),
    "block_0.7": Case("block"),
    "block_1": Case("block", temperature=1.0),
    "coupled_0.7": Case("coupled"),
    "coupled_1": Case("coupled", temperature=1.0),
    "gumbel_fp32": Case("gumbel_fp32"),
    "gumbel_fp64": Case("gumbel_fp64"),
    "gumbel_scalars": Case("gumbel_scalars"),
    "drawn_0.7_graphs": Case("drawn_graphs"),
    "gumbel_fp32_graphs": Case("gumbel_graphs"),
    "xla_drawn_0.7": Case("xla_drawn"),
    "xla_gumbel_fp32": Case("xla_gumbel"),
    "categorical": Case("categorical"),
}
