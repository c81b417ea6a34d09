"""The decode loop: propose, verify, commit, again.

`generate`, `init_and_step` for streaming and `compile/`, which compiles before the first prompt,
hold the public functions, which check what enters. `prefill` reads the prompts, and `loop`
is one step of arrays. A drafter proposes K tokens (`draft_next`, `drafters`, `propose`), as many as
`choose_k` says, and the target scores them in one forward pass (`target_rows`). `samplers` accepts
some of them, and `commit` appends what was emitted and holds the codes in a state. `state_and_info`
is what the loop carries, `metrics` what it counts, `logprobs` what it lists. `capacity` sizes and
pads the buffers, and `unpad` there makes lists of them. Open `generate` first.

Letters: `B` requests, `K` drafted tokens, `L` token buffer, `V` vocabulary.
"""
