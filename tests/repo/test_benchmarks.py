"""The GPU benchmarks rehearse on a CPU, and the tables of them are those of the measurements."""

import importlib
import json
import pathlib
import re
import sys

import pytest
from scripts import run_process

ROOT = pathlib.Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "h200.json"

pytestmark = [pytest.mark.lenient, pytest.mark.once]


@pytest.fixture
def benchmark(monkeypatch):
    """A module of benchmarks/ by its name there."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def measured(ours="2026-01-01T10:00:00+00:00", theirs="2026-01-01T10:30:00+00:00", gpu="G"):
    """A JSON as the benchmarks write it, of two batch sizes."""
    case = {"case": "drawn_0.7", "K": 5, "V": 128, "dtype": "bfloat16", "mean_accepted": 1.0}
    cases = [case | {"B": b, "median_us": 2.0 * b, "floor_us": 1.0 * b} for b in (8, 64)]
    failed = case | {"case": "greedy", "B": 8, "error": "no"}
    where = {"device": "G", "jax": "1", "date": ours, "command": "python a"}
    there = {"device": gpu, "date": theirs, "command": "python b"}
    there |= {"vllm": "vllm 1", "torch": "2", "triton": "3"}
    return {
        "main": {"environment": where, "bytes_per_us": 4.3e6, "cases": [*cases, failed]},
        "vllm": {
            "environment": there,
            "cases": [{"case": "drawn_0.7", "B": b, "median_us": 5.0 * b} for b in (8, 64)],
        },
    }


@pytest.mark.parametrize(
    ("command", "cases"),
    [
        (
            ["gpu.verify", "--only", "more"],
            ["drawn_0.7", "greedy", "block_0.7", "coupled_0.7", "gumbel_scalars"],
        ),
        (["gpu.cutoff"], ["top-k 50, top-p 0.9", "gumbel_sample"]),
        (["gpu.split", "--cases", "gumbel_fp32"], ["gumbel_fp32 B=2"]),
        (["gpu.filtered"], ["nothing asked", "all three"]),
        (["gpu.kept_tokens"], ['{"device":']),
        (["gpu.row_invariance"], ["B=2 T=2 at 20"]),
        (["gpu.mesh", "--batch", "2", "--cases", "sums"], ["sums"]),
        (["gpu.batches", "--batch", "2"], ["plain", "EAGLE-3, K = 3"]),
        (["gpu.batches", "--cases", "costs", "slots", "--batch", "2"], ["step costs", "few slots"]),
        (
            ["gpu.batches", "--cases", "lengths", "--batch", "2"],
            ["plain, longer buffers", "EAGLE-3, K = 3, mixed lengths"],
        ),
        (["gpu.decode", "--batch", "2"], ["plain step", "speculative step"]),
        (["gpu.cold_start", "--case", "plain"], ['{"first":']),
        (["gpu.engine", "--cases", "queue", "late"], ["case=mixed load", "case=late prompt"]),
    ],
)
def test_the_gpu_benchmarks_rehearse_on_a_cpu(
    command, cases, benchmark, tmp_path, monkeypatch, capsys
):
    script, *options = command
    monkeypatch.chdir(tmp_path)
    if script == "gpu.cutoff":
        # One of them as it is called.
        text = run_process("-m", f"benchmarks.{script}", "--smoke", *options, cwd=tmp_path)
    else:
        monkeypatch.setattr(sys, "argv", [script, "--smoke", *options])
        benchmark(script).main()
        text = capsys.readouterr().out
    for case in cases:
        assert f"\n{case} " in f"\n{text}"
    assert not list(tmp_path.iterdir())


def test_the_bound_of_a_queue_is_made_of_its_chunks_and_of_steps_by_what_the_slots_hold(benchmark):
    module = benchmark("gpu.engine_bound")
    times = module.Times({8: 3.0, 16: 5.0}, [(0.0, 1.0), (100.0, 11.0)])
    requests = [(12, 6, 3), (2, 4, 4), (13, 0, 1), (1, 8, 2)]
    bound = module.bound_seconds(times, requests, num_slots=2, chunk_size=4)
    # The prompts' last tokens are read by steps: 4, 8 and 11 tokens, 1, 4, 8 and 12, none.
    assert bound["bound_of_chunks"] == pytest.approx((3 + 3 + 5 + 3 + 3 + 3 + 5) / 1e3)
    held = [12 + 2, 14 + 3, 16 + 4, 13 + 5, 1, 5]
    steps = sum(1 + tokens / 10 for tokens in held) / 1e3
    assert bound["bound_seconds"] == pytest.approx(bound["bound_of_chunks"] + steps)
    assert (bound["chunks"], bound["least_steps"]) == (7, 6)


def test_a_ratio_to_vllm_is_quoted_within_one_session_alone(benchmark):
    table = benchmark("tables.gpu").gpu_table
    same = table(measured())
    assert "| 16.0 (40.0: 2.5 times) | 128.0 (320.0: 2.5 times) |" in same
    assert "vllm 1, torch 2, triton 3: `python b`" in same
    for other in (measured(theirs="2026-01-01T12:00:00+00:00"), measured(gpu="H")):
        apart = table(other)
        assert "| 16.0 | 128.0 |" in apart
        assert "times" not in apart
        assert "vLLM" not in apart


def test_seconds_that_two_spans_share_count_once(benchmark):
    length = benchmark("cpu.cold_start").length_of_union
    inside, overlapping, apart = (1.5, 1.6), (1, 3), (5, 6)
    assert length([apart, (0, 2), overlapping, inside]) == 4


def test_a_trace_is_cut_where_the_device_rested(benchmark):
    loop = benchmark("gpu.loop")
    events = [
        loop.Event(3e3 * i + 3e7 * run, 1e3, "long" if i % 2 else "short")
        for run in range(3)
        for i in range(10)
    ]
    assert [len(run) for run in loop.split_runs(events)] == [10, 10, 10]
    figures = loop.kernel_times(events, calls=15)
    assert figures["kernels_us"] == pytest.approx(2)
    assert figures["kernels"]["long"] == {"us": pytest.approx(1), "launches": 1}


def test_other_sizes_stand_a_line_each_and_what_failed_in_none(benchmark):
    where = {"device": "G", "jax": "1", "date": "2026-01-01T10:00:00+00:00", "command": "python c"}
    first = {"case": "greedy", "B": 8, "K": 5, "V": 128, "dtype": "bfloat16", "median_us": 2.04}
    cases = [
        first,
        first | {"case": "gumbel_scalars", "median_us": 1.0, "V": 64},
        first | {"case": "drawn_0.7", "median_us": 3.96},
        {"case": "onehot_0.7", "B": 8, "K": 5, "V": 128, "dtype": "bfloat16", "error": "no"},
    ]
    table = benchmark("tables.gpu").more_table({"more": {"environment": where, "cases": cases}})
    assert table == (
        "| B | K | V | dtype | rejection_sample, greedy | gumbel_sample, scalar arguments "
        "| rejection_sample, sampled drafts |\n|---|---|---|---|---|---|---|\n"
        "| 8 | 5 | 128 | bfloat16 | 2.0 |  | 4.0 |\n| 8 | 5 | 64 | bfloat16 |  | 1.0 |  |\n\n"
        "G, jax 1, 2026-01-01: `python c`"
    )


@pytest.mark.parametrize(
    ("table", "result", "document"),
    [
        ("gpu_table", "h200.json", "docs/speed.md"),
        ("more_table", "h200.json", "docs/measurements.md"),
    ],
)
def test_the_gpu_tables_of_the_documents_are_those_of_the_measurement(
    table, result, document, benchmark
):
    make = getattr(benchmark("tables.gpu"), table)
    made = make(json.loads((RESULT.parent / result).read_text(encoding="utf-8")))
    assert made in (ROOT / document).read_text(encoding="utf-8"), (
        "benchmarks/tables/gpu.py says which commands write the tables anew"
    )


def test_the_plot_draws_the_points_of_the_measurement(benchmark):
    made = benchmark("tables.gpu")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    points = made.points_of(result)
    ours = {(x["case"], x["B"]): x for x in result["main"]["cases"] if x["rows"] == "normal"}
    assert points["greedy"]["rejection_sample, greedy"] == [
        [size, ours["greedy", size]["median_us"]] for size in (8, 64, 256)
    ]
    assert [len(curves) for curves in points.values()] == [3] * len(made.PLOTTED)
    written = RESULT.with_suffix(".png").read_bytes()
    assert json.dumps(points).encode() in written, "run benchmarks.tables.gpu, as it says itself"


def test_the_cutoffs_table_shows_every_case_at_every_shape_and_what_failed_at_none(benchmark):
    kernels = {"reduce_kernel": {"us": 1.5}, "loop_add_fusion": {"us": 0.5}}
    case = {"case": "top-p 0.9", "B": 64, "V": 128, "dtype": "bfloat16", "kernels": kernels}
    cases = [
        case | {"median_us": 2.0},
        case | {"median_us": 1.0, "B": 8},
        case | {"median_us": 4.0, "dtype": "float32", "B": 8},
        case | {"median_us": 8.0, "case": "a new one", "V": 64},
        case | {"median_us": 3.0, "case": "gumbel_sample", "kernels": {"draw_kernel": {"us": 1.0}}},
        case | {"case": "top-k 50", "error": "no"},
    ]
    where = {"device": "G", "jax": "1", "date": "2026-01-01T10:00:00+00:00", "command": "python a"}
    found = benchmark("tables.cutoff").cutoff_table({"environment": where, "cases": cases})
    assert "| | B = 64, V = 64 | B = 8 | B = 64 | B = 8, float32 |" in found
    assert "| top-p 0.9 at T = 0.7 |  | 1.0 | 2.0 | 4.0 |" in found
    assert "| a new one | 8.0 |  |  |  |" in found
    assert "top-k 50" not in found
    assert "| of that at B = 64 | reduce |\n|---|---|\n| top-p 0.9 at T = 0.7 | 1.5 |\n\n" in found
    assert found.endswith("G, jax 1, 2026-01-01: `python a`")
    theirs = where | {"vllm": "vllm 1", "torch": "2", "triton": "3", "command": "python b"}
    filtered = {"case": "top-p 0.9", "B": 64, "median_us": 99.6, "copy_us": 20.4}
    for date, shown in (("2026-01-01T10:30:00+00:00", True), ("2026-01-02T10:00:00+00:00", False)):
        peer = {"environment": theirs | {"date": date}, "cases": [filtered]}
        result = {"environment": where, "cases": cases, "vllm": peer}
        found = benchmark("tables.cutoff").cutoff_table(result)
        assert ("| top-p 0.9 at T = 0.7 | 100 (20) |" in found) == shown
        assert ("G, torch 2, triton 3, 2026-01-01: `python b`" in found) == shown


def with_flashinfer(date):
    """A JSON of cutoffs, and FlashInfer's section of a date in it."""
    where = {"device": "G", "jax": "1", "date": "2026-01-01T10:00:00+00:00", "command": "python a"}
    case = {"B": 8, "V": 128, "dtype": "bfloat16", "kernels": {}}
    names = ("top-k 50", "top-p 0.9")
    cases = [case | {"case": name, "median_us": us} for name, us in zip(names, (2, 3), strict=True)]
    there = where | {"flashinfer": "flashinfer 7, nvcc 13.0", "torch": "2", "command": "python b"}
    few = {"B": 8, "per_request": True, "alone_us": 20.4}
    ways = [
        few | {"case": "top-k 50", "call": "top_k_sampling_from_probs", "median_us": 99.6},
        {"B": 8, "per_request": True, "case": "top-k 50", "call": "mask_it", "median_us": 50.0},
        {"B": 8, "per_request": False, "case": "top-k 50", "call": "it, one k", "median_us": 9.0},
        few | {"case": "top-p 0.9", "call": "keep, draw", "median_us": 70.0, "B": 64},
    ]
    peer = {"environment": there | {"date": date}, "cases": ways}
    return {"environment": where, "cases": cases, "flashinfer": peer}


