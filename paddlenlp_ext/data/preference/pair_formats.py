"""Formats of preference data, and the fine-tuning row of each answer.

In the fine-tuning row of an answer, earlier messages have weight 0, and the fields of the other answer are absent.
`FORMATS` lists the formats; docs/reference/preference.md has an example row for each format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from paddlenlp_ext.data.rows.checked_values import (
    EMPTY_TARGET,
    MISSING_KEY,
    WRONG_TYPE,
    FieldPath,
    read_list,
    read_member,
    read_object,
    read_text,
)
from paddlenlp_ext.data.rows.errors import NOT_SUPPORTED, InvalidRowError
from paddlenlp_ext.data.rows.known_fields import (
    ALPACA,
    CONTEXT,
    MESSAGES,
    PROMPT,
    QUERY,
    RATINGS,
    SHAREGPT,
    SRC_TGT,
    TEXTS,
    RowFormat,
)
from paddlenlp_ext.data.rows.loss_weights import loss_weights
from paddlenlp_ext.data.rows.row_formats import UNEQUAL_LISTS

SAME_ANSWERS = "same answers"
_DIALOGUE_ROLES = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
"""Start of a turn in the texts of Anthropic's hh-rlhf."""


def _pair_format(*required: str | tuple[str, ...], optional: tuple[str, ...] = (), base: RowFormat) -> RowFormat:
    """Return a format whose answers are read as rows of the format `base`."""
    alternatives = tuple((names,) if isinstance(names, str) else names for names in required)
    name = ", ".join(" or ".join(names) for names in alternatives)
    lost = (*TEXTS, "prompt", "question", "messages", "conversations")
    return RowFormat(name, alternatives, (*optional, *CONTEXT), base.message, lost)


RANKED = RowFormat("src, response, sort", (("src",), ("response",), ("sort",)), ("tgt", *SRC_TGT.optional))
PAIR = _pair_format("chosen", "rejected", optional=("prompt", "messages"), base=PROMPT)
QUESTION_PAIR = _pair_format("question", "chosen", "rejected", base=QUERY)
ALPACA_PAIR = _pair_format(("instruction", "input"), "chosen", "rejected", optional=("history",), base=ALPACA)
SHAREGPT_PAIR = _pair_format("conversations", "chosen", "rejected", base=SHAREGPT)
REJECTED_TEXT = _pair_format("messages", "rejected_response", base=MESSAGES)
REJECTED_MESSAGES = _pair_format("messages", "rejected_messages", base=MESSAGES)
OPENAI_PAIR = _pair_format("input", "preferred_output", "non_preferred_output", base=MESSAGES)
RATED = tuple(
    replace(row_format, name=f"{row_format.name}, label", required=(*row_format.required, RATINGS.names))
    for row_format in (PROMPT, MESSAGES, SHAREGPT, ALPACA, QUERY)
)
"""Fine-tuning formats, with a rating of the last answer."""

Places = dict[FieldPath, FieldPath]
"""Path in a fine-tuning row -> path of the same value in the preference row."""
Split = Iterator[tuple[dict[str, Any], Places, bool]]
"""Fine-tuning row of each answer, its `Places`, and whether the answer is chosen or rated as good."""


