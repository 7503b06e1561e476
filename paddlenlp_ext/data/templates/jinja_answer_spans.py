"""Locate the span of every answer in the text that a Jinja template renders.

If the template marks assistant text with `{% generation %}`, the marks are the spans of the answers. Otherwise, this
module derives the spans from several renderings. (A search for the text of an answer could find the same text in a
question.)

- Start of an answer: the end of its prompt. The prompt is the rendering of the earlier messages with the generation
  prompt, as in serving.
- End of an answer: the last special token in the rendering of the messages up to the answer, for example the end of
  `<|im_end|>`, excluding the line break after the token.

In a long conversation, every answer would need renderings of the full conversation. The spans of its answers are
therefore derived from renderings of a few turns at a time (`_located_in_windows`), provided that the concatenated
renderings equal the text of the conversation.

Some templates rewrite an answer when later messages follow; Qwen3, for example, drops earlier reasoning. A rewritten
answer is a target only in a separate example, which ends with the answer.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paddlenlp_ext.data.rows.conversation import REFUSED, SYSTEM, USER, Conversation, Message
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.templates.base import TemplateOptions
from paddlenlp_ext.data.templates.jinja_probe import REMEDY, Probe
from paddlenlp_ext.data.templates.jinja_renderer import Renderer, check_work
from paddlenlp_ext.data.templates.turns import Example, Lead, RenderedTurn

_WINDOW = 8
"""Number of answers that are located in one window; the window also has the same number of earlier answers."""
_MARKED_COST = 8
"""Cost of a rendering with marks, relative to a rendering without marks."""
_CHARS_PER_MESSAGE = 256
"""Number of characters whose rendering counts as the work of one message."""
_ENCODED_CHARS = 16
"""Number of characters whose encoding counts as the work of one message."""


class Renderings:
    """Cached renderings of a conversation and of its prefixes (the first messages).

    Args:
        conversation: the conversation.
        renderer: renderer of the template.
        kwargs: variables of the template.
        options: options of the run for the loss mask.
        probe: texts that the template writes around contents, for the variables `kwargs`.
        special: regular expression that matches special tokens.
    """

    def __init__(
        self,
        conversation: Conversation,
        renderer: Renderer,
        kwargs: Mapping[str, Any],
        options: TemplateOptions,
        probe: Probe,
        special: re.Pattern[str],
    ) -> None:
        self.conversation = conversation
        self.messages = conversation.messages
        self.renderer, self.kwargs, self.options = renderer, kwargs, options
        self.probe, self.special = probe, special
        self.answers = [index for index, message in enumerate(self.messages) if message.is_answer]
        self._questions = [index for index, message in enumerate(self.messages) if message.role == USER]
        self._texts: dict[tuple[int, bool], str] = {}
        self._marks: dict[int, dict[int, tuple[int, int]]] = {}
        self._headers: dict[int, int] = {}
        self._work = 0

    def text(self, count: int) -> str:
        return self._render(count, False)

    def prompt(self, count: int) -> str:
        """Return the text of the first `count` messages with the generation prompt of the next answer."""
        return self._render(count, True)

    def located(self, count: int) -> dict[int, tuple[int, int]]:
        """Return a dict from message indices to the (start, end) of the answers in the text of `count` messages.

        An answer is omitted if the template writes it differently in the shorter text that ends with the answer.
        """
        if bisect.bisect_left(self.answers, count) > 4 * _WINDOW:
            in_windows = self._located_in_windows(count)
            if in_windows is not None:
                return in_windows
        if self.renderer.is_marked:
            spans = self._marked_spans(count)
            text = self.text(count)
            shorter = {index: (self.text(index + 1), *self._marked_spans(index + 1)[index]) for index in spans}
            answers = {index: prefix[start:end] for index, (prefix, start, end) in shorter.items()}
            return {index: (start, end) for index, (start, end) in spans.items() if text[start:end] == answers[index]}
        spans = {index: self._span(index) for index in self.answers if index < count}
        text = self.text(count)
        return {
            index: span
            for index, span in spans.items()
            if span is not None and _have_equal_starts(text, self.text(index + 1), span)
        }

    def _located_in_windows(self, count: int) -> dict[int, tuple[int, int]] | None:
        """Return the result of `located`, derived from renderings of windows of the conversation.

        A window has `_WINDOW` answers and the same number of earlier answers. The result is None if an answer of a
        window cannot be located, or the texts of the windows differ from the text of the first `count` messages.
        """
        text, spans, end = self.text(count), dict[int, tuple[int, int]](), 0
        answers = self.answers[: bisect.bisect_left(self.answers, count)]
        for first in range(0, len(answers), _WINDOW):
            kept = self._window(answers, first)
            positions = {index: position for position, index in enumerate(kept)}
            new = {index: positions[index] for index in answers[first : first + _WINDOW]}
            part = replace(self.conversation, messages=tuple(self.messages[index] for index in kept))
            window = Renderings(part, self.renderer, self.kwargs, self.options, self.probe, self.special)
            try:
                located, written = window.located(len(kept)), window.text(len(kept))
            except InvalidRowError:  # raised, for example, by a template that counts turns
                return None
            before = positions[answers[first - 1]] if first else None
            if not located.keys() >= {*new.values(), *([] if before is None else [before])}:
                return None
            start = 0 if before is None else located[before][1]
            last = located[max(new.values())][1]
            if not text.startswith(written[start:last], end):
                return None
            for index, position in new.items():
                spans[index] = (located[position][0] - start + end, located[position][1] - start + end)
                self._headers[index] = window.header_length(position, written, located[position][0])
            end += last - start
        return spans

    def _window(self, answers: Sequence[int], first: int) -> list[int]:
        """Return the message indices of a window: system messages, a question, and messages up to the last answer.

        Args:
            answers: message indices of the answers.
            first: index in `answers` of the first of `_WINDOW` answers.
        """
        stop = answers[min(first + _WINDOW, len(answers)) - 1] + 1
        start = answers[max(first - _WINDOW, 0)]
        question = bisect.bisect_left(self._questions, start) - 1
        if first <= _WINDOW or question < 0:
            return list(range(stop))
        head = next(index for index, message in enumerate(self.messages) if message.role != SYSTEM)
        return [*range(head), self._questions[question], *range(start, stop)]

    def header_length(self, index: int, text: str, start: int) -> int:
        """Return how many characters at the end of the generation prompt are marked as part of the answer."""
        if not self.renderer.is_marked or not index:
            return 0
        if index not in self._headers:
            prompt = self.prompt(index)
            self._headers[index] = len(prompt) - start if text.startswith(prompt) else 0
        return self._headers[index]

    def _span(self, index: int) -> tuple[int, int] | None:
        """Return (start, end) of an answer in the text that ends with the answer; None if the start is not found."""
        text = self.text(index + 1)
        start = self._start(index, text)
        return None if start is None else (start, self._end(text, start))

    def _marked_spans(self, count: int) -> dict[int, tuple[int, int]]:
        """Return a dict from message indices to marked spans in the text of `count` messages, with end tokens."""
        if count not in self._marks:
            renderer = self.renderer
            text, spans = renderer.marked_text_of(self.conversation.until(count), self.kwargs)
            self._charge(_MARKED_COST * count, text)
            answers = [index for index in self.answers if index < count]
            if len(spans) > len(answers):  # for example, content and end token are marked separately
                spans = _join_adjacent(spans)
            if len(spans) != len(answers):
                problem = f"marks {len(spans)} answers with {{% generation %}}, but the conversation has {len(answers)}"
                raise InvalidRowError(REFUSED, f"the template {problem}; mark each answer once")
            self._marks[count] = {
                index: (start, self._with_end_token(text, end))
                for index, (start, end) in zip(answers, spans, strict=True)
            }
        return self._marks[count]

    def _with_end_token(self, text: str, end: int) -> int:
        """Return the end of a marked span, including an end token directly after the mark."""
        token = self.special.match(text, end)
        return end if token is None or token[0] not in self.probe.answer_end else token.end()

    def answer_after_prompt(self, index: int) -> str | None:
        """Return the text of an answer, for a template that rewrites the prompt when the answer follows.

        To locate the end of the prompt, the message before the answer is replaced with a label, and the conversation is
        rendered without and with the answer. The result is None if the answer is the first message, if a rendering
        lacks the label, or if the two renderings differ right after the label.
        """
        if index == 0:
            return None
        label = "Zq0x"
        asked = replace(self.messages[index - 1], content=label)
        labelled = replace(self.conversation, messages=(*self.messages[: index - 1], asked, self.messages[index]))
        render = self.renderer.text_of
        prompt, full = render(labelled.until(index), self.kwargs, True), render(labelled, self.kwargs)
        before, after = prompt.rpartition(label)[2], full.rpartition(label)[2]
        if label not in prompt or label not in full or not after.startswith(before):
            return None
        answer = after.removeprefix(before)
        return answer[: self._end(answer, 0)]

    def _start(self, index: int, text: str) -> int | None:
        if index == 0:
            return self._start_of_greeting(text)
        if text.startswith(prompt := self.prompt(index)):
            return len(prompt)
        before = self.text(index)
        if text.startswith(before):
            for header in self.probe.headers:
                if text.startswith(header, len(before)):
                    return len(before) + len(header)
        return None

    def _start_of_greeting(self, text: str) -> int | None:
        """Return the start of an answer that is the first message, found by rendering a label as its content."""
        label = "Zq0x"
        greeting = replace(self.messages[0], content=label, reasoning=None)
        labelled = replace(self.conversation, messages=(greeting,))
        before, found, _ = self.renderer.text_of(labelled, self.kwargs).partition(label)
        return len(before) if found and text.startswith(before) else None

    def _end(self, text: str, start: int) -> int:
        tail, end = self.probe.answer_tail, self.probe.answer_end
        if text.endswith(tail):
            return len(text) - len(tail) + len(end)
        ends = [match.end() for match in self.special.finditer(text, start)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)

    def _render(self, count: int, for_generation: bool) -> str:
        key = (count, for_generation)
        if key not in self._texts:
            part = self.conversation.until(count)
            self._texts[key] = self.renderer.text_of(part, self.kwargs, for_generation)
            self._charge(count, self._texts[key])
        return self._texts[key]

    def charge_example(self, count: int) -> None:
        """Count the work of encoding the first `count` messages, unless the conversation has only `count` messages."""
        if count < len(self.messages):
            self._work += len(self.text(count)) // _ENCODED_CHARS
            check_work(self._work)

    def _charge(self, count: int, text: str) -> None:
        """Count the work of a rendering of `count` messages."""
        self._work += count + len(text) // _CHARS_PER_MESSAGE
        check_work(self._work)


def _have_equal_starts(text: str, shorter: str, span: tuple[int, int]) -> bool:
    """Return whether two texts are equal up to the end of a span."""
    start, end = span
    return text[start:end] == shorter[start:end] and text.startswith(shorter[:end])


def _join_adjacent(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge consecutive spans if the second span starts at the end of the first span."""
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, end))
    return joined


