"""Parse rows of preference data: a prompt with two answers to compare, or with one rated answer.

    PaddleNLP   {"src": ["q1", "q2"], "tgt": ["a1"], "response": ["good", "bad"], "sort": [1, 0]}
    TRL         {"prompt": "q", "chosen": "good", "rejected": "bad"}, each a text or a list of messages
                {"chosen": [user, assistant], "rejected": [user, assistant]}, with the prompt in both
    rated       {"prompt": "q", "completion": "a", "label": true}, or one `response` with one `sort` (0: bad)

Each answer is parsed as a fine-tuning row, `{"src", "tgt"}` or `{"prompt", "completion"}`, whose last answer is the
only target. All other fields have the same effects as in fine-tuning (data/rows/known_fields.py).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

from paddlenlp_ext.data.rows.checked_values import MISSING_KEY, WRONG_TYPE, FieldPath, dotted
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.rows.errors import NOT_SUPPORTED, InvalidRowError
from paddlenlp_ext.data.rows.formats import UNEQUAL_LISTS, UNKNOWN_FORMAT, parse_row
from paddlenlp_ext.data.rows.known_fields import PROMPT, SRC_TGT, RowFormat, check_texts, unknown_in

SAME_ANSWERS = "same answers"
RANKED = RowFormat("src, response, sort", (("src",), ("response",), ("sort",)), ("tgt", *SRC_TGT.optional))
PAIR = RowFormat(
    "prompt, chosen, rejected", (("chosen",), ("rejected",)), ("prompt", *PROMPT.optional), message=PROMPT.message
)
RATED = RowFormat(
    "prompt, completion, label", (("prompt",), ("completion",), ("label",)), PROMPT.optional, message=PROMPT.message
)
FORMATS = (RANKED, PAIR, RATED)
KNOWN_FORMATS = (
    '{"prompt", "chosen", "rejected"}, {"src", "tgt", "response", "sort"}, {"prompt", "completion", "label"}'
)

Rename = Callable[[FieldPath], FieldPath]
"""Function from a path in a fine-tuning row to the path in the preference row that it comes from."""


@dataclass(frozen=True)
class Answer:
    """Answer of a preference row, with its prompt.

    Attributes:
        conversation: the prompt and this answer, whose assistant messages are the only targets.
        is_desirable: True for a chosen answer, or an answer that is rated as good.
    """

    conversation: Conversation
    is_desirable: bool

    @property
    def prompt(self) -> Conversation:
        """Messages before the first target."""
        is_target = [message.is_target for message in self.conversation.messages]
        return self.conversation.until(is_target.index(True))


def parse_preference(value: Any) -> tuple[Answer, ...]:
    """Return the answers of a row: a pair with the chosen answer first, or one rated answer.

    Raises:
        InvalidRowError: the row matches no format or two formats, or a field is missing, empty or of the wrong type.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, "the row is not an object; write a JSON object")
    complete = [row_format for row_format in FORMATS if not row_format.missing(value)]
    if len(complete) > 1:
        named = " and ".join(row_format.name for row_format in complete)
        raise InvalidRowError(UNKNOWN_FORMAT, f"the row has the keys of two formats: {named}; keep one")
    if not complete:
        raise _no_format(value)
    check_texts(value, complete[0])
    split = {RANKED: _split_ranked, PAIR: _split_pair, RATED: _split_rated}[complete[0]]
    return tuple(Answer(_parse(row, rename), good) for row, rename, good in split(value))


def unknown_preference_fields(row: Any, read: Container[str] = ()) -> Iterator[str]:
    """Yield the path of each field that is neither read nor metadata, such as `chosen[].name` in a message.

    `read` names further fields of the row that are read.
    """
    if isinstance(row, dict):
        for row_format in FORMATS:
            if not row_format.missing(row):
                unknown = unknown_in(row, row_format, lists=("prompt", "chosen", "rejected", "completion"))
                yield from (name for name in unknown if name not in read)


def _no_format(row: dict[str, Any]) -> InvalidRowError:
    keys = ", ".join(map(repr, row)) or "no keys"
    for row_format in FORMATS:
        missing = row_format.missing(row)
        if row_format is not RATED and len(missing) < len(row_format.required):
            return InvalidRowError(MISSING_KEY, f"the row has {keys}; add {', '.join(map(repr, missing))}")
    return InvalidRowError(UNKNOWN_FORMAT, f"the row has {keys}; known formats: {KNOWN_FORMATS}")


def _parse(row: dict[str, Any], rename: Rename) -> Conversation:
    """Return the conversation of a fine-tuning row; paths in errors and messages refer to the preference row."""
    try:
        conversation = parse_row(row)
        for message in conversation.messages:
            if message.is_target and message.path[:1] == ("prompt",):
                problem = "a message of the prompt has weight 1, but only the answers are compared; remove the weight"
                raise InvalidRowError(NOT_SUPPORTED, problem, message.path)
        messages = (replace(message, path=rename(message.path)) for message in conversation.messages)
        return replace(conversation, messages=tuple(messages))
    except InvalidRowError as error:
        path = rename(error.path)
        message = str(error).replace(dotted(error.path), dotted(path)) if error.path else str(error)
        raise InvalidRowError(error.reason, message, path, by_policy=error.by_policy) from error


