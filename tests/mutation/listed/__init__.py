"""The mutations, by what they are of."""

from ..mutation import Mutation
from . import (
    adapters,
    block,
    coupled,
    cutoffs,
    decoding,
    engine,
    folders,
    grammars,
    heads,
    kernels_models,
    kernels_verification,
    processes,
    requests,
    rules,
    sampling,
    shares,
    split,
    subnormals,
    theory,
    token_maps,
    trees,
    verification,
)

__all__ = ["MUTATIONS"]

MUTATIONS: tuple[Mutation, ...] = (
    verification.MUTATIONS
    + sampling.MUTATIONS
    + decoding.MUTATIONS
    + requests.MUTATIONS
    + subnormals.MUTATIONS
    + cutoffs.MUTATIONS
    + kernels_verification.MUTATIONS
    + kernels_models.MUTATIONS
    + block.MUTATIONS
    + coupled.MUTATIONS
    + rules.MUTATIONS
    + trees.MUTATIONS
    + theory.MUTATIONS
    + heads.MUTATIONS
    + folders.MUTATIONS
    + token_maps.MUTATIONS
    + engine.MUTATIONS
    + engine_faults.MUTATIONS
    + grammars.MUTATIONS
    + split.MUTATIONS
    + adapters.MUTATIONS
    + shares.MUTATIONS
    + processes.MUTATIONS
    + files.MUTATIONS
)
