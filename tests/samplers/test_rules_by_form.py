"""Every rule with every form of a call: it gives the padded tokens, or says why not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_block
import pytest
from over_devices import over_devices, split
from verify_cases import exact, make_draft, make_keys, sample_tokens, sampled_case, with_statistics

import specjax
from specjax import Draft, Options, RaggedDraft, Rule, rules
from specjax.implementation import Implementation
from specjax.pallas.kernel_config import KernelConfig, Tile

pytestmark = pytest.mark.once

B, K, V, DEVICES = 16, 2, 256, 2
TOKEN_MAP = np.random.default_rng(0).permutation(V)[: V // 2].astype(np.int32)
RATES = np.tile(np.float32([0.8, 0.4]), (B, 1))
RULES = {
    "standard": rules.standard(),
    "block": rules.block(),
    "coupled": rules.coupled(),
    "synthetic": rules.synthetic(RATES),
    "own": rules.lenience(0.5),
}
SAME_AS_OWN = Rule(
    accept=lambda lp, lq, u, row: jnp.log(u) + jnp.log(0.5).astype(u.dtype) < lp - lq,
    log_residual=RULES["own"].log_residual,
)
ORACLES = {"block": oracle_block.verify_one, "coupled": oracle.couple_one}
TILE = Tile(128, 4)
INTERPRETED = Implementation("interpret", (KernelConfig(target=TILE, residual=TILE),))


@functools.cache
def shared_case():
    """Drafts of half the tokens, drawn by what they carry; some rows of the target have drawn."""
    case = sampled_case(3, B, K, V)
    inside = np.isin(np.arange(V), TOKEN_MAP)
    case["draft_logits"] = np.where(inside, case["draft_logits"], -np.inf).astype(np.float32)
    case["token_ids"] = sample_tokens(np.random.default_rng(4), case["draft_logits"], np.ones(B))
    # What coupled sampling accepts.
    drawn = verify(rules.coupled(), Draft(case["token_ids"]), case).token_ids
    case["token_ids"][::2, 0] = np.asarray(drawn)[::2, 0]
    del case["rows"]
    return with_statistics(case | dict(rows=np.arange(B, dtype=np.int32)))


def verify(rule, draft, case, **options):
    names = ("positions", "temperature", "cutoff")
    arguments = {name: jnp.asarray(case[name]) for name in names} | options
    rows = arguments.pop("rows", jnp.asarray(case["target_logits"]))
    return specjax.rejection_sample(draft, rows, keys=make_keys(B), rule=rule, **arguments)


def drafted():
    return make_draft(shared_case()).replace(rows=None)


def padded(rule):
    return verify(rule, drafted(), shared_case())


def ragged(rule):
    flat = vars(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), drafted()))
    flat |= {name: getattr(drafted(), name) for name in ("temperature", "num_tokens")}
    ends = K * np.arange(B + 1, dtype=np.int32)
    draft = RaggedDraft(cu_num_draft_tokens=ends, max_draft_tokens=K, **flat)
    case = shared_case()
    rows = jnp.asarray(case["target_logits"].reshape(-1, V))
    return verify(rule, draft, case, rows=rows, cutoff=jnp.asarray(case["cutoff"].reshape(-1)))


def token_map(rule):
    draft = drafted()
    draft = draft.replace(logits=draft.logits[..., TOKEN_MAP], token_map=TOKEN_MAP)
    return verify(rule, draft, shared_case())


def kernels(rule):
    return verify(rule, drafted(), shared_case(), options=Options(implementation=INTERPRETED))


def over_two(rule, implementation):
    draft, rows = drafted(), jnp.asarray(shared_case()["target_logits"])
    options = Options(implementation=implementation, axis_name="model")

    def call(draft, rows):
        return verify(rule, draft, shared_case(), rows=rows, options=options)

    specs = jax.tree.map(lambda x: split(x) if x.ndim == 3 else jax.P(), draft)
    check = implementation == "xla"
    program = over_devices(call, (draft, rows), (specs, split(rows)), DEVICES, check_vma=check)
    return program(draft, rows)


def split_vocabulary(rule):
    return over_two(rule, "xla")


def split_on_kernels(rule):
    return over_two(rule, INTERPRETED)


def on_target_stream(rule):
    return verify(rule, drafted().replace(on_target_stream=True), shared_case())


FORMS = (
    ragged,
    token_map,
    split_vocabulary,
    on_target_stream,
    *(pytest.param(form, marks=pytest.mark.interpret) for form in (kernels, split_on_kernels)),
)
WHOLE_ROWS = "rule is given over axis 'model'; rules read whole rows"
BIASED = "on_target_stream is True: .* which biases the output"
# What does not give the padded tokens.
REFUSED = {
    ("own", split_vocabulary): WHOLE_ROWS,
    ("own", split_on_kernels): WHOLE_ROWS,
    ("block", split_on_kernels): "over devices of axis 'model' do not verify blocks",
    ("standard", on_target_stream): BIASED,
    ("block", on_target_stream): BIASED,
    ("own", on_target_stream): BIASED,
}


@functools.cache
def expected(name):
    return jax.device_get(padded(RULES[name]))


def same(ours, theirs, who=slice(None)):
    for field in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, field)[who], getattr(theirs, field)[who], field)


@pytest.mark.parametrize("name", RULES)
def test_a_padded_batch_is_verified_as_by_numpy(name):
    ours = expected(name)
    assert len(set(ours.num_accepted.tolist())) > 1
    if name == "own":
        same(ours, padded(SAME_AS_OWN))
        assert not np.array_equal(ours.token_ids, expected("standard").token_ids)
        return
    case = shared_case() | (dict(conditional_rates=RATES) if name == "synthetic" else {})
    theirs = exact(case, make_keys(B), one=ORACLES.get(name, oracle.verify_one))
    assert np.mean(theirs.certain) > 0.9
    same(ours, theirs, theirs.certain)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("name", RULES)
def test_a_form_gives_the_padded_tokens_or_says_why_not(name, form):
    sentence = REFUSED.get((name, form))
    if sentence is None:
        same(jax.device_get(form(RULES[name])), expected(name))
        return
    with pytest.raises(ValueError, match=sentence):
        form(RULES[name])


@pytest.mark.parametrize("name", RULES)
def test_greedy_requests_accept_the_argmax_by_every_rule_but_given_rates(name):
    case = shared_case() | {"temperature": np.zeros(B, np.float32)}
    rows = np.where(
        case["target_logits"] < case["cutoff"][..., None], -np.inf, case["target_logits"]
    )
    best = np.argmax(rows, axis=-1)
    ids = np.where(np.arange(K) < (np.arange(B) % (K + 1))[:, None], best[:, :K], best[:, :K] ^ 1)
    rule = rules.synthetic(np.float32([1, 0])) if name == "synthetic" else RULES[name]
    step = jax.device_get(verify(rule, Draft(ids.astype(np.int32)), case))
    accepted = np.full(B, 1) if name == "synthetic" else np.arange(B) % (K + 1)
    np.testing.assert_array_equal(step.num_accepted, accepted)
    np.testing.assert_array_equal(
        step.token_ids[np.arange(B), accepted], best[np.arange(B), accepted]
    )
