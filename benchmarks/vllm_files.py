"""vLLM's Triton kernels, from an installation or from a few files of its wheel.

The files import parts of vLLM that only whole engines need; those are stood in for by small
modules that are written to a temporary folder when this runs.
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

# What the two files import from the rest of vLLM. Triton reads the source of every function that
# a kernel names, called or not, so that these must be files.
STAND_INS = {
    "vllm.triton_utils": """
import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice
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
    if folder is None:
        source = f"vllm {importlib.import_module('vllm').__version__}"
    else:
        if not (folder / (SAMPLER.replace(".", "/") + ".py")).exists():
            sys.exit(f"{folder} holds no {SAMPLER.replace('.', '/')}.py of an unpacked vLLM wheel.")
        _stand_in(folder)
        version = folder / "VERSION"
        source = version.read_text().strip() if version.exists() else "files of a vLLM wheel"
    sampler, gumbel = importlib.import_module(SAMPLER), importlib.import_module(GUMBEL)
    return Functions(
        sampler.rejection_sample, gumbel.gumbel_sample, gumbel.apply_temperature, source
    )


def _stand_in(folder: pathlib.Path) -> None:
    """Makes `vllm` a package of the folder's files, without running vLLM's own `__init__`."""
    written = pathlib.Path(tempfile.mkdtemp(prefix="vllm_stand_ins_"))
    for name in (SAMPLER, GUMBEL, *STAND_INS):
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
