"""Trained draft heads that people publish: their forward passes, their drafters, their folders.

A head reads the target's residual stream after some layers, its taps. Open `eagle3` first. What
both kinds do alike is in the modules that are named after neither.

| module | what it holds |
|---|---|
| `eagle3` | EAGLE-3: variants, forward pass, and a head over its own outputs, for training |
| `dflash` | DFlash: variants, forward pass over a block |
| `drafters` | the drafters of both |
| `head_target` | what a head uses of its target; refuses a head of another target |
| `sample_block` | draws a block whose rows of logits are there at once |
| `eagle3_folder`, `dflash_folder` | their folders: read in every format, written in one |
| `head_folder` | what a folder drafts with; tensors under the names of every format |
| `head_fields` | what the formats of `config.json` have in common: layer, taps, drafted tokens |

Only `load_drafter` and the package of models import this room.
"""
