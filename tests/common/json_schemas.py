"""Random JSON schemas, with the keywords that clients send."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "age", "tags", "größe", 'quoted "key"', "a/b", "value", "$ref", "type", "items")


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties; a model may write other properties without end."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {"additionalProperties": False} if schema.get("type") == "object" else {}
    return {key: closed(value) for key, value in schema.items()} | own


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of an object whose properties have up to `depth` levels."""
    schema = _object(rng, depth)
    if rng.random() < 0.3:  # a definition, as pydantic writes nested models
        schema["$defs"] = {"Item": _object(rng, depth - 1)}
        schema["properties"]["item"] = {"$ref": "#/$defs/Item"}
        schema["required"] = [*schema["required"], "item"]
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.8:
        schema["additionalProperties"] = False
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _number, _constant, _any_of, *([_array, _object] if depth > 0 else [])]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    shortest = rng.randint(0, 3)
    return {
        "type": "string",
        **rng.choice(
            (
                {"minLength": shortest, "maxLength": shortest + rng.randint(0, 9)},
                {"pattern": rng.choice(("^[a-z]{2,5}$", r"^\d{4}-\d{2}$", "^(yes|no|[^a-y]{3})$"))},
                {"format": rng.choice(("date", "date-time", "ipv4", "uuid"))},
                {"enum": rng.sample(["red", "grün", 'a"b', "\\", "\n", ""], 3)},
            )
        ),
    }


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    smallest = rng.randint(-1000, 1000)
    if rng.random() < 0.5:
        step = {"multipleOf": rng.choice((2, 5, 7))} if rng.random() < 0.3 else {}
        return {"type": "integer", "minimum": smallest, "maximum": smallest + rng.randint(20, 10**6), **step}
    return {"type": "number", "exclusiveMinimum": smallest, "maximum": smallest + 1.5}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(({"const": rng.choice(("x", 3, None, [1, {"a": True}]))}, {"type": "boolean"}, {"type": "null"}))


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1) if depth > 0 else _string(rng, 0), {"type": "null"}]}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    fewest = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": fewest, "maxItems": fewest + 2}
