"""Verification of rows over a mesh axis, on the kernels of whole rows. Open `verify` first.

Device d of D has tokens `d * width : (d + 1) * width` of every row, and launches kernels on them:

    verify_reduce_kernel    (m, l) of its blocks and tiles; the drafted tokens' logits that it has
    all_gather              (m, l) of tiles, and those logits
    split_draw_kernel       n accepted, as every device decides; a token from its share of row n
    all_gather              each device's token, and how it scores
    choose                  the token that scores best

`gumbel_sample` and `rules.coupled` need one gather: a device's scores are known up to its mass.

Blocks, the ids of tokens and their noise are those of whole rows. A draw by Gumbel-max is a maximum
over blocks: that of a row is the best of its devices'. What is drawn where a residual is empty is
known once the masses of all devices are added up, so a device of no mass sends that token, too.

| module | what it holds |
|---|---|
| `verify` | the launches, what travels between them, and which calls they serve |
| `shared_rows` | what devices tell each other of their rows, and how a kernel reads it |
| `sample` | `gumbel_sample`, and `rules.coupled` on its draws |
| `proposals` | the token that a device proposes, as numbers to exchange; the choice |
"""
