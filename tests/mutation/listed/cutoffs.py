"""Wrong versions of cutoffs: the reference's search, and the kernels'."""

from ..mutation import Mutation
from .tests import cutoff_teams, cutoffs, pivots, searches

__all__ = ["MUTATIONS"]

_SORT = "test_cutoffs_are_those_of_a_sort"
_NARROW = "test_narrow_logits_are_read_exactly"
_HAND = "test_cutoffs_computed_by_hand"
_OFF = "test_filters_that_are_off_and_greedy_rows_keep_all"
_LAWLESS = "test_an_invalid_row_stays_invalid_to_the_samplers"
_GATHERED = "test_the_blocks_that_are_gathered_are_those_that_matter"
_BRACKET = "specjax.core.bisection."
_PIVOTS = "specjax.core.pivot_search."
_FILTERS = "specjax.core.truncation.search_cutoff"
_THRESHOLD = "specjax.processing.cutoff_xla."
_TRUNCATION = "specjax.core.truncation."
_PALLAS = "specjax.pallas."

_REFERENCE = (
    Mutation(
        "specjax.core.truncation.refuse_nan",
        "(filters.top_p, filters.min_p)",
        "(filters.top_p,)",
        cutoffs("test_a_nan_filter_makes_the_row_invalid[xla-min_p]"),
        "min-p may be NaN",
    ),
    Mutation(
        "specjax.core.truncation.refuse_nan",
        "jnp.isnan(value), jnp.inf, cutoff",
        "jnp.isnan(value), -jnp.inf, cutoff",
        cutoffs("test_a_nan_filter_makes_the_row_invalid[xla-top_p]"),
        "a filter that is NaN keeps all",
    ),
    Mutation(
        "specjax.processing.logit_cutoff.find_cutoff",
        "leading=leading",
        "leading=leading[::-1]",
        cutoffs("test_a_parameter_goes_with_the_leading_axes"),
        "a parameter [B] goes with the rows of a request",
    ),
    Mutation(
        "specjax.processing.logit_cutoff.logit_cutoff",
        'parse_optional("min_p", min_p,',
        'parse_optional("min_p", top_p,',
        cutoffs(f"{_HAND}[xla]"),
        "min-p is what top-p is",
    ),
    Mutation(
        "specjax.processing.logit_cutoff.logit_cutoff",
        'parse_array("temperature", temperature,',
        'parse_array("temperature", 1.0,',
        cutoffs(f"{_SORT}[xla-129]"),
        "every row is at temperature 1",
    ),
    Mutation(
        f"{_FILTERS}",
        "jnp.where(rows.cuts_k, queries.mass_above(low), mass)",
        "mass",
        cutoffs(f"{_HAND}[xla]"),
        "top-p is a share of all tokens, not of what top-k kept",
    ),
    Mutation(
        f"{_FILTERS}",
        "filters.top_k.astype(jnp.float32)",
        "filters.top_k.astype(jnp.float32) + 1",
        cutoffs(f"{_HAND}[xla]"),
        "top-k keeps one token more",
    ),
    Mutation(
        f"{_FILTERS}",
        "required_mass(filters.top_p, mass)",
        "required_mass(filters.top_p, jnp.ones_like(mass))",
        cutoffs(f"{_HAND}[xla]"),
        "top-p is compared with masses that are not normalised",
    ),
    Mutation(
        f"{_THRESHOLD}cutoff_of_rows",
        "jnp.where(row.cuts, cutoff, -jnp.inf)",
        "cutoff",
        cutoffs(f"{_OFF}[xla]"),
        "a row that is not to be cut is cut at its least logit",
    ),
    Mutation(
        f"{_THRESHOLD}cutoff_of_rows",
        "num_candidates <= _NUM_GATHERED",
        "num_candidates <= 2 * _NUM_GATHERED",
        cutoffs(f"{_GATHERED}[xla]"),
        "blocks are gathered where more of them hold the threshold",
    ),
    Mutation(
        f"{_THRESHOLD}_row_facts",
        "& scaling.valid & ~scaling.greedy",
        "& scaling.valid",
        cutoffs(f"{_OFF}[xla]"),
        "greedy rows are cut",
    ),
    Mutation(
        f"{_THRESHOLD}_row_facts",
        "jnp.where(cuts, low, row.low)",
        "jnp.maximum(low, row.low)",
        cutoffs(f"{_NARROW}[xla-1025-float16]"),
        "what top-p weighs is cut by min-p's bound before top-k's",
    ),
    Mutation(
        f"{_THRESHOLD}_search_cutoff.extremes",
        "merge(jnp.maximum,",
        "merge(jnp.minimum,",
        cutoffs(f"{_SORT}[xla-129]"),
        "a bracket ends at the smaller of two blocks' largest logits",
    ),
    Mutation(
        f"{_BRACKET}ordered_key",
        "jnp.where(x == 0, jnp.float32(0), x)",
        "x",
        searches("test_keys_are_in_the_order_of_the_numbers_and_lead_back"),
        "the zeros are two keys",
    ),
    Mutation(
        f"{_BRACKET}bisect",
        "mass >= target",
        "mass > target",
        searches("test_a_search_finds_the_kth_largest_in_tiles[7-True]"),
        "the target is to be exceeded",
    ),
    Mutation(
        f"{_BRACKET}clamp_to_logits",
        "ordered_key(extremes.most) + jnp.int32(1)",
        "ordered_key(extremes.most)",
        why="a bracket ends before its largest logit",
        equivalent="where that is the threshold the search ends one key below it, with no logit "
        "between them, and the least logit kept is the same",
    ),
    Mutation(
        f"{_BRACKET}clamp_to_logits",
        "jnp.maximum(ordered_key(extremes.least), bracket.low)",
        "jnp.maximum(ordered_key(extremes.least) + jnp.int32(1), bracket.low)",
        searches("test_a_search_finds_the_kth_largest_in_tiles[200-True]"),
        "a bracket begins after its smallest logit",
    ),
    Mutation(
        f"{_BRACKET}key_midpoint",
        "start + end + carry",
        "start + end",
        searches("test_a_pivot_is_above_low_and_cuts_in_half"),
        "of two odd ends the halves lose one",
    ),
    Mutation(
        f"{_PIVOTS}search_by_pivots.divide",
        "sums >= target",
        "sums > target",
        pivots("test_a_search_by_pivots_finds_the_logit_in_few_passes[8-bfloat16]"),
        "the target is to be exceeded",
    ),
    Mutation(
        f"{_PIVOTS}pivot_keys",
        "step * (index + one)",
        "step * index",
        pivots("test_pivots_are_inside_a_bracket_and_divide_it_evenly[0]"),
        "the first pivot is the bracket's end",
    ),
    Mutation(
        f"{_PIVOTS}pivot_keys",
        "jax.lax.div(bracket.high, parts) - jax.lax.div(bracket.low, parts)",
        "jax.lax.div(bracket.high - bracket.low, parts)",
        pivots("test_pivots_are_inside_a_bracket_and_divide_it_evenly[0]"),
        "the width of a bracket overflows",
    ),
    Mutation(
        f"{_PIVOTS}_divide_by_halves",
        "index * 2 + 1",
        "index * 2",
        pivots("test_pivots_are_inside_a_bracket_and_divide_it_evenly[16]"),
        "pivots are at the ends of parts, one of which is the bracket's",
    ),
    Mutation(
        f"{_PIVOTS}search_by_pivots.divide",
        "jnp.where(is_kept_mass, kept, pivots)",
        "pivots",
        pivots("test_a_search_by_pivots_finds_the_logit_in_few_passes[8-bfloat16]"),
        "top-p weighs what lies above the end of top-k's bracket",
    ),
    Mutation(
        f"{_PIVOTS}search_by_pivots.divide",
        "_target(filters, jnp.max(sums))",
        "target",
        pivots("test_a_search_by_pivots_finds_the_logit_in_few_passes[8-bfloat16]"),
        "the mass of top-p is sought where top-k's count was",
    ),
    Mutation(
        f"{_PIVOTS}search_by_pivots",
        "bracket.low > state.bracket.low",
        "bracket.low >= state.bracket.low",
        pivots("test_what_no_search_reached_is_no_logit"),
        "a bound that no search reached is taken for a logit",
    ),
    Mutation(
        f"{_TRUNCATION}mass_above",
        "blocks >= pivot",
        "blocks > pivot",
        cutoffs(f"{_SORT}[xla-129]"),
        "what lies at a pivot is not above it",
    ),
    Mutation(
        f"{_TRUNCATION}top_k_active",
        "(top_k > 0) & (top_k < vocab_size)",
        "top_k < vocab_size",
        cutoffs(f"{_OFF}[xla]"),
        "a top-k of 0 or less cuts",
    ),
    Mutation(
        f"{_TRUNCATION}required_mass",
        "jnp.maximum(top_p * mass, jnp.float32(_TINY))",
        "top_p * mass",
        why="a top-p of 0 or less has a target of that",
        equivalent="every probe reaches such a target, so that the search ends at the largest "
        "logit, as it does with the least positive one",
    ),
    Mutation(
        f"{_TRUNCATION}min_kept",
        "(blocks - anchor[..., None]) * scale[..., None]",
        "(blocks - anchor[..., None])",
        cutoffs(f"{_SORT}[xla-129]"),
        "min-p is at temperature 1",
    ),
    Mutation(
        f"{_TRUNCATION}min_p_threshold",
        "jnp.minimum(jnp.maximum(min_p, jnp.float32(0)), jnp.float32(1))",
        "jnp.maximum(min_p, jnp.float32(0))",
        cutoffs(f"{_SORT}[xla-129]"),
        "a min-p above 1 drops the likeliest token",
    ),
    Mutation(
        f"{_TRUNCATION}mass_bound",
        "jnp.float32(size - 1) * pivot_mass",
        "0 * pivot_mass",
        searches("test_a_bound_from_blocks_is_never_above_what_is_there"),
        "a block that reaches the pivot counts whole",
    ),
)

