"""Interface of chat templates.

    conversation --render--> examples of RenderedTurn, ... --encode_turns--> examples of EncodedTurn, ...

    turn      prompt (head + content + tail)    lead    answer
    loss      0  0  0  0  0  0  0  0  0  0  0   0 or 1   1  1  1

Prompt, lead and answer are encoded separately, so that training uses exactly the prompt ids of generation. Most rows
give one example; a row whose earlier turns the template rewrites is unfolded into several.
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
    """Options of a run that change the text of a chat template and its loss mask.

    Attributes:
        kwargs: variables of the template, such as `enable_thinking`; rows may override them.
        learn_empty_think: whether an empty reasoning block before an answer counts in the loss.
        mask_reasoning: whether reasoning is excluded from the loss.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    learn_empty_think: bool = False
    mask_reasoning: bool = False

    @classmethod
    def from_config(cls, config: DataConfig) -> TemplateOptions:
        """Return the options that the data keys of a run set."""
        return cls(config.chat_template_kwargs or {}, config.learn_empty_think, config.mask_reasoning)


class ChatTemplate(ABC):
    """Base class of chat templates, which render conversations to text and encode them as token ids.

    Attributes:
        text: source text of the template.
        encoder: encoder of the tokenizer.
        prefix_ids: ids added before the first prompt.
        answer_end_ids: ids added after every answer; they are targets.
        pieces_continue: whether each piece of text is encoded as a continuation of the previous piece.
        stop_token_ids: ids that end generation.
        tail_ids: ids of the text after the last answer, such as a line break; they are not targets.
        ends_answers: whether a special token ends every answer; if not, loading the template logs a warning.
        writes_messages: whether the template writes any list of messages, rather than only question-answer turns.
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
        """Text that identifies the rendering in the cache key."""
        return self.text

    @abstractmethod
    def render(self, conversation: Conversation) -> list[Example]:
        """Return the examples of a conversation as text, in the order of their last answers.

        A conversation has several examples if the template rewrites earlier answers once later messages follow. Each
        target answer is a target in exactly one example.

        Raises:
            InvalidRowError: the template rejects the conversation or leaves a part out, or an answer cannot be located.
        """

    @abstractmethod
    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Return the prompt ids after which the model generates the answer to the last message.

        Args:
            conversation: messages, the last of them not an answer.

        Raises:
            InvalidRowError: the template rejects the conversation.
        """

    def encode(self, conversation: Conversation) -> list[tuple[list[int], list[bool]]]:
        """Return tokens and loss mask of each example of a conversation.

        Raises:
            InvalidRowError: as for `render`.
        """
        return [join_turns(turns) for turns in self.encode_turns([e.turns for e in self.render(conversation)])]

    def answer_text(self, turn: RenderedTurn) -> str:
        """Return the text that the model should generate in a turn."""
        return "".join(lead.text for lead in turn.lead if not lead.is_prompt) + turn.answer

    def encode_turns(self, examples: Sequence[Sequence[RenderedTurn]]) -> list[list[EncodedTurn]]:
        """Encode the turns of many examples with one call of the tokenizer."""
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
        """Return prompt ids that start with `prefix_ids`; they are added unless already there."""
        prefix = list(self.prefix_ids)
        return prompt if prompt[: len(prefix)] == prefix else prefix + prompt

    def _add_end(self, answer: list[int]) -> list[int]:
        end = list(self.answer_end_ids)
        return answer if end and answer[-len(end) :] == end else answer + end
