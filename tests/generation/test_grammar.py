"""Answers of a random model match their grammar, whatever else is in the batch."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.generation.grammar import (
    MAX_GRAMMAR_CHARS,
    GrammarCompiler,
    GrammarError,
    choice_grammar,
    combined_grammar,
    json_schema_grammar,
    regex_grammar,
)
from paddlenlp_ext.generation.request import LENGTH, STOP
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.common.byte_tokenizer import byte_tokenizer
from tests.common.json_schemas import random_schema
from tests.common.models import TINY_LLAMA
from tests.generation.engine_answers import Answer, engine_of, run

llguidance = pytest.importorskip("llguidance")
TOKENIZER = byte_tokenizer("<|end|>", "<|role|>")
END = TOKENIZER.eos_token_id
VOCAB = 260  # as in many models, the embedding has more rows than the tokenizer has tokens
HOT: dict[str, Any] = {"decode_strategy": "sampling", "temperature": 2.0}


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_config({**TINY_LLAMA, "vocab_size": VOCAB, "initializer_range": 0.35}, seed=1)


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER)


def text_of(tokens) -> str:
    return TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)


def allowed_after(grammar, text: str) -> set[str | int]:
    """Return what may follow a text: characters, and END."""
    state = grammar.copy()
    for token in TOKENIZER(text)["input_ids"]:
        state.advance(token)
    tokens = np.flatnonzero(state.allowed_tokens(VOCAB, [END])).tolist()
    return {token if token == END else text_of([token]) for token in tokens}


def test_engine_answers_to_random_schemas_validate(model, compiler):
    """Run 100 schemas in one engine; every third row has no grammar, and its tokens are those of generate."""
    jsonschema = pytest.importorskip("jsonschema")
    rng, schemas, answers = random.Random(0), [], []
    for number in range(100):
        schema = random_schema(rng)
        grammar = compiler.compile(json_schema_grammar(schema))
        schemas.append(schema)
        answers.append(Answer([number % 250, 7], 300, [END], row=number, grammar=grammar, **HOT))
        if number % 3 == 0:
            answers.append(Answer([number % 250, 9], 20, row=number, **HOT))
    run(engine_of(model, max_rows=32), answers, limit=10_000)
    with_grammar = [answer for answer in answers if answer.request.grammar is not None]
    free = [answer for answer in answers if answer.request.grammar is None]
    complete = 0
    for schema, answer in zip(schemas, with_grammar, strict=True):
        assert answer.ended == ([LENGTH] if len(answer.tokens) == 300 and answer.ended != [STOP] else [STOP])
        if answer.ended == [STOP]:
            complete += 1
            jsonschema.validate(json.loads(text_of(answer.tokens)), schema)
    assert complete >= 70
    prompts = [answer.request.prompt for answer in free]
    expected = [
        generate(model, [p], first_row=a.request.row, max_new_tokens=20, **HOT)[0]
        for p, a in zip(prompts, free, strict=True)
    ]
    assert [answer.tokens for answer in free] == expected


@pytest.mark.parametrize("options", [HOT, {}, {"max_draft_tokens": 3, "max_ngram_size": 2, "batch_size": 1}])
def test_generate_with_regex_returns_full_matches(model, compiler, options):
    pattern = r"(ab|[0-9]{3})+(-[^\x00-\x1f]{1,4})?;"
    grammar = compiler.compile(regex_grammar(pattern))
    answers = generate(
        model, [[5], [6, 7], [8, 9, 10]], max_new_tokens=100, eos_token_id=END, grammar=grammar, **options
    )
    assert [bool(re.fullmatch(pattern, text_of(tokens))) for tokens in answers] == [len(t) < 100 for t in answers]
    assert any(len(tokens) < 100 for tokens in answers) or not options.get("temperature")
    if options != HOT:
        greedy = generate(model, [[5], [6, 7], [8, 9, 10]], max_new_tokens=100, eos_token_id=END, grammar=grammar)
        assert answers == greedy


def test_generate_leaves_passed_grammar_at_its_start(model, compiler):
    grammar = compiler.compile(choice_grammar(["yes", "no"]))
    for _ in range(2):
        answers = generate(model, [[5], [6]], max_new_tokens=9, grammar=grammar, **HOT)
        assert {text_of(tokens) for tokens in answers} <= {"yes", "no"}, "rows end without an end token"


def test_allowed_tokens_has_end_exactly_where_text_is_complete(compiler):
    grammar = compiler.compile(regex_grammar("a+(bc)?"))
    assert allowed_after(grammar, "") == {"a"}
    assert allowed_after(grammar, "a") == {"a", "b", END}
    assert allowed_after(grammar, "ab") == {"c"}
    assert allowed_after(grammar, "abc") == {END}


def test_allowed_tokens_excludes_end_token_with_text_inside_of_strings(compiler):
    """The end token of a model may be an ordinary letter for the tokenizer."""
    letter = TOKENIZER("x")["input_ids"][0]
    state = compiler.compile(regex_grammar("[a-z]{2}"))
    assert not state.allowed_tokens(VOCAB, [letter])[letter]
    for token in TOKENIZER("ab")["input_ids"]:
        state.advance(token)
    assert np.flatnonzero(state.allowed_tokens(VOCAB, [letter])).tolist() == [letter]


def test_allowed_tokens_of_json_bounds_white_space(compiler):
    grammar = compiler.compile(json_schema_grammar({"type": "object"}))
    assert {" ", "\n", '"'} <= allowed_after(grammar, "{")
    assert allowed_after(grammar, "{ ") == {'"', "}"}
    assert {" ", '"'} <= allowed_after(grammar, "{\n    ")


def test_allowed_tokens_without_any_raises_error():
    grammar = GrammarCompiler(byte_tokenizer("<|end|>", letters="abc")).compile(regex_grammar("a(z|y)"))
    grammar.advance(0)
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        grammar.allowed_tokens(4, [3])


def is_answer(compiler, schema, text: str) -> bool:
    state = compiler.compile(json_schema_grammar(schema))
    for token in TOKENIZER(text)["input_ids"]:
        if not state.allowed_tokens(VOCAB, [END])[token]:
            return False
        state.advance(token)
    return bool(state.allowed_tokens(VOCAB, [END])[END])


@pytest.mark.parametrize(
    ("schema", "outside", "inside"),
    [
        ({"exclusiveMinimum": 2, "maximum": 2.5}, ["2", "2.0", "2.00000000000000001"], ["2.00000001", "2.5"]),
        ({"exclusiveMinimum": 987, "maximum": 988.5}, ["987", "987.00000000000000001"], ["987.001", "988"]),
        ({"minimum": -2.5, "exclusiveMaximum": -2.0}, ["-2", "-2.00000000000000001", "-1"], ["-2.00000001", "-2.5"]),
        ({"exclusiveMinimum": 0}, ["0", "0.0", "-1"], ["0.00000001", "17"]),
        ({"exclusiveMinimum": 0.5, "minimum": 0.7}, ["0.6"], ["0.7"]),
        ({"exclusiveMinimum": 0.5, "minimum": 0.1}, ["0.50000000000000001", "0.4"], ["0.51"]),
        ({"type": "integer", "exclusiveMinimum": 10**12}, [str(10**12)], [str(10**12 + 1)]),
    ],
)
def test_numbers_at_exclusive_bound_are_excluded_even_after_rounding(compiler, schema, outside, inside):
    schema = {"type": "number", **schema}
    assert not any(is_answer(compiler, schema, text) for text in outside)
    assert all(is_answer(compiler, schema, text) for text in inside)


def test_exclusive_bounds_in_data_are_kept():
    """A property may be named like a keyword, and a constant may look like a schema."""
    data = {"exclusiveMinimum": 2}
    schema = {"properties": {"const": data, "exclusiveMinimum": data}, "const": data, "items": [data]}
    ((part,),) = [each.values() for each in json_schema_grammar(schema)]
    changed = {"minimum": 2 + 2e-9}
    assert part["properties"] == {"const": changed, "exclusiveMinimum": changed} and part["items"] == [changed]
    assert part["const"] == data


def test_combined_grammar_keeps_definitions_of_each_part(compiler):
    schemas = {
        name: {"$ref": "#/$defs/x", "$defs": {"x": {"const": number}}} for number, name in enumerate(("one", "two"))
    }
    parts = {name: json_schema_grammar(schema) for name, schema in schemas.items()}
    grammar = compiler.compile(combined_grammar('start: "<" @one ">" | @two', parts))
    assert allowed_after(grammar, "") == {"<", "1"}
    assert allowed_after(grammar, "<") == {"0"}


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (lambda: regex_grammar("(a"), "unclosed group"),
        (lambda: regex_grammar("(?=a)b"), "look-ahead"),
        (lambda: json_schema_grammar({"type": "text"}), "Invalid type: text"),
        (lambda: json_schema_grammar({"$ref": "#/$defs/none"}), "'/\\$defs/none' does not exist"),
        (lambda: json_schema_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: json_schema_grammar({"type": "integer", "minimum": 3, "maximum": 1}), "minimum"),
        (lambda: json_schema_grammar({"$ref": "#"}), "no text matches"),
        (lambda: json_schema_grammar({"multipleOf": 99991}), "multipleOf"),
        (lambda: json_schema_grammar({"allOf": [{"multipleOf": 4999}, {"multipleOf": 0.03}]}), "multipleOf"),
        (
            lambda: json_schema_grammar({"type": "number", "exclusiveMinimum": 2, "maximum": 2}),
            "minimum .2.000000002. is greater",
        ),
        (lambda: json_schema_grammar({"exclusiveMaximum": 10**400}), "number out of range"),
        (lambda: json_schema_grammar({"enum": ["a" * MAX_GRAMMAR_CHARS]}), f"the limit is {MAX_GRAMMAR_CHARS}"),
        (lambda: json_schema_grammar({"properties": {f"k{i}": {} for i in range(3000)}}), "too big"),
    ],
)
def test_compile_of_invalid_grammar_names_problem_in_one_line(compiler, grammar, problem):
    with pytest.raises(GrammarError, match=problem) as caught:
        compiler.compile(grammar())
    assert "\n" not in str(caught.value)


def test_compiler_of_tokenizer_without_json_raises_error():
    with pytest.raises(GrammarError, match=r"need a fast tokenizer .*, not a object"):
        GrammarCompiler(object())


def test_engine_with_grammar_beyond_limits_ends_only_its_row(model, compiler):
    properties = {f"k{index}": {"type": "null"} for index in range(1000)}
    schema = {"type": "object", "properties": properties, "required": ["k999"]}
    complex_grammar = compiler.compile(json_schema_grammar(schema))
    rows = [Answer([3], 50, [END], grammar=complex_grammar, row=row, **HOT) for row in range(2)]
    rows.append(Answer([4], 50, [END], grammar=compiler.compile(regex_grammar("[a-z]{20}")), **HOT))
    rows[1].request.grammar = complex_grammar.copy()
    run(engine_of(model, max_rows=4), rows)
    assert all(isinstance(row.ended[0], GrammarError) for row in rows[:2])
    assert rows[2].ended == [STOP] and len(rows[2].tokens) == 20


def test_engine_at_token_limit_ends_with_stop_only_for_complete_text(model, compiler):
    reasons = {}
    for limit in (2, 3):
        answer = Answer([3], limit, [END], grammar=compiler.compile(regex_grammar("[a-z]{3}")), **HOT)
        run(engine_of(model, max_rows=1), [answer])
        reasons[limit] = answer.ended
    assert reasons == {2: [LENGTH], 3: [STOP]}


def test_engine_logprobs_are_those_of_model_without_grammar(model, compiler):
    grammar = compiler.compile(regex_grammar("[0-9]{5}"))
    answer = Answer([3, 4], 9, [END], grammar=grammar, num_top=1)
    scored = Answer([3, 4], 0, num_top=1)
    run(engine_of(model, max_rows=2), [answer])
    scored.request.prompt = [3, 4, *answer.tokens]
    run(engine_of(model, max_rows=2), [scored])
    expected = [each.logprob for each in scored.prompt_logprobs or ()][1:]
    np.testing.assert_allclose([each.logprob for each in answer.logprobs], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"decode_strategy": "beam_search", "num_beams": 2}, "beam_search cannot use grammar"),
        ({"min_new_tokens": 2}, "min_new_tokens 2 with grammar"),
    ],
)
def test_generate_with_grammar_and_contradicting_option_raises_error(model, compiler, options, problem):
    with pytest.raises(ValueError, match=problem):
        generate(model, [[3]], max_new_tokens=4, grammar=compiler.compile(regex_grammar("a")), **options)