def test_flashinfer_stands_beside_the_cutoffs_of_its_session_alone(benchmark):
    made = benchmark("tables.cutoff")
    result = with_flashinfer("2026-01-01T10:30:00+00:00")
    found = made.cutoff_table(result)
    assert (
        "| FlashInfer 7, nvcc 13.0 (without `softmax` and its float32 copy) | | B = 8 | B = 64 |"
        "\n|---|---|---|---|\n| top-k 50 | `top_k_sampling_from_probs` | 100 (20) |  |\n"
        "|  | `mask_it` | 50 |  |\n|  | `it`, one k | 9 |  |\n"
        "| top-p 0.9 at T = 0.7 | `keep`, `draw` |  | 70 (20) |\n\n"
        "G, torch 2, 2026-01-01: `python b`"
    ) in found
    brief = made.brief_table(result)
    # The one k of all rows answers another question.
    assert (
        "| `logit_cutoff` | B = 8 | FlashInfer, B = 8 |\n|---|---|---|\n| top-k 50 | 2.0 | 50 |"
        in brief
    )
    assert "| top-p 0.9 at T = 0.7 | 3.0 |  |" in brief
    apart = with_flashinfer("2026-01-02T10:00:00+00:00")
    without = {name: value for name, value in result.items() if name != "flashinfer"}
    for table in (made.cutoff_table, made.brief_table):
        assert table(apart) == table(without)
        assert "FlashInfer" not in table(without)


