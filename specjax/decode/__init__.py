"""The decode loop: propose, verify, commit, again.

`generate`, and `init_and_step` for streaming, hold the public functions, which check what enters.
`loop` is one step of arrays. A drafter proposes K tokens (`drafters`, `propose`), and the target
scores them in one forward pass. `samplers` accepts some of them, and `commit` appends what was
emitted. `state_and_info` is what the loop carries, `settings` what stays constant,
`finish_and_origin` the codes in a state, `metrics` what the loop counts, `logprobs` what it lists.
`draft_from_probs` and `gather_drafts` serve a loop of your own. `capacity` sizes and pads the
buffers, and `unpad` there makes lists of them. Open `generate` first.

Letters: `B` requests, `K` drafted tokens, `L` token buffer, `V` vocabulary. Imports the rooms
before it; `models` and `cli` import it.
"""
