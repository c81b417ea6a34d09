"""Chat templates come from the folder, are rendered in a sandbox, and are refused in a sentence."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
import tokenizers
from tokenizers import processors

from specjax.cli import main
from specjax.cli.model_pair import encode_text
from specjax.models import TransformerConfig, build, chat_prompt, load_tokenizer, save

CONFIG = TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=96,
)
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ('user', 'system') %}{{ raise_exception('No ' + message.role) }}
    {%- endif %}
    {{- '<' + message.role + '>' + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<a>{% endif %}"""
HELLO = [{"role": "user", "content": "ab ba "}]
SPECIAL = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def tokenizer(*added):
    vocabulary = ["<s>", "</s>", "<user>", "<a>", "a", "b", " ", *added]
    bpe = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: n for n, word in enumerate(vocabulary)}, [])
    )
    bpe.add_special_tokens(vocabulary[:4])
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return bpe


def write_settings(path, **settings):
    path.mkdir(exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps(SPECIAL | settings))
    return path


def test_a_template_is_found_where_transformers_4_and_5_put_it(tmp_path):
    prompt = "<s><user>ab ba</s><a>"
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    for template in (TEMPLATE, templates):
        assert chat_prompt(write_settings(tmp_path, chat_template=template), HELLO) == prompt
    (tmp_path / "chat_template.jinja").write_text("file: " + TEMPLATE)
    assert chat_prompt(tmp_path, HELLO) == "file:" + prompt


def test_a_template_has_the_filters_and_globals_of_transformers(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y')|length }}{{ tools }}{{ documents is none }}{{ absent }}\n"
        "    {% if true %}\nkept\n    {% endif %}\n"
    )
    messages = [{"role": "user", "content": "é<'"}, {"role": "user", "content": ""}]
    expected = '{"role": "user", "content": "é<\'"}4NoneTrue\nkept\n'
    assert chat_prompt(tmp_path, messages) == expected


ABSENT = "{{ m.content }}{% if 'tool_calls' in m %} calls {{ m.tool_calls | length }}{% endif %};"


def test_a_field_of_a_message_that_is_null_is_absent(tmp_path):
    template = "{% for m in messages %}" + ABSENT + "{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    call = {"name": "f", "arguments": None}
    messages = [
        {"role": "user", "content": "Hi", "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_calls": []},
    ]
    assert chat_prompt(tmp_path, messages) == "Hi; calls 1; calls 0;"
    assert "tool_calls" in messages[0], "the caller's messages are left alone"
    # Nulls inside a field are data, as in transformers.
    (tmp_path / "chat_template.jinja").write_text("{{ messages[1].tool_calls | tojson }}")
    assert chat_prompt(tmp_path, messages) == '[{"name": "f", "arguments": null}]'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": "é<", "a": 1}'),
        ("ensure_ascii=True", '{"b": "\\u00e9<", "a": 1}'),
        ("true", '{"b": "\\u00e9<", "a": 1}'),
        ("separators=(',', ':')", '{"b":"é<","a":1}'),
        ("indent=1, sort_keys=true", '{\n "a": 1,\n "b": "é<"\n}'),
    ],
)
def test_the_json_filter_takes_the_arguments_of_transformers(tmp_path, arguments, expected):
    template = f"{{{{ {{'b': messages[0].content, 'a': 1}} | tojson({arguments}) }}}}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chat_prompt(tmp_path, [{"role": "user", "content": "é<"}]) == expected


@pytest.mark.parametrize("argument", ["default='{0.__class__}'.format", "cls=dict", "skipkeys=1"])
def test_the_json_filter_runs_nothing_that_a_template_gives_it(tmp_path, argument):
    (tmp_path / "chat_template.jinja").write_text(f"{{{{ cycler | tojson({argument}) }}}}")
    with pytest.raises(ValueError, match="unexpected keyword argument"):
        chat_prompt(tmp_path, HELLO)


