"""JSON by a schema: the automata accept what the schema does, and decoded texts are valid."""

import itertools
import json
import re

import bigrams
import numpy as np
import pytest
from byte_texts import accepts, automaton_of

import specjax
from specjax import Finish, RowMasks, SamplingParams, SpeculativeConfig
from specjax.contrib.grammars import llguidance_matchers
from specjax.contrib.grammars.json_schema import schema_pattern
from specjax.engine.engine import all_allowed_masks
from specjax.engine.submission import EngineLimits, Submission, check_request
from specjax.markov_chain import markov_chain
from specjax.processing.token_bytes import token_bytes

pytestmark = pytest.mark.once

NOTES = ("title", "description", "default", "examples", "$schema", "$comment", "id", "$id")
NOTES += ("readonly", "readOnly", "writeOnly", "deprecated", "x-order", "x-")


@pytest.mark.parametrize(
    ("kind", "expression"),
    [
        ("integer", r"-?(0|[1-9]\d*)"),
        ("number", r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"),
    ],
)
def test_every_short_text_is_accepted_as_the_grammar_of_json_says(kind, expression):
    automaton = automaton_of({"type": kind})
    for length in range(6):
        for text in itertools.product("-01.e", repeat=length):
            text = "".join(text)
            assert accepts(automaton, text.encode()) == bool(re.fullmatch(expression, text))


def is_string(text):
    """Whether bytes are a JSON string of one character that is no lone surrogate."""
    try:
        value = json.loads(text.decode())
        return type(value) is str and len(value.encode().decode()) == 1
    except (ValueError, UnicodeError):
        return False


def test_a_character_is_one_of_utf8_or_an_escape():
    automaton = automaton_of({"type": "string", "minLength": 1, "maxLength": 1})
    bodies = [bytes(x) for n in (1, 2) for x in itertools.product(range(0, 256, 3 - n), repeat=n)]
    bodies = bodies[:256] + bodies[256::7]
    bodies += ["\u20ac".encode(), b"\xed\xa0\x80", "\U0001f600".encode(), b"\xf4\x90\x80\x80"]
    bodies += [b"\\" + bytes([x]) for x in range(256)]
    bodies += [b"\\u" + x for x in (b"00e9", b"D7ff", b"d800", b"DFFF", b"ABCD", b"12g4", b"123")]
    found = [accepts(automaton, b'"' + body + b'"') for body in bodies]
    assert found == [is_string(b'"' + body + b'"') for body in bodies]
    assert 200 < sum(found) < len(found) - 200


OPTIONAL = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}},
    "required": ["b"],
    "additionalProperties": False,
}
ITEMS = {"type": "array", "items": {"enum": ["x", None]}, "minItems": 1, "maxItems": 3}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            OPTIONAL,
            ['{"b":2}', '{"a":1,"b":2}', '{"b":2,"c":3}', '{"a":1,"b":2,"c":3}'],
            ["{}", '{"a":1}', '{"a":1,"c":3}', '{"b":2,"a":1}', '{,"b":2}', '{"b":2,}', '{"b": 2}'],
        ),
        (
            OPTIONAL | {"required": []},
            ["{}", '{"a":1}', '{"c":3}', '{"a":1,"c":3}', '{"b":2,"c":3}'],
            ['{"a":1"c":3}', '{"c":3,"c":3}'],
        ),
        (
            ITEMS,
            ['["x"]', '["x",null]', "[null,null,null]"],
            ["[]", '["x",]', "[null,null,null,null]", '[,"x"]'],
        ),
        (ITEMS | {"minItems": 0}, ["[]", '["x"]'], ["[null,null,null,null]", "null"]),
        (ITEMS | {"minItems": 0, "maxItems": 0}, ["[]"], ["[null]"]),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 2},
            ["[null,null,null]"],
            ["[null]"],
        ),
        ({"type": "integer", "minimum": -2, "maximum": 11}, ["-2", "0", "11"], ["-3", "12", "-0"]),
        ({"type": ["integer", "null"], "enum": [2.0, None]}, ["2.0", "null"], ["2"]),
        ({"type": ["boolean", "null"]}, ["true", "false", "null"], ["nul", "1"]),
        ({"anyOf": [{"type": "boolean"}, {"const": {"k": [1]}}]}, ["true", '{"k":[1]}'], ["{}"]),
        (
            {"type": "string", "minLength": 1, "maxLength": 2},
            ['"a"', '"\u00e9\\n"'],
            ['""', '"abc"'],
        ),
        ({"type": "object"}, ["{}"], ["[]", '{"a":1}']),
    ],
)
def test_a_schema_accepts_its_compact_texts_and_no_others(schema, good, bad):
    automaton = automaton_of(schema)
    assert [accepts(automaton, text.encode()) for text in good + bad] == [True] * len(good) + [
        False
    ] * len(bad)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([], "it needs an object"),
        ({"type": "string", "pattern": "a"}, r"has \['pattern'\], which is not read"),
        ({"type": "date"}, r"has type \['date'\]"),
        ({}, r"the schema has \[\] and no type"),
        ({"type": "object", "required": True}, "required True; it needs a list of names"),
        ({"type": "object", "required": "a"}, "required 'a'; it needs a list of names"),
        ({"type": "string", "enum": ["a", 1]}, "has 1 in enum; with its type"),
        ({"type": "integer", "const": True}, "has True in const; with its type"),
        ({"const": float("nan")}, "the schema has const nan; NaN"),
        ({"enum": ["\ud800"]}, "the schema has enum .* half a surrogate pair"),
        ({"type": ["integer", "number"], "minimum": 1, "maximum": 2}, r"\['maximum', 'minimum'\]"),
        ({"type": "array"}, "an array without items"),
        ({"type": "object", "required": ["a"]}, "requires"),
        ({"type": "object", "additionalProperties": True}, "additionalProperties"),
        ({"type": "integer", "minimum": 0.5}, "has minimum 0.5; it needs an integer"),
        ({"type": "integer", "maximum": True}, "has maximum True; it needs an integer"),
        ({"type": "integer", "maximum": -(10**40)}, "an integer of at most 40 digits"),
        ({"type": "integer", "minimum": 0, "maximum": -1}, "no integer follows it"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no text follows it"),
        ({"type": "string", "maxLength": 2.5}, "an integer >= 0"),
        ({"enum": []}, "a list that is not empty"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}},
            r"\$ref is '#'; the schema defines \[\]",
        ),
    ],
)
def test_what_is_not_read_is_refused(schema, words):
    with pytest.raises(ValueError, match=words):
        schema_pattern(schema)