_KERNELS = (
    Mutation(
        f"{_PALLAS}cutoff.bound.bound_cutoff",
        "row.cuts_p & ~row.cuts_k",
        "row.cuts_p",
        cutoffs(f"{_NARROW}[interpret-1025-float16]"),
        "top-p's bound cuts what top-k keeps",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound.bound_cutoff",
        "min_p_threshold(filters.min_p) - jnp.float32(BOUND_SLACK)",
        "min_p_threshold(filters.min_p) + jnp.float32(BOUND_SLACK)",
        cutoffs(f"{_SORT}[interpret-129]"),
        "min-p's bound lies above its threshold",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound._bisect_distance",
        "jnp.where(is_bound, low, -jnp.inf)",
        "low",
        cutoffs(f"{_SORT}[interpret-5000]", f"{_SORT}[interpret-129]"),
        "a bound that does not reach the target is taken for one",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound.bound_cutoff.least_mass",
        "size=SUB_BLOCK",
        "size=1",
        cutoffs(f"{_SORT}[interpret-5000]"),
        "a sub-block that reaches a logit counts whole",
    ),
    Mutation(
        f"{_PALLAS}cutoff.candidates.classify_sub_blocks",
        "holds_several = reaches & (other_mass >=",
        "holds_several = reaches & (0 * other_mass >",
        cutoffs(f"{_SORT}[interpret-5000]"),
        "every sub-block gives its largest logit alone",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound._bound_by_remainder",
        "share * row.mass / num_logits",
        "share * row.mass",
        cutoff_teams("test_wide_rows_have_the_cutoffs_of_a_sort[float32]"),
        "what top-p may drop is taken for the mass of one token",
    ),
    Mutation(
        f"{_PALLAS}cutoff.candidates.compact_candidates",
        "num_chosen + (chunk_size - 1), chunk_size)",
        "num_chosen, chunk_size)",
        cutoffs(f"{_SORT}[interpret-5000]"),
        "the last sub-blocks, which do not fill a batch, are not read",
    ),
    Mutation(
        f"{_PALLAS}cutoff.candidates._compact_chunk",
        "jnp.cumsum(ones, axis=1, dtype=jnp.int32) - 1",
        "jnp.cumsum(ones, axis=1, dtype=jnp.int32)",
        cutoffs(f"{_SORT}[interpret-5000]"),
        "the candidates of a sub-block begin one index too late",
    ),
    Mutation(
        f"{_PALLAS}cutoff.candidates._prefix_sums",
        "holds_one.shape[0] >= _COUNT_RADIX",
        "holds_one.shape[0] > 4 * _COUNT_RADIX",
        cutoffs("test_more_sub_blocks_than_one_scan_counts[interpret]"),
        "more is counted in half an integer than it holds",
    ),
    Mutation(
        f"{_PALLAS}cutoff.search.search_candidates",
        "fits, no_cutoff = count <= num_register_logits",
        "fits, no_cutoff = count <= 2 * num_register_logits",
        cutoffs(f"{_NARROW}[interpret-1025-float16]"),
        "a program searches among fewer candidates than there are",
    ),
    Mutation(
        f"{_PALLAS}cutoff.rows._search_row",
        "(count > buffer.values.shape[1])",
        "(count > 2 * buffer.values.shape[1])",
        cutoffs(f"{_NARROW}[interpret-1025-float16]"),
        "candidates beyond the buffer are taken for cut",
    ),
    Mutation(
        f"{_PALLAS}cutoff.search.search_candidates",
        "MemoryRow(values, row.b, count,",
        "MemoryRow(values, row.b, count - 1,",
        cutoffs(f"{_NARROW}[interpret-1025-float16]"),
        "the last candidate is not searched",
    ),
    Mutation(
        f"{_PALLAS}cutoff.rows.cutoff_search_kernel",
        "refuse_nan(keeps_all, load_filters(operands.rows, b))",
        "keeps_all",
        cutoffs("test_a_nan_filter_makes_the_row_invalid[interpret-top_p]"),
        "a filter that is NaN keeps all",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound.store_sub_blocks",
        "reduce_blocks(x, scale[None]",
        "reduce_blocks(x, jnp.ones_like(scale)[None]",
        cutoffs(f"{_SORT}[interpret-5000]"),
        "sub-blocks are summed at temperature 1",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound.any_filter_active",
        "temperature.valid & ~temperature.greedy",
        "temperature.valid",
        cutoffs(f"{_OFF}[interpret]"),
        "greedy rows are cut",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound.any_filter_active",
        "filters.min_p > 0",
        "filters.min_p >= 0",
        cutoffs(f"{_OFF}[interpret]"),
        "a min-p of 0 asks for a cut",
    ),
    Mutation(
        f"{_PALLAS}cutoff.bound.summarize_row",
        "& jnp.isfinite(row_partial.max) & jnp.isfinite(row_partial.sum)",
        "& (row_partial.max < jnp.inf)",
        cutoffs(f"{_LAWLESS}[interpret-masked]"),
        "a row of nothing but -inf is cut",
    ),
    Mutation(
        f"{_PALLAS}cutoff.queries.register_queries",
        "mass_above(x, weights, pivot)",
        "mass_above(x, None, pivot)",
        cutoffs(f"{_SORT}[interpret-129]"),
        "top-p counts tokens",
    ),
    Mutation(
        f"{_PALLAS}cutoff.search.search_candidates",
        "count + (tile.size - 1)",
        "count",
        cutoffs(f"{_SORT}[interpret-5000]"),
        "the last tile, which is not full, is not searched",
    ),
    Mutation(
        f"{_PALLAS}launch.make_add_above.add_above",
        "x >= pivots",
        "x > pivots",
        cutoff_teams("test_wide_rows_have_the_cutoffs_of_a_sort[bfloat16]"),
        "what lies at a pivot is not above it",
    ),
    Mutation(
        f"{_PALLAS}cutoff.queries._min_kept",
        "end * parts",
        "end",
        cutoff_teams("test_wide_rows_have_the_cutoffs_of_a_sort[float32]"),
        "the smallest kept logit is sought in the first chunks alone",
    ),
    Mutation(
        f"{_PALLAS}cutoff.queries.MemoryRow.load",
        "jnp.where(index <= last, x.astype(jnp.float32), jnp.float32(-jnp.inf))",
        "x.astype(jnp.float32)",
        cutoff_teams("test_wide_rows_have_the_cutoffs_of_a_sort[bfloat16]"),
        "the last logit counts once more for every place after it",
    ),
    Mutation(
        f"{_PALLAS}cutoff.search.search_candidates",
        "load_first_values(values, row.b, num_register_logits, count)",
        "load_first_values(values, row.b, num_register_logits, count + 1)",
        cutoffs("test_uninitialised_memory_is_no_logit[interpret]"),
        "what the memory held after the candidates is searched, too",
    ),
    Mutation(
        f"{_PALLAS}cutoff.search.search_by_team",
        "vocab_size // NUM_SHARES",
        "vocab_size // (2 * NUM_SHARES)",
        cutoff_teams("test_wide_rows_have_the_cutoffs_of_a_sort[float16]"),
        "the last logits of a row are in no share",
    ),
    Mutation(
        f"{_PALLAS}cutoff.team.reduce_shares",
        "team.rank + number * team.size",
        "team.rank + number",
        cutoff_teams("test_members_ask_each_share_once_and_know_the_same"),
        "members ask what others ask, too, and leave shares out",
    ),
    Mutation(
        f"{_PALLAS}cutoff.team.form_team",
        "joined != num_programs",
        "joined < num_programs",
        cutoff_teams("test_a_team_has_those_who_joined_before_it_was_closed[before3-2-2]"),
        "a team that was closed is taken for full",
    ),
    Mutation(
        f"{_PALLAS}cutoff.team.form_team.close_team",
        "jnp.where(before < _CLOSED, before, 0)",
        "before",
        cutoff_teams("test_a_team_has_those_who_joined_before_it_was_closed[before4-3-3]"),
        "a program that closes a team again changes its size",
    ),
)

MUTATIONS = _REFERENCE + _KERNELS
