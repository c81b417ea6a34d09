"""`logit_cutoff` on the kernels. Open `rows` first: two launches, four phases.

| module | contents |
|---|---|
| `rows` | the launches and their kernels |
| `bound` | a lower bound of a row's cutoff, from sub-blocks |
| `candidates` | logits at or above the bound, compacted |
| `search` | the search among candidates, or in a wide row |
| `queries` | sums that a search needs of logits, in registers or in memory |
| `team` | the programs that search a wide row together |
"""
