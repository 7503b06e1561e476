"""Interface of chat templates.

    conversation --render--> examples of RenderedTurn, ... --encode_turns--> examples of EncodedTurn, ...

    turn      prompt (head + content + tail)    lead    answer
    loss      0  0  0  0  0  0  0  0  0  0  0   0 or 1   1  1  1

The parts are encoded separately, so that training uses exactly the prompt ids that generation starts from. Most rows
are one example; a row whose earlier turns the template rewrites is unfolded into several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.templates.loss_mask import EncodedTurn, join_turns
from paddlenlp_ext.data.templates.rendered_turns import Example, RenderedTurn
from paddlenlp_ext.data.templates.text_encoder import TextEncoder


@dataclass(frozen=True)
class TemplateOptions:
    """Options of a run that change what a chat template writes, and what of it counts in the loss.

    Attributes:
        kwargs: variables of the template, such as `enable_thinking`; a row may set them itself.
        learn_empty_think: an empty thought before an answer counts in the loss.
        mask_reasoning: thoughts do not count in the loss.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    learn_empty_think: bool = False
    mask_reasoning: bool = False

    @classmethod
    def from_config(cls, config: DataConfig) -> TemplateOptions:
        """Return the options that the data keys of a run set."""
        return cls(config.chat_template_kwargs or {}, config.learn_empty_think, config.mask_reasoning)


class ChatTemplate(ABC):
    """Base class of chat templates, which render a conversation to text and token ids, prompts separate from answers.

    Attributes:
        text: source of the template.
        encoder: encoder of the tokenizer.
        prefix_ids: ids added before the first prompt.
        answer_end_ids: ids added after every answer, as targets.
        pieces_continue: True if each piece of text is encoded as the continuation of the piece before it.
        stop_token_ids: ids that end generation.
        tail_ids: ids of the text after the end of the last answer, such as a line break, which is no target.
        ends_answers: True if a special token ends every answer. If False, loading the template logs a warning.
        writes_messages: True if it writes any list of messages, False if only turns of a question and an answer.
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
        """Text that determines the rendering, as part of the cache key."""
        return self.text

    @abstractmethod
    def render(self, conversation: Conversation) -> list[Example]:
        """Return the examples of a conversation as text, in the order of their last answers.

        There are several if the template writes earlier answers differently once later messages follow. Each target
        answer is a target in exactly one example.

        Raises:
            InvalidRowError: the template refuses the conversation or does not write all of it, or an answer cannot be
                located.
        """

    @abstractmethod
    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt ids after which the model generates the answer to the last message.

        Args:
            conversation: messages of which the last is not an answer.

        Raises:
            InvalidRowError: the template refuses the conversation.
        """

    def encode(self, conversation: Conversation) -> list[tuple[list[int], list[bool]]]:
        """Return tokens and loss mask of each example of a conversation.

        Raises:
            InvalidRowError: as for `render`.
        """
        return [join_turns(turns) for turns in self.encode_turns([e.turns for e in self.render(conversation)])]

    def answer_text(self, turn: RenderedTurn) -> str:
        """Return the text that the model is to generate in a turn, without special tokens."""
        return "".join(lead.text for lead in turn.lead if not lead.is_prompt) + turn.answer

    def encode_turns(self, examples: Sequence[Sequence[RenderedTurn]]) -> list[list[EncodedTurn]]:
        """Return the ids of all turns of many examples, from one call of the tokenizer."""
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
        """Return the prompt with `prefix_ids` before it, unless its text already begins with them."""
        prefix = list(self.prefix_ids)
        return prompt if prompt[: len(prefix)] == prefix else prefix + prompt

    def _add_end(self, answer: list[int]) -> list[int]:
        end = list(self.answer_end_ids)
        return answer if end and answer[-len(end) :] == end else answer + end
