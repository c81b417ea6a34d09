"""Builds FlashInfer's sampling kernels from the headers of its wheel, and loads them by ctypes.

python -m benchmarks.flashinfer.library --flashinfer UNPACKED_WHEEL --out build/flashinfer.so
"""

import argparse
import ctypes
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).with_name("sampling.cu")
# Its newest sampler is generated, 47 MB in all: of that the kernels which this file launches. Each
# begins with its own macros; what stands before the first is common to all.
RADIX = SOURCE.with_name("radix.cu")
GENERATED, BEGINNING = "data/csrc/cake_sampling/generated", "#define CAKE_INF "
HEADERS = ("include", "cccl/cub", "cccl/libcudacxx/include", "cccl/thrust")
# As FlashInfer compiles itself when it is first called, for the device of the figures.
COMMON = (
    *("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr"),
    *("-Xcompiler=-fPIC,-fvisibility=hidden", "-w"),
    "-gencode=arch=compute_90a,code=sm_90a",
)
FLAGS = (
    *("-use_fast_math", "-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16"),
    *("-DFLASHINFER_ENABLE_FP8_E4M3", "-DFLASHINFER_ENABLE_FP8_E5M2"),
    *("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1"),
    *("-static-global-template-stub=false", "-Xfatbin=-compress-all", "--compress-mode=size"),
)
# CUDA's runtime inside, so that the machine that loads it needs a driver and no toolkit.
LINKING = ("--shared", "--cudart=static")

# What the source exports: the arrays and the numbers that each function takes before the stream.
FUNCTIONS = {
    "softmax": (4, 2),
    "top_k_sampling_from_probs": (4, 3),
    "top_p_sampling_from_probs": (4, 3),
    "min_p_sampling_from_probs": (4, 3),
    "top_k_top_p_sampling_from_probs": (5, 3),
    "top_k_mask_logits": (4, 2),
    "top_k_renorm_probs": (4, 2),
    "top_p_renorm_probs": (4, 2),
    "top_k": (4, 3),
    "radix_top_k_top_p": (7, 3),
}


def find(folder: pathlib.Path | None) -> pathlib.Path:
    """The package of an unpacked wheel, or of the FlashInfer that is installed."""
    if folder is None:
        spec = importlib.util.find_spec("flashinfer")
        if spec is None or spec.origin is None:
            sys.exit("FlashInfer is not installed; --flashinfer names a folder of its wheel.")
        return pathlib.Path(spec.origin).parent
    package = folder / "flashinfer"
    for name in ("data/include/flashinfer/sampling.cuh", "_build_meta.py"):
        if not (package / name).exists():
            sys.exit(f"{folder} holds no flashinfer/{name} of an unpacked FlashInfer wheel.")
    return package


def radix_kernels(package: pathlib.Path) -> str:
    """The source of the generated kernels that `radix.cu` launches."""
    names = set(re.findall(r"&(kernel_cake_\w+)", RADIX.read_text()))
    parts = sorted((package / GENERATED).glob("*_part*.cuh"))
    sections = [part.read_text().split(BEGINNING) for part in parts]
    # The first part alone includes headers: before its first kernel, and after that one's macros.
    common = [f"{each[0]}{BEGINNING}{each[1]}" for each in sections if "#include" in each[0]]
    chosen = [
        BEGINNING + section
        for each in sections
        for section in each[1:]
        if any(f"{name}(" in section for name in names)
    ]
    if len(common) != 1 or len(chosen) != len(names):
        sys.exit(f"{package / GENERATED} does not hold {', '.join(sorted(names))}.")
    return "".join(common + chosen)


def build(package: pathlib.Path, out: pathlib.Path, more: list[pathlib.Path]) -> None:
    """Compiles the library with nvcc; `more` are folders of headers that nvcc does not have."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        sys.exit("No nvcc here: build the library where there is one, and name it by --library.")
    version = re.search(r'__version__ = "([\w.+]+)"', (package / "_build_meta.py").read_text())
    folders = [*(package / "data" / name for name in HEADERS), *more]
    out.parent.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str) -> None:
        command = [nvcc, *COMMON, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"nvcc fails; headers that it lacks are named by --include.\n{done.stderr}")

    with tempfile.TemporaryDirectory() as folder:
        kernels, compiled = pathlib.Path(folder, "radix_kernels.cuh"), f"{folder}/radix.o"
        kernels.write_text(radix_kernels(package))
        run(f"-I{folder}", "-c", str(RADIX), "-o", compiled)
        run(
            *(*FLAGS, *LINKING),
            f"-DFLASHINFER_VERSION={version[1] if version else 'unknown'}",
            *(f"-I{folder}" for folder in folders),
            *("-o", str(out), str(SOURCE), compiled),
        )


def load(path: pathlib.Path) -> tuple[ctypes.CDLL, str]:
    """The library, its functions declared, and what it was built of."""
    if not path.exists():
        sys.exit(f"There is no library {path}: {__doc__.splitlines()[2]}")
    library = ctypes.CDLL(str(path.resolve()))
    for name, (arrays, numbers) in FUNCTIONS.items():
        if not hasattr(library, name):
            sys.exit(f"{path} has no {name}: it was built of another {SOURCE.name}.")
        function = getattr(library, name)
        pointer = ctypes.c_void_p
        function.argtypes = [pointer] * arrays + [ctypes.c_uint64] * numbers + [pointer]
    library.built_of.restype = ctypes.c_char_p
    return library, library.built_of().decode()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `build` has to know."""
    parser.add_argument(
        "--flashinfer", type=pathlib.Path, help="folder of an unpacked wheel; else the installed"
    )
    parser.add_argument(
        "--include",
        type=pathlib.Path,
        action="append",
        default=[],
        help="a folder of headers that nvcc lacks (curand_kernel.h, say)",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the library")
    args = parser.parse_args()
    build(find(args.flashinfer), args.out, args.include)
    print(f"{args.out}: {load(args.out)[1]}")


if __name__ == "__main__":
    main()
