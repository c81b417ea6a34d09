"""Doors to other libraries: their models as `specjax.Model`, this decoding as a part of theirs.

`tunix` is for google-tunix. Each library has a folder, and nothing else in the package imports it.
`docs/adapters.md` shows how a model of any library becomes a `specjax.Model`.
"""
