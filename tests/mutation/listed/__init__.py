"""The mutations, by what they are of."""

from ..mutation import Mutation
from . import (
    cutoffs,
    decoding,
    kernels_models,
    kernels_verification,
    requests,
    sampling,
    verification,
)

__all__ = ["MUTATIONS"]

MUTATIONS: tuple[Mutation, ...] = (
    verification.MUTATIONS
    + sampling.MUTATIONS
    + decoding.MUTATIONS
    + requests.MUTATIONS
    + cutoffs.MUTATIONS
    + kernels_verification.MUTATIONS
    + kernels_models.MUTATIONS
)
