"""`specjax generate --input FILE --output FILE`: a file of prompts through the engine.

Open `run_batch` first. `read_lines` checks the lines of the input, `openai_lines` those of
OpenAI's batch format. `output_file` appends whole
lines, and knows those of earlier runs.
"""
