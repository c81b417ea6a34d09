"""`block_rejection_sample` on the kernels. Open `verify` first, then `judge`.

| module | what it holds |
|---|---|
| `verify` | the launches and their kernels |
| `judged_arrays` | what a launch leaves to the next |
| `judge` | rho of a request's prefixes, and which of them the next drafted token decides |
| `bounds` | bounds of an open prefix, from the heaviest blocks of its row |
"""
