"""`specjax.process_logits` of rules by their names."""

import specjax


def process_rules(
    logits, *, history=None, drafted_token_ids=None, first_row=0, axis_name=None, **rules
):
    return specjax.process_logits(
        logits,
        specjax.SamplingParams(**rules),
        history=history,
        drafted_token_ids=drafted_token_ids,
        first_row=first_row,
        axis_name=axis_name,
    )