def _split_ranked(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Rename, bool]]:
    responses, ranks = row["response"], row["sort"]
    rest = {name: value for name, value in row.items() if name not in ("response", "sort", "tgt")}
    for name in ("response", "sort"):
        if not isinstance(row[name], list) or not 1 <= len(row[name]) <= 2:
            message = f"{name} is not a list of one or two items; write one row for each pair of answers"
            raise InvalidRowError(WRONG_TYPE, message, (name,))
    if len(responses) != len(ranks):
        message = f"sort has {len(ranks)} items for {len(responses)} answers in response; write one for each"
        raise InvalidRowError(UNEQUAL_LISTS, message, ("sort",))
    for index, rank in enumerate(ranks):
        if isinstance(rank, bool) or not isinstance(rank, int | float):
            message = f"sort[{index}] is not a number; the answer with the greater number is the chosen one"
            raise InvalidRowError(WRONG_TYPE, message, ("sort", index))
    if len(ranks) == 2 and ranks[0] == ranks[1]:
        message = "both answers have the same sort; the answer with the greater number is the chosen one"
        raise InvalidRowError(NOT_SUPPORTED, message, ("sort",))
    if row.get("label") not in (None, True):
        message = "label is not read in a row with sort, which rates the answers; remove it"
        raise InvalidRowError(NOT_SUPPORTED, message, ("label",))
    _check_different(responses, ("response",))
    order = sorted(range(len(ranks)), key=lambda index: -ranks[index])
    for index in order:
        is_desirable = index == order[0] if len(ranks) == 2 else ranks[0] > 0
        yield *_ranked_answer(rest, row.get("tgt"), responses[index], index), is_desirable


def _ranked_answer(rest: dict[str, Any], earlier: Any, response: Any, index: int) -> tuple[dict[str, Any], Rename]:
    if not isinstance(rest["src"], list):
        if earlier not in (None, "", []):
            message = "src is one question, so tgt has no earlier answers; leave tgt out, or write src as a list"
            raise InvalidRowError(UNEQUAL_LISTS, message, ("tgt",))
        targets: Any = response
        at: FieldPath = ("tgt",)
    else:
        earlier = [] if earlier in (None, "") else earlier
        if not isinstance(earlier, list) or len(earlier) != len(rest["src"]) - 1:
            message = f"src has {len(rest['src'])} questions; tgt needs the answers to all but the last one"
            raise InvalidRowError(UNEQUAL_LISTS, message, ("tgt",))
        targets = [*earlier, response]
        at = ("tgt", len(earlier))
        rest = {**rest, "label": [0] * len(earlier) + [1]}
    place = ("response", index)
    return {**rest, "tgt": targets}, lambda path: (*place, *path[len(at) :]) if path[: len(at)] == at else path


def _split_pair(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Rename, bool]]:
    rest = {name: value for name, value in row.items() if name not in ("prompt", "chosen", "rejected")}
    answers = [row["chosen"], row["rejected"]]
    for name in ("chosen", "rejected"):
        if not isinstance(row[name], list | str):
            raise InvalidRowError(WRONG_TYPE, f"{name} is neither a text nor a list of messages", (name,))
    if isinstance(answers[0], list) != isinstance(answers[1], list):
        message = "one of chosen and rejected is a text, the other a list of messages; write both in the same form"
        raise InvalidRowError(WRONG_TYPE, message, ("rejected",))
    _check_different(answers, ("rejected",))
    prompt, length = _prompt_of(row)
    for name, is_desirable in (("chosen", True), ("rejected", False)):
        answer = row[name][length:] if length else row[name]
        rename = _pair_rename(name, length, isinstance(row.get("prompt"), str))
        yield {**rest, "prompt": prompt, "completion": answer}, rename, is_desirable


def _prompt_of(row: dict[str, Any]) -> tuple[Any, int]:
    """Return the prompt of a pair, and the number of leading messages of both answers that repeat it."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if not isinstance(chosen, list):
        if prompt is None:
            raise InvalidRowError(MISSING_KEY, "chosen and rejected are texts, and prompt is missing; add it")
        return prompt, 0
    same = [first == second for first, second in zip(chosen, rejected, strict=False)]
    length = same.index(False) if False in same else len(same)
    begins_with_answer = bool(chosen) and isinstance(chosen[0], dict) and chosen[0].get("role") == "assistant"
    if prompt is None or (isinstance(prompt, str) and not begins_with_answer):
        if not length:
            message = (
                "chosen and rejected begin with different messages; add prompt, or start both with the same messages"
            )
            raise InvalidRowError(MISSING_KEY, message, ("rejected",))
        contents = [message.get("content") for message in chosen[:length] if isinstance(message, dict)]
        if prompt is not None and prompt not in contents:
            message = "prompt is not among the messages that chosen and rejected share; remove prompt or these messages"
            raise InvalidRowError(NOT_SUPPORTED, message, ("prompt",))
        return chosen[:length], length
    return ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt), 0


def _pair_rename(name: str, length: int, prompt_is_text: bool) -> Rename:
    def rename(path: FieldPath) -> FieldPath:
        if path[:1] == ("completion",):
            index = (path[1] + length,) if len(path) > 1 and isinstance(path[1], int) else path[1:2]
            return (name, *index, *path[2:])
        if path[:1] != ("prompt",):
            return path
        if length:
            return (name, *path[1:])
        return ("prompt",) if prompt_is_text else path

    return rename


def _split_rated(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Rename, bool]]:
    label = row["label"]
    if label not in (True, False):
        raise InvalidRowError(WRONG_TYPE, "label is neither true (a good answer) nor false; change it", ("label",))
    yield {name: value for name, value in row.items() if name != "label"}, lambda path: path, bool(label)


def _check_different(answers: list[Any], path: FieldPath) -> None:
    if len(answers) == 2 and answers[0] == answers[1]:
        raise InvalidRowError(SAME_ANSWERS, "both answers are the same, so neither is preferred; remove the row", path)
