"""`logit_cutoff` on the kernels. Open `rows` first: two launches, four phases.

| module | what it holds |
|---|---|
| `rows` | the launches and their kernels |
| `bound` | a lower bound of a row's cutoff, from sub-blocks |
| `candidates` | logits at or above the bound, compacted |
"""
