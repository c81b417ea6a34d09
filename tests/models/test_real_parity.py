"""SmolLM2-135M and Gemma 3 270M give the greedy texts and log-probabilities of transformers.

Both read the folders of SPECJAX_REAL_MODELS, in float32. `make real-parity` writes and names them;
without it nothing is tested here. The folders come from GGUF files of short integers, so these are
not the published bits, but a trained model's: the texts are English.
"""

import os
import pathlib
import types

import jax
import numpy as np
import pytest

import specjax
from specjax.models import chat_prompt, load, load_tokenizer

if not os.environ.get("SPECJAX_REAL_MODELS"):
    pytest.skip("there are no folders to read: make real-parity", allow_module_level=True)

import torch
import transformers

torch.set_num_threads(1)
# What transformers warns of is its own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = pathlib.Path(os.environ["SPECJAX_REAL_MODELS"])
DAYS = "The days of the week are Monday, Tuesday, Wednesday,"
QUESTION = "What is the capital of France?"
NEW_TOKENS = 64
TOLERANCE = 5e-4
# Of the licence, in a prompt. Gemma's has more tokens than its windows, 512.
NUM_CHARACTERS = {"SmolLM2-135M-Instruct": 600, "gemma-3-270m": 2800}


@pytest.fixture(scope="module", params=NUM_CHARACTERS)
def real(request):
    """A model, its prompts, and what transformers makes of them."""
    folder = FOLDERS / request.param
    model, config = load(folder, "float32")
    tokenizer = load_tokenizer(folder)
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")[: NUM_CHARACTERS[request.param]]
    prompts = [DAYS, "def fibonacci(n):\n", licence, f"Question: {QUESTION}\nAnswer:"]
    reference_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if reference_tokenizer.chat_template:
        messages = [{"role": "user", "content": QUESTION}]
        prompts[3] = chat_prompt(folder, messages)
        assert prompts[3] == reference_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    assert ids == [reference_tokenizer.encode(prompt) for prompt in prompts]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts, logprobs = [], []
    for prompt in ids:
        with torch.no_grad():
            text = reference.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)
            logits = reference(text).logits[0, :-1]
        texts.append(text[0].tolist())
        logprobs.append(logits.log_softmax(-1).gather(1, text[0, 1:, None])[:, 0].numpy())
    return types.SimpleNamespace(
        model=model,
        eos_token_ids=config.eos_token_ids,
        new_texts=[tokenizer.decode(x[len(y) :]) for x, y in zip(texts, ids, strict=True)],
        prompts=ids,
        texts=texts,
        logprobs=logprobs,
    )


def assert_close(rows, reference_rows, record_property):
    error = max(np.abs(x - y).max() for x, y in zip(rows, reference_rows, strict=True))
    record_property("max_abs_error", float(error))
    assert error < TOLERANCE


def test_transformers_writes_english(real):
    days, code, _, answer = real.new_texts
    assert days.startswith(" Thursday, Friday, Saturday, Sunday")
    assert "return" in code
    assert "Paris" in answer


@pytest.mark.parametrize("drafter", [None, specjax.ngram_drafter()], ids=["plain", "lookup"])
def test_greedy_texts_and_their_log_probabilities_are_those_of_transformers(
    real, drafter, record_property
):
    output = specjax.generate(
        real.model,
        drafter,
        real.prompts,
        keys=jax.random.key(0),
        max_new_tokens=NEW_TOKENS,
        temperature=0,
        eos_token_ids=real.eos_token_ids,
        config=specjax.SpeculativeConfig(num_speculative_tokens=4),
    )
    assert specjax.unpad(output.token_ids) == real.texts
    assert drafter is None or output.metrics.num_accepted.sum() > NEW_TOKENS
    sizes = [(len(x), len(y)) for x, y in zip(real.prompts, real.texts, strict=True)]
    logprobs = [output.logprobs[row, start:end] for row, (start, end) in enumerate(sizes)]
    expected = [row[start - 1 :] for row, (start, _) in zip(real.logprobs, sizes, strict=True)]
    assert_close(logprobs, expected, record_property)


def test_scores_are_the_log_probabilities_of_transformers(real, record_property):
    options = specjax.LoopOptions(prefill_chunk_size=64)  # of 262144 logits each
    scores = specjax.score(real.model, real.texts, options=options)
    assert_close([row.logprobs[1:] for row in scores], real.logprobs, record_property)
