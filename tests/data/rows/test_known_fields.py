"""Fields of rows: each known field is obeyed or refused, and unknown fields are named.

`row_fields.txt` is the table of outcomes. Write it again with `python -m tests.data.rows.test_known_fields`.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.prediction_prompts import parse_prompt
from paddlenlp_ext.data.rows import known_fields as row_fields
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import NO_TARGET, DataError, InvalidRowError
from paddlenlp_ext.data.rows.row_formats import parse_row, parse_text
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.tokenization.statistics import DataStats
from tests.data.tiny_tokenizers import CHATML, TEMPLATES, make_marking_tokenizer

TABLE = Path(__file__).with_name("row_fields.txt")
DOCS = Path(__file__).parents[3] / "docs"

MESSAGES = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": [{"type": "text", "text": "a2"}]},
]
ROWS = {
    "src_tgt": {"src": ["q1", "q2"], "tgt": ["a1", "a2"]},
    "messages": {"messages": MESSAGES},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "q1"},
            {"from": "gpt", "value": "a1"},
            {"from": "human", "value": "q2"},
            {"from": "gpt", "value": "a2"},
        ]
    },
    "alpaca": {"instruction": "q2", "output": "a2", "history": [["q1", "a1"]]},
    "query": {"query": "q2", "response": "a2", "history": [["q1", "a1"]]},
    "prompt": {"prompt": "q1", "completion": "a1"},
    "chat": {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]},
    "text": {"text": "q1 a1"},
}
PLACES = {
    **{f"{name} row": (name, ()) for name in ROWS},
    "messages question": ("messages", ("messages", 2)),
    "messages answer": ("messages", ("messages", 3)),
    "messages part": ("messages", ("messages", 3, "content", 0)),
    "sharegpt question": ("sharegpt", ("conversations", 2)),
    "sharegpt answer": ("sharegpt", ("conversations", 3)),
    "chat question": ("chat", ("prompt", 2)),
    "chat answer of prompt": ("chat", ("prompt", 1)),
    "chat answer": ("chat", ("completion", 0)),
}
"""Name of a place in a row -> format of the row, and path of the object that the place is."""
VALUES = (
    *(None, False, True, 0, 0.0, 1, 0.5, -1, "", "[]", "0", "word", "false", "negative", "true"),
    *([], [0], [0, 1], ["word"], {}, {"word": 1}),
)
FORMATS = (*row_fields.CONVERSATION_FORMATS, row_fields.TEXT)
READ = {name for row_format in FORMATS for name in (*row_format.fields, *row_format.message, *row_fields.PART)}
FIELDS = sorted(
    {
        *READ,
        *row_fields.LOSS_WEIGHTS,
        *(name for refusal in row_fields.REFUSALS for name in refusal.names),
        *row_fields.METADATA,
        "an_unknown_field",
    }
)


def is_read(field: str, place: str) -> bool:
    """Return whether the format of a place reads a field there."""
    name, path = PLACES[place]
    if name == "text" or "content" in path:
        return False
    row_format = {"messages": row_fields.MESSAGES, "chat": row_fields.PROMPT, "sharegpt": row_fields.SHAREGPT}.get(name)
    return field in (row_fields.CONTEXT if not path or row_format is None else row_format.message)


def targets_of(conversation: Conversation) -> list[bool]:
    return [answer.is_target for answer in conversation.answers]


def as_targets(conversation: Conversation) -> Conversation:
    messages = (replace(m, is_target=m.is_answer) for m in conversation.messages)
    return replace(conversation, messages=tuple(messages))


def outcome(place: str, field: str, value: object) -> str:
    """Return the effect of a field.

    "read": the conversation changes. "context", "target": an answer no longer contributes to the loss, or now does.
    "invalid": the row is refused. "named": no effect, and named in the log. "-": no effect.
    """
    return outcome_of_json(place, field, json.dumps(value))


@functools.cache
def outcome_of_json(place: str, field: str, text: str) -> str:
    value = json.loads(text)
    row_format, path = PLACES[place]
    row = copy.deepcopy(ROWS[row_format])
    part: dict = row
    for step in path:
        part = part[step]
    part[field] = value
    parse = parse_text if row_format == "text" else parse_row
    before = parse(ROWS[row_format])
    try:
        after = parse(row)
    except InvalidRowError as error:
        at_field = error.path[: len(path) + 1] == (*path, field) or error.reason == NO_TARGET
        assert field in READ or at_field, f"{place} {field} {value!r}: {error.path}"
        return "invalid"
    is_same_length = isinstance(before, Conversation) and len(before.answers) == len(after.answers)
    if is_same_length and targets_of(before) != targets_of(after):
        assert as_targets(after) == as_targets(before)
        return "context" if sum(targets_of(after)) < sum(targets_of(before)) else "target"
    if after != before:
        return "read"
    return (
        "named" if any(name.endswith(field) for name in row_fields.unknown_fields(row, row_format == "text")) else "-"
    )


def table() -> str:
    """Return the outcome of every known field, at every place, with every value."""
    lines = []
    for field in FIELDS:
        places: dict[str, list[str]] = {}
        for place in PLACES:
            values: dict[str, list[str]] = {}
            for value in VALUES:
                values.setdefault(outcome(place, field, value), []).append(json.dumps(value))
            effects = "; ".join(f"{effect}: {' '.join(shown)}" for effect, shown in sorted(values.items()))
            places.setdefault(effects if len(values) > 1 else f"{effects.partition(':')[0]}: all", []).append(place)
        lines.append(field)
        lines += [f"    {', '.join(names) if len(places) > 1 else 'everywhere'} | {e}" for e, names in places.items()]
    return "\n".join(lines) + "\n"


def test_row_fields_have_the_recorded_outcomes():
    assert table() == TABLE.read_text(encoding="utf-8"), "see the module's docstring if the change is meant"


NO = (False, 0, 0.0, -0.0, -1, float("nan"), "0", "false", "False", "no", "none", "null", "negative", "bad", "rejected")
"""Values that say that a row or an answer is not to be learned."""
UNSET = (None, "", [], {})


def test_row_fields_that_say_do_not_learn_are_obeyed_or_refused():
    answers = {place for place in PLACES if "answer" in place}
    for field in (*row_fields.LOSS_WEIGHTS, *row_fields.RATINGS.names):
        for place in PLACES:
            allowed = {"context", "invalid"} if field in row_fields.LOSS_WEIGHTS and place in answers else {"invalid"}
            if "question" in place or place == "chat answer of prompt":
                allowed = {"invalid", "-"}  # they are not learned anyway
            outcomes = {outcome(place, field, value) for value in NO}
            assert outcomes <= allowed, (field, place)
            if field in row_fields.RATINGS.names:
                assert {outcome(place, field, value) for value in UNSET} == {"-"}, (field, place)


def test_row_fields_that_ask_for_something_unsupported_have_an_effect_only_as_a_refusal():
    for refusal in row_fields.REFUSALS:
        for field in refusal.names:
            for place in PLACES:
                if is_read(field, place):
                    continue
                for value in VALUES:
                    accepted = value in refusal.accepted or (field, place) == ("label", "src_tgt row")
                    effect = outcome(place, field, value)
                    assert effect == "invalid" if not accepted else effect in ("-", "context", "invalid"), (
                        field,
                        value,
                    )


def test_row_fields_table_of_the_docs_is_current():
    spec = importlib.util.spec_from_file_location("make_data", DOCS / "make_data.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    page = (DOCS / "reference" / "data_formats.md").read_text(encoding="utf-8")
    assert maker.renew(page) == page, "run: python docs/make_data.py"


def test_row_fields_are_in_one_group_each():
    groups = [name for refusal in row_fields.REFUSALS for name in refusal.names]
    names = [*groups, *row_fields.LOSS_WEIGHTS, *row_fields.METADATA]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("refusal", row_fields.REFUSALS, ids=lambda refusal: refusal.names[0])
def test_parse_row_with_a_refused_field_names_field_and_remedy(refusal):
    for name in refusal.names:
        row, path = ROWS["alpaca"] | {name: "word"}, (name,)
        if name in row_fields.ALPACA.fields:
            row, path = {"messages": [MESSAGES[0], MESSAGES[1] | {name: "word"}]}, ("messages", 1, name)
        with pytest.raises(InvalidRowError) as caught:
            parse_row(row)
        assert str(caught.value) == f"{name} {refusal.problem}; {refusal.remedy}"
        assert (caught.value.path, caught.value.reason) == (path, "not supported")


@pytest.mark.parametrize("name", ["src_tgt", "messages", "sharegpt", "alpaca"])
def test_parse_row_with_weight_0_of_the_row_has_no_target(name):
    for field in row_fields.LOSS_WEIGHTS:
        for value in (0, 0.0, False):
            with pytest.raises(InvalidRowError, match="remove the row") as caught:
                parse_row(ROWS[name] | {field: value})
            assert (caught.value.path, caught.value.reason) == ((field,), "no target token")


def test_parse_row_with_weight_0_of_every_answer_has_no_target():
    messages = [message | {"weight": 0} for message in MESSAGES]
    with pytest.raises(InvalidRowError, match="every answer has weight 0") as caught:
        parse_row({"messages": messages})
    assert caught.value.reason == "no target token"


def weighted(*weights: object) -> dict:
    """Return a row of questions q0, q1, ... and answers a0, a1, ..., with the weights of the answers."""
    messages = []
    for index, weight in enumerate(weights):
        messages.append({"role": "user", "content": f"{index}0"})
        messages.append({"role": "assistant", "content": f"{index}1", "weight": weight})
    return {"messages": messages}


def write(folder: Path, *rows: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def targets(dataset, tokenizer) -> list[str]:
    rows = (dataset[index] for index in range(len(dataset)))
    return [tokenizer.decode(row.tokens[row.loss_mask]) for row in rows]


@pytest.mark.parametrize("name", ["none", *(name for name in TEMPLATES if name != "thinking")])
def test_load_dataset_with_weights_masks_the_context_only(name, options, tokenizer, tmp_path):
    tokenizer = make_marking_tokenizer() if name == "marked" else tokenizer
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATES.get(name, (CHATML,))[0])
    folder = write(tmp_path / "set", weighted(1, 0, 1), weighted(1, 1, 1))
    chat_template = "none" if name == "none" else str(template)
    config = options(folder, chat_template=chat_template, src_length=999, max_length=999)
    masked, full = (load_dataset(config, "train", tokenizer)[index] for index in range(2))
    assert masked.tokens.tolist() == full.tokens.tolist()
    turns = load_template(chat_template, tokenizer).encode_turns(
        [load_template(chat_template, tokenizer).render(parse_row(weighted(1, 1, 1)))[0].turns]
    )[0]
    before = turns[0].length + len(turns[1].prompt)
    expected = full.loss_mask.copy()
    expected[before : before + len(turns[1].answer)] = False
    assert masked.loss_mask.tolist() == expected.tolist() != full.loss_mask.tolist()


@pytest.mark.parametrize(
    ("truncation", "max_length", "weights", "expected"),
    [
        ("right", 99, (1, 0, 1), "01</s>21</s>"),
        ("right", 12, (1, 0, 1), "01</s>"),
        ("right", 12, (0, 1, 1), "11</s>"),
        ("left", 12, (1, 0, 1), "21</s>"),
        ("left", 12, (0, 1, 0), "11</s>"),
        ("right", 12, (0, 0, 1), None),
        ("left", 12, (1, 0, 0), None),
    ],
)
def test_load_dataset_with_weights_and_truncation_masks_the_same_answers(
    truncation, max_length, weights, expected, options, tokenizer, tmp_path
):
    folder = write(tmp_path / "set", weighted(*weights))
    config = options(folder, truncation=truncation, max_length=max_length)
    if expected is None:
        with pytest.raises(DataError, match="truncation leaves only answers of weight 0"):
            load_dataset(config, "train", tokenizer)
        return
    assert targets(load_dataset(config, "train", tokenizer), tokenizer) == [expected]


def test_prompts_of_a_row_with_weights_ask_the_last_target(options, tokenizer, tmp_path):
    dataset = load_dataset(options(write(tmp_path / "set", weighted(0, 1, 0))), "train", tokenizer)
    ((ids, answer, question),) = dataset.prompts()
    assert (tokenizer.decode(ids), answer, question) == ("0001</s>10", "11", "10")


def test_parse_row_with_llama_factory_messages_reads_text_and_weights():
    def message(role: str, text: str, weight: float) -> dict:
        return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": weight}

    turns = [message("user", "q1", 0.0), message("assistant", "a1", 0.0), message("user", "q2", 0.0)]
    row = {"messages": [message("system", "You", 0.0), *turns, message("assistant", "a2", 1.0)]}
    assert parse_row(row) == Conversation.from_turns("You", (("q1", "a1"), ("q2", "a2")), frozenset({0}))


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "", "input": "b"}, "b"),
        ({"instruction": None, "input": "b"}, "b"),
        ({"input": "b"}, "b"),
        ({"instruction": "a", "input": ""}, "a"),
        ({"instruction": "a", "input": "b"}, "a\nb"),
    ],
)
def test_parse_row_alpaca_joins_instruction_and_input(row, question):
    assert parse_row(row | {"output": "c"}) == Conversation.from_turns(None, [(question, "c")])
    assert parse_prompt(row).text == question


def test_parse_prompt_ignores_weights_and_ratings():
    row = weighted(0, 0) | {"label": False, "train": 0.5}
    assert (parse_prompt(row).text, parse_prompt(row).reference) == ("10", "11")
    with pytest.raises(InvalidRowError, match="tools"):
        parse_prompt(row | {"tools": ["word"]})


def test_load_dataset_names_unknown_fields_once_per_file(options, tokenizer, tmp_path, caplog):
    folder = tmp_path / "set"
    (folder / "train").mkdir(parents=True)
    chat = {"messages": [message | {"note": 1} for message in MESSAGES], "id": 7}
    for name, rows in (("a.json", [{"src": "a", "tgt": "b", "foo": 1, "text": "c"}] * 2), ("b.json", [chat])):
        (folder / "train" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = str(folder / "train" / "a.json"), str(folder / "train" / "b.json")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="paddlenlp_ext"):
            stats = load_dataset(options(folder), "train", tokenizer).stats
        assert stats.unknown_fields == {first: {"foo": 2, "text": 2}, second: {"messages[].note": 1}}
        lines = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
        assert lines == [
            f"{first}: fields without effect: foo (2 rows), text (2 rows)",
            f"{second}: fields without effect: messages[].note (1 row)",
        ]


def test_load_dataset_with_equal_fields_of_other_values_checks_the_values(options, tokenizer, tmp_path):
    """Test rows whose fields have the same names, so that the checks of the names are computed once."""
    rows = [{"src": "a", "tgt": "b", "foo": foo, "images": images} for foo, images in (("", []), (1, []), (2, ["c"]))]
    folder = write(tmp_path / "set", *rows)
    stats = load_dataset(options(folder, bad_rows="drop"), "train", tokenizer).stats
    assert stats.unknown_fields == {str(folder / "train.json"): {"foo": 2}}
    assert stats.dropped == {"not supported": 1} and stats.examples[0].location.line == 3


def test_load_dataset_autoregressive_names_the_fields_beside_the_text(options, tokenizer, tmp_path):
    rows = ({"src": "a", "text": "b", "tgt": "c"}, {"text": "a", "system": "You", "messages": MESSAGES})
    folder = write(tmp_path / "set", *rows)
    stats = load_dataset(options(folder, autoregressive=True), "train", tokenizer).stats
    assert stats.unknown_fields == {
        str(folder / "train.json"): {"text": 1, "tgt": 1, "system": 1, "messages": 1},
    }


def test_template_encode_masks_context_turns(tokenizer):
    ((tokens, mask),) = load_template("none", tokenizer).encode(parse_row(weighted(0, 1)))
    assert tokenizer.decode([token for token, flag in zip(tokens, mask, strict=True) if flag]) == "11</s>"


def test_describe_unknown_fields_lists_the_most_frequent():
    stats = DataStats(unknown_fields={"f": {f"n{index:02}": index for index in range(1, 26)}})
    (line,) = stats.describe_unknown_fields()
    assert line.startswith("f: fields without effect: n25 (25 rows), n24") and line.endswith("n06 (6 rows) and 5 more")


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
