"""Node ids of tests by the files that hold them."""

from collections.abc import Callable

__all__ = [
    "acceptance_rates",
    "batches",
    "block_laws",
    "block_verification",
    "byte_automata",
    "capacity",
    "chats",
    "checkpoints",
    "adaptive_k",
    "commands",
    "coupled_decoding",
    "coupled_sampling",
    "cutoffs",
    "decode",
    "dflash",
    "dflash_folder",
    "draft_folders",
    "sample_block",
    "draft_vocabularies",
    "drafts",
    "eagle3",
    "eagle3_folder",
    "embedded_eagle3",
    "edges",
    "engines",
    "submissions",
    "threads",
    "faults",
    "few",
    "grammar_laws",
    "grammars",
    "greedy_logprobs",
    "head_folders",
    "interpreted",
    "invariant_texts",
    "json_schemas",
    "kept_requests",
    "kept_sets",
    "kept_texts",
    "kernel_configs",
    "laws",
    "listed_prompts",
    "logprobs",
    "lowered",
    "memory",
    "metrics",
    "noise",
    "pieces",
    "processes",
    "processing",
    "products",
    "queues",
    "ragged",
    "refusals",
    "row_groups",
    "row_invariance",
    "row_masks",
    "rule_values",
    "scores",
    "sampled_decoding",
    "saved_programs",
    "sampling",
    "pivots",
    "sample_kernels",
    "searches",
    "server_parameters",
    "server_routes",
    "step_sizes",
    "stop_strings",
    "text_streams",
    "soaks",
    "split_kernels",
    "split_models",
    "split_processing",
    "split_vocabulary",
    "step_costs",
    "streamed",
    "subnormal",
    "theory",
    "token_automata",
    "token_maps",
    "token_scores",
    "tokens",
    "transformer",
    "tree_laws",
    "tree_sampling",
    "verify",
]


def _of(path: str) -> Callable[..., tuple[str, ...]]:
    return lambda *names: tuple(f"tests/{path}::{name}" for name in names)


block_laws = _of("laws/test_block_laws.py")
block_verification = _of("samplers/test_block_rule.py")
capacity = _of("decode/test_capacity.py")
byte_automata = _of("contrib/grammars/test_byte_automaton.py")
batches = _of("cli/test_batch.py")
chats = _of("models/test_chat.py")
checkpoints = _of("models/test_checkpoint.py")
adaptive_k = _of("decode/test_adaptive_k.py")
commands = _of("cli/test_command.py")
conversations = _of("cli/test_conversation.py")
command_options = _of("cli/test_options.py")
line_formats = _of("cli/test_line_formats.py")
coupled_decoding = _of("decode/test_coupled.py")
coupled_sampling = _of("samplers/test_coupled_rule.py")
cutoffs = _of("processing/test_cutoff.py")
cutoff_teams = _of("pallas/test_cutoff_team.py")
decode = _of("decode/test_generate.py")
dflash = _of("models/test_dflash.py")
dflash_folder = _of("models/test_dflash_folder.py")
sample_block = _of("models/test_sample_block.py")
draft_vocabularies = _of("decode/test_draft_vocabulary.py")
draft_folders = _of("cli/test_draft_folders.py")
drafts = _of("decode/test_drafts.py")
edges = _of("samplers/test_edges.py")
engines = _of("engine/test_engine.py")
submissions = _of("engine/test_submission.py")
threads = _of("engine/test_async_engine.py")
faults = _of("engine/test_faults.py")
queues = _of("engine/test_queue.py")
soaks = _of("engine/test_soak.py")
eagle3 = _of("models/test_eagle3.py")
embedded_eagle3 = _of("models/test_embedded_eagle3.py")
eagle3_folder = _of("models/test_eagle3_folder.py")
pieces = _of("engine/test_pieces.py")
few = _of("models/decoder/test_decode_step.py")
grammar_laws = _of("laws/test_grammar_laws.py")
grammars = _of("processing/test_grammar.py")
greedy_logprobs = _of("samplers/test_greedy_logprobs.py")
group_lookup = _of("contrib/tunix/test_group_lookup.py")
head_folders = _of("models/test_head_folders.py")
interpreted = _of("pallas/test_verify.py")
json_schemas = _of("contrib/grammars/test_json_schema.py")
kept_requests = _of("engine/test_kept_requests.py")
kept_sets = _of("processing/test_kept_tokens.py")
kept_texts = _of("decode/test_kept_texts.py")
kernel_configs = _of("pallas/test_kernel_config.py")
laws = _of("laws/test_laws.py")
listed_prompts = _of("engine/test_prompt_logprobs.py")
logprobs = _of("decode/test_logprobs.py")
lowered = _of("pallas/test_lowering.py")
memory = _of("decode/test_memory.py")
metrics = _of("decode/test_metrics.py")
noise = _of("core/test_noise.py")
processes = _of("cli/test_processes.py")
processing = _of("processing/test_process_logits.py")
products = _of("models/decoder/test_matmul.py")
ragged = _of("samplers/test_ragged.py")
refusals = _of("samplers/test_refusals.py")
saved_programs = _of("decode/compile/test_saved_programs.py")
invariant_texts = _of("models/test_invariant_texts.py")
row_groups = _of("models/decoder/test_row_groups.py")
row_invariance = _of("decode/test_row_invariance.py")
row_masks = _of("decode/test_matchers.py")
rule_values = _of("samplers/test_rules.py")
scores = _of("decode/test_score.py")
sampled_decoding = _of("decode/test_sampling_params.py")
sampling = _of("samplers/test_gumbel_sample.py")
acceptance_rates = _of("theory/test_acceptance_rates.py")
searches = _of("core/test_bisection.py")
pivots = _of("core/test_pivot_search.py")
sample_kernels = _of("pallas/test_sample.py")
step_sizes = _of("engine/test_step_sizes.py")
stop_strings = _of("engine/test_stop_strings.py")
text_streams = _of("engine/test_text_stream.py")
streamed = _of("cli/test_stream_programs.py")
subnormal = _of("core/test_subnormal.py")
threefry = _of("pallas/test_threefry.py")
step_costs = _of("theory/test_step_costs.py")
theory = _of("theory/test_theory.py")
split_models = _of("models/test_sharding.py")
split_processing = _of("processing/test_split_processing.py")
split_vocabulary = _of("samplers/test_split_vocabulary.py")
split_kernels = _of("pallas/test_split.py")
token_scores = _of("contrib/serve/test_token_scores.py")
server_parameters = _of("contrib/serve/test_parameters.py")
server_routes = _of("contrib/serve/test_app.py")
token_maps = _of("samplers/test_token_map.py")
token_automata = _of("contrib/grammars/test_token_automaton.py")
tokens = _of("decode/test_commit.py")
transformer = _of("models/decoder/test_transformer.py")
tree_laws = _of("laws/test_tree_laws.py")
tree_sampling = _of("samplers/test_tree_rejection_sample.py")
verify = _of("samplers/test_rejection_sample.py")
