"""The mathematics of sampling and verification: functions of arrays, for all implementations.

No function here checks an argument, compiles, or knows where it runs. The plain-JAX reference and
the kernels both call them.

    noise          random numbers at an address
    temperature    temperatures parsed into scale, greedy, valid
    logsumexp      log-normalizer of a row from partials of its blocks
    gumbel_max     a token from log-weights
    acceptance     the rules by which a drafted token is accepted: min(1, p / q)
    block_acceptance  which prefix of the drafted tokens is accepted as one
    rule, rules    other rules of acceptance, as values
    residual       max(p - q, 0), which a rejected token is replaced from
    bisection      a threshold among floats, by bisection of their bits
    pivot_search   the same in few passes over a row, with several pivots in each
    truncation     top-k, top-p and min-p as such thresholds
    subnormal      float32 numbers below 2^-126, which count as zero
    token_map      ids of a draft's vocabulary and of the target's

Open `gumbel_max` first. Letters: `V` vocabulary, `n` or `N` blocks of `SAMPLING_BLOCK` tokens.
Every other package of specjax may import it.
"""
