"""Node ids of tests by the files that hold them."""

from collections.abc import Callable

__all__ = [
    "cutoffs",
    "decode",
    "drafts",
    "edges",
    "few",
    "interpreted",
    "laws",
    "logprobs",
    "metrics",
    "noise",
    "processing",
    "products",
    "ragged",
    "sampled_decoding",
    "sampling",
    "schedules",
    "searches",
    "subnormal",
    "tokens",
    "verify",
]


def _of(path: str) -> Callable[..., tuple[str, ...]]:
    return lambda *names: tuple(f"tests/{path}::{name}" for name in names)


cutoffs = _of("test_cutoff.py")
decode = _of("test_decode.py")
drafts = _of("test_drafts.py")
edges = _of("test_edges.py")
few = _of("models/test_few.py")
interpreted = _of("pallas/test_interpret.py")
laws = _of("test_laws.py")
logprobs = _of("test_logprobs.py")
metrics = _of("test_metrics.py")
noise = _of("test_noise.py")
processing = _of("test_processing.py")
products = _of("models/test_product.py")
ragged = _of("test_ragged.py")
sampled_decoding = _of("test_sampled_decoding.py")
sampling = _of("test_sampling.py")
schedules = _of("test_schedules.py")
searches = _of("test_cutoff_search.py")
subnormal = _of("test_subnormal.py")
tokens = _of("test_tokens.py")
verify = _of("test_verify.py")
