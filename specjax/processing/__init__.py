"""From `SamplingParams` to processed logits and a cutoff, which the samplers take.

    processed = mask(penalize(logits + bias))        `process_logits`, `logit_rules`, `bad_words`
    cutoff = smallest processed logit that is kept   `logit_cutoff`, `cutoff_xla`; on a GPU `pallas`

`apply_sampling` does both, and `token_counts` keeps what penalties count. A public function checks
its arguments (`rule_checks`) and calls a function of arrays, as `decode` does. Open
`sampling_params` first.

Letters: `B` requests, `R` rows of a request, `V` vocabulary. Imported by `decode`.
"""
