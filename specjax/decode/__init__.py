"""The decode loop: propose, verify, commit, again.

`generate` holds the public functions `generate`, `init` and `step`, which check what enters. `loop`
is one step of arrays: a drafter proposes K tokens (`drafters`, `propose`, `drafts`), the target
scores them in one forward pass, `samplers` accepts some of them, and `commit` appends what was
emitted. `state` is what the loop carries, `metrics` what it counts, `logprobs` what it lists, and
`markov_chain` a model for examples. Open `generate` first.

Letters: `B` requests, `K` drafted tokens, `L` token buffer, `V` vocabulary. Imports the rooms
before it; `models` and `cli` import it.
"""
