"""Chat templates in Jinja, and the exact span of every answer in the rendered text.

Answers are not searched for in the text, because an answer may also occur in the question. Their spans follow from
rendering the conversation up to each border:

- A prompt is the template's rendering of the messages so far, with the generation prompt, as a server renders it. It
  has to be a prefix of the rendering of the full conversation.
- The text that a template writes after an answer is the same for every answer. A probe conversation finds it once. It
  belongs to the answer up to its last special token (`<|im_end|>`, but not the line break after it).

If a template rewrites earlier turns, some prompts are not a prefix of the full text. Such a row is refused, unless the
template marks the assistant's text with `{% generation %}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from paddlenlp_ext.data.templates.base import (
    ChatTemplate,
    RenderedTurn,
    TextEncoder,
    end_of_answer,
    special_token_pattern,
    stop_token_ids,
)
from paddlenlp_ext.data.types import Conversation, InvalidRowError

REFUSED = "template refuses"
_QUESTION = "Wherefore?"
_ANSWER = "Therefore."
_FIXED = {"date_string": "26 Jul 2024"}
"""Variables that fix the date, with the name and the default value of Llama 3's template."""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = "mark the assistant's text with {% generation %} in the template, or split the conversation"

Messages = list[dict[str, str]]
Spans = list[tuple[int, int]]


class JinjaTemplate(ChatTemplate):
    """Chat template in the Jinja dialect of Hugging Face tokenizers.

    Raises:
        ValueError: the template cannot be rendered, or the assistant's text in it cannot be located.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.text = text
        self.encoder = TextEncoder(tokenizer)
        self._tokenizer = tokenizer
        self._is_marked = bool(_GENERATION_MARK.search(text))
        self._special = special_token_pattern(tokenizer)
        self._answer_tail = self._answer_end = self._prompt_tail = self._probe = ""
        self._probe_template()

    @property
    def identity(self) -> str:
        """Source of the template, and the rendered probe, which changes daily if the template writes the date."""
        return f"{self.text}\n{self._probe}"

    def render(self, conversation: Conversation) -> tuple[RenderedTurn, ...]:
        """Render as `ChatTemplate.render` describes."""
        messages = _messages(conversation)
        full_text, spans = self._spans(messages, len(conversation.turns))
        turns = []
        previous_end = 0
        for (start, end), (question, _) in zip(spans, conversation.turns, strict=True):
            turns.append(self._split(full_text[previous_end:start], question, full_text[start:end]))
            previous_end = end
        return tuple(turns)

    def encode_prompt(
        self, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None
    ) -> list[int]:
        """Encode as `ChatTemplate.encode_prompt` describes."""
        messages = [*_messages(Conversation(system, tuple(history))), {"role": "user", "content": question}]
        return self.encoder.encode([self._render(messages, add_generation_prompt=True)], [False])[0]

    def _spans(self, messages: Messages, num_turns: int) -> tuple[str, Spans]:
        """Return the text of the conversation, and the (start, end) of each answer in it."""
        spans: Spans = []
        full_text = self._render(messages, add_generation_prompt=False)
        first_answer = len(messages) - 2 * num_turns + 1
        for answer_index in range(first_answer, len(messages), 2):
            prompt = self._render(messages[:answer_index], add_generation_prompt=True)
            end = (
                self._find_end(full_text, messages, answer_index, len(prompt)) if full_text.startswith(prompt) else None
            )
            if end is None:
                break
            spans.append((len(prompt), end))
        if len(spans) == num_turns:
            return full_text, spans
        if self._is_marked:
            return self._marked_spans(messages, num_turns)
        what = f"the template writes turn {len(spans) + 1} differently in the full conversation than as a prompt"
        raise InvalidRowError(REFUSED, f"{what}, so its answer cannot be located; {_REMEDY}")

    def _find_end(self, full_text: str, messages: Messages, answer_index: int, start: int) -> int | None:
        """Return the end of the answer that begins at `start`, after its end token; None if it cannot be located."""
        after_end = len(self._answer_tail) - len(self._answer_end)
        so_far = full_text
        if answer_index + 1 < len(messages):
            so_far = self._render(messages[: answer_index + 1], add_generation_prompt=False)
        if full_text.startswith(so_far) and so_far.endswith(self._answer_tail):
            return len(so_far) - after_end
        # Later messages changed the rendering of this turn; the answer may still follow verbatim.
        answer = messages[answer_index]["content"].strip()
        start += len(full_text[start:]) - len(full_text[start:].lstrip())
        if full_text.startswith(answer + self._answer_end, start):
            return start + len(answer) + len(self._answer_end)
        return None

    def _marked_spans(self, messages: Messages, num_turns: int) -> tuple[str, Spans]:
        """Return the text, and the spans marked by `{% generation %}` with the special token that follows each."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = render_jinja_template(
            [messages],
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            **_FIXED,
            **self._tokenizer.special_tokens_map,
        )
        full_text, spans = str(texts[0]), []
        for start, end in marks[0]:
            end_token = self._special.match(full_text, int(end))
            spans.append((start, end_token.end() if end_token else end))
        if len(spans) != num_turns:
            message = (
                f"the template marks {len(spans)} answers with {{% generation %}}, the conversation has {num_turns}"
            )
            raise InvalidRowError(REFUSED, message)
        return full_text, spans

    def _split(self, prompt: str, question: str, answer: str) -> RenderedTurn:
        for content in (question, question.strip()):
            if prompt.endswith(content + self._prompt_tail):
                start = len(prompt) - len(self._prompt_tail) - len(content)
                return RenderedTurn(prompt[:start], content, self._prompt_tail, answer)
        return RenderedTurn(prompt, None, "", answer)

    def _probe_template(self) -> None:
        """Find the text after a question and after an answer, by rendering a probe conversation."""
        question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
        try:
            prompt = self._render([question], add_generation_prompt=True)
            full_text = self._render([question, answer], add_generation_prompt=False)
        except InvalidRowError as error:
            raise ValueError(f"the chat template cannot render a question and an answer: {error}") from error
        self._probe = full_text
        if prompt.count(_QUESTION) != 1 or full_text.count(_ANSWER) != 1:
            raise ValueError(
                "the chat template does not write the user message and the answer once each; use another template"
            )
        if not full_text.startswith(prompt) and not self._is_marked:
            raise ValueError(
                "the generation prompt of the chat template is not a prefix of the answered question, so answers "
                f"cannot be located; {_REMEDY}"
            )
        self._prompt_tail = prompt.partition(_QUESTION)[2]
        self._answer_tail = full_text.partition(_ANSWER)[2]
        self._answer_end = end_of_answer(self._answer_tail, self._special)
        self.ends_answers = bool(self._special.search(self._answer_end))
        self.stop_token_ids = stop_token_ids(self._answer_end, self._special, self._tokenizer)

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self.text, add_generation_prompt=add_generation_prompt, tokenize=False, **_FIXED
            )
        except TemplateError as error:
            raise InvalidRowError(REFUSED, f"the chat template raises: {error}") from error


def _messages(conversation: Conversation) -> Messages:
    messages = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    for question, answer in conversation.turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages
