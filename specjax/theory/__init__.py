r"""Expected acceptance and speed, as formulas: of a rule, of a step, and of the best rule there is.

With p the target's probabilities of the next token and q the draft's:

    acceptance_rate            sum min(p, q): no rule accepts one drafted token more often
    match_probability          how often coupled draws agree, at most that
    optimal_acceptance_rate    the same bound for several candidates at one position, V <= 16
    unconditional_rates        how often a step accepts i tokens, token by token or as a block
    rates_given_text           these rates given one text of the target, for any vocabulary
    acceptance_lengths         tokens per step for every K, from unconditional rates
    expected_acceptance_length tokens per step, from conditional rates
    best_k                     the K with the most tokens per second
    step_costs.StepCosts       times of steps by batch size and K, interpolated

Functions of few numbers compute with NumPy in float64. `acceptance_rate`, `acceptance_lengths` and
`best_k` also take arrays of JAX and may be traced. The decode loop, the command and the benchmarks
may import this room.

    acceptance, coupling, optimal_transport    one position: the first three functions
    prefix_rates, acceptance_rates, speed      a step: the others, in this order
    step_costs                                 what `speed` divides by: a table of steps' times
    arrays                                     arguments as arrays, checked

Open `prefix_rates` first.
"""

from specjax.theory.acceptance import acceptance_rate
from specjax.theory.acceptance_rates import acceptance_lengths, expected_acceptance_length
from specjax.theory.coupling import match_probability
from specjax.theory.optimal_transport import optimal_acceptance_rate
from specjax.theory.prefix_rates import rates_given_text, unconditional_rates
from specjax.theory.speed import BestK, best_k

__all__ = [
    "BestK",
    "acceptance_lengths",
    "acceptance_rate",
    "best_k",
    "expected_acceptance_length",
    "match_probability",
    "optimal_acceptance_rate",
    "rates_given_text",
    "unconditional_rates",
]
