"""Chat templates in Jinja, with an exact account of which characters the model is to say.

Nothing is searched for in the text of a row: an answer may well occur in its question. What is known instead is where
things begin and end, from rendering the conversation up to each point:

- a prompt is the template's own rendering of the messages so far with the generation prompt, as a server makes it;
  it has to be a beginning of the rendering of the whole conversation;
- what a template writes behind an answer is the same for every answer. It is learned once, from a made-up
  conversation; of it, everything up to the last special token belongs to the answer (`<|im_end|>`, but not the line
  break after it).

Templates that rewrite what went before fail the first test for some turns. Such a row is refused, unless the template
marks what the assistant says by `{% generation %}`.
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
"""What a template is given so that it need not ask the clock: Llama 3's name for the day, with its own default."""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = "mark the assistant's words with {% generation %} in the template, or split the conversation"

Messages = list[dict[str, str]]
Spans = list[tuple[int, int]]


class JinjaTemplate(ChatTemplate):
    """A chat template in the dialect of Hugging Face tokenizers.

    Raises:
        ValueError: the template cannot be rendered, or what it has the assistant say cannot be told.
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
        """The source, and a rendering: a template may write the day, and its rows are others tomorrow."""
        return f"{self.text}\n{self._probe}"

    def render(self, conversation: Conversation) -> tuple[RenderedTurn, ...]:
        """See `ChatTemplate.render`."""
        messages = _messages(conversation)
        whole, spans = self._spans(messages, len(conversation.turns))
        turns = []
        previous_end = 0
        for (start, end), (question, _) in zip(spans, conversation.turns, strict=True):
            turns.append(self._split(whole[previous_end:start], question, whole[start:end]))
            previous_end = end
        return tuple(turns)

    def encode_prompt(
        self, question: str, history: Sequence[tuple[str, str]] = (), system: str | None = None
    ) -> list[int]:
        """See `ChatTemplate.encode_prompt`."""
        messages = [*_messages(Conversation(system, tuple(history))), {"role": "user", "content": question}]
        return self.encoder.encode([self._render(messages, add_generation_prompt=True)], [False])[0]

    def _spans(self, messages: Messages, num_turns: int) -> tuple[str, Spans]:
        """The whole text, and where in it each answer begins and ends."""
        spans: Spans = []
        whole = self._render(messages, add_generation_prompt=False)
        first_answer = len(messages) - 2 * num_turns + 1
        for answer_index in range(first_answer, len(messages), 2):
            prompt = self._render(messages[:answer_index], add_generation_prompt=True)
            end = self._find_end(whole, messages, answer_index, len(prompt)) if whole.startswith(prompt) else None
            if end is None:
                break
            spans.append((len(prompt), end))
        if len(spans) == num_turns:
            return whole, spans
        if self._is_marked:
            return self._marked_spans(messages, num_turns)
        what = f"the template writes turn {len(spans) + 1} differently in the whole conversation than as a prompt"
        raise InvalidRowError(REFUSED, f"{what}, so its answer cannot be told; {_REMEDY}")

    def _find_end(self, whole: str, messages: Messages, answer_index: int, start: int) -> int | None:
        """Where the answer that begins at `start` ends, its end token included; None where that cannot be told."""
        behind_end = len(self._answer_tail) - len(self._answer_end)
        so_far = whole
        if answer_index + 1 < len(messages):
            so_far = self._render(messages[: answer_index + 1], add_generation_prompt=False)
        if whole.startswith(so_far) and so_far.endswith(self._answer_tail):
            return len(so_far) - behind_end
        # The rest of the conversation changed how this turn is written; it may still stand there word for word.
        answer = messages[answer_index]["content"].strip()
        start += len(whole[start:]) - len(whole[start:].lstrip())
        if whole.startswith(answer + self._answer_end, start):
            return start + len(answer) + len(self._answer_end)
        return None

    def _marked_spans(self, messages: Messages, num_turns: int) -> tuple[str, Spans]:
        """Spans from `{% generation %}`; a special token right behind the mark belongs to the answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marks = render_jinja_template(
            [messages],
            chat_template=self.text,
            return_assistant_tokens_mask=True,
            **_FIXED,
            **self._tokenizer.special_tokens_map,
        )
        whole, spans = texts[0], []
        for start, end in marks[0]:
            end_token = self._special.match(whole, end)
            spans.append((start, end_token.end() if end_token else end))
        if len(spans) != num_turns:
            message = f"the template marks {len(spans)} answers by generation, the conversation has {num_turns}"
            raise InvalidRowError(REFUSED, message)
        return whole, spans

    def _split(self, prompt: str, question: str, answer: str) -> RenderedTurn:
        for content in (question, question.strip()):
            if prompt.endswith(content + self._prompt_tail):
                start = len(prompt) - len(self._prompt_tail) - len(content)
                return RenderedTurn(prompt[:start], content, self._prompt_tail, answer)
        return RenderedTurn(prompt, None, "", answer)

    def _probe_template(self) -> None:
        """Find out from a made-up turn what stands behind a question and behind an answer."""
        question, answer = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
        try:
            prompt = self._render([question], add_generation_prompt=True)
            whole = self._render([question, answer], add_generation_prompt=False)
        except InvalidRowError as error:
            raise ValueError(f"the chat template cannot render a question and an answer: {error}") from error
        self._probe = whole
        if prompt.count(_QUESTION) != 1 or whole.count(_ANSWER) != 1:
            raise ValueError("the chat template does not write the user's and the assistant's words once each")
        if not whole.startswith(prompt) and not self._is_marked:
            raise ValueError(
                "the chat template writes a prompt for generation that does not begin its rendering of the answered "
                f"question, so what to learn cannot be told; {_REMEDY}"
            )
        self._prompt_tail = prompt.partition(_QUESTION)[2]
        self._answer_tail = whole.partition(_ANSWER)[2]
        self._answer_end = end_of_answer(self._answer_tail, self._special)
        self.ends_answers = bool(self._special.search(self._answer_end))
        self.stop_token_ids = stop_token_ids(self._answer_end, self._special, self._tokenizer)

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self.text, add_generation_prompt=add_generation_prompt, tokenize=False, **_FIXED
            )
        except TemplateError as error:
            raise InvalidRowError(REFUSED, f"the chat template says: {error}") from error


def _messages(conversation: Conversation) -> Messages:
    messages = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    for question, answer in conversation.turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages
