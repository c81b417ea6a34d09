"""The contents of a pair's folders, before their weights are read.

| module | contents |
|---|---|
| `hub_cache` | the folder of a name such as Qwen/Qwen3-0.6B, in the local cache of the hub |
| `generation_config` | sampling parameters, for options that are not given |
| `pair_memory` | what the pair takes of the memory that is free |
"""