def test_flashinfers_library_declares_what_its_source_exports(benchmark):
    library = benchmark("flashinfer.library")
    source = "".join(path.read_text(encoding="utf-8") for path in (library.SOURCE, library.RADIX))
    exported = {}
    for name, arguments in re.findall(
        r"^EXPORT (\w+)\((.*?)\) \{", source, re.DOTALL | re.MULTILINE
    ):
        *parts, stream = re.sub(r"\s+", " ", arguments).split(", ")
        assert stream == "cudaStream_t stream"
        arrays = ["*" in part for part in parts]
        assert arrays == sorted(arrays, reverse=True), f"{name} takes a number before an array."
        assert all("*" in part or part.startswith("uint64_t ") for part in parts)
        exported[name] = sum(arrays), len(arrays) - sum(arrays)
    assert exported == library.FUNCTIONS


def test_flashinfers_library_is_built_of_the_headers_in_its_wheel(benchmark, tmp_path, monkeypatch):
    library = benchmark("flashinfer.library")
    with pytest.raises(SystemExit, match=r"holds no flashinfer/data/include.* of an unpacked"):
        library.find(tmp_path)
    package = tmp_path / "flashinfer"
    headers = package / "data" / "include" / "flashinfer"
    headers.mkdir(parents=True)
    (headers / "sampling.cuh").touch()
    (package / "_build_meta.py").write_text('__version__ = "7.1.post2"\n')
    assert library.find(tmp_path) == package
    # Of the generated kernels, those that are launched: each with its macros.
    generated = package / library.GENERATED
    generated.mkdir(parents=True)
    names = re.findall(r"&(kernel_cake_\w+)", library.RADIX.read_text(encoding="utf-8"))
    one = "#define CAKE_INF 1\n{name}(int) {{}}\n#undef CAKE_INF\n"
    text = "".join(one.format(name=name) for name in ("kernel_cake_other", names[0]))
    (generated / "it_part1.cuh").write_text(f"#include <stdint.h>\n{text}")
    (generated / "it_part2.cuh").write_text(one.format(name=f"{names[1]}_lp"))
    with pytest.raises(SystemExit, match=f"does not hold .*{names[1]}"):
        library.radix_kernels(package)
    (generated / "it_part3.cuh").write_text(one.format(name=names[1]))
    kernels = library.radix_kernels(package)
    assert re.findall(r"kernel_cake_\w+", kernels) == ["kernel_cake_other", *names]
    assert kernels.count("#include") == 1
    tools, out = tmp_path / "tools", tmp_path / "build" / "it.so"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(SystemExit, match=r"No nvcc here: .* --library"):
        library.build(package, out, [])
    nvcc = tools / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {out}\n')
    nvcc.chmod(0o755)
    library.build(package, out, [tmp_path / "more"])
    of_radix, of_all = out.read_text().splitlines()
    assert str(library.RADIX) in of_radix
    assert "-use_fast_math" not in of_radix
    words = of_all.split()
    wanted = [f"-I{package}/data/{name}" for name in library.HEADERS] + [f"-I{tmp_path}/more"]
    assert [word for word in words if word.startswith("-I")] == wanted
    assert {"-DFLASHINFER_VERSION=7.1.post2", "--cudart=static", str(library.SOURCE)} <= {*words}
    nvcc.write_text("#!/bin/sh\necho no curand_kernel.h >&2; exit 1\n")
    with pytest.raises(SystemExit, match=r"(?s)--include.*no curand_kernel.h"):
        library.build(package, out, [])


