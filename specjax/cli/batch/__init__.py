"""`specjax generate --input FILE --output FILE`: a file of prompts through the engine.

Open `run_batch` first. `arguments` has the options, `read_lines` checks the lines of the input,
and `output_file` appends whole lines and says which are there already.
"""
