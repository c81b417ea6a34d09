"""The programs of `generate` before the first prompt, in this process and in the next."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from scripts import run_process

import specjax
from specjax import SamplingParams, SpeculativeConfig
from specjax.core.rules import lenience
from specjax.decode.compile.saved_programs import read_programs, write_programs
from specjax.markov_chain import markov_chain

B, S = 2, 16
PROBS = [[0.1, 0.6, 0.3], [0.5, 0.1, 0.4], [0.4, 0.5, 0.1]]
MODEL, NGRAM = markov_chain(PROBS), specjax.ngram_drafter()
CONFIG = SpeculativeConfig(num_speculative_tokens=2)
PROMPTS = [[1, 2, 1, 2, 1], [0]]


def run(function, prompts=PROMPTS, *, model=MODEL, drafter=NGRAM, **options):
    defaults = {"keys": jax.random.key(1), "max_new_tokens": 9, "temperature": 0.8}
    defaults["sampling"] = SamplingParams(top_k=np.array([2, 3]))
    return function(model, drafter, prompts, **defaults | options)


OPTIONS = specjax.LoopOptions(max_length=S, num_logprobs=1, max_kept_tokens=3)


def generate(*given, **values):
    return specjax.generate(*given, config=CONFIG, options=OPTIONS, **values)


@pytest.fixture(scope="module")
def compiled():
    """For parameters that are not there yet."""
    shapes = jax.ShapeDtypeStruct(MODEL.params.shape, MODEL.params.dtype)
    model = specjax.Model(shapes, MODEL.init_cache, MODEL.apply, MODEL.logits)
    few = SamplingParams(top_k=1)
    return specjax.compile_generate(
        model, NGRAM, batch_size=B, sampling=few, config=CONFIG, options=OPTIONS
    )


@pytest.fixture(scope="module")
def path(compiled, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "saved"
    compiled.save(path)
    return path


@pytest.mark.once
def test_calls_give_the_tokens_of_generate_and_compile_nothing(compiled):
    keys = jax.random.split(jax.random.key(2), B)
    calls = [
        {},
        {"keys": keys, "temperature": np.array([0.0, 1.5]), "max_new_tokens": np.array([1, 8])},
        {"prompts": [[2], [1]], "eos_token_ids": [2, 0], "max_new_tokens": 15},
        {"prompts": (np.array([[2, 7], [1, 2]]), [1, 2])},
        {"temperature": jnp.float32(2), "sampling": SamplingParams(top_k=jnp.int32(2))},
    ]
    # A number on a device for all requests: `generate` would compile another program.
    each = {"temperature": np.array([2, 2]), "sampling": SamplingParams(top_k=np.array([2, 2]))}
    with compilations() as found:
        outputs = [run(compiled, **call) for call in calls]
    assert found == []
    for call, output in zip([*calls[:-1], each], outputs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, output, run(generate, **call))


def test_another_process_runs_saved_programs_and_compiles_nothing(path):
    code = """if True:
        import json, sys
        import jax, numpy as np, specjax
        from specjax.markov_chain import markov_chain
        path, probs, key, prompts = map(json.loads, sys.argv[1:])
        model = markov_chain(probs)
        key = jax.random.wrap_key_data(np.array(key, np.uint32), impl="threefry2x32")
        rules = specjax.SamplingParams(top_k=np.array([2, 3]))
        found = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **of: "backend_compile" in name and found.append(of))
        output = specjax.load_compiled(path)(
            model, specjax.ngram_drafter(), prompts, keys=key, max_new_tokens=9,
            temperature=0.8, sampling=rules)
        leaves = [leaf.tolist() for leaf in jax.tree.leaves(output)]
        print(json.dumps([leaves, str(jax.tree.structure(output)), found]))
    """
    key = jax.random.key_data(jax.random.key(1)).tolist()
    arguments = map(json.dumps, (str(path), PROBS, key, PROMPTS))
    leaves, structure, found = json.loads(run_process("-c", code, *arguments, cwd=path.parent))
    assert found == []
    wanted = run(generate)
    assert structure == str(jax.tree.structure(wanted))
    for leaf, x in zip(leaves, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.array(leaf, x.dtype), x)


@pytest.mark.parametrize("source", ["compiled", "path"])
def test_what_was_not_compiled_for_is_refused(source, request):
    programs = request.getfixturevalue(source)
    programs = specjax.load_compiled(programs) if source == "path" else programs
    for change, words in [
        ({"prompts": [[1]]}, "prompts has 1 of them; it needs 2, the batch size"),
        ({"max_new_tokens": 12}, "max_length is 16; .* need 17"),
        ({"sampling": None}, "sampling.top_k is absent; .* compiled for int32"),
        ({"sampling": SamplingParams(top_k=1, top_p=0.5)}, "top_p is float32.* calls without it"),
        ({"eos_token_ids": range(9)}, r"eos_token_ids is int32\[16\]; .* compiled for int32\[8\]"),
        ({"model": markov_chain(np.eye(4))}, r"target is float32\[4, 4\]; .*float32\[3, 3\]"),
        ({"drafter": specjax.model_drafter(MODEL)}, "drafter is float32"),
        ({"drafter": None}, "a drafter is absent; these programs are compiled for given"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(programs, **change)


def test_a_capacity_is_needed_to_compile():
    with pytest.raises(ValueError, match="max_length is None; it needs a Python int >= 2"):
        specjax.compile_generate(MODEL, None, batch_size=B, options=specjax.LoopOptions())


@pytest.mark.slow
def test_other_functions_than_those_compiled_in_are_refused(compiled):
    """They would be left unused: what was compiled runs."""

    def apply(*arguments):
        return MODEL.apply(*arguments)

    another = specjax.Model(MODEL.params, MODEL.init_cache, apply, MODEL.logits)
    drafter = dataclasses.replace(NGRAM, propose=specjax.ngram_drafter(max_ngram=2).propose)
    longer = dataclasses.replace(MODEL, max_length=99)
    for change, words in [
        ({"model": another}, r"target.apply is <function .*, and another function is compiled in;"),
        ({"drafter": drafter}, "drafter.propose is <function"),
        ({"model": longer}, "target.max_length is 99, and None is compiled in;"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(compiled, **change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"jaxlib": "', b'"jaxlib": "9.', "compiled with jaxlib '9.* and this is"),
        (b'"specjax": "', b'"specjax": "9.', "compiled with specjax '9"),
        (b'"device": "', b'"device": "another ', "compiled with device 'another"),
        (
            b"Generate 2",
            b"Generate 1",
            "with file format 'specjax.CompiledGenerate 1', and this is",
        ),
        (b"specjax.C", b"something.C", "holds no compiled programs of specjax"),
    ],
)
def test_a_file_from_elsewhere_is_refused_before_its_programs_are_read(
    old, new, words, path, tmp_path
):
    header, _ = path.read_bytes().split(b"\n", maxsplit=1)
    changed = tmp_path / "changed"
    changed.write_bytes(header.replace(old, new) + b"\nno pickle")
    with pytest.raises(ValueError, match=words):
        specjax.load_compiled(changed)


def test_programs_of_a_rule_are_not_saved(compiled, tmp_path):
    config = SpeculativeConfig(num_speculative_tokens=2, rule=lenience(0.5))
    other = dataclasses.replace(compiled, config=config)
    with pytest.raises(ValueError, match="config has a rule, whose functions a file cannot hold"):
        other.save(tmp_path / "programs")
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_loaded_is_saved_again(path, tmp_path):
    again = tmp_path / "absent" / "folder" / "again"
    specjax.load_compiled(path).save(again)
    assert again.read_bytes() == path.read_bytes()


def test_a_damaged_file_is_refused_before_anything_of_it_is_unpickled(path, tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.decode.compile.compile_generate.load_program", None)
    whole, damaged = path.read_bytes(), tmp_path / "damaged"
    for data in (whole[:-1], whole[:-1] + b"?", whole.replace(b'_size": 2', b'_size": 3'), b""):
        damaged.write_bytes(data)
        with pytest.raises(ValueError, match=f"^{damaged} .*[.]$"):
            specjax.load_compiled(damaged)


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"options": [], "arguments": {}},
        {"options": {"config": {"step_costs": None}}, "arguments": {}},
        {
            "batch_size": 2,
            "vocab_size": 3,
            "num_eos_token_ids": 8,
            "arguments": {},
            "config": {"step_costs": None},
            "options": {"capacity": 16},
        },
    ],
)
def test_a_description_of_another_specjax_of_this_version_is_refused(description, path, tmp_path):
    write_programs(tmp_path / "other", description, read_programs(path)[1])
    with pytest.raises(ValueError, match="other says other things of its programs than this"):
        specjax.load_compiled(tmp_path / "other")
