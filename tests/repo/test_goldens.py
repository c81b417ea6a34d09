"""The goldens hold: a dozen scenarios and every refusal; `python -m frozen.goldens` runs all."""

import json

import jax
import pytest
from frozen.goldens.__main__ import OF_BITS, RECORD, changes, describe, run
from frozen.goldens.refusals import REFUSALS, sentence_of
from frozen.goldens.scenarios import SCENARIOS
from machine import has_gpu

GOLDENS = json.loads(RECORD.read_text())
# Another JAX may round a near-tie otherwise, and compile other programs.
recorded = pytest.mark.skipif(
    jax.__version__ != GOLDENS["jax"] or has_gpu(),
    reason=f"the goldens are of jax {GOLDENS['jax']} on a CPU",
)
pytestmark = [pytest.mark.once, pytest.mark.lenient]
# Each kind of call, drafter and method once; the record holds five times as many.
CHOSEN = (
    "verify: standard, everything",
    "verify: block, sampled, ragged, bfloat16",
    "verify: relaxed, mapped, ragged",
    "verify: tree, everything",
    "verify: coupled, ragged, 1 x 2 devices",
    "part: propose, coupled, mapped",
    "generate: n-gram, standard, auto, penalties",
    "generate: model, coupled, raw log-probabilities",
    "steps: n-gram, block, a host's masks",
    "steps: EAGLE-3, standard",
    "loaded: n-gram, synthetic, grammar",
    "engine: model, block, auto, preempted and aborted",
    "engine: whole prompt, lenience",
)


def test_every_scenario_and_every_refusal_has_its_record():
    assert list(SCENARIOS) == list(GOLDENS["scenarios"])
    assert list(REFUSALS) == list(GOLDENS["sentences"])
    assert None not in GOLDENS["sentences"].values(), "a wrong call is not refused"


@recorded
@pytest.mark.parametrize("name", CHOSEN)
def test_tokens_counts_and_compilations_are_those_of_the_record(name):
    moved = list(changes(GOLDENS["scenarios"][name], run(name), OF_BITS))
    assert not moved, "\n".join(line for change in moved for line in describe(*change))


@pytest.mark.skipif(has_gpu(), reason="some sentences say that there is no GPU")
def test_wrong_calls_are_refused_in_the_sentences_of_the_record():
    found = {name: sentence_of(call) for name, call in REFUSALS.items()}
    moved = {name: found[name] for name in found if found[name] != GOLDENS["sentences"][name]}
    assert not moved


def test_a_change_is_told_by_its_field():
    old = {"token_ids": [[1, 2]], "logprobs": ["3f800000"], "carry": {"lengths": "ab"}}
    assert list(changes(old, old, ())) == []
    new = {"token_ids": [[1, 3]], "logprobs": ["3f800001"], "carry": {"lengths": "cd"}}
    moved = list(changes(old, new, ()))
    assert [".".join(path) for path, *_ in moved] == ["token_ids", "logprobs", "carry.lengths"]
    assert [path for path, *_ in changes(old, new, OF_BITS)] == [("token_ids",)]
    assert "      row 0, token 0: 1.0 -> 1.0000001" in list(describe(*moved[1]))
    listed = [{"top_logprobs": [[{"rank": 1, "logprobs": bits}]]} for bits in ("3f8", "3f9")]
    assert [path[-1] for path, *_ in changes(*listed, ())] == ["logprobs"]
    assert list(changes(*listed, OF_BITS)) == []
    counted = [{"compiled": {"first": {name: 2}, "again": 0}} for name in ("run_loop", "loop")]
    assert list(changes(*counted, ())) == [], "a program may have another name"
    counted[1]["compiled"]["again"] = 1
    assert len(list(changes(*counted, ()))) == 1
