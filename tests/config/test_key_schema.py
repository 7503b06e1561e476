"""JSON schemas of the programs: equal to the code, and accepting the same values as the parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paddlenlp_ext.config.dataclass_options import Option, convert
from paddlenlp_ext.config.help_text import read_keys, schema_file
from paddlenlp_ext.config.known_keys import KnownKeys, known_keys
from paddlenlp_ext.config.paddlenlp_keys import CompatKey
from paddlenlp_ext.config.programs import PROGRAMS, Program
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.scripts import ROOT, load_script

BY_NAME = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
NUMBERS = (-1, 0, 1, 2, 7, 0.5, 1e-9, 1e9 + 0.5)
PROBES: tuple[Any, ...] = (None, True, *NUMBERS, "", "x", "true", [], ["x"], [1], {}, {"a": "b"}, {"a": None}, {"a": 1})


def schema_of(program: Program) -> dict[str, Any]:
    return json.loads(schema_file(program.name).read_text(encoding="utf-8"))


def known_keys_of(program: Program) -> KnownKeys:
    return known_keys(peft_methods() if program.has_adapters else {}, program.sections)


def test_schema_files_equal_the_schemas_of_the_code():
    schemas = load_script(ROOT / "docs" / "make_configuration.py").schemas()
    assert set(schemas) == set(schema_file("sft").parent.glob("*"))
    for path, text in schemas.items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/make_configuration.py"


@BY_NAME
def test_schema_accepts_the_names_that_the_parser_accepts(program: Program):
    schema, known = schema_of(program), known_keys_of(program)
    on_command_line = {spelling for key in schema["x-command-line"] for spelling in known.options[key].spellings}
    assert schema["properties"].keys() == {*known.keys, "$schema"} - on_command_line
    assert not schema["additionalProperties"]


def test_schema_accepts_the_values_that_the_parser_accepts():
    jsonschema.Draft202012Validator.check_schema(schema_of(PROGRAMS[1]))
    seen: list[Option] = []
    for program in PROGRAMS:
        properties, known = schema_of(program)["properties"], known_keys_of(program)
        for key, option in known.options.items():
            if key in known.toolkit or option.section == "command" or option in seen:
                continue
            seen.append(option)
            validator = jsonschema.Draft202012Validator(properties[key])
            choices = (*(option.limits.choices or ()), *option.synonyms, *(option.limits.flags or ()))
            for value in (*PROBES, *choices, [*choices]):
                assert validator.is_valid(value) == parses(option, value, known.compat.get(key)), (key, value)
    assert len(seen) > 250


def parses(option: Option, value: Any, entry: CompatKey | None) -> bool:
    try:
        read = value if value is None else convert(option, value, from_command_line=False)
    except ValueError:
        return False
    is_limited = entry is not None and entry.outcome != "no effect" and entry.needs is None
    return value is None or not is_limited or read in entry.neutral


def test_schema_accepts_shipped_configurations():
    validators = {program.name: jsonschema.Draft202012Validator(schema_of(program)) for program in PROGRAMS}
    names = {"dpo": "dpo", "reward": "reward", "ptq": "quantize", "gptq": "quantize", "awq": "quantize"}
    for path in (ROOT / "llm" / "config" / "llama").glob("*.json"):
        validator = validators[names.get(path.stem.split("_")[0], "sft")]
        assert [error.message for error in validator.iter_errors(json.loads(path.read_text()))] == [], path


@BY_NAME
def test_read_keys_describes_every_key(program: Program):
    keys, known = read_keys(program.name), known_keys_of(program)
    assert keys.keys() == known.options.keys() - {key for key in known.keys if key not in known.options}
    for key, entry in keys.items():
        assert entry["description"] and "\n" not in entry["description"], key
        assert set(entry.get("x-with", ())) <= keys.keys() and key not in entry.get("x-with", ())
    assert Path(schema_file(program.name)).is_file()
