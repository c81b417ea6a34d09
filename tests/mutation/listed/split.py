"""Wrong versions of split vocabularies: padding, a block on two devices, the places of tokens."""

from ..mutation import Mutation
from .tests import split_kernels, split_models, split_processing, split_vocabulary, subnormal

__all__ = ["MUTATIONS"]

_EMPTY = "test_a_device_without_tokens_changes_no_sample"
_PROCESSED = "test_what_is_processed_cut_and_listed_is_that_of_whole_rows_and_no_row_travels"
_TOKENS = "test_tokens_are_those_of_whole_rows_and_no_row_travels"
_UNEVEN = "test_no_row_of_logits_travels_where_devices_do_not_divide_the_requests"
_OWN_OPTIONS = "test_requests_that_devices_do_not_divide_keep_their_own_options"
_SAMPLES_BY_SHARDING = "test_samples_of_rows_whose_sharding_splits_them_are_those_of_whole_rows"
_WHOLE_BY_SHARDING = (
    "test_what_reads_whole_rows_gathers_those_of_a_sharding_unless_it_names_their_size"
)
_ANY_SHAPE = "test_vocab_size_is_of_the_axis_that_a_sharding_names_on_a_mesh_of_any_shape"
_WORDS = "test_a_mask_in_words_that_lie_on_two_devices_is_refused_by_name_and_read_whole_otherwise"
_EVERY = "test_every_verification_asks_for_the_axis_and_for_the_size"
_SUBNORMAL = "test_devices_compare_the_subnormal_maxima_of_greedy_rows_as_zeros"
_DRAWN = "test_what_rows_have_drawn_counts_for_active_requests_up_to_an_invalid_row"
_PALLAS = "specjax.pallas."
_KERNELS = "test_two_gathers_of_numbers_suffice_for_the_tokens_of_whole_rows"
_SAMPLES = "test_one_gather_suffices_for_the_samples_of_whole_rows"
_COUPLED = "test_one_gather_suffices_for_coupled_sampling"

