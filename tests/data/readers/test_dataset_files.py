"""Damaged data files: all errors are reported, each with file, line, column and reason."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.rows.errors import MAX_LISTED, DataError

GOOD = '{"src": "2 + 2?", "tgt": "vier"}'
LONG = "verb " * 200

BROKEN, TYPE, MISSING, UNKNOWN = "broken JSON", "wrong type", "missing key", "unknown format"
EMPTY, UNEQUAL, ROLES, TWICE = "empty target", "unequal lists", "role order", "duplicate key"
UTF8, SYSTEMS, UNSUPPORTED = "not UTF-8", "two system prompts", "not supported"
NO_TARGET, REFUSED = "no target token", "template refuses"


def messages(*pairs: tuple[str, object]) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in pairs]})


def sharegpt(*pairs: tuple[str, object]) -> str:
    return json.dumps({"conversations": [{"from": speaker, "value": value} for speaker, value in pairs]})


def at(text: str, part: str, occurrence: int = 1) -> int:
    """Return the column of a part of the line."""
    position = -1
    for _ in range(occurrence):
        position = text.index(part, position + 1)
    return position + 1


def located(text: str, part: str, reason: str, occurrence: int = 1) -> tuple[str, int, str]:
    return text, at(text, part, occurrence), reason


USER, ANSWER = ("user", "2 + 2?"), ("assistant", "vier")
HUMAN, GPT = ("human", "2 + 2?"), ("gpt", "vier")

# line, column of the reported error, reason
DAMAGED_LINES = [
    # not JSON
    ('{"src": "a", "tgt": "b"', 24, BROKEN),
    ('{"src": "a" "tgt": "b"}', 13, BROKEN),
    ('{"src": "a", "tgt": b}', 21, BROKEN),
    ('{"src": "a", "tgt": "b}', 21, BROKEN),
    ('{"src": "a", tgt: "b"}', 14, BROKEN),
    ("{'src': 'a', 'tgt': 'b'}", 2, BROKEN),
    ('{"src": "a", "tgt": "b"} {"src": "a", "tgt": "b"}', 26, BROKEN),
    ('{"src": "a", "tgt": "b"},', 25, BROKEN),
    ('{"src": "a\tb", "tgt": "b"}', 11, BROKEN),
    ('{"src": "a\\x", "tgt": "b"}', 11, BROKEN),
    ("not json", 1, BROKEN),
    ("{", 2, BROKEN),
    ('  {"src": "a", "tgt": }', 23, BROKEN),
    ("src,tgt", 1, BROKEN),
    ("[" * 100_000, 1, BROKEN),
    # JSON, but not a row
    ("[]", 1, TYPE),
    ('"text"', 1, TYPE),
    ("17", 1, TYPE),
    ("null", 1, TYPE),
    ("  true", 3, TYPE),
    ("{}", 1, UNKNOWN),
    ('{"question": "a", "answer": "b"}', 1, UNKNOWN),
    ('{"src": "a", "src": "b", "tgt": "c"}', 1, TWICE),
    ('{"src": "a", "tgt": "b", "messages": []}', 1, UNKNOWN),
    # src and tgt
    ('{"src": "a"}', 1, MISSING),
    ('{"tgt": "a"}', 1, MISSING),
    located('{"src": 3, "tgt": "b"}', "3", TYPE),
    located('{"src": "a", "tgt": null}', "null", TYPE),
    located('{"src": {"text": "a"}, "tgt": "b"}', '{"text', TYPE),
    located('{"src": "a", "tgt": true}', "true", TYPE),
    located('{"src": ["a", 2], "tgt": ["b", "c"]}', "2", TYPE),
    located('{"src": ["a", "b"], "tgt": ["c", ["d"]]}', '["d"', TYPE),
    located('{"src": "a", "tgt": ""}', '""', EMPTY),
    located('{"src": "a", "tgt": " \\n "}', '" \\n', EMPTY),
    located('{"src": ["a", "b"], "tgt": ["c", ""]}', '""', EMPTY),
    located('{"src": ["a", "b"], "tgt": ["c"]}', '["c', UNEQUAL),
    located('{"src": ["a"], "tgt": ["c", "d"]}', '["c', UNEQUAL),
    located('{"src": ["a", "b"], "tgt": "c"}', '"c', UNEQUAL),
    ('{"src": [], "tgt": []}', 1, EMPTY),
    located('{"src": "a", "tgt": "b", "context": "You"}', '"You', TYPE),
    located('{"src": "a", "tgt": "b", "context": {"system": 1}}', "1", TYPE),
    located('{"src": "a", "tgt": "b", "context": {"sistem": "You"}}', '"You', UNKNOWN),  # codespell:ignore sistem
    located('{"src": "a", "tgt": "b", "train": false}', "false", NO_TARGET),
    located('{"src": "a", "tgt": "b", "label": false}', "false", UNSUPPORTED),
    located('{"src": "a", "tgt": "b", "response": ["b", "c"], "sort": [1, 0]}', "[1", UNSUPPORTED),
    located('{"src": "a", "tgt": "b", "input": "c"}', '"c', UNSUPPORTED),
    located('{"src": "\\ud800", "tgt": "b"}', '"\\ud', UTF8),
    located('{"src": "a", "tgt": "\\udfff"}', '"\\ud', UTF8),
    located('{"src": "a", "tgt": "b", "tools": [{"name": "f", "description": "\\ud800"}]}', "[{", UTF8),
    located('{"src": "a", "tgt": "b", "chat_template_kwargs": {"day": ["\\ud800"]}}', '{"day', UTF8),
    located('{"src": "a", "tgt": "b", "tools": [{"name": "f", "\\ud800": 1}]}', "[{", UTF8),
    located('{"id": {"src": [1]}, "src": "a", "tgt": 7}', "7", TYPE),
    ('{"src": "a", "tgt": "b", "id": ' + "7" * 5000 + "}", 1, "number too long"),
    located('{"src": "a", "tgt": "b", "context": {"system": "You"}, "system": "I"}', '"You', SYSTEMS),
    # messages
    ('{"messages": []}', 1, EMPTY),
    located('{"messages": {"role": "user"}}', '{"role', TYPE),
    located('{"messages": ["hello"]}', '"hello', TYPE),
    located('{"messages": [{"content": "a"}]}', '{"content', MISSING),
    located('{"messages": [{"role": "user"}]}', '{"role', MISSING),
    located(messages(USER, ("assistant", None)), "null", TYPE),
    located(messages(USER, ("assistant", "")), '""', EMPTY),
    (messages(("system", "You")), 1, EMPTY),
    located(messages(ANSWER), '{"role', ROLES),
    located(messages(USER), '{"role', ROLES),
    located(messages(USER, USER, ANSWER), '{"role', ROLES, 2),
    located(messages(USER, ANSWER, ANSWER), '{"role', ROLES, 3),
    located(messages(USER, ("system", "You"), ANSWER), '{"role', ROLES, 2),
    located(messages(USER, ANSWER, USER), '{"role', ROLES, 3),
    located(messages(USER, ("tool", "4"), ANSWER), '{"role', ROLES, 2),
    located(messages(("usr", "a"), ANSWER), '{"role', ROLES),
    located(messages((3, "a"), ANSWER), '{"role', ROLES),
    located(messages(("user", [{"type": "image_url"}]), ANSWER), '{"type', TYPE),
    located(messages(("user", [{"type": "text"}]), ANSWER), '{"type', MISSING),
    located(messages(("user", [{"type": "text", "text": 1}]), ANSWER), "1", TYPE),
    located(messages(("system", "I"), USER, ANSWER)[:-1] + ', "system": "You"}', '"You', SYSTEMS),
    located(messages(("system", "I"), USER, ANSWER)[:-1] + ', "context": {"system": "You"}}', '"You', SYSTEMS),
    located(messages(USER, ANSWER)[:-1] + ', "system": 5}', "5", TYPE),
    (messages(USER, ANSWER).replace('"vier"', '"vier", "weight": 0'), 1, NO_TARGET),
    located(messages(USER, ANSWER).replace('"vier"', '"vier", "weight": 0.5'), "0.5", UNSUPPORTED),
    located(messages(USER, ANSWER).replace('?"', '?", "loss_weight": 1'), "1}", UNSUPPORTED),
    located(messages(USER, ANSWER).replace('"vier"', '"vier", "weight": 1, "train": false'), "false", UNSUPPORTED),
    located(messages(USER, ("assistant", [{"type": "text", "value": "a", "text": "b"}])), '"a"', UNSUPPORTED),
    located(messages(USER, ("assistant", [{"type": "text", "text": "a", "weight": 0}])), "0}", UNSUPPORTED),
    located(messages(USER, ("assistant", [{"type": "reasoning", "value": "a"}])), '[{"type', EMPTY),
    located(messages(("user", [{"type": "reasoning", "value": "a"}]), ANSWER), '{"type', TYPE),
    located(messages(USER, ANSWER).replace('"vier"', 'null, "tool_calls": [{"id": "a"}]'), '{"id', MISSING),
    located(messages(USER, ANSWER).replace('"vier"', '"vier", "reasoning_content": "a"'), '{"role', REFUSED, 2),
    located(messages(USER, ANSWER).replace('?"', '?", "reasoning_content": "a"'), '"a"', UNSUPPORTED),
    located(messages(USER, ANSWER)[:-1] + ', "tools": [{"name": "a"}]}', '[{"name', REFUSED),
    located(messages(USER, ANSWER)[:-1] + ', "tools": "[}"}', '"[}', TYPE),
    located(messages(USER, ANSWER)[:-1] + ', "enable_thinking": "false"}', '"false', TYPE),
    # sharegpt
    located('{"conversations": "hello"}', '"hello', TYPE),
    located('{"conversations": [{"role": "user", "content": "a"}]}', '{"role', MISSING),
    located(sharegpt(HUMAN, ("gpt", 4)), "4", TYPE),
    located(sharegpt(HUMAN, ("gpt", "  ")), '"  "', EMPTY),
    located(sharegpt(GPT, HUMAN), '{"from', ROLES),
    located(sharegpt(HUMAN, ("observation", "4"), GPT), '{"from', ROLES, 2),
    located(
        '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": 1}', "1", TYPE
    ),
    ('{"conversations": [], "tools": "[{}]"}', 1, EMPTY),
    located('{"conversations": [{"from": "gpt", "value": "a"}], "tools": "[{}]"}', '"[{}', MISSING),
    located('{"conversations": [{"from": "function_call", "value": "word"}]}', '"word', TYPE),
    # alpaca
    located('{"instruction": "a", "chosen": "b", "rejected": "c"}', '"b', UNSUPPORTED),
    located('{"instruction": "a", "output": "b", "context": "c"}', '"c"', TYPE),
    located('{"instruction": null, "output": "b"}', "null", TYPE),
    located('{"input": null, "output": "b"}', "{", TYPE),
    ('{"instruction": "a"}', 1, MISSING),
    ('{"instruction": "a", "input": "b"}', 1, MISSING),
    ('{"output": "a"}', 1, MISSING),
    located('{"instruction": "a", "output": ""}', '""', EMPTY),
    located('{"instruction": ["a"], "output": "b"}', '["a', TYPE),
    located('{"instruction": "a", "input": 3, "output": "b"}', "3", TYPE),
    located('{"instruction": "a", "output": "b", "system": []}', "[]", TYPE),
    located('{"instruction": "a", "output": "b", "history": "c"}', '"c', TYPE),
    located('{"instruction": "a", "output": "b", "history": [["q"]]}', '["q', TYPE),
    located('{"instruction": "a", "output": "b", "history": [["q", ""]]}', '""', EMPTY),
    located('{"instruction": "a", "output": "b", "history": [["q", 1]]}', "1", TYPE),
]


def write(tmp_path, lines: list[str] | bytes, name: str = "train.json"):
    folder = tmp_path / "set"
    folder.mkdir(exist_ok=True)
    content = lines if isinstance(lines, bytes) else ("\n".join(lines) + "\n").encode()
    (folder / name).write_bytes(content)
    return folder


def problems_of(options, folder, tokenizer, **changed):
    with pytest.raises(DataError) as caught:
        load_dataset(options(folder, **changed), "train", tokenizer)
    return caught.value


def test_load_dataset_damaged_line_cases_are_many_and_distinct():
    assert len(DAMAGED_LINES) >= 60
    assert len({line for line, _, _ in DAMAGED_LINES}) == len(DAMAGED_LINES)


@pytest.mark.parametrize(("line", "column", "reason"), DAMAGED_LINES, ids=lambda value: str(value)[:50])
def test_load_dataset_with_a_damaged_line_names_location_and_reason(line, column, reason, options, tokenizer, tmp_path):
    folder = write(tmp_path, [GOOD, "", line, GOOD])
    error = problems_of(options, folder, tokenizer)
    (problem,) = error.problems
    assert (problem.location.line, problem.location.column, problem.reason) == (3, column, reason)
    assert f"{folder / 'train.json'}:3:{column}: {reason}: " in str(error)
    dataset = load_dataset(options(folder, bad_rows="drop"), "train", tokenizer)
    assert dataset.stats.dropped == {reason: 1}
    assert (dataset.stats.num_read, dataset.stats.num_untruncated) == (3, 2)
    assert [dataset.source(index)[1] for index in range(len(dataset))] == [1, 4]


def test_load_dataset_with_many_damaged_lines_reports_all(options, tokenizer, tmp_path):
    lines = [line for line, _, _ in DAMAGED_LINES]
    folder = write(tmp_path, [GOOD, *lines])
    error = problems_of(options, folder, tokenizer)
    expected = [(number, column, reason) for number, (_, column, reason) in enumerate(DAMAGED_LINES, start=2)]
    assert [(p.location.line, p.location.column, p.reason) for p in error.problems] == expected
    message = str(error)
    assert message.startswith(f"{len(lines)} invalid rows:")
    assert message.count("train.json:") == MAX_LISTED and f"and {len(lines) - MAX_LISTED} more" in message
    account = load_dataset(options(folder, bad_rows="drop"), "train", tokenizer).stats
    assert account.num_dropped == len(lines) and account.num_read == len(lines) + 1
    assert sum(account.dropped.values()) + account.num_untruncated == account.num_read


TOO_LONG_ROWS = {
    "prompt": json.dumps({"src": LONG, "tgt": "vier"}),
    "answer": json.dumps({"src": "2 + 2?", "tgt": LONG * 2}),
    "both": json.dumps({"src": LONG, "tgt": LONG * 2}),
    "turns": json.dumps({"src": ["2 + 2?"] * 30, "tgt": ["vier"] * 30}),
}


@pytest.mark.parametrize("kind", TOO_LONG_ROWS)
@pytest.mark.parametrize("truncation", ["error", "drop", "right", "left"])
def test_load_dataset_with_long_rows_counts_or_reports_them(kind, truncation, options, tokenizer, tmp_path):
    folder = write(tmp_path, [GOOD, TOO_LONG_ROWS[kind]])
    if truncation == "error" or (truncation == "left" and kind in ("answer", "both")):
        (problem,) = problems_of(options, folder, tokenizer, truncation=truncation).problems
        assert (problem.location.line, problem.location.column) == (2, 1)
        assert problem.reason == ("too long" if truncation == "error" else "no room")
        return
    account = load_dataset(options(folder, truncation=truncation), "train", tokenizer).stats
    assert account.num_read == 2 and account.num_untruncated == 1
    if truncation == "drop":
        assert account.dropped == {"too long": 1} and account.num_truncated == 0
    else:
        assert account.num_truncated == 1 and account.num_dropped == 0 and account.num_truncated_tokens > 0


def test_load_dataset_with_a_prompt_that_fills_the_row_reports_it(options, tokenizer, tmp_path):
    folder = write(tmp_path, [GOOD, TOO_LONG_ROWS["prompt"]])
    (problem,) = problems_of(options, folder, tokenizer, src_length=500, max_length=128).problems
    assert problem.reason == "no target token" and problem.location.line == 2


def test_load_dataset_with_invalid_utf8_names_its_location(options, tokenizer, tmp_path):
    folder = write(tmp_path, GOOD.encode() + b'\n{"src": "\xc3\xbc \xff", "tgt": "b"}\n')
    (problem,) = problems_of(options, folder, tokenizer).problems
    assert (problem.location.line, problem.location.column, problem.reason) == (2, 12, UTF8)
    assert "0xff" in problem.message


ARRAYS = [
    (b'[{"src": "a", "tgt": "b"},\n {"src": "a", "tgt": 7}\n]', 2, 22, TYPE),
    (b'[\n  {"src": "a",\n   "tgt": ""}]', 3, 11, EMPTY),
    (b'[{"src": "a", "tgt": "b"},\n 3]', 2, 2, TYPE),
    (b'[{"src": "a", "tgt": "b"}\n {"src": "a", "tgt": "b"}]', 2, 2, BROKEN),
    (b'[{"src": "a", "tgt": "b"},\n {"src": "a", "tgt": }]', 2, 22, BROKEN),
    (b'[{"src": "a", "tgt": "b"}', 1, 26, BROKEN),
    (b'[{"src": "a", "tgt": "b"},', 1, 27, BROKEN),
    (b'\n [{"src": "a", "tgt": "b"},\n\n  {"src": "a", "src": "b"}]', 4, 3, TWICE),
    (b'[{"src": "a", "tgt": "b"},\n {"src": "\xff"}]', 2, 11, UTF8),
    (b'[{"src": "a", "tgt": "b"},\n' + b"[" * 100_000, 2, 1, BROKEN),
    (b'[{"src": "a", "tgt": "b"}]\n {"src": "a", "tgt": "b"}\n', 2, 2, BROKEN),
]


@pytest.mark.parametrize(("content", "line", "column", "reason"), ARRAYS)
def test_load_dataset_with_a_damaged_array_names_location_and_reason(
    content, line, column, reason, options, tokenizer, tmp_path
):
    error = problems_of(options, write(tmp_path, content), tokenizer)
    (problem,) = error.problems
    assert (problem.location.line, problem.location.column, problem.reason) == (line, column, reason)
    assert problem.fatal == (reason in (BROKEN, UTF8)) == ("cannot skip a syntax error" in str(error))


@pytest.mark.parametrize("content", [content for content, _, _, reason in ARRAYS if reason in (BROKEN, UTF8)])
def test_load_dataset_with_a_broken_array_raises_even_with_drop(content, options, tokenizer, tmp_path):
    error = problems_of(options, write(tmp_path, content), tokenizer, bad_rows="drop")
    assert len(error.problems) == 1 and "cannot skip a syntax error" in str(error)


@pytest.mark.parametrize("bad", [b'{"src": "a", "src": "b"}', b'{"src": "a", "tgt": "b", "n": ' + b"1" * 5000 + b"}"])
def test_load_dataset_with_an_invalid_element_skips_only_it(bad, options, tokenizer, tmp_path):
    folder = write(tmp_path, b"[" + b",\n".join([GOOD.encode(), bad, GOOD.encode()]) + b"]")
    dataset = load_dataset(options(folder, bad_rows="drop"), "train", tokenizer)
    assert (dataset.stats.num_read, len(dataset), dataset.stats.num_dropped) == (3, 2, 1)
    assert [dataset.source(index)[1] for index in range(2)] == [1, 3]


@pytest.mark.parametrize("content", [b"", b"\n\n \n", b"[]", b"\xef\xbb\xbf"])
def test_load_dataset_with_a_file_without_rows_raises(content, options, tokenizer, tmp_path):
    with pytest.raises(
        ValueError, match=r"train\.json: no valid rows, because the file is empty; write one JSON object"
    ):
        load_dataset(options(write(tmp_path, content)), "train", tokenizer)


def test_load_dataset_with_all_rows_dropped_lists_them(options, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no valid rows") as caught:
        load_dataset(options(write(tmp_path, ["{"]), bad_rows="drop"), "train", tokenizer)
    assert "train.json:1:2" in str(caught.value)


def test_load_dataset_after_a_failure_leaves_no_cache(options, tokenizer, tmp_path):
    folder = write(tmp_path, [GOOD, "{"])
    problems_of(options, folder, tokenizer)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_load_dataset_with_unknown_columns_names_column_mapping(options, tokenizer, tmp_path):
    with pytest.raises(DataError, match="Fix the rows, rename their keys with column_mapping, or set"):
        load_dataset(options(write(tmp_path, ['{"question": "q", "answer": "a"}'])), "train", tokenizer)
    with pytest.raises(DataError, match="Fix the rows, or set"):
        load_dataset(options(write(tmp_path, ["{"])), "train", tokenizer)
