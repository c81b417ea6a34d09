"""Wrong versions of drafts by lookup in a group."""

from ..mutation import Mutation
from .tests import group_lookup

_LONGEST = "test_the_longest_suffix_wins_then_the_most_tokens_then_its_own_text"
_GROUP = "test_a_request_drafts_what_followed_in_its_group_alone"

MUTATIONS = (
    Mutation(
        "specjax.contrib.tunix.group_lookup._propose",
        "groups == groups[request]",
        "groups >= 0",
        group_lookup(_GROUP),
        "every request searches all groups",
    ),
    Mutation(
        "specjax.contrib.tunix.group_lookup._look_up",
        "(num_after * 2 + is_request.astype(jnp.int32)) * width + index",
        "num_after * width + index",
        group_lookup(_LONGEST),
        "a later occurrence in another text goes before the request's own",
    ),
    Mutation(
        "specjax.contrib.tunix.group_lookup._look_up",
        "index < lengths[:, None] - n",
        "index <= lengths[:, None] - n",
        group_lookup(_GROUP),
        "the end of a text counts as an occurrence with nothing after it",
    ),
)
