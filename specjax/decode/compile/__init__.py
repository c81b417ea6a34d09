"""Compiled programs that outlive a process: `compile_generate`, its files, JAX's cache folder.

| module | contents |
|---|---|
| `compile_generate` | `generate`, compiled before the first prompt; open it first |
| `saved_programs` | a file of compiled programs |
| `compiler_options` | XLA's options for kinds of programs |
| `cache_folder` | JAX's own compilation cache, turned on |
"""
