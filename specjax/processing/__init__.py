"""From `SamplingParams` to processed logits and a cutoff, which the samplers take.

    processed = mask(penalize(logits + bias))        `process_logits`, `logit_rules`, `bad_words`
    cutoff = smallest processed logit that is kept   `logit_cutoff`, `cutoff_xla`; on a GPU `pallas`

`apply_sampling` does both. `kept_tokens` lists the tokens that are left then, for a trainer.
`sampling_params` has a table with an entry for each parameter, and `rule_checks` the other checks
of a call. `history` is the text so far, and `token_counts` what penalties count. `bias` and
`bad_words` make arrays on the host. `grammar` and `host_masks` say which tokens may follow, and
`draft_vocabulary` takes all of it through a draft's map. `token_bytes` reads the bytes of a
tokenizer's tokens, for grammars. Open `sampling_params` first.

Letters: `B` requests, `R` rows of a request, `V` vocabulary.
"""
