"""`specjax serve`: a pair of models as a server in OpenAI's protocol.

`serve_arguments` has the options. `run_serve` loads the pair, makes the engine, and runs uvicorn on
the application of `specjax.contrib.serve`.
"""