def _split_ranked(row: dict[str, Any]) -> Split:
    responses, ranks = row["response"], row["sort"]
    rest = _without(row, "response", "sort", "tgt")
    for name in ("response", "sort"):
        if not isinstance(row[name], list) or not 1 <= len(row[name]) <= 2:
            message = f"{name} is not a list of one or two items; write one row for each pair of answers"
            raise InvalidRowError(WRONG_TYPE, message, (name,))
    if len(responses) != len(ranks):
        message = f"sort has {len(ranks)} items for {len(responses)} answers in response; write one item per answer"
        raise InvalidRowError(UNEQUAL_LISTS, message, ("sort",))
    for index, rank in enumerate(ranks):
        if isinstance(rank, bool) or not isinstance(rank, int | float):
            message = f"sort[{index}] is not a number; give the chosen answer the greater of two numbers"
            raise InvalidRowError(WRONG_TYPE, message, ("sort", index))
    if len(ranks) == 2 and ranks[0] == ranks[1]:
        message = "sort has the same number for both answers; give the chosen answer the greater of two numbers"
        raise InvalidRowError(NOT_SUPPORTED, message, ("sort",))
    if row.get("label") not in (None, True):
        message = "label is not read in a row with sort; remove label"
        raise InvalidRowError(NOT_SUPPORTED, message, ("label",))
    order = sorted(range(len(ranks)), key=lambda index: -ranks[index])
    for index in order:
        is_desirable = index == order[0] if len(ranks) == 2 else ranks[0] > 0
        yield *_ranked_answer(rest, row.get("tgt"), responses[index], index), is_desirable


def _ranked_answer(rest: dict[str, Any], earlier: Any, response: Any, index: int) -> tuple[dict[str, Any], Places]:
    if not isinstance(rest["src"], list):
        if earlier not in (None, "", []):
            message = "src is one question, so tgt has no earlier answers; remove tgt, or write src as a list"
            raise InvalidRowError(UNEQUAL_LISTS, message, ("tgt",))
        return {**rest, "tgt": response}, {("tgt",): ("response", index)}
    earlier = [] if earlier in (None, "") else earlier
    if not isinstance(earlier, list) or len(earlier) != len(rest["src"]) - 1:
        message = f"src has {len(rest['src'])} questions; tgt needs the answers to all questions except the last"
        raise InvalidRowError(UNEQUAL_LISTS, message, ("tgt",))
    return {**rest, "tgt": [*earlier, response]}, {("tgt", len(earlier)): ("response", index)}


def _split_pair(row: dict[str, Any]) -> Split:
    rest = _without(row, "prompt", "chosen", "rejected", "messages")
    prompt, answers = row.get("prompt"), {name: row[name] for name in ("chosen", "rejected")}
    for name, answer in answers.items():
        if not isinstance(answer, list | str):
            message = f"{name} is neither a text nor a list of messages; write a text or a list"
            raise InvalidRowError(WRONG_TYPE, message, (name,))
    if len({type(answer) for answer in answers.values()}) > 1:
        message = "one of chosen and rejected is a text, the other a list of messages; write both in the same form"
        raise InvalidRowError(WRONG_TYPE, message, ("rejected",))
    if row.get("messages") not in (None, [], row["chosen"]):
        message = "messages and chosen differ, and only chosen is used; remove messages"
        raise InvalidRowError(NOT_SUPPORTED, message, ("messages",))
    if prompt is None and all(isinstance(text, str) and _TURN.match(text) for text in answers.values()):
        answers = {name: _dialogue(text) for name, text in answers.items()}
    if isinstance(answers["chosen"], list):
        yield from _split_lists(rest, answers, prompt)
    elif prompt is None:
        yield from _split_texts(rest, answers)
    else:
        yield from _split_answers({**rest, "prompt": prompt}, answers, "completion", {})


