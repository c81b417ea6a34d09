"""Trained draft heads that people publish: their folders, their forward passes, their drafters.

A head reads the target's residual stream after some layers, its taps. Open `eagle3` first.

| module | what it holds |
|---|---|
| `eagle3` | EAGLE-3: its forward pass, its variants |
| `eagle3_drafter` | its drafter |
| `eagle3_unrolled` | a head over its own outputs, for training |
| `eagle3_folder`, `eagle3_writer` | its folders: read in every format, written in one |
| `dflash` | DFlash: its forward pass over a block, its variants |
| `dflash_drafter` | its drafter |
| `draft_rows` | draws a block whose rows of logits are there at once |
| `dflash_folder`, `dflash_writer` | its folders |
| `folder_kind` | tells by config.json what a folder drafts with |
| `head_fields` | what the formats of `config.json` have in common: layer, taps, drafted tokens |
| `head_tensors` | tensors under the names of every format, and the draft's vocabulary |
| `check_target` | refuses a head of another target |
| `head_writer` | writes what the folders of both kinds have in common |
"""
