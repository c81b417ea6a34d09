"""Faulty functions of a model are refused in a sentence that names them, where a call enters."""

import dataclasses

import bigrams
import jax
import jax.numpy as jnp
import pytest

import specjax

V = 4
TARGET, DRAFT = (bigrams.model(table) for table in bigrams.pair(V, seed=1))
CONFIG = specjax.SpeculativeConfig(2)
OPTIONS = specjax.LoopOptions(max_length=8)


def changed(function, change):
    """A function of a model, whose outputs are changed."""
    return lambda *arguments: change(function(*arguments))


def of_hidden(change):
    return changed(bigrams.apply, lambda outputs: (change(outputs[0]), outputs[1]))


def of_cache(change):
    return changed(bigrams.apply, lambda outputs: (outputs[0], change(outputs[1])))


FAULTS = {
    "hidden of the last token alone": (
        {"apply": of_hidden(lambda hidden: hidden[:, -1])},
        r"apply returned hidden int32\[2, 2\] for token_ids int32\[2, 3\]; it needs \[2, 3, E\]\.",
    ),
    "hidden with tokens first": (
        {"apply": of_hidden(lambda hidden: hidden.swapaxes(0, 1))},
        r"apply returned hidden int32\[3, 2, 2\] for token_ids int32\[2, 3\]; it needs \[2, 3, E\]",
    ),
    "hidden alone": (
        {"apply": changed(bigrams.apply, lambda outputs: outputs[0])},
        r"apply returned int32\[2, 3, 2\]; it needs \(hidden, cache\)\.",
    ),
    "three values": (
        {"apply": changed(bigrams.apply, lambda outputs: (*outputs, None))},
        r"apply returned 3 values; it needs \(hidden, cache\)\.",
    ),
    "a cache that grows": (
        {"apply": of_cache(lambda cache: jnp.pad(cache, ((0, 0), (0, 1))))},
        r"apply returned a cache with 'int32\[2, 9\]' in place of 'int32\[2, 8\]'; it needs",
    ),
    "a cache of another dtype": (
        {"apply": of_cache(lambda cache: cache.astype(jnp.float32))},
        r"apply returned a cache with 'float32\[2, 8\]' in place of 'int32\[2, 8\]'; it needs",
    ),
    "a cache of another structure": (
        {"apply": of_cache(lambda cache: [cache])},
        r"apply returned a cache with 'PyTreeDef\(\[\*\]\)' in place of 'PyTreeDef\(\*\)';",
    ),
    "logits without a vocabulary": (
        {"logits": changed(bigrams.logits, lambda logits: logits[..., 0])},
        r"logits returned float32\[2, 3\] for hidden int32\[2, 3, 2\]; it needs \[2, 3, V\] in bf",
    ),
    "logits of the last token alone": (
        {"logits": changed(bigrams.logits, lambda logits: logits[..., -1, :])},
        r"logits returned float32\[2, 4\] for hidden int32\[2, 3, 2\]; it needs \[2, 3, V\]",
    ),
    "logits of integers": (
        {"logits": changed(bigrams.logits, lambda logits: logits.astype(int))},
        r"logits returned int32\[2, 3, 4\] for hidden .* in bfloat16, float16 or float32\.",
    ),
}


def decode(call, target, drafter):
    prompts, keys = ([[1, 2, 3], [3]], jax.random.key(0))
    call(target, drafter, prompts, keys=keys, max_new_tokens=5, config=CONFIG, options=OPTIONS)


def traced(target, drafter):
    """`generate` under an outer `jit`, where prompts are traced."""

    def run(ids, lengths):
        return specjax.generate(
            target,
            drafter,
            (ids, lengths),
            keys=jax.random.key(0),
            max_new_tokens=5,
            config=CONFIG,
            options=OPTIONS,
        )

    jax.eval_shape(run, jnp.ones((2, 3), jnp.int32), jnp.array([3, 1]))


CALLS = {
    "generate": lambda *models: decode(specjax.generate, *models),
    "init": lambda *models: decode(specjax.init, *models),
    "Engine": lambda *models: specjax.Engine(*models, num_slots=2, config=CONFIG, options=OPTIONS),
    "compile_generate": lambda *models: specjax.compile_generate(
        *models, batch_size=2, config=CONFIG, options=OPTIONS
    ),
    "jit": traced,
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_faulty_target_is_refused_where_a_call_enters(call, name):
    functions, words = FAULTS[name]
    if call in ("compile_generate", "jit"):
        words = words.split(" returned")[0]
    drafter = specjax.model_drafter(DRAFT)
    with pytest.raises(ValueError, match=rf"^target\.{words}"):
        CALLS[call](dataclasses.replace(TARGET, **functions), drafter)


def test_logits_that_are_no_array_are_refused():
    target = dataclasses.replace(TARGET, logits=changed(bigrams.logits, lambda logits: (logits,)))
    with pytest.raises(ValueError, match=r"^target\.logits returned tuple for hidden"):
        CALLS["generate"](target, None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_draft_model_is_refused(name):
    functions, words = FAULTS[name]
    drafter = specjax.model_drafter(dataclasses.replace(DRAFT, **functions))
    with pytest.raises(ValueError, match=rf"^the draft model's {words.split(' returned')[0]}"):
        CALLS["init"](TARGET, drafter)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda outputs: outputs[::2], r"returned 2 values; it needs \(hidden, features, cache\)"),
        (
            lambda outputs: (outputs[0], outputs[1][:, 0], outputs[2]),
            r"returned features int32\[2, 4\] .*; it needs \[2, 8, 2 \* E\]",
        ),
        (lambda outputs: (*outputs[:2], None), "returned a cache with 'PyTreeDef"),
    ],
)
def test_faulty_features_are_refused(change, words):
    target = dataclasses.replace(TARGET, apply_with_taps=changed(bigrams.apply_with_taps, change))
    reader = dataclasses.replace(
        specjax.ngram_drafter(), taps=(1, 2), reads_features=True, extend=lambda *chunk: ()
    )
    with pytest.raises(ValueError, match=rf"^target\.apply_with_taps {words}"):
        CALLS["generate"](target, reader)
