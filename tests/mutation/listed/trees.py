"""Wrong versions of the verification of trees."""

from ..mutation import Mutation
from .tests import tree_laws, tree_sampling

_TREES = "specjax.samplers.trees."
_NUMPY = tree_sampling("test_decisions_are_those_of_numpy[200]")
_WALKED = tree_sampling("test_nodes_without_draft_logits_are_walked")
_CHAIN = tree_sampling("test_a_chain_is_verified_as_by_the_block_rule")
_NOTHING = tree_sampling("test_a_child_that_cannot_have_been_drawn_changes_nothing")
_OWN_SCALES = "test_drafts_of_a_temperature_and_a_cutoff_of_their_own_follow_the_target_jointly"
_INVALID = tree_sampling(
    "test_an_invalid_row_of_the_root_emits_nothing_and_an_invalid_request_neither"
)

MUTATIONS = (
    Mutation(
        f"{_TREES}tree._place",
        "depths + MAX_DEPTH * jnp.sum(is_before, axis=1, dtype=jnp.int32)",
        "nodes",
        tree_laws("test_texts_of_alternating_shapes_follow_the_target_jointly"),
        "noise is keyed by a node's number alone, which comes back in a tree of another shape",
    ),
    Mutation(
        f"{_TREES}tree._place",
        "nodes[None] < nodes[:, None]",
        "nodes[None] < 0 * nodes[:, None]",
        tree_laws("test_three_siblings_follow_the_target"),
        "all nodes of a depth share an address",
    ),
    Mutation(
        f"{_TREES}walk.walk_tree.step",
        "valid & jnp.any(is_child)",
        "jnp.any(is_child)",
        _WALKED,
        "an invalid row may lead on to what happens to be drawn from it",
    ),
    Mutation(
        f"{_TREES}traverse._visit.step",
        "first_index(is_child & (nodes > state.tried))",
        "jnp.max(jnp.where(is_child & ((state.tried == node) | (nodes < state.tried)), nodes, -1))"
        " % (size + 1)",
        _NUMPY,
        "siblings are visited in another order than that in which they were drawn",
    ),
    Mutation(
        f"{_TREES}traverse._visit.step",
        "has_child & in_vocabulary & (q == -jnp.inf)",
        "has_child & in_vocabulary & (q > 0)",
        _NOTHING,
        "a child of q(x) = 0 is rejected, as if it had been drawn",
    ),
    Mutation(
        f"{_TREES}traverse._accepts",
        "Stream.accept(tree.indices[v])",
        "Stream.accept(tree.depths[v])",
        _NUMPY,
        "siblings share one uniform",
    ),
    Mutation(
        f"{_TREES}traverse._draw",
        "tree, row = rows.tree, end.node + 1",
        "tree, row = rows.tree, num_accepted",
        _NUMPY,
        "the token after a path is drawn from the row of another node",
    ),
    Mutation(
        f"{_TREES}traverse._draw",
        "tree.position + num_accepted, Stream.TARGET",
        "tree.position + 0 * num_accepted, Stream.TARGET",
        _CHAIN,
        "the token after a path is drawn with the noise of the first position",
    ),
    Mutation(
        f"{_TREES}walk.walk_tree.step",
        "child = first_index(is_child)",
        "child = jnp.max(jnp.where(is_child, jnp.arange(is_child.shape[0], dtype=jnp.int32), -1))",
        tree_sampling("test_of_siblings_that_hold_the_target_s_draw_the_walk_takes_the_lowest"),
        "of equal siblings the walk takes the last",
    ),
    Mutation(
        f"{_TREES}siblings.reject_child",
        "jax.nn.logsumexp(q)",
        "jnp.log(jnp.sum(jnp.exp(q)))",
        tree_sampling(
            "test_a_sibling_far_less_likely_than_the_first_is_judged_by_its_share_of_the_rest"
        ),
        "what siblings left of q is what float32 can add to 1",
    ),
    Mutation(
        f"{_TREES}siblings.updated_rate",
        "mass - jnp.expm1(log_rate)",
        "mass + jnp.float32(1)",
        _NUMPY,
        "r is missing in Z + 1 - r",
    ),
    Mutation(
        f"{_TREES}siblings._residual_after.step",
        "jnp.where(is_token, -jnp.inf, q)",
        "jnp.where(is_token, q, q)",
        _NOTHING,
        "a sibling's token stays in q, and may come again",
    ),
    Mutation(
        f"{_TREES}siblings.reject_child",
        "jnp.where(is_sampled, least, jnp.float32(0))",
        "jnp.float32(-1)",
        tree_sampling("test_an_empty_residual_falls_back_to_the_target_row"),
        "an empty residual is divided by its mass",
    ),
    Mutation(
        f"{_TREES}siblings.TreeRows.draft_logprobs",
        "self.tree.draft_temperature",
        "self.tree.temperature",
        (*_NUMPY, *tree_laws(_OWN_SCALES)),
        "q is taken at the target's temperature",
    ),
    Mutation(
        f"{_TREES}siblings.TreeRows.draft_logprobs",
        "self.draft.row(self.tree.first_row + row)",
        "type(self.draft)(self.draft.logits).row(self.tree.first_row + row)",
        (*_NUMPY, *tree_laws(_OWN_SCALES)),
        "q is not zero below the draft's cutoff",
    ),
    Mutation(
        f"{_TREES}traverse.traverse_tree",
        "row_statistics_of(draft, tree.first_row, tree.draft_temperature",
        "row_statistics_of(draft, tree.first_row, tree.temperature",
        _NUMPY,
        "q is normalised by the sum at the target's temperature",
    ),
    Mutation(
        f"{_TREES}siblings.updated_rate",
        "jnp.log(mass) - jnp.log(total), jnp.float32(0)",
        "jnp.log(mass) - jnp.log(total), jnp.float32(-jnp.inf)",
        tree_sampling("test_an_empty_residual_falls_back_to_the_target_row"),
        "after an id of no token nothing else is accepted where p is q",
    ),
    Mutation(
        f"{_TREES}verify_tree._emit",
        "is_active = parse_temperature(tree.temperature).valid",
        "is_active = tree.position == tree.position",
        _INVALID,
        "a request of an invalid temperature emits tokens",
    ),
)