def unfold(renderings: Renderings) -> list[Example]:
    """Return examples that contain each target exactly as the model would generate it.

    The last example is the full conversation. The template can rewrite an earlier answer when later messages follow. A
    rewritten target is trained in a shorter example, which is a prefix of the conversation.
    """
    remaining = {index for index in renderings.answers if renderings.messages[index].is_target}
    examples: list[Example] = []
    count = len(renderings.messages)
    while remaining:
        located = renderings.located(count)
        targets = remaining & set(located)
        last = max(remaining)
        if targets:
            renderings.charge_example(count)
            examples.append(_example(renderings, count, located, targets))
            remaining -= targets
        elif count == last + 1:
            examples.append(_spliced_example(renderings, last))
            remaining.remove(last)
        count = max(remaining, default=last) + 1
    return examples[::-1]


def _spliced_example(renderings: Renderings, index: int) -> Example:
    """Return the example of an answer, for a template that rewrites the prompt when the answer follows.

    For example, the template of gpt-oss writes the reasoning of a tool call in the prompt, but omits the reasoning when
    the final answer follows. The example is the prompt, as rendered in serving, followed by the answer.
    """
    answer = renderings.answer_after_prompt(index)
    if answer is None:
        number = renderings.answers.index(index) + 1
        problem = f"the template rewrites the prompt of turn {number}, so its answer cannot be located"
        raise InvalidRowError(REFUSED, f"{problem}; {REMEDY}", renderings.messages[index].path)
    turn = _turn(renderings, index, renderings.prompt(index), "", answer)
    return Example(renderings.conversation.until(index + 1).with_targets((index,)), (turn,))


