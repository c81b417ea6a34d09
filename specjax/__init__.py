"""specjax: speculative-decoding verification in JAX."""

from specjax.api import gumbel_sample, rejection_sample, rejection_sample_ragged
from specjax.typing import Draft, Sample, Stream, Verification
