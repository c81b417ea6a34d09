"""vLLM's Triton kernels, from an installation or from a few files of its wheel.

The files import parts of vLLM that only whole engines need. Small modules, written to a temporary
folder at run time, replace these.
"""

import importlib
import importlib.util
import pathlib
import sys
import tempfile
import types
from typing import Any, NamedTuple

SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"
FILTERS = "vllm.v1.sample.ops.topk_topp_triton"
# Read as they are, next to the three: how the last one's kernels are launched.
LAUNCHERS = (
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
)

# What these files import from the rest of vLLM. Triton reads the source of every function that
# a kernel names, called or not, so that these must be files.
STAND_INS = {
    "vllm.triton_utils": """
import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice

HAS_TRITON = True
""",
    "vllm.envs": """
VLLM_TRITON_JIT_WARMUP_NUM_THREADS = 1
""",
    "vllm.platforms": """
import torch


class _Platform:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self):
        return torch.cuda.is_available()

    def is_cuda_alike(self):
        return torch.cuda.is_available()


current_platform = _Platform()
""",
    "vllm.utils.gpu_sync_debug": """
from contextlib import nullcontext as gpu_sync_allowed
""",
    "vllm.utils.math_utils": """
def next_power_of_2(n):
    return 1 << max(n - 1, 0).bit_length()
""",
    "vllm.utils.platform_utils": """
import torch


def num_compute_units(device_id=0):
    if not torch.cuda.is_available():
        return 2
    return torch.cuda.get_device_properties(device_id).multi_processor_count
""",
    "vllm.v1.spec_decode.fly": """
def compute_fly_entropy(*args, **kwargs):
    raise NotImplementedError
""",
    "vllm.v1.worker.gpu.sample.watermark": """
import triton
import triton.language as tl


@triton.jit
def philox_gumbel_block_argmax(
    logits, mask, block_idx, contexts_ptr, key_0, key_1, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    return tl.max(logits, axis=0, return_indices=True)
""",
}


class Functions(NamedTuple):
    """vLLM's functions and where they came from."""

    rejection_sample: Any
    gumbel_sample: Any
    apply_temperature: Any
    source: str


def load(folder: pathlib.Path | None) -> Functions:
    """The functions of the installed vLLM, or of a folder that holds files of its wheel."""
    source = _find(folder, SAMPLER, GUMBEL)
    sampler, gumbel = importlib.import_module(SAMPLER), importlib.import_module(GUMBEL)
    return Functions(
        sampler.rejection_sample, gumbel.gumbel_sample, gumbel.apply_temperature, source
    )


def load_filters(folder: pathlib.Path | None) -> tuple[Any, str]:
    """vLLM's top-k and top-p of float32 rows, in place, and where it came from."""
    source = _find(folder, FILTERS, *LAUNCHERS)
    return importlib.import_module(FILTERS).apply_top_k_top_p_triton, source


def _find(folder: pathlib.Path | None, *names: str) -> str:
    """Makes modules of vLLM importable, and says where they are from."""
    if folder is None:
        return f"vllm {importlib.import_module('vllm').__version__}"
    for name in names:
        if not (folder / (name.replace(".", "/") + ".py")).exists():
            sys.exit(f"{folder} holds no {name.replace('.', '/')}.py of an unpacked vLLM wheel.")
    _stand_in(folder, names)
    version = folder / "VERSION"
    return version.read_text().strip() if version.exists() else "files of a vLLM wheel"


def _stand_in(folder: pathlib.Path, names: tuple[str, ...]) -> None:
    """Makes `vllm` a package of the folder's files, without running vLLM's own `__init__`."""
    written = pathlib.Path(tempfile.mkdtemp(prefix="vllm_stand_ins_"))
    for name in (*names, *STAND_INS):
        parents = name.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            package = types.ModuleType(".".join(parents[:depth]))
            package.__path__ = [str(folder.joinpath(*parents[:depth]))]
            sys.modules.setdefault(package.__name__, package)
    for name, text in STAND_INS.items():
        path = written / f"{name.replace('.', '_')}.py"
        path.write_text(text.lstrip())
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
