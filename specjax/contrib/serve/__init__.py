"""A server of an engine, in OpenAI's protocol: `specjax serve`. It needs the extra `serve`.

    body -> `parameters` -> `service` -> engine -> `service` -> `responses` -> events
              `fields`       `codec`              `token_scores`  `answers`

| module | what it holds |
|---|---|
| `app` | the routes, an application of Starlette |
| `answers` | an answer to a request for texts: waits, streams, aborts if the client goes |
| `service` | what a request asks for, submitted to the engine; parts of what comes back |
| `parameters`, `fields`, `limits` | the body of a request, checked strictly |
| `codec`, `token_texts` | prompts to tokens, tokens to texts and bytes |
| `responses`, `token_scores` | OpenAI's objects |
| `errors`, `metrics_text` | refusals; counts for Prometheus |

Open `app` first. Only `app` and `answers` import Starlette. `specjax.cli` has the command, which
loads models, makes the engine and runs uvicorn.
"""
