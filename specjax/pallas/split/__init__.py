"""Verification of rows over a mesh axis, on the kernels of whole rows. Open `verify` first.

Device d of D has tokens `d * width : (d + 1) * width` of every row, and launches kernels on them:

    verify_reduce_kernel    (m, l) of its blocks and tiles; logits of the drafted tokens that it has
    all_gather              (m, l) of tiles, and those logits
    split_draw_kernel       n accepted, equal on all devices; a token from its share of row n
    all_gather              each device's token, and its score
    choose                  the token of the best score

`gumbel_sample` and `rules.coupled` need one gather: a device's scores are known up to its mass.

Blocks, token ids and noise equal those of whole rows. A draw by Gumbel-max is a maximum over
blocks, so a row's draw is the best of its devices' draws. Whether a residual is empty is known only
after the sum over devices, so each device also sends a fallback token.

| module | contents |
|---|---|
| `verify` | the launches, the messages between them, and the calls that they serve |
| `shared_rows` | the statistics of rows that devices exchange, and their views in a kernel |
| `sample` | `gumbel_sample`, and `rules.coupled` on its draws |
| `proposals` | the token that a device proposes, as numbers to exchange; the choice |
"""
