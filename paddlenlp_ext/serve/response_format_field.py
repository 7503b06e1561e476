"""Parse the fields that restrict the text of an answer to a grammar: `response_format`, and vLLM's fields.

| field | answer |
|---|---|
| `response_format` | any JSON object, or a value of a JSON schema |
| `structured_outputs` | `json`: a value of a JSON schema; `regex`: a match; `choice`: one of several strings |
| `guided_json`, `guided_regex`, `guided_choice` | earlier names of vLLM's fields |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.data.rows.checked_values import type_name
from paddlenlp_ext.generation.grammar import Grammar, choice_grammar, json_schema_grammar, regex_grammar
from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.serve.request_fields import Fields, check_texts


@dataclass(frozen=True)
class AnswerFormat:
    """Grammar of an answer.

    Attributes:
        field: field of the request that sets the grammar, for errors.
        grammar: the grammar.
    """

    field: str
    grammar: Grammar

    def error(self, error: ValueError) -> ApiError:
        """Return the error of a request whose grammar cannot be used."""
        return invalid(self.field, str(error))


def parse_answer_format(fields: Fields) -> AnswerFormat | None:
    """Return the format of the answer, or None if the answer is free text.

    Raises:
        ApiError: a field is invalid, or two fields set a format.
    """
    found = [_response_format(fields), _structured_outputs(fields)]
    found += [_format(fields, f"guided_{kind}", kind) for kind in _KINDS]
    formats = [each for each in found if each is not None]
    if len(formats) > 1:
        raise invalid(formats[1].field, f"{formats[0].field} also sets a format; send one of the two")
    return formats[0] if formats else None


def _response_format(fields: Fields) -> AnswerFormat | None:
    given = fields.object("response_format")
    if given is None:
        return None
    kind, schema = given.text("type"), given.object("json_schema")
    if kind not in ("text", "json_object", "json_schema"):
        raise invalid("response_format.type", "send text, json_object or json_schema")
    if (schema is not None) != (kind == "json_schema"):
        raise invalid("response_format.json_schema", "send json_schema if the type is json_schema, else leave it out")
    found = None
    if schema is not None:
        for name in ("name", "description"):
            schema.text(name)
        schema.flag("strict")
        found = _format(schema, "schema", "json")
        if found is None:
            raise invalid(
                "response_format.json_schema.schema",
                "the field is missing; send a schema",
                "missing_required_parameter",
            )
        schema.check_all_read()
    elif kind == "json_object":
        found = AnswerFormat("response_format", json_schema_grammar({"type": "object"}))
    given.check_all_read()
    return found


def _structured_outputs(fields: Fields) -> AnswerFormat | None:
    given = fields.object("structured_outputs")
    if given is None:
        return None
    formats = [each for kind in _KINDS if (each := _format(given, kind, kind)) is not None]
    given.check_all_read()
    if len(formats) != 1:
        raise invalid("structured_outputs", f"send one of {', '.join(_KINDS)}")
    return formats[0]


def _format(fields: Fields, name: str, kind: str) -> AnswerFormat | None:
    """Return the format that a field sets; `kind` is a key of `_KINDS`."""
    value = fields.get(name)
    if value is None:
        return None
    path = fields.path_of(name)
    check_texts(value, path)
    expected, is_valid, grammar = _KINDS[kind]
    if not is_valid(value):
        raise invalid(path, f"the value is {type_name(value)}; send {expected}", "invalid_type")
    try:
        return AnswerFormat(path, grammar(value))
    except ValueError as error:
        raise invalid(path, str(error)) from None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


_KINDS: dict[str, tuple[str, Callable[[Any], bool], Callable[[Any], Grammar]]] = {
    "json": ("a JSON schema, which is an object", lambda value: isinstance(value, dict), json_schema_grammar),
    "regex": ("a regular expression, which is a string", lambda value: isinstance(value, str), regex_grammar),
    "choice": ("a list of at least one string", _is_texts, choice_grammar),
}
"""Kind of format -> description of the field's value, check of the value, and function that returns the grammar."""
