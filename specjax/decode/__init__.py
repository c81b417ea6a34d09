"""The decode loop: compute rows, verify, commit, extend, draft, and again.

    pending draft -> target's K + 1 rows -> accepted tokens -> buffers -> next draft

| module | contents |
|---|---|
| `generate`, `init_and_step` | public calls: whole texts, and one step at a time for streaming |
| `score` | log-probabilities of given texts |
| `row_invariance` | whether a model's rows depend on their neighbours |
| `compile/` | `generate`, compiled before the first prompt; programs in a file |
| `prefill` | the prompts, read in chunks by one program whatever their length |
| `step` | one step, as five calls |
| `target_step` | the target's rows: one forward pass over the last token and the drafted ones |
| `draft_step` | the next draft, and how many tokens it may have |
| `adaptive_k` | K = "auto": how many tokens are worth drafting, and which work a step then omits |
| `step_times` | `measure_step_costs`: times of steps, by which K = "auto" chooses |
| `drafters`, `propose` | `Drafter`, three of them, `Models`; K tokens sampled from a draft model |
| `commit` | emitted tokens in buffers; codes of origins and ends |
| `request_batch`, `options` | checked arguments: arrays, and static options |
| `state` | `DecodeState`, `Settings`, `StepInfo` |
| `matchers` | `RowMasks`: masks of each row, by matchers on the host |
| `metrics` | counts of steps |
| `token_info`, `logprobs` | lists of each emitted token; listed log-probabilities |
| `capacity`, `kinds` | sizes and padding of buffers; the key of a model's compiled programs |
| `memory` | bytes of a slot, a step and a chunk; refuses a loop that does not fit |

Open `step` first. Public calls check their arguments, and the other modules trust them.

    generate    check_arguments -> run_requests: prefill, then run_loop: steps until all have ended
    init        check_arguments -> run_requests: prefill, then run_first_step
    step        check_step_options -> run_step
    score       parse_texts -> batches of chunks, each a forward pass

`request_batch` has the checks, `prefill` has `run_requests`, `generate` has `run_loop`, and `step`
has the other two.

A row is one of the K + 1 positions of a step, with its logits.

Letters: `A` taps (target layers whose hidden states a drafter reads), `B` requests, `C` tokens read
at once, `D` hidden size, `E` end-of-sequence ids, `K` drafted tokens, `L` any other number of
tokens, `S` tokens that buffers hold, `V` vocabulary. In `Drafter` and `Model`, `E` is the hidden
size. Imported by `engine`, `models`, `contrib` and `cli`.
"""
