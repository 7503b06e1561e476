"""Grammars that restrict the text of an answer: JSON schemas, regular expressions, choices, and their combinations.

    grammar in the format of llguidance --GrammarCompiler--> GrammarState, one copy per row
    GrammarState.allowed_tokens --logits_processors.py--> logits of the next token

In each decoding step, a token is allowed only if the resulting text can be completed to a text of the grammar. An end
token is allowed only if the text is complete. Limits bound the size of a grammar and the work per token.

Shapes: V vocab.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddlenlp_ext.utils.optional_packages import import_extra

Grammar = Sequence[Mapping[str, Any]]
"""Parts of a grammar. The first part is the start, and refers to the other parts as `@name`."""
MAX_GRAMMAR_CHARS = 1 << 16
_MAX_MULTIPLE = 10_000
"""Maximum least common multiple of all `multipleOf` in a schema; the automaton has a state for each remainder."""
_STEP = Fraction(1, 10**9)
"""Relative distance from an exclusive bound to the inclusive bound that replaces it; absolute if the bound is 0.

llguidance 1.9 fails to distinguish bounds whose first 15 digits are equal.
"""
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""
_KEYWORDS_WITH_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose value is data, not a schema."""
_WHITESPACE = r" |\r?\n[ \t]{0,32}"  # bounded, because a model could otherwise write whitespace forever
_END = "<|end of an answer with a grammar|>"
"""End token of llguidance. The model's own end tokens depend on the chat template; masks permit them where the grammar
can end."""
_DEAD_END = "no token of the vocabulary continues the answer within its grammar"
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 20_000,
    "verbose_errors": False,
}


class GrammarError(ValueError):
    """Error for a grammar that is invalid, exceeds a limit, or allows no token."""


def json_schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of JSON values that a JSON schema accepts; `{"type": "object"}` accepts any JSON object.

    The grammar requires the keys of objects in the order of the schema.

    Raises:
        GrammarError: the least common multiple of all `multipleOf` is too large. `GrammarCompiler.compile` reports
            other errors.
    """
    objects = list(_objects(schema))
    multiples = [number for each in objects if (number := _number(each.get("multipleOf")))]
    unit = math.lcm(*(number.denominator for number in multiples))
    if math.lcm(*(int(number * unit) for number in multiples)) > _MAX_MULTIPLE:
        raise GrammarError(
            "the least common multiple of all multipleOf values is too large; remove multipleOf, or use values with a "
            "smaller common multiple"
        )
    return [{"json_schema": {**_with_inclusive_bounds(schema), "x-guidance": {"whitespace_pattern": _WHITESPACE}}}]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a JSON value."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(each)


def _number(value: Any) -> Fraction | None:
    """Return the exact value of a number as written in JSON; None if the value is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return Fraction(value) if isinstance(value, int) else Fraction(str(value)) if math.isfinite(value) else None