def test_a_library_of_another_source_is_refused(benchmark, tmp_path):
    library = benchmark("flashinfer.library")
    with pytest.raises(SystemExit, match="There is no library"):
        library.load(tmp_path / "it.so")
    another = pathlib.Path(importlib.import_module("numpy._core._multiarray_umath").__file__)
    with pytest.raises(SystemExit, match=r"has no softmax: it was built of another"):
        library.load(another)


def test_the_decode_tables_add_up(benchmark):
    profile = {"kernels_us": 4000.0, "num_events": 300.4}
    profile["kernels"] = {"gemm_fusion_dot": {"us": 3000.0}, "loop_fusion": {"us": 100.0}}
    profile["between"] = {"median_us": 5900.0}
    case = {"case": "speculative step", "B": 8, "median_ms": 6.0, "profile": profile}
    case["quartiles_ms"] = [5.5, 6.25]
    where = {"device": "G", "jax": "1", "date": "2026-01-01T10:00:00+00:00", "command": "python a"}
    section = {"environment": where, "read_ms": {"target": 2.0, "draft": 0.2}}
    eight = section | {"cases": [case | {"tokens_per_step": 3.0, "tokens_per_s": 500.0}]}
    one = section | {"cases": [case | {"case": "draft, 1 token", "B": 1}]}
    one["environment"] = where | {"command": "python b"}
    found = benchmark("tables.decode").decode_table({"B = 1": one, "B = 8": eight})
    assert "| draft, 1 token | 1 | 6.000 (5.500 to 6.250) | 5.900 | 30.00 |  |  | 300 |" in found
    assert (
        "| speculative step | 8 | 6.000 (5.500 to 6.250) | 5.900 | 2.00 | 3.00 | 500 | 300 |"
        in found
    )
    assert "| products | 3.000 | 3.000 |" in found
    assert "B = 1: G, jax 1, 2026-01-01: `python b`" in found
    assert "B = 8: G, jax 1, 2026-01-01: `python a`" in found
    assert "verification, commit | 1.000 | 1.000 |" in found
    assert "| all kernels | 4.000 | 4.000 |" in found


