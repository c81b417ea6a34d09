"""`specjax chat`: answers do not depend on what the caches hold, and little is read again."""

import argparse
import dataclasses
import io
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from test_command import TARGET, write_model

import specjax
from specjax import SpeculativeConfig
from specjax.cli import main
from specjax.cli.chat.conversation import Conversation
from specjax.cli.chat.prefix_cache import PrefixCache
from specjax.cli.generate import GenerateJob
from specjax.cli.model_pair import ModelPair
from specjax.cli.streams import catch_interrupt
from specjax.decode.drafters import Models
from specjax.models import Eagle3Config, build, build_eagle3, eagle3_drafter

pytestmark = pytest.mark.lenient

CONFIG = dataclasses.replace(TARGET, max_position_embeddings=256)
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
AUTO = SpeculativeConfig("auto", step_costs=(1.0, 1.6, 1.9))
KINDS = {
    "none": AUTO,
    "model": SpeculativeConfig(2),
    "auto": AUTO,
    "ngram": SpeculativeConfig(2),
    "head": SpeculativeConfig(2),
}


def character_tokenizer():
    """Every token is a character of its own, so that a text has one sequence of tokens."""
    characters = ["<|end|>", "\n", *map(chr, range(32, 127))]
    characters += [chr(0x100 + i) for i in range(260 - len(characters))]
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def scaled(model, scale=12.0):
    return dataclasses.replace(
        model, params=jax.tree.map(lambda a: a * jnp.asarray(scale, a.dtype), model.params)
    )


@pytest.fixture(scope="module")
def target():
    return scaled(build(CONFIG))


def drafter_of(kind, target):
    if kind == "head":
        head = Eagle3Config(CONFIG, CONFIG.hidden_size, CONFIG.vocab_size, taps=(0, 1))
        return eagle3_drafter(target, head, build_eagle3(head))
    if kind in ("model", "auto"):
        # So similar to the target that some of its drafts are accepted.
        return specjax.model_drafter(scaled(target, 0.95))
    return specjax.ngram_drafter() if kind == "ngram" else None


@pytest.fixture
def job_of(tmp_path, target):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def make(kind, max_new_tokens=20, max_length=128, stop=(), system=None):
        options = argparse.Namespace(
            max_new_tokens=max_new_tokens,
            temperature=0.7,
            seed=3,
            stop=stop,
            logprobs=None,
            system=system,
            template_arg=[],
        )
        files = "pair", tmp_path, "none", CONFIG, character_tokenizer()
        pair = ModelPair(options, KINDS[kind], *files)
        models = target, drafter_of(kind, target)
        return GenerateJob(pair, "", [0], None, None, *models, max_length=max_length)

    return make


def ask_both(job, conversation, text):
    """The answer, which has to be that of a conversation of the same messages with empty caches."""
    fresh = Conversation(job)
    fresh.set_system(conversation._job.options.system)
    fresh.messages, fresh.num_answers = list(conversation.messages), conversation.num_answers
    expected, answer = fresh.ask(text), conversation.ask(text)
    assert answer.result.token_ids == expected.result.token_ids
    jax.tree.map(np.testing.assert_array_equal, answer.result.metrics, expected.result.metrics)
    assert expected.num_read_tokens == expected.num_prompt_tokens == answer.num_prompt_tokens
    # Of the draft's cache, too, which decides only how many drafts are accepted.
    caches = (x._prefix._caches for x in (conversation, fresh))
    num_read = len(fresh._prefix._token_ids)
    for mine, other in zip(*map(jax.tree.leaves, caches), strict=True):
        mine, other = (x[..., :num_read, :] if x.ndim == 4 else x for x in (mine, other))
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
    return answer


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_that_of_the_whole_conversation_and_reads_only_what_is_new(kind, job_of):
    job = job_of(kind)
    conversation, most_unread = Conversation(job), 3
    kept = 0
    for turn, text in enumerate(("ab", "what?", "go on")):
        answer = ask_both(job, conversation, text)
        num_new = answer.num_prompt_tokens - kept
        # A draft model may have to read the last tokens of the answer before.
        slack = most_unread if kind in ("model", "auto") and turn else 0
        assert num_new <= answer.num_read_tokens <= num_new + slack
        # All but the end of sequence; the last token is read by the next turn.
        kept = answer.num_prompt_tokens + len(answer.result.token_ids) - 1
        assert len(set(answer.result.token_ids)) > 3