def _with_inclusive_bounds(schema: Any) -> Any:
    """Return a schema in which inclusive bounds, stricter by `_STEP`, replace the exclusive bounds of non-integers.

    Otherwise, an answer could contain 2.0000000000000000001, which float64 rounds to the excluded bound 2.
    """
    if isinstance(schema, list):
        return [_with_inclusive_bounds(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            changed[key] = {name: _with_inclusive_bounds(each) for name, each in value.items()}
        else:
            changed[key] = value if key in _KEYWORDS_WITH_VALUES else _with_inclusive_bounds(value)
    if schema.get("type") == "integer":
        return changed
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound, given = _number(schema.get(exclusive)), _number(schema.get(inclusive))
        if bound is None or abs(bound) > sys.float_info.max / 2:  # llguidance rejects such a bound
            continue
        nearest = float(bound + sign * _STEP * abs(bound or 1))
        if given is None or sign * (nearest - given) > 0:
            changed[inclusive] = nearest
        del changed[exclusive]
    return changed


def regex_grammar(pattern: str) -> Grammar:
    """Return the grammar of texts that match a regular expression from start to end.

    Args:
        pattern: regular expression in the syntax of Rust's crate `regex`, without word boundaries and look-around.
    """
    return json.loads(_llguidance().LLMatcher.grammar_from_regex(pattern))["grammars"]


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return the grammar that allows exactly the texts of a list."""
    return [{"lark_grammar": "start: " + " | ".join(map(json.dumps, choices))}]


def combined_grammar(start: str, parts: Mapping[str, Grammar]) -> Grammar:
    """Return a grammar with the rules `start` in Lark's syntax, which refer to other grammars as `@name`.

    Args:
        start: rules, beginning with the rule `start`.
        parts: grammars by name; each grammar has a single part.
    """
    return [{"lark_grammar": start}, *({**part, "name": name} for name, (part,) in parts.items())]


class GrammarCompiler:
    """Compiler of grammars for the tokens of a tokenizer.

    Args:
        tokenizer: a tokenizer of transformers with a `tokenizer.json`. Only the constructor reads the tokenizer.

    Raises:
        ValueError: llguidance is not installed, or the tokenizer is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        _llguidance()
        core = getattr(tokenizer, "backend_tokenizer", None)
        if core is None or not hasattr(core, "to_str"):
            raise GrammarError(
                "structured answers need a fast tokenizer (from tokenizer.json or a GGUF file), not a "
                f"{type(tokenizer).__name__}"
            )
        core = copy.copy(core)
        core.no_truncation()
        core.no_padding()
        core.add_special_tokens([_END])
        self._end = core.token_to_id(_END)
        self._json = core.to_str()

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the state at the start of an answer.

        The first call takes a second or more, because it indexes the vocabulary.

        Raises:
            GrammarError: the grammar is invalid, too large or too complex, or no text matches it.
        """
        library = _llguidance()
        text = json.dumps({"grammars": grammar})
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"the grammar has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}")
        limits = library.LLParserLimits(**_LIMITS)
        matcher = library.LLMatcher(_indexed_vocabulary(self._json, self._end), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_message(matcher))
        matcher.compute_bitmask()  # prepares the masks once, for all copies of the state
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError("no text matches the grammar")
        return GrammarState(matcher, self._end)


class GrammarState:
    """Position of a row in the grammar of its answer.

    Args:
        matcher: `llguidance.LLMatcher`.
        end: the library's end token, whose id follows the last token of the tokenizer.
    """

    def __init__(self, matcher: Any, end: int) -> None:
        self._matcher, self._end = matcher, end

    def copy(self) -> GrammarState:
        """Return an independent state at the same position."""
        return GrammarState(self._matcher.deep_copy(), self._end)

    def allowed_tokens(self, vocab_size: int, end_tokens: Collection[int]) -> NDArray[np.bool_]:
        """Return a mask of the tokens that may come next, bool [V].

        Args:
            vocab_size: number of logits, V.
            end_tokens: token ids that end the answer.

        Raises:
            GrammarError: the grammar is too complex at this position, or no token of the vocabulary continues the text.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed_V = np.zeros(vocab_size, np.bool_)
        known = min(vocab_size, self._end)
        allowed_V[:known] = np.unpackbits(bits, count=known, bitorder="little")
        allowed_V[[token for token in end_tokens if token < vocab_size]] = self._matcher.is_accepting()
        if not allowed_V.any():
            raise GrammarError(_DEAD_END)
        return allowed_V

    def advance(self, token: int) -> None:
        """Append a token that is not an end token.

        Raises:
            GrammarError: the grammar is too complex at this position.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_complete(self) -> bool:
        """True if the text matches the grammar and cannot be continued."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_message(self._matcher))


def _message(matcher: Any) -> str:
    """Return llguidance's error in one line of at most 300 characters, without the dump of the state."""
    text = matcher.get_error().partition("<state>")[0].partition("<non-verbose/>")[0]
    if text.startswith("NoExtension"):
        return _DEAD_END
    return " ".join(text.split())[:300]


@functools.lru_cache(maxsize=8)  # cached, because the adapters of a server share the tokenizer of their base
def _indexed_vocabulary(tokenizer_json: str, end: int) -> Any:
    return _llguidance().LLTokenizer(tokenizer_json, eos_token=end)


def _llguidance() -> Any:
    return import_extra("llguidance", "structured", "structured answers")