NO_INTEGERS = ["-0", "01", "", "-"]


@pytest.mark.parametrize("bound", [-120, -19, -1, 0, 1, 7, 10, 99, 100, 1234])
def test_a_lone_bound_of_an_integer_accepts_what_is_on_its_side(bound):
    numbers = [*range(-1300, 1300), 99999, -99999]
    texts = [*map(str, numbers), *NO_INTEGERS]
    for key, sign in (("minimum", 1), ("maximum", -1)):
        automaton = automaton_of({"type": "integer", key: bound})
        expected = [sign * number >= sign * bound for number in numbers] + [False] * 4
        assert [accepts(automaton, text.encode()) for text in texts] == expected


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (7, 7), (3, 8), (-1, 1), (19, 21), (95, 1203), (117, 132), (120, 999), (-1203, -95)],
)
def test_two_bounds_of_an_integer_accept_what_is_between_them(low, high):
    automaton = automaton_of({"type": "integer", "minimum": low, "maximum": high})
    numbers = range(-1300, 1300)
    expected = [low <= number <= high for number in numbers] + [False] * 4
    texts = [*map(str, numbers), *NO_INTEGERS]
    assert [accepts(automaton, text.encode()) for text in texts] == expected


def test_optional_properties_share_what_follows_them():
    def size(number):
        properties = {f"p{i}": {"type": "string"} for i in range(number)}
        return len(automaton_of({"type": "object", "properties": properties}).accepts)

    sizes = [size(number) for number in (5, 10, 20)]
    assert sizes[2] < 500
    assert sizes[2] - sizes[1] < 2.5 * (sizes[1] - sizes[0])


def test_a_reference_stands_for_the_definition_that_it_names():
    point = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"]}
    schema = {
        "$defs": {"x": {"type": "integer", "minimum": 3}, "point": point},
        "anyOf": [
            {"$ref": "#/$defs/point"},
            {"type": "array", "items": {"$ref": "#/$defs/x", "title": "t"}},
            {"const": {"$ref": "#/$defs/x"}},
        ],
    }
    automaton = automaton_of(schema)
    good = ['{"x":3}', "[3,14]", "[]", '{"$ref":"#/$defs/x"}']
    bad = ['{"x":2}', "[2]", "3"]
    assert [accepts(automaton, text.encode()) for text in good + bad] == [True] * 4 + [False] * 3
    for wrong, words in (
        ({"$ref": "#/$defs/y"}, "the schema defines"),
        (
            {
                "$defs": {"y": {"type": "array", "items": {"$ref": "#/$defs/y"}}},
                "$ref": "#/$defs/y",
            },
            "inside itself",
        ),
        ({"$defs": {"y": {}}, "anyOf": [{"$ref": "#/$defs/y", "type": "null"}]}, "next to it"),
    ):
        with pytest.raises(ValueError, match=words):
            schema_pattern(wrong)


