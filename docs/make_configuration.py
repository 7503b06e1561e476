"""Update the tables of keys in docs/configuration.md and docs/reference, and the schemas in the package.

python docs/make_configuration.py
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.help_text import schema_file, show_default
from paddlenlp_ext.config.key_schema import program_schema, schema_text
from paddlenlp_ext.config.key_tables import markdown_tables
from paddlenlp_ext.config.known_keys import KnownKeys, known_keys, program_options
from paddlenlp_ext.config.programs import PROGRAMS, find_program
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.config.toolkit_keys import TOOLKIT_GROUPS
from paddlenlp_ext.peft.registry import peft_methods

PAGE = Path(__file__).with_name("configuration.md")
PREFERENCE_PAGE = Path(__file__).parent / "reference" / "preference.md"
GRPO_PAGE = PREFERENCE_PAGE.with_name("grpo.md")
KEYS = ("<!-- keys: made by docs/make_configuration.py -->\n", "<!-- end of keys -->\n")
REWARD_KEYS = (
    "<!-- keys of reward models: made by docs/make_configuration.py -->\n",
    "<!-- end of keys of reward models -->\n",
)
TOOLKITS = ("<!-- toolkits: made by docs/make_configuration.py -->\n", "<!-- end of toolkits -->\n")
DEFAULTS = ("<!-- defaults: made by docs/make_configuration.py -->\n", "<!-- end of defaults -->\n")

_NO_DROPOUT = "the decoders have no dropout; PaddleNLP's Llama, Mistral and Qwen2 ignore the key"
DIFFERENT_DEFAULTS: dict[str, tuple[Any, str]] = {
    "sharding_parallel_degree": (
        1,
        "as in PaddleNLP's code: -1 means all remaining devices, and 1 no sharding",
    ),
    "position": ("f7", "as in PaddleNLP's code"),
    "intervention_type": ("LoReftIntervention", "only the spelling differs; both spellings are accepted"),
    "device": ("gpu", "`auto` uses a GPU if there is one, and the CPU otherwise"),
    "report_to": ("visualdl", "trackers are extra packages; the metrics are always written to `metrics.jsonl`"),
    "num_cycles": (0.5, "0.5 with `cosine`, and 1 with `cosine_with_restarts`, as in transformers"),
    "hidden_dropout_prob": (0.1, _NO_DROPOUT),
    "attention_probs_dropout_prob": (0.1, _NO_DROPOUT),
}
"""Key -> PaddleNLP's documented default, and the reason for a different default."""


def renew(page: str) -> str:
    """Return the page with its tables generated from the code."""
    known = known_keys(peft_methods())
    page = _replace(_replace(page, KEYS, markdown_tables(known)), DEFAULTS, defaults_table(known))
    return _replace(page, TOOLKITS, toolkit_tables())


def renew_preference(page: str) -> str:
    """Return docs/reference/preference.md with its tables generated from the code: keys that fine-tuning lacks."""
    page = _replace(page, KEYS, _own_keys(PREFERENCE_SECTIONS))
    return _replace(page, REWARD_KEYS, _own_keys({"reward": REWARD_SECTIONS["reward"]}))


def renew_grpo(page: str) -> str:
    """Return docs/reference/grpo.md with its table generated from the code: keys that fine-tuning lacks."""
    program = find_program("run_grpo.py")
    return _replace(page, KEYS, _own_keys(program.sections, program.unread))


def _own_keys(sections: Mapping[str, type], unread: Collection[str] = ()) -> str:
    options = [
        option
        for name, section in sections.items()
        if section is not SECTIONS.get(name)
        for option in options_of(section, name)
        if option.key not in unread and (name not in SECTIONS or option not in options_of(SECTIONS[name], name))
    ]
    return markdown_tables(program_options(options))


def schemas() -> dict[Path, str]:
    """Return the JSON schemas of all programs: file -> text."""
    methods = peft_methods()
    return {schema_file(program.name): schema_text(program_schema(program, methods)) for program in PROGRAMS}


def defaults_table(known: KnownKeys) -> str:
    """Return the defaults that differ from PaddleNLP's, as a Markdown table."""
    lines = ["| key | default of PaddleNLP | default of this library | reason |", "|---|---|---|---|"]
    for key, (documented, reason) in DIFFERENT_DEFAULTS.items():
        here = show_default(known.options[known.keys[key]].default)
        lines.append(f"| `{key}` | {show_default(documented)} | {here} | {reason} |")
    return "\n".join(lines) + "\n"


def toolkit_tables() -> str:
    """Return the keys of other toolkits and their meanings as Markdown tables."""
    lines = []
    for title, entries in TOOLKIT_GROUPS.items():
        lines += [f"### Toolkit keys: {title}", "", "| toolkit key | here |", "|---|---|"]
        lines += [f"| {', '.join(f'`{key}`' for key in entry['keys'])} | {_here(entry)} |" for entry in entries]
        lines.append("")
    return "\n".join(lines)


def _here(entry: Mapping[str, Any]) -> str:
    """Return the meaning of a toolkit key: a key, keys for some values, or an explanation."""
    if "is" in entry:
        return f"`{entry['is']}`"
    if entry.get("outcome") == "no effect":
        return f"no effect: {entry['reason']}"
    accepted = [value for value in entry.get("neutral", ()) if value not in ("", [], {})]
    values_by_meaning: dict[str, list[str]] = {"": [_shown(value) for value in accepted]}
    for value, keys in entry.get("sets", {}).items():
        meaning = " and ".join(f"`{key}: {show_default(each)}`" for key, each in keys.items())
        values_by_meaning.setdefault(meaning, []).append(_shown(value))
    accepted_words = values_by_meaning.pop("")
    clauses = [f"{_listed(words)} {'set' if words[1:] else 'sets'} {what}" for what, words in values_by_meaning.items()]
    if accepted_words:
        clauses.append(f"{_listed(accepted_words)} {'are' if accepted_words[1:] else 'is'} accepted")
    shown = {*accepted_words, *(_shown(value) for value in entry.get("sets", {}))}
    refused = [word for word in ("`true`", "`false`") if word not in shown] if entry["type"] == "bool" else []
    if clauses and refused:
        clauses.append(f"{refused[0]} is an error: {entry['reason']}")
    elif entry["type"] != "bool" or not clauses:
        clauses.append(f"{'other values are errors' if clauses else 'error'}: {entry['reason']}")
    return "; ".join(clauses)


def _shown(value: Any) -> str:
    return f"`{value if isinstance(value, str) else show_default(value)}`"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _replace(page: str, markers: tuple[str, str], text: str) -> str:
    before, rest = page.split(markers[0])
    _, after = rest.split(markers[1])
    return f"{before}{markers[0]}\n{text}\n{markers[1]}{after}"


if __name__ == "__main__":
    for path, make in ((PAGE, renew), (PREFERENCE_PAGE, renew_preference), (GRPO_PAGE, renew_grpo)):
        path.write_text(make(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path, text in schemas().items():
        path.write_text(text, encoding="utf-8")