def _dialogue(text: str) -> list[dict[str, str]]:
    """Return the messages of a text in the format of Anthropic's hh-rlhf."""
    _, *parts = _TURN.split(text)
    return [
        {"role": _DIALOGUE_ROLES[speaker], "content": content}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


def _split_texts(rest: dict[str, Any], answers: dict[str, str]) -> Split:
    """Split two texts after their common prefix; a trailing space of the prefix belongs to the answers.

    Source: `extract_prompt` of TRL.
    """
    length = _shared_length(answers)
    if answers["chosen"][:length].endswith(" "):
        length -= 1
    for name, text in answers.items():
        places: Places = {("prompt",): (name,), ("completion",): (name,)}
        yield {**rest, "prompt": text[:length], "completion": text[length:]}, places, name == "chosen"


def _split_lists(rest: dict[str, Any], answers: dict[str, list[Any]], prompt: Any = None) -> Split:
    """Split two lists of messages; if `prompt` is None, both lists start with the prompt."""
    first_name, first = next(iter(answers.items()))
    context: PlacedMessages = []
    length = 0
    if isinstance(prompt, list):
        context = _placed(prompt, "prompt")
        starts = [answer[: len(prompt)] == prompt for answer in answers.values() if prompt]
        if any(starts) and not all(starts):
            message = "only one of chosen and rejected starts with prompt; remove the prompt from that answer"
            raise InvalidRowError(NOT_SUPPORTED, message, ("rejected",))
        length = len(prompt) if any(starts) else 0
    elif prompt is not None and first and isinstance(first[0], dict) and first[0].get("role") == "assistant":
        context = [({"role": "user", "content": read_text(prompt, ("prompt",))}, ("prompt",))]
    else:
        length = _shared_length(answers)
        context = _placed(first[:length], first_name)
        contents = [message.get("content") for message, _ in context if isinstance(message, dict)]
        if prompt is not None and prompt not in contents:
            message = "prompt is not among the messages that chosen and rejected share; remove prompt or these messages"
            raise InvalidRowError(NOT_SUPPORTED, message, ("prompt",))
    for name, answer in answers.items():
        yield *_joined(rest, "messages", context, _placed(answer, name)[length:]), name == first_name


def _shared_length(answers: dict[str, Any]) -> int:
    """Return the length of the common prefix of both answers, in characters or messages.

    Raises:
        InvalidRowError: the answers are equal or have no common prefix, or one has nothing after it.
    """
    (first_name, first), (second_name, second) = answers.items()
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    if first == second:
        message = "both answers are the same, so neither is preferred; remove the row"
        raise InvalidRowError(SAME_ANSWERS, message, (second_name,))
    if not length:
        problem = f"{first_name} and {second_name} have no common prefix"
        remedy = "start both with the prompt, or write prompt, chosen and rejected"
        raise InvalidRowError(MISSING_KEY, f"{problem}; {remedy}", (second_name,))
    for name, answer in answers.items():
        if len(answer) == length:
            message = f"{name} has nothing after the common prefix of both answers; add an answer, or remove the row"
            raise InvalidRowError(EMPTY_TARGET, message, (name,))
    return length


def _split_question(row: dict[str, Any]) -> Split:
    rest, answers = _without(row, "question", "chosen", "rejected"), _pair_of(row)
    return _split_answers({**rest, "prompt": row["question"]}, answers, "completion", {("prompt",): ("question",)})


def _split_alpaca(row: dict[str, Any]) -> Split:
    return _split_answers(_without(row, "chosen", "rejected"), _pair_of(row), "output", {})


def _pair_of(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("chosen", "rejected")}


def _split_answers(rest: dict[str, Any], answers: dict[str, Any], key: str, places: Places) -> Split:
    """Yield a row for each answer, with the text of the answer in the field `key`."""
    for name, answer in answers.items():
        yield {**rest, key: answer}, {**places, (key,): (name,)}, name == "chosen"


def _split_sharegpt(row: dict[str, Any]) -> Split:
    rest, answers = _without(row, "conversations", "chosen", "rejected"), _pair_of(row)
    context = _placed(read_list(row["conversations"], ("conversations",)), "conversations")
    for name, answer in answers.items():
        yield *_joined(rest, "conversations", context, [(read_object(answer, (name,)), (name,))]), name == "chosen"


def _split_rejected_text(row: dict[str, Any]) -> Split:
    rest = _without(row, "messages", "rejected_response")
    placed = _placed(read_list(row["messages"], ("messages",)), "messages")
    rejected = {"role": "assistant", "content": read_text(row["rejected_response"], ("rejected_response",))}
    yield *_joined(rest, "messages", placed[:-1], placed[-1:]), True
    yield *_joined(rest, "messages", placed[:-1], [(rejected, ("rejected_response",))]), False


def _split_rejected_messages(row: dict[str, Any]) -> Split:
    answers = {name: read_list(row[name], (name,)) for name in ("messages", "rejected_messages")}
    return _split_lists(_without(row, *answers), answers)


def _split_openai(row: dict[str, Any]) -> Split:
    given = read_object(row["input"], ("input",))
    messages = read_list(read_member(given, "messages", ("input",)), ("input", "messages"))
    answers = {name: read_list(row[name], (name,)) for name in ("preferred_output", "non_preferred_output")}
    rest, asked = _without(row, "input", *answers), _without(given, "messages")
    for name in set(rest) & set(asked):
        raise InvalidRowError(NOT_SUPPORTED, f"{name} is in the row and in input; keep one", ("input", name))
    context = _placed(messages, "input", "messages")
    for name, answer in answers.items():
        joined, places = _joined({**rest, **asked}, "messages", context, _placed(answer, name))
        yield joined, {(key,): ("input", key) for key in asked} | places, name == "preferred_output"


def _split_rated(row: dict[str, Any]) -> Split:
    rating, *others = (name for name in RATINGS.names if name in row)
    if others:
        raise InvalidRowError(NOT_SUPPORTED, f"the row has {rating} and {others[0]}; keep one", (others[0],))
    if row[rating] not in (True, False):
        message = f"{rating} is neither true nor false; write true for a good answer, or false for a bad answer"
        raise InvalidRowError(WRONG_TYPE, message, (rating,))
    rest = _without(row, rating)
    for key in ("prompt", "messages", "conversations"):
        if isinstance(row.get(key), list):
            placed = _placed(row[key], key)
            length = len(placed) if key == "prompt" else _length_of_prompt(row[key])
            rest, _ = _joined(rest, key, placed[:length], placed[length:])
    yield rest, {}, bool(row[rating])


def _length_of_prompt(messages: list[Any]) -> int:
    """Return the number of messages up to the last user message."""
    roles = [message.get("role", message.get("from")) if isinstance(message, dict) else None for message in messages]
    return max((index + 1 for index, role in enumerate(roles) if role in ("user", "human")), default=0)


PlacedMessages = list[tuple[Any, FieldPath]]
"""Messages with their paths in the preference row."""


def _placed(messages: Sequence[Any], *path: str | int) -> PlacedMessages:
    return [(message, (*path, index)) for index, message in enumerate(messages)]


def _joined(
    rest: dict[str, Any], key: str, context: PlacedMessages, answer: PlacedMessages
) -> tuple[dict[str, Any], Places]:
    """Return the row of an answer with all messages in the field `key`; messages of `context` have weight 0.

    Raises:
        InvalidRowError: a message of `context` has weight 1.
    """
    messages = []
    for message, place in context:
        weights = loss_weights(message, place) if isinstance(message, dict) else {"": False}
        if True in weights.values():
            problem = "a message of the prompt has weight 1, but only the answers are compared; remove the weight"
            raise InvalidRowError(NOT_SUPPORTED, problem, place)
        messages.append(message if weights else {**message, "weight": 0})
    messages += [message for message, _ in answer]
    places: Places = {(key, index): place for index, (_, place) in enumerate([*context, *answer])}
    return {**rest, key: messages}, places


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


SPLITS: dict[RowFormat, Callable[[dict[str, Any]], Split]] = {
    PAIR: _split_pair,
    RANKED: _split_ranked,
    QUESTION_PAIR: _split_question,
    ALPACA_PAIR: _split_alpaca,
    SHAREGPT_PAIR: _split_sharegpt,
    REJECTED_TEXT: _split_rejected_text,
    REJECTED_MESSAGES: _split_rejected_messages,
    OPENAI_PAIR: _split_openai,
    **dict.fromkeys(RATED, _split_rated),
}
FORMATS = tuple(SPLITS)
