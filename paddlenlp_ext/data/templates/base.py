"""Interface of chat templates.

    conversation --render--> examples of RenderedTurn, ... --encode_turns--> examples of EncodedTurn, ...

    turn      prompt (head + content + tail)    lead    answer
    loss      0  0  0  0  0  0  0  0  0  0  0   0 or 1   1  1  1

Prompt, lead and answer are encoded separately, so that the prompt has the same token ids in training and generation.
Usually a row becomes one example. If the template rewrites earlier turns, the row becomes several examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.templates.text_encoder import TextEncoder
from paddlenlp_ext.data.templates.turns import EncodedTurn, Example, RenderedTurn, join_turns


@dataclass(frozen=True)
class TemplateOptions:
    """Options of a run that change the rendered text and the loss mask.

    Attributes:
        kwargs: variables of the template, such as `enable_thinking`; a row may override variables.
        learn_empty_think: whether an empty reasoning block before an answer is included in the loss.
        mask_reasoning: whether reasoning is excluded from the loss.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    learn_empty_think: bool = False
    mask_reasoning: bool = False

    @classmethod
    def from_config(cls, config: DataConfig) -> TemplateOptions:
        """Return the options from the data section of a run configuration."""
        return cls(config.chat_template_kwargs or {}, config.learn_empty_think, config.mask_reasoning)


class ChatTemplate(ABC):
    """Base class of chat templates, which render conversations to text and encode them as token ids.

    Attributes:
        text: source text of the template.
        encoder: encoder of the tokenizer.
        prefix_ids: token ids added before the first prompt.
        answer_end_ids: token ids added after every answer, as targets.
        pieces_continue: whether each text of a turn is encoded as the continuation of the previous text.
        stop_token_ids: token ids that end generation.
        tail_ids: token ids of the text after the last answer, such as a line break; not targets.
        ends_answers: whether a special token ends every answer; otherwise loading the template logs a warning.
        writes_messages: whether the template accepts any list of messages, and not only question-answer turns.
    """

    text: str
    encoder: TextEncoder
    prefix_ids: tuple[int, ...] = ()
    answer_end_ids: tuple[int, ...] = ()
    pieces_continue: bool = True
    stop_token_ids: tuple[int, ...] = ()
    tail_ids: tuple[int, ...] = ()
    ends_answers: bool = True
    writes_messages: bool = False

    @property
    def identity(self) -> str:
        """Text that identifies the template and its options in the cache key of tokenized data."""
        return self.text

    @abstractmethod
    def render(self, conversation: Conversation) -> list[Example]:
        """Return the examples of a conversation as text, in the order of their last answers.

        A conversation becomes several examples if the template rewrites earlier answers when later messages follow.
        Each target answer is a target in exactly one example.

        Raises:
            InvalidRowError: the template rejects the conversation or omits content, or an answer cannot be located.
        """

    @abstractmethod
    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt token ids for generating the answer to the last message.

        Args:
            conversation: messages; the last message is not an answer.

        Raises:
            InvalidRowError: the template rejects the conversation.
        """

    def encode(self, conversation: Conversation) -> list[tuple[list[int], list[bool]]]:
        """Return token ids and loss mask of each example of a conversation.

        Raises:
            InvalidRowError: see `render`.
        """
        return [join_turns(turns) for turns in self.encode_turns([e.turns for e in self.render(conversation)])]

    def answer_text(self, turn: RenderedTurn) -> str:
        """Return the text that the model is trained to generate in a turn."""
        return "".join(lead.text for lead in turn.lead if not lead.is_prompt) + turn.answer

    def encode_turns(self, examples: Sequence[Sequence[RenderedTurn]]) -> list[list[EncodedTurn]]:
        """Encode the turns of many examples with a single tokenizer call."""
        texts: list[str] = []
        continues: list[bool] = []
        for turns in examples:
            for index, turn in enumerate(turns):
                parts = [turn.prompt, *(lead.text for lead in turn.lead), turn.answer]
                texts += parts
                continues += [self.pieces_continue and index > 0, *[self.pieces_continue] * (len(parts) - 1)]
        pieces = iter(self.encoder.encode(texts, continues))
        encoded = []
        for turns in examples:
            ids = [(turn, next(pieces), tuple(next(pieces) for _ in turn.lead), next(pieces)) for turn in turns]
            encoded.append(
                [
                    EncodedTurn(prompt if index else self.add_prefix(prompt), self._add_end(answer), turn, lead)
                    for index, (turn, prompt, lead, answer) in enumerate(ids)
                ]
            )
        return encoded

    def add_prefix(self, prompt: list[int]) -> list[int]:
        """Return the prompt ids, preceded by `prefix_ids` unless the prompt already starts with `prefix_ids`."""
        prefix = list(self.prefix_ids)
        return prompt if prompt[: len(prefix)] == prefix else prefix + prompt

    def _add_end(self, answer: list[int]) -> list[int]:
        end = list(self.answer_end_ids)
        return answer if end and answer[-len(end) :] == end else answer + end
