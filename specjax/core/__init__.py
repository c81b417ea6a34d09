"""The mathematics of sampling and verification: functions of arrays, for all implementations.

Nothing here checks an argument, compiles, or knows where it runs. `noise` gives the random numbers
of an address, `logsumexp` a row's statistics, block by block, `gumbel_max` a token from log-
weights; `acceptance` and `residual` are the rule of rejection sampling, `temperature` splits
temperatures into data; `bisection` and `truncation` find the cutoff of top-k, top-p and min-p. Open
`gumbel_max` first.

Letters: `V` vocabulary, `n` blocks of `SAMPLING_BLOCK` tokens. Imported by every room above.
"""
