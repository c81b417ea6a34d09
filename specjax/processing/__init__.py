"""From `SamplingParams` to processed logits and a cutoff.

`process_logits` adds penalties, biases and masks to rows of logits, `token_counts` keeps what
penalties count, `cutoff` finds top-k, top-p and min-p as one number per row (`cutoff_xla` in plain
JAX, `specjax.pallas` on a GPU), and `apply_sampling` does both. Open `sampling_params` first.

Letters: `B` requests, `V` vocabulary. Imported by `decode`.
"""
