"""Compiled programs that outlive a process: `compile_generate`, its files, JAX's cache folder.

Open `compile_generate` first. `saved_programs` writes and reads a file of programs, `compatibility`
says which machine and models they were compiled for, `compiler_options` what XLA is told, and
`cache_folder` turns JAX's own compilation cache on.
"""