@pytest.mark.once
@pytest.mark.parametrize("kind", ["model", "head"])
def test_caches_go_back_to_where_another_conversation_begins_to_differ(kind, job_of):
    """A changed system message, a removed answer, and buffers that grow."""
    job = job_of(kind, system="one")
    conversation = Conversation(job)
    first = conversation.ask("ab" * 20)
    answer_began = first.num_prompt_tokens
    conversation.messages[-1]["content"] = "x"
    answer = ask_both(job, conversation, "c")
    # The prompt of the first turn is kept, but for the last token, which the head has not read.
    assert answer.num_prompt_tokens - answer.num_read_tokens == answer_began - (kind == "head")
    conversation.set_system("two")
    answer = ask_both(job, conversation, "c")
    num_kept = answer.num_prompt_tokens - answer.num_read_tokens
    assert num_kept == (0 if kind == "head" else len("system:"))
    conversation.set_system("one")
    conversation.reset()
    assert conversation.ask("ab" * 20).num_prompt_tokens == answer_began


@pytest.fixture
def taken_interrupts():
    """A process that takes SIGINT: shells start those of the background without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.once
@pytest.mark.usefixtures("taken_interrupts")
def test_an_interrupted_answer_is_kept_and_the_next_turn_continues_it(job_of):
    conversation, shown = Conversation(job_of("model")), []

    def show(piece, origin):
        before = len("".join(shown))
        shown.append(piece)
        # A piece may have several characters.
        if before < 5 <= before + len(piece):
            signal.raise_signal(signal.SIGINT)

    with catch_interrupt() as is_interrupted:
        answer = conversation.ask("ab", show=show, is_interrupted=is_interrupted)
    assert answer.result.finish == "interrupted"
    text = "".join(shown)
    assert 5 <= len(text) < 20
    assert conversation.messages[-1]["content"] == text == answer.result.text
    after = conversation.ask("c")
    num_kept = after.num_prompt_tokens - after.num_read_tokens
    assert num_kept >= answer.num_prompt_tokens + len(text) - 3


@pytest.mark.once
def test_a_conversation_that_is_full_is_refused_and_goes_on_after_a_reset(job_of):
    job = job_of("none", max_new_tokens=500, max_length=256)
    conversation = Conversation(job)
    answer = conversation.ask("a" * 200)
    # The target's longest sequence is 256.
    assert len(answer.result.token_ids) == 256 - answer.num_prompt_tokens
    with pytest.raises(ValueError, match=r"at most 256; /reset begins"):
        conversation.ask("b")
    conversation.reset()
    assert conversation.ask("a" * 200).num_read_tokens == 1


def test_a_target_that_cannot_go_back_is_refused(target):
    def init_cache(batch_size, max_length):
        return jnp.zeros((batch_size, max_length)), jnp.zeros((batch_size, 4))

    recurrent = dataclasses.replace(target, init_cache=init_cache)
    with pytest.raises(ValueError, match="cannot go back to an earlier token"):
        PrefixCache(Models(recurrent, None))


@pytest.mark.once
def test_lines_of_standard_input_are_messages_and_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    folder = write_model(tmp_path / "target", CONFIG, 0)
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE)
    lines = 'ab\n"""c\nd"""\n\n/system be short\n/reset\n/sytem\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    options = ["--draft", "none", "--max-new-tokens", "5", "--system", "be long"]
    assert main(["chat", "--target", folder, *options]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("\n") >= 2
    first, second, error = captured.err.splitlines()
    assert "read 32 of 32 prompt tokens" in first
    assert "tokens, ended by" in second
    assert error.startswith("specjax: /sytem is no command")
