"""`specjax serve`: a server of an engine in OpenAI's protocol; it needs the extra `serve`.

    body -> `parameters` -> `service` -> engine -> `service` -> `responses` -> events
              `fields`       `codec`              `token_scores`  `answers`

| module | contents |
|---|---|
| `app` | the routes, an application of Starlette |
| `answers` | an answer to a request for texts: waits, streams, aborts if the client leaves |
| `service` | submits requests to the engine, and makes parts of answers from chunks |
| `parameters`, `fields`, `limits` | a request's parameters, read from its body and checked |
| `codec`, `token_texts` | the tokens of prompts; the texts and bytes of tokens |
| `responses`, `token_scores` | OpenAI's objects |
| `errors`, `metrics_text` | refusals; counts for Prometheus |

Open `app` first. Only `app` and `answers` import Starlette. `specjax.cli` has the command, which
loads models, makes the engine and runs uvicorn.
"""