def test_templates_whose_names_are_no_text_are_left_out(tmp_path):
    odd = [{"name": name, "template": "no"} for name in (["x"], {}, None, 3)]
    folder = write_settings(tmp_path, chat_template=["default", {"template": "no"}, *odd])
    with pytest.raises(ValueError, match="has several chat templates and none is named 'default'"):
        chat_prompt(folder, HELLO)
    write_settings(tmp_path, chat_template=[*odd, {"name": "default", "template": "yes"}])
    assert chat_prompt(folder, HELLO) == "yes"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "has no chat template; its model continues text"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "none is named 'de"),
        ({"chat_template": 3}, "chat_template that is no text"),
        ({"chat_template": "{% for %}"}, "cannot render this conversation"),
        ({"chat_template": "{{ raise_exception('Only\\nodd turns.') }}"}, r"\(Only odd turns\.\)"),
        ({"chat_template": "{{ 1 / 0 }}"}, "division by zero"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "unsafe"),
        ({"chat_template": "{% do messages.append(1) %}"}, "cannot render"),
        ({"chat_template": "{% if messages.append(1) %}{% endif %}"}, "unsafe"),
        ({"chat_template": "{% include 'config.json' %}"}, "cannot render"),
    ],
)
def test_a_template_that_fails_is_refused_by_its_folder(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        chat_prompt(write_settings(tmp_path, **settings), HELLO)
    assert str(tmp_path) in str(refusal.value)


def test_a_missing_folder_is_told_from_one_without_a_template(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder; it needs to be a Hugging Face"):
        chat_prompt(tmp_path / "nowhere", HELLO)
    with pytest.raises(ValueError, match="the name of the folder is empty; it needs to be that"):
        chat_prompt("", HELLO)


@pytest.mark.parametrize("messages", ["hello", "", b"", None, HELLO[0], ["hello"], [*HELLO, None]])
def test_messages_that_are_no_list_of_messages_are_refused(tmp_path, messages):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(ValueError, match=r"^messages is .*; it needs to be a list of mappings"):
        chat_prompt(tmp_path, messages)


def test_unreadable_settings_are_refused(tmp_path):
    for content, sentence in (("x", "is not valid JSON"), ("[]", "holds no JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match=sentence):
            chat_prompt(tmp_path, HELLO)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8"):
        chat_prompt(tmp_path, HELLO)


# Through the command -----------------------------------------------------------------------------


def write_model(path, size, seed, *added):
    config = dataclasses.replace(CONFIG, vocab_size=size)
    params = jax.tree.map(lambda a: a * jnp.float32(12), build(config, seed=seed).params)
    save(path, params, config, tokenizer(*added), dtype="float32")
    return str(write_settings(path, chat_template=TEMPLATE))


SHORT = ["--max-new-tokens", "12", "--json"]


def generate(capsys, *options):
    code = main(["generate", *options, *SHORT])
    captured = capsys.readouterr()
    return json.loads(captured.out) if code == 0 else captured.err


@pytest.fixture(autouse=True)
def _use_own_compilation_cache(tmp_path, monkeypatch):
    # Else the command turns on the user's cache, for all tests that follow in this process.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))


@pytest.fixture
def target(tmp_path):
    return write_model(tmp_path / "target", 16, 0)


def test_a_message_is_put_into_the_template_and_encoded_as_it_stands(capsys, target):
    prompt = chat_prompt(target, HELLO)
    ids = load_tokenizer(target).encode(prompt, add_special_tokens=False).ids
    assert ids == [0, 2, 4, 5, 6, 5, 4, 1, 3]
    output = generate(capsys, "ab ba ", "--chat", "--target", target, "--draft", "none")
    assert output["num_prompt_tokens"] == len(ids)
    # The same text as a prompt, to which the tokenizer would add its first token once more.
    assert main(["generate", prompt, "--target", target, "--draft", "none", *SHORT]) == 0
    text, err = capsys.readouterr()
    assert json.loads(text)["token_ids"] == output["token_ids"]
    assert err.count("warning: the prompt begins with <s>, which the tokenizer would add; it") == 1


BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
TWO = processors.TemplateProcessing(
    single="<s> [a] $A </s>", special_tokens=[("<s>", 0), ("[a]", 3), ("</s>", 1)]
)
END = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])


@pytest.mark.parametrize(
    ("adds", "text", "ids"),
    [
        (BOS, "b", [0, 2]),
        (BOS, "<s>b", None),
        (BOS, "b<s>", [0, 2, 0]),
        (BOS, "<s><s>", None),
        (TWO, "<s>[a]b", None),
        (TWO, "[a]b", [0, 3, 3, 2, 1]),
        (END, "</s>b", [1, 2, 1]),
        (processors.Sequence([processors.ByteLevel(), BOS]), "<s>b", None),
    ],
)
def test_a_token_that_begins_a_text_is_not_added_again(adds, text, ids):
    names = {"<s>": 0, "</s>": 1, "b": 2, "[a]": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, "b"))
    made.add_special_tokens(["<s>", "</s>", "[a]"])
    made.post_processor = adds
    found, warning = encode_text(made, text, chat=False)
    alone = made.encode(text, add_special_tokens=False).ids
    last = [1] if adds is TWO else []
    assert found == ([*alone, *last] if ids is None else ids)
    assert (warning is not None) == (ids is None)
    assert encode_text(made, text, chat=True) == (alone, None)


def test_a_folder_that_does_not_chat_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("specjax.models.load", None)
    assert "has no chat template" in generate(capsys, "hello", "--chat")


@pytest.mark.once
@pytest.mark.parametrize("size", [12, 24])
def test_a_draft_may_have_a_head_padded_to_another_size(capsys, tmp_path, target, size):
    draft = write_model(tmp_path / "draft", size, 1)
    for temperature in ("0", "1"):
        options = ["ab", "--target", target, "--temperature", temperature]
        output = generate(capsys, *options, "--draft", draft)
        assert sum(output["metrics"]["num_drafted"])
        if temperature == "0":
            assert output["token_ids"] == generate(capsys, *options, "--draft", "none")["token_ids"]


def test_a_draft_of_another_tokenizer_is_refused(capsys, tmp_path, target):
    draft = write_model(tmp_path / "draft", 16, 1, "c")
    error = generate(capsys, "ab", "--target", target, "--draft", draft)
    assert "have different vocabularies (8 and 7 tokens); a draft needs the target's" in error
