"""Compiled programs that outlive a process: `compile_generate`, its files, JAX's cache folder.

Open `compile_generate` first. `saved_programs` writes and reads a file of programs,
`compiler_options` what XLA is told, and
`cache_folder` turns JAX's own compilation cache on.
"""
