"""How programs are compiled: once for layers or draws, and kept for later processes.

Open `cache_folder` first.

| module | what it holds |
|---|---|
| `cache_folder` | `enable_compilation_cache`: the folder, and whether JAX reads it |
| `compiled_for` | the types and functions that a program is compiled for |
| `saved_programs` | programs as bytes, and the file of `CompiledGenerate.save` |
| `by_layer` | a function cut at its layers, which share a program that the host runs for each |
| `draw_loop` | the draws of a proposal, compiled once where what they carry keeps its type |
| `compiler_options` | XLA's options for kinds of programs |
| `program_store` | the command's programs, each under a name that says what it was traced from |
"""