def test_steps_are_timed_from_one_beginning_to_the_next(benchmark):
    event = benchmark("gpu.loop").Event
    # A copy first, then three iterations of two kernels, the first of which comes late.
    run = [event(0.0, 900e3, "copy")]
    for start in (5000e3, 6000e3, 7100e3):
        run += [event(start, 10e3, "once"), event(start + 5e3, 50e3, "twice")]
        run += [event(start + 9e3, 50e3, "twice")]
    assert benchmark("gpu.decode").between(run, 3) == [1000.0, 1100.0]


@pytest.mark.parametrize(
    ("name", "table", "document", "card"),
    [
        ("batches", "batches_table", "docs/measurements.md", "h100"),
        ("cutoff", "cutoff_table", "docs/measurements.md", "h200"),
        ("cutoff", "brief_table", "docs/speed.md", "h200"),
        ("decode", "decode_table", "docs/measurements.md", "h200"),
        ("mesh", "mesh_table", "docs/measurements.md", "h200"),
    ],
)
def test_the_tables_of_the_documents_are_those_of_the_measurements(
    name, table, document, card, benchmark
):
    made, result = benchmark(f"tables.{name}"), RESULT.with_name(f"{card}_{name}.json")
    table = getattr(made, table)(json.loads(result.read_text(encoding="utf-8")))
    text = (ROOT / document).read_text(encoding="utf-8")
    assert (
        benchmark("tables.publish").put_between_markers(text, table, made.BEGIN, made.END) == text
    ), f"run benchmarks.tables.{name}, as it says itself, for {document}"


def test_the_cost_model_is_near_the_measured_steps(benchmark):
    made, found = (
        benchmark("tables.mesh"),
        json.loads(RESULT.with_name("h200_mesh.json").read_text()),
    )
    cases = [*found["one pair"]["cases"], *found["large"]["cases"]]
    near = [
        abs(made.step_ms(config, case["devices"]) / case["median_ms"] - 1)
        for case in cases
        for name, config in (("plain step", made.TARGET), ("large, plain step", made.LARGE))
        if case["case"] == name and case["B"] == 1
    ]
    assert len(near) == 3
    assert max(near) < 0.1


@pytest.mark.parametrize(
    ("table", "result"),
    [
        ("cold_start_table", "cpu_cold_start.json"),
        ("gpu_cold_start_table", "h200_cold_start.json"),
    ],
)
def test_the_tables_of_the_first_text_are_those_of_the_measurements(table, result, benchmark):
    made = getattr(benchmark("tables.cold_start"), table)
    text = made(json.loads(RESULT.with_name(result).read_text(encoding="utf-8")))
    assert text in (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8"), (
        "benchmarks/tables/cold_start.py says which commands write the tables anew"
    )
