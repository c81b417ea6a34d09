"""`tree_rejection_sample`: verification of drafted trees, in plain JAX.

A tree has N nodes, parents before children. Row 0 of a request is that after its last committed
token, the root; row v + 1 follows node v. A row decides the children of its node.

The way of the data:

1. `tree_rejection_sample` checks its arguments, and maps `verify_tree` over requests;
2. `tree`: the depth of each node, the index of its streams, and which nodes are padding;
3. `walk`: greedy requests, and requests of one-hot nodes. The target draws, and the walk descends
   while a child holds the drawn token;
4. `traverse`: requests whose siblings were sampled without replacement. Nodes are tried depth
   first, the deepest of a path before its ancestors;
5. `siblings`: p and q after rejected siblings, recomputed from the raw rows.

On a chain `traverse` is block verification, with the addresses of `rules.block`. Open
`tree` first, then `traverse`.

Letters: `B` requests, `N` nodes, `D` = `max_depth`, `V` vocabulary, `V_d` of the draft. Imported by
nothing but `specjax`; imports `samplers` and `core`.
"""