def _example(renderings: Renderings, count: int, located: dict[int, tuple[int, int]], targets: set[int]) -> Example:
    """Return the example of the first `count` messages.

    Args:
        renderings: renderings of the conversation.
        count: number of messages.
        located: message index -> (start, end) of the answer in the text.
        targets: message indices of the answers that are targets.
    """
    text = renderings.text(count)
    turns: list[RenderedTurn] = []
    previous_end = 0
    for index, (start, end) in located.items():
        header = text[start : start + renderings.header_length(index, text, start)]
        turn = _turn(renderings, index, text[previous_end:start], header, text[start + len(header) : end])
        turns.append(turn if index in targets or not turn.is_target else replace(turn, is_target=False))
        previous_end = end
    return Example(renderings.conversation.until(count).with_targets(targets), tuple(turns))


def _turn(renderings: Renderings, index: int, prompt: str, header: str, answer: str) -> RenderedTurn:
    """Return the turn of the answer at `index`.

    Args:
        renderings: renderings of the conversation.
        index: index of the answer.
        prompt: text from the end of the previous answer to the start of this answer.
        header: end of the generation prompt, if the template marks it as assistant text; otherwise empty.
        answer: text of the answer.
    """
    message, options = renderings.messages[index], renderings.options
    thought = renderings.renderer.reasoning_of(message).strip()
    block, found = renderings.probe.split_thought(answer) or ("", None)
    if thought and message.is_target and (found == "" or renderings.probe.empty_thought.search(prompt + header)):
        problem = (
            "the chat template writes an empty reasoning block before the row's reasoning; set enable_thinking to true"
        )
        raise InvalidRowError(REFUSED, problem, message.path)
    is_left_out = options.mask_reasoning if thought else not options.learn_empty_think
    if found != thought or not is_left_out or not message.is_target:
        block = ""
    if thought and options.mask_reasoning and message.is_target and not block:
        problem = "mask_reasoning: the reasoning cannot be located in the text of the chat template"
        raise InvalidRowError(REFUSED, problem, message.path)
    head, content, tail = _split_prompt(renderings, index, prompt)
    leads = []
    if header:
        # The header may contain the start tag of reasoning, or an entire empty reasoning block.
        begun = (renderings.probe.thought_start if block else renderings.probe.empty_thought).search(header)
        start = begun.start() if begun and is_left_out else len(header)
        leads = [Lead(header[:start], True, True), Lead(header[start:], False, True)]
        leads = [lead for lead in leads if lead.text]
    if block and not thought and not header:
        if content is None:
            head += block
        else:
            tail += block
    elif block:
        leads.append(Lead(block, False, not thought))
    answer = answer[len(block) :]
    return RenderedTurn(
        head,
        content,
        tail,
        answer,
        tuple(leads),
        is_target=message.is_target,
        number=bisect.bisect_left(renderings.answers, index),
        has_reasoning=bool(thought),
        num_tool_calls=len(message.tool_calls),
        has_empty_reasoning=bool(block) and not thought,
    )


def _split_prompt(renderings: Renderings, index: int, prompt: str) -> tuple[str, str | None, str]:
    """Split a prompt into the text before the last message, its content (None if not found), and the text after it."""
    before: Message | None = renderings.messages[index - 1] if index else None
    tail = None if before is None else renderings.probe.prompt_tails.get(before.role)
    if before is None or tail is None:
        return prompt, None, ""
    for content in (before.content, before.content.strip()):
        if prompt.endswith(content + tail):
            start = len(prompt) - len(tail) - len(content)
            return prompt[:start], content, tail
    return prompt, None, ""