def test_a_note_says_nothing_about_a_text_and_a_property_may_have_its_name():
    notes = dict.fromkeys(NOTES, True)
    properties = {"id": {"type": "null"} | notes, "title": {"$ref": "#/$defs/one"} | notes}
    schema = {"type": "object", "properties": properties, "required": ["id", "title"]} | notes
    definitions = {"one": {"const": {"id": 1, "x-y": 2}} | notes}
    automaton = automaton_of(schema | {"$defs": definitions})
    assert accepts(automaton, b'{"id":null,"title":{"id":1,"x-y":2}}')
    assert not accepts(automaton, b"{}")
    for key in ("format", "xml"):
        with pytest.raises(ValueError, match=rf"has \['{key}'\], which is not read"):
            automaton_of({"type": "string", key: "date"} | notes)


def test_an_error_shows_the_beginning_of_a_long_value():
    for schema in (
        {"enum": ["a" * 10**5, float("nan")]},
        {"type": "a" * 10**5},
        {"type": "object", "properties": {"a" * 10**5: {"enum": []}}},
        {"$ref": "a" * 10**5},
    ):
        with pytest.raises(ValueError, match="aaa") as caught:
            schema_pattern(schema)
        assert len(str(caught.value)) < 300


# Tokens ------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "n": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "a\u00e9"]}, "maxItems": 2},
        "ok": {"type": ["boolean", "null"]},
    },
    "required": ["name", "tags"],
}
PIECES = [
    '{"',
    '":"',
    '","',
    '":[',
    '"]',
    "name",
    "na",
    "me",
    "tags",
    "tr",
    "ue",
    "null",
    "12",
    '":-',
]
BYTES = sorted(set(b'{}[]":,-0123456789abcdefghiklmnorstu\\') | set("\u00e9\u20ac".encode()))
# The first token ends a text; the last are no text, and one that no text has.
VOCABULARY = [b"<eos>", *(bytes([value]) for value in BYTES), *map(str.encode, PIECES), b"", b"]]"]
V, EOS = len(VOCABULARY), 0
GRAMMAR = specjax.contrib.grammars.json_schema_grammar(SCHEMA, VOCABULARY, [EOS])


def is_valid(text):
    """Whether the text is JSON that SCHEMA accepts, by its definition."""
    value = json.loads(text.decode())
    name, n, tags, ok = (value.pop(key, None) for key in ("name", "n", "tags", "ok"))
    return (
        not value
        and type(name) is str
        and 1 <= len(name) <= 3
        and (n is None or (type(n) is int and -3 <= n <= 120))
        and len(tags) <= 2
        and set(tags) <= {"a", "bc", "a\u00e9"}
        and ok in (None, True, False)
    )


