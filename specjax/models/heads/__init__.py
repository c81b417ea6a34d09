"""Published draft heads: their forward passes, drafters and folders.

A head reads the target's residual stream after some layers, its taps. Open `eagle3` first. Modules
that are named after neither kind serve both.

| module | contents |
|---|---|
| `eagle3` | EAGLE-3: variants, forward pass, and a head over its own outputs, for training |
| `dflash` | DFlash: variants, forward pass over a block |
| `drafters` | the drafters of both |
| `head_target` | the parts of its target that a head uses |
| `sample_block` | draws a block from ready logits |
| `head_formats` | their folders: read in every format, written in one |
| `head_folder` | opens, loads and saves a folder of any kind; tensors by the names of any format |
| `head_fields` | common fields of the formats of `config.json`: layer, taps, drafted tokens |

Only `load_drafter` and the package of models import this room.
"""