MUTATIONS = (
    Mutation(
        "specjax.devices.rows._true_row",
        "ids < split.vocab_size",
        "ids < split.vocab_size + 1",
        split_vocabulary(_EMPTY),
        "the first column of padding has mass",
    ),
    Mutation(
        "specjax.devices.rows._device_blocks",
        "[row, head, jnp",
        "[row, jnp.full_like(head, fill), jnp",
        split_vocabulary(f"{_TOKENS}[coupled]"),
        "a block on two devices has the sum of the first one's tokens alone",
    ),
    Mutation(
        "specjax.devices.rows._device_blocks",
        "start = -first % SAMPLING_BLOCK",
        "start = jnp.int32(0)",
        split_vocabulary(f"{_TOKENS}[coupled]"),
        "blocks begin where a device's tokens do, and not at multiples of 128",
    ),
    Mutation(
        "specjax.devices.rows._device_blocks",
        "row = _true_row(row, first, split, fill)",
        "pass",
        split_vocabulary(_EMPTY),
        "what stands past the end of the vocabulary is read as logits",
    ),
    Mutation(
        "specjax.devices.rows._gather_blocks",
        "for d in range(size)]",
        "for d in reversed(range(size))]",
        split_vocabulary(f"{_TOKENS}[coupled]"),
        "blocks stand in the reverse order of devices: other noise, and ties to the last device",
    ),
    Mutation(
        "specjax.devices.rows._gather_blocks",
        "begins[d + 1] - begins[d]]",
        "-(-width // SAMPLING_BLOCK)]",
        split_vocabulary(f"{_TOKENS}[token]"),
        "a device on which one block less begins gives an arbitrary one",
    ),
    Mutation(
        "specjax.devices.rows._take",
        "index - first_token(width, split)",
        "index",
        split_vocabulary(f"{_TOKENS}[coupled]"),
        "a token's logit and noise are looked up without the device's offset",
    ),
    Mutation(
        "specjax.devices.rows._take",
        "is_token & (column >= 0) & (column < width)",
        "is_token",
        split_vocabulary(f"{_TOKENS}[coupled]"),
        "devices that do not have a token add a logit to it",
    ),
    Mutation(
        "specjax.devices.rows._take",
        "(index >= 0) & (index < split.vocab_size)",
        "index >= 0",
        split_vocabulary(_EMPTY),
        "a column of padding is a token",
    ),
    Mutation(
        "specjax.samplers.reference.coupled.couple_request",
        "_, token, logprob, row = jax.tree.map(lambda x: x[n], drawn)",
        "_, token, logprob, row = jax.tree.map(lambda x: x[0], drawn)",
        split_vocabulary(f"{_TOKENS}[coupled]"),
        "the token after the accepted ones is that of the first row",
    ),
    Mutation(
        "specjax.devices.rows.SplitRows.merge",
        "_OVER_DEVICES[two](values",
        "_OVER_DEVICES[jnp.maximum](values",
        split_processing(_PROCESSED),
        "a cutoff is searched by the counts and masses of the device that has most",
    ),
    Mutation(
        "specjax.processing.cutoff_xla.cutoff_of_rows",
        "split_blocks(rows.true_logits())",
        "split_blocks(jnp.where(jnp.isnan(logits), jnp.inf, logits))",
        split_processing(_PROCESSED),
        "padding counts among the largest logits",
    ),
    Mutation(
        "specjax.devices.rows.SplitRows.columns",
        "self.offsets(ids)",
        "ids",
        split_processing(_PROCESSED),
        "every device forbids and penalises the first one's tokens",
    ),
    Mutation(
        "specjax.devices.rows.SplitRows.columns",
        "jnp.where(offsets < 0, self.logits.shape[-1], offsets)",
        "offsets",
        split_processing(_PROCESSED),
        "a bad word of an earlier device is counted from the end of a later one's tokens",
    ),
    Mutation(
        "specjax.devices.rows.SplitRows.top_k",
        "ids + first_token(width, self.split)",
        "ids",
        split_processing(_PROCESSED),
        "tokens are listed by their columns on a device",
    ),
    Mutation(
        "specjax.decode.logprobs._top_logprobs",
        "rows.merge(jnp.add,",
        "rows.merge(jnp.maximum,",
        split_processing(_PROCESSED),
        "a rank counts the likelier tokens of one device alone",
    ),
    Mutation(
        "specjax.devices.vocabulary_split._axes_of",
        "if mesh.shape[name] > 1",
        "if mesh.shape[name] < 1",
        split_vocabulary(f"{_SAMPLES_BY_SHARDING}[4-AxisType.Explicit]"),
        "rows are gathered whose sharding splits them",
    ),
    Mutation(
        "specjax.devices.vocabulary_split._axes_of",
        "if has_size and not split_over:",
        "if not split_over:",
        split_vocabulary(f"{_ANY_SHAPE}[8-1-AxisType.Auto]"),
        "rows on one device are read as split without a size, and miss the kernels of whole rows",
    ),
    Mutation(
        "specjax.devices.vocabulary_split._axes_of",
        "if has_size and not split_over:",
        "if has_size and len(names) > 1:",
        split_vocabulary(f"{_ANY_SHAPE}[8-1-AxisType.Explicit]"),
        "vocab_size is refused where the axis has one device",
    ),
    Mutation(
        "specjax.devices.vocabulary_split._axes_of",
        "(names or _unnamed_axes(mesh, sum(by_axis, ())))",
        "names",
        split_vocabulary(f"{_ANY_SHAPE}[8-1-AxisType.Auto]"),
        "vocab_size is refused of what jit returns where the axis has one device",
    ),
    Mutation(
        "specjax.devices.vocabulary_split._unnamed_axes",
        " and name not in names",
        "",
        split_vocabulary(f"{_ANY_SHAPE}[1-8-AxisType.Auto]"),
        "the vocabulary is said to lie over the axis of the requests",
    ),
    Mutation(
        "specjax.devices.vocabulary_split._unnamed_axes",
        "not isinstance(mesh, Mesh)",
        "mesh.empty",
        split_vocabulary(f"{_ANY_SHAPE}[8-1-AxisType.Auto]"),
        "inside jit a mesh whose axis has one device takes what no other mesh takes",
    ),
    Mutation(
        "specjax.devices.vocabulary_split._axes_of",
        "jax.typeof(logits) if is_traced else logits",
        "logits",
        split_vocabulary(f"{_TOKENS}[coupled]"),
        "inside jit no axis is seen, Explicit ones neither",
    ),
    Mutation(
        "specjax.devices.vocabulary_split.parse_split",
        "most = logits.shape[-1] * (size if mesh is None else 1)",
        "most = logits.shape[-1] * size",
        split_vocabulary(_WHOLE_BY_SHARDING),
        "the rows of whole arrays are taken for a device's part of longer ones",
    ),
    Mutation(
        "specjax.devices.vocabulary_split.parse_split",
        "mesh is not None and vocab_size is None",
        "mesh is not None",
        split_vocabulary(_WHOLE_BY_SHARDING),
        "padding is emitted where rows with a given size are gathered",
    ),
    Mutation(
        "specjax.devices.map_parts.map_parts.spec",
        "_holds(over_vocabulary, x)",
        "x.ndim >= 3",
        split_vocabulary(f"{_TOKENS}[ragged]"),
        "every device is given whole rows of flat logits",
    ),
    Mutation(
        "specjax.devices.map_parts.map_parts.spec",
        "None if is_whole else requests",
        "None",
        split_vocabulary(f"{_TOKENS}[block]"),
        "every device verifies all requests, in place of its own",
    ),
    Mutation(
        "specjax.processing.token_counts.add_to_counts.add",
        "logit_rows(generated, split).offsets(token_ids)",
        "token_ids",
        split_processing(_PROCESSED),
        "every device counts the first one's tokens",
    ),
    Mutation(
        "specjax.devices.vocabulary_split.keep_split",
        "return split if reason is None else None",
        "return split",
        split_processing(_WORDS),
        "a mask in words is split within a word",
    ),
    Mutation(
        f"{_PALLAS}split.shared_rows.with_shared_tiles",
        "2 * num_tiles, load_first_token(arrays))",
        "2 * num_tiles, jnp.int32(0))",
        split_kernels(f"{_KERNELS}[sampled]"),
        "a greedy request emits a column of a device in place of a token",
    ),
    Mutation(
        f"{_PALLAS}split.shared_rows._StridedRef.__getitem__",
        "row, column + self._first",
        "row, tile - tile + self._first",
        split_kernels(f"{_KERNELS}[sampled]"),
        "every tile of a device has the numbers of its first one",
    ),
    Mutation(
        f"{_PALLAS}split.proposals._propose",
        "draw_noise(address, first_block,",
        "draw_noise(address, first_block * 0,",
        split_kernels(f"{_KERNELS}[sampled]"),
        "every device draws by the noise of the first one's blocks",
    ),
    Mutation(
        f"{_PALLAS}residual.reduce_masses",
        "_row_times_rho(prefix)._replace(first_token=None)",
        "_row_times_rho(prefix)",
        split_kernels(f"{_KERNELS}[sampled]"),
        "columns of a later device are taken for the ids of tokens, of which it has none",
    ),
    Mutation(
        f"{_PALLAS}split.proposals._propose",
        "prefix.from_residual, load_residual, load_row_without_draft",
        "prefix.from_residual, load_row_without_draft, load_row_without_draft",
        split_kernels(f"{_KERNELS}[empty residuals]"),
        "the block of a residual is drawn by the masses of the target's row",
    ),
    Mutation(
        f"{_PALLAS}split.proposals._propose.weigh",
        "residual_logprobs(*load_residual_terms(prefix, token_id, logprobs))",
        "exclude(token_id, logprobs)",
        split_kernels(f"{_KERNELS}[sampled]"),
        "the token of a residual's block is drawn by its probabilities in the target's row",
    ),
    Mutation(
        f"{_PALLAS}gumbel_max.exclude_token",
        "block_index += divmod_i32(row.first_token, SAMPLING_BLOCK)[0]",
        "block_index += 0",
        split_kernels(f"{_KERNELS}[one-hot]"),
        "a rejected one-hot draft leaves mass in its block, on every device but the first",
    ),
    Mutation(
        f"{_PALLAS}split.proposals._propose",
        "mass <= _min_mass(prefix)",
        "mass < 0",
        split_kernels(f"{_KERNELS}[empty residuals]"),
        "where a residual is empty no device proposes a token of the row",
    ),
    Mutation(
        f"{_PALLAS}split.proposals.choose",
        "mass = jnp.sum(numbers[:, :, _MASS], axis=0)",
        "mass = numbers[0, :, _MASS]",
        split_kernels(f"{_KERNELS}[sampled]", f"{_KERNELS}[empty residuals]"),
        "a residual is empty where the first device has none of it",
    ),
    Mutation(
        f"{_PALLAS}split.proposals.store_proposal",
        "jnp.where(is_here, jnp.float32(0), nothing)",
        "jnp.float32(0)",
        split_kernels(f"{_KERNELS}[sampled]"),
        "a bonus token has the log-probability that a device without it gives",
    ),
    Mutation(
        f"{_PALLAS}split.sample._choose",
        "gathered[..., _SCORE] + log_masses",
        "gathered[..., _SCORE]",
        split_kernels(_SAMPLES, f"{_COUPLED}[False]"),
        "devices of little mass are drawn from as often as others",
    ),
    Mutation(
        f"{_PALLAS}split.sample.target_samples",
        "inputs.positions[owner] + row - first_row[owner]",
        "arrays.positions[owner]",
        split_kernels(f"{_COUPLED}[False]"),
        "all rows of a request are drawn by the noise of its first position",
    ),
    Mutation(
        f"{_PALLAS}split.sample.target_samples",
        "row[:, None] >= first_row[None, 1:]",
        "row[:, None] > first_row[None, 1:]",
        split_kernels(f"{_COUPLED}[True]"),
        "the first row of a ragged request is drawn as the last one's of the request before",
    ),
    Mutation(
        f"{_PALLAS}split.sample.compare_draws",
        "is_emitted = active[:, None] & ",
        "is_emitted = ",
        split_kernels(_DRAWN),
        "an inactive request emits what its first row has drawn",
    ),
    Mutation(
        f"{_PALLAS}split.sample.compare_draws",
        " & active[:, None]\n    n = ",
        "\n    n = ",
        why="an inactive request has drafted tokens accepted",
        equivalent="it has -1 drafted tokens, or its rows have drawn -1, which is none of them",
    ),
    Mutation(
        f"{_PALLAS}split.sample.compare_draws",
        "counts if num_tokens is None else jnp.minimum(num_tokens, counts)",
        "counts if num_tokens is None else num_tokens",
        split_kernels(_DRAWN),
        "a request whose num_tokens is above its count verifies the next one's drafts",
    ),
    Mutation(
        f"{_PALLAS}split.sample.compare_draws",
        "active[:, None] & is_valid & (i",
        "active[:, None] & (i",
        split_kernels(_DRAWN),
        "the token of an invalid row is counted",
    ),
    Mutation(
        f"{_PALLAS}split.sample.compare_draws",
        "is_valid & (tokens == drafted)",
        "(tokens == drafted)",
        why="an invalid row accepts a drafted token",
        equivalent="such a row has drawn -1, and no drafted token before the last counted one is",
    ),
    Mutation(
        f"{_PALLAS}split.sample._choose",
        "flush_subnormals(gathered[..., _MAX])",
        "gathered[..., _MAX]",
        subnormal(_SUBNORMAL),
        "a device's largest subnormal logit is above another's zero",
    ),
    Mutation(
        f"{_PALLAS}split.sample.split_sample_kernel.take_argmax",
        "flush_subnormals(drawn.blocks.max)",
        "drawn.blocks.max",
        subnormal(_SUBNORMAL),
        "a block's largest subnormal logit is above another's zero on its device",
    ),
    Mutation(
        f"{_PALLAS}target_rows.evaluate_acceptance",
        "flush_subnormals(tiles.max)",
        "tiles.max",
        subnormal("test_verification_takes_subnormal_logits_for_zero[interpret-4-False]"),
        "a tile's largest subnormal logit is above another's zero, on one device or on several",
    ),
    Mutation(
        f"{_PALLAS}split.shared_rows.best_of_devices",
        "scores[device] > score",
        "scores[device] >= score",
        split_kernels(_SAMPLES),
        "of equal largest logits a greedy row takes that of the last device",
    ),
    Mutation(
        f"{_PALLAS}split.sample._choose",
        "jnp.where(log_masses == -jnp.inf, -jnp.inf, gathered[..., _SCORE] + log_masses)",
        "gathered[..., _SCORE] + log_masses",
        split_kernels(_SAMPLES),
        "a device without mass scores NaN, which no other score is above",
    ),
    Mutation(
        "specjax.devices.map_parts.map_vocabulary",
        "dataclasses.replace(split, requests=None)",
        "split",
        split_vocabulary(f"{_EVERY}[rules.standard()-end to end]"),
        "rows end to end are dealt to devices as if they were requests",
    ),
    Mutation(
        "specjax.decode.capacity.pad_batch_to_mesh",
        "num_filled = round_up_to_mesh(size, placement)",
        "num_filled = size",
        split_models(f"{_UNEVEN}[False]"),
        "rows of logits travel in every step of a batch that devices do not divide",
    ),
    Mutation(
        "specjax.decode.capacity.pad_batch_to_mesh",
        "np.ndim(x) >= rank",
        "np.ndim(x) == 1",
        split_models(_OWN_OPTIONS),
        "copies of a request have no bias of their own",
    ),
)
