"""The decode loop around verification: propose, verify, commit, again.

`generate` holds the public functions `generate`, `init` and `step`; `loop` is one step: a drafter
proposes K tokens (`drafters`, `propose`), the target scores them in one forward pass, verification
accepts some, and `commit` appends what was emitted. `state` is what the loop carries, `metrics`
what it counts, `logprobs` what it reports. Open `generate` first.

Letters: `B` requests, `K` drafted tokens, `L` token buffer, `V` vocabulary. Imports the rooms
before it; `models` and `cli` import it.
"""