def walk(tokens):
    """The state after some tokens, each of which is allowed."""
    state = 0
    for token in tokens:
        assert GRAMMAR.allowed[state, token // 32] >> np.uint32(token % 32) & 1, VOCABULARY[token]
        state = GRAMMAR.next_states[state, GRAMMAR.token_classes[token]]
    return state


def test_a_text_may_be_cut_into_tokens_in_any_way():
    rng = np.random.default_rng(0)
    text = '{"name":"a\\\\\u20ac","n":12,"tags":["bc","a\u00e9"],"ok":true}'.encode()
    for _ in range(100):
        tokens, at = [], 0
        while at < len(text):
            fitting = [
                token for token, x in enumerate(VOCABULARY[1:-2], 1) if text[at:].startswith(x)
            ]
            tokens.append(int(rng.choice(fitting)))
            at += len(VOCABULARY[tokens[-1]])
        walk([*tokens, EOS, EOS])


def test_a_token_after_which_no_text_can_be_completed_is_not_allowed():
    # "[1" can begin, but there is no token for the bracket that closes it.
    schema = {"anyOf": [{"const": [1]}, {"const": 1}]}
    grammar = specjax.contrib.grammars.json_schema_grammar(schema, [b"", b"[", b"1"], [0])
    assert grammar.allowed[0].tolist() == [0b100]
    of_one_id = specjax.contrib.grammars.json_schema_grammar(schema, [b"", b"[", b"1"], 0)
    np.testing.assert_array_equal(of_one_id.allowed, grammar.allowed)
    for vocabulary in ([b"", b"[", b"1"], [b"", b""]):
        with pytest.raises(ValueError, match="complete no text"):
            specjax.contrib.grammars.json_schema_grammar({"const": [1]}, vocabulary, [0])
    for eos in ([], [3], [-1], 3):
        with pytest.raises(ValueError, match="eos_token_ids is"):
            specjax.contrib.grammars.json_schema_grammar({"const": 1}, [b"", b"[", b"1"], eos)


NUM_PROMPTS, NEW = 200, 72
_RNG = np.random.default_rng(5)
TABLES = _RNG.dirichlet(np.full(V, 0.3), (2, V)) + 1e-4
PROMPTS = _RNG.integers(0, V, (NUM_PROMPTS, 3))


def check_texts(rows, least=NUM_PROMPTS / 4):
    """Every row of generated tokens is valid JSON and the end of sequence; they differ."""
    texts = set()
    for row in rows:
        assert row.index(EOS) == len(row) - 1
        text = b"".join(VOCABULARY[token] for token in row[:-1])
        assert is_valid(text), text
        texts.add(text)
    assert len(texts) > least


def letters(text):
    """Tokens of single bytes."""
    return [VOCABULARY.index(bytes([value])) for value in text.encode()]


def matchers_of(number):
    schema = SCHEMA | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    return llguidance_matchers([schema] * number, VOCABULARY, [EOS], letters)


class Broken:
    """A matcher one of whose methods raises when it is called once more than `num_calls` times."""

    def __init__(self, matcher, method, num_calls):
        self._matcher, self._method, self._left = matcher, method, num_calls

    def __getattr__(self, name):
        if name == self._method:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError(f"no {name}")
        return getattr(self._matcher, name)


# The first mask is that of `submit`.
BREAKS = [
    ("compute_bitmask", 1),
    ("compute_bitmask", 7),
    ("try_consume_tokens", 9),
    ("rollback", 0),
]


def test_an_engine_gives_valid_json_by_the_automaton_and_by_llguidance_next_to_free_texts():
    target, draft = (markov_chain(table / table.sum(-1, keepdims=True)) for table in TABLES)
    # 50 by the automaton, 50 by a matcher, 20 without a grammar, in any order.
    kinds = np.random.default_rng(2).permutation(
        np.repeat(["table", "matcher", "free"], [50, 50, 20])
    )
    keys = bigrams.keys(len(kinds), seed=1)

    def decode(kept, takes_matchers):
        engine = specjax.Engine(
            target,
            specjax.model_drafter(draft),
            num_slots=8,
            options=specjax.LoopOptions(3 + NEW, prefill_chunk_size=4),
            sampling=SamplingParams(grammar=GRAMMAR, grammar_state=-1),
            config=SpeculativeConfig(3),
            takes_matchers=takes_matchers,
        )
        matchers = matchers_of(len(kinds)) if takes_matchers else [None] * len(kinds)
        requests, broken = {}, {}

        def submit(i, matcher):
            return engine.submit(
                PROMPTS[i],
                key=keys[i],
                max_new_tokens=NEW,
                eos_token_ids=[EOS],
                sampling=SamplingParams(grammar_state=0 if kinds[i] == "table" else -1),
                matcher=matcher,
            )

        for i, kind in enumerate(kinds):
            if kind in kept:
                requests[i] = submit(i, matchers[i] if kind == "matcher" else None)
            if kind == "matcher" and kind in kept and len(broken) < len(BREAKS):
                broken[i] = submit(i, Broken(*matchers_of(1), *BREAKS[len(broken)]))
        while engine.step():
            if takes_matchers and engine.num_steps % 5 == 0:
                request = requests[engine.num_steps % len(kinds)]
                engine.preempt(request, drops_cache=engine.num_steps % 2 == 0)
        for (method, _), (i, request) in zip(BREAKS, broken.items(), strict=takes_matchers):
            assert request.finish_reason == "matcher_error"
            assert request.error == f"its matcher raised RuntimeError: no {method}"
            assert request.token_ids == requests[i].token_ids[: len(request.token_ids)]
        return {i: request.token_ids for i, request in requests.items()}

    texts = decode({"table", "matcher", "free"}, True)
    for kind in ("table", "matcher"):
        check_texts([texts[i] for i in np.flatnonzero(kinds == kind)], 25)
    others = decode({"table", "free"}, False)
    assert {i: texts[i] for i in others} == others


def test_a_matcher_that_an_engine_does_not_take_is_refused():
    (matcher,) = matchers_of(1)
    options = EngineLimits(8, V, None, None, takes_matchers=False)
    with pytest.raises(ValueError, match="it needs takes_matchers=True"):
        check_request(Submission([1], bigrams.keys(1)[0], matcher=matcher), options)
    options = options._replace(takes_matchers=True, vocab_size=8 * V)
    with pytest.raises(ValueError, match="has 2 words; 472 tokens need 15"):
        check_request(Submission([1], bigrams.keys(1)[0], matcher=matcher), options)
    with pytest.raises(ValueError, match=r"takes_matchers is True, and sampling\.allowed is given"):
        all_allowed_masks(True, SamplingParams(allowed=np.ones(V, bool)), (1, 1, V))


def test_two_hundred_prompts_give_valid_json_by_the_automaton_and_by_llguidance():
    matchers = matchers_of(NUM_PROMPTS)
    size = 2 * NUM_PROMPTS
    masks = RowMasks([None] * NUM_PROMPTS + matchers, [3] * size, V)
    target, draft = (markov_chain(table / table.sum(-1, keepdims=True)) for table in TABLES)
    drafter, config = specjax.model_drafter(draft), SpeculativeConfig(3)
    state = specjax.init(
        target,
        drafter,
        (np.tile(PROMPTS, (2, 1)), np.full(size, 3)),
        keys=bigrams.keys(size),
        config=config,
        max_new_tokens=NEW,
        eos_token_ids=[EOS],
        sampling=SamplingParams(
            grammar=GRAMMAR,
            grammar_state=np.repeat(np.array([0, -1], np.int32), NUM_PROMPTS),
            allowed=masks.first(),
        ),
    )
    while not np.all(state.finish):
        rows = masks.of_rows(state)
        state, _ = specjax.step(target, drafter, state, config=config, allowed=rows)
    np.testing.assert_array_equal(state.finish, Finish.END_OF_SEQUENCE)
    rows = [row[3:] for row in specjax.unpad(state.token_ids)]
    check_texts(rows[:NUM_PROMPTS])
    check_texts(rows[NUM_PROMPTS:])
    assert all(
        np.split(np.sum(state.metrics.num_accepted, axis=1), 2)[half].sum() > 100 for half in (0, 1)
    )
    with pytest.raises(ValueError, match="llguidance does not read the grammar"):
        llguidance_matchers([{"type": "nothing"}], VOCABULARY, [EOS], letters)
    with pytest.raises(ValueError, match="lets no token begin a text"):
        llguidance_matchers([{"$ref": "#"}], VOCABULARY, [EOS], letters)
    with pytest.raises(ValueError, match="eos_token_ids is empty"):
        llguidance_matchers([], VOCABULARY, [], letters)


def test_the_bytes_of_tokens_are_those_of_the_text():
    tokenizers = pytest.importorskip("tokenizers")
    from specjax.models import load_tokenizer, pretrained_folder

    tokenizer = load_tokenizer(pretrained_folder("target"))
    vocabulary = token_bytes(tokenizer, 5000)
    for text in ('{"a": [1.5e3, "\u00e9\u20ac\\n"]}', "once more \U0001f600\t\x7f"):
        ids = tokenizer.encode(text).ids
        assert b"".join(vocabulary[i] for i in ids) == text.encode()
    assert vocabulary[0] == b""
    assert len(vocabulary) == 5000
    with pytest.raises(ValueError, match="vocab_size is 7"):
        token_bytes(tokenizer, 7)
    pieces = {"<unk>": 0, "<0x0A>": 1, "\u2581on": 2, "ce": 3, "<0xFF>": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=pieces, merges=[]))
    with pytest.raises(ValueError, match="decoder is"):
        token_bytes(tokenizer)
    parts = tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback()
    tokenizer.decoder = tokenizers.decoders.Sequence(list(parts))
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.add_tokens(["<think>", "\u2581\u2581"])
    assert token_bytes(tokenizer) == [b"", b"\n", b" on", b"ce", b"\xff", b"<think>", b"  "]
