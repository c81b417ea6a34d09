"""Devices: where a batch and a vocabulary lie, and a call on each device's part.

Open `placement` first: a batch over the axis `data` of a mesh, a model over the axis `model`.
`vocabulary_split` says how rows of logits lie over devices. `rows` makes values of them that are
read alike, `LogitRows` or `SplitRows`. `map_parts` runs a function on each device's part of them,
and `map_groups` on 8 rows at a time.

Rooms above import this one; it imports `core`, `implementation` and `types`.
"""
