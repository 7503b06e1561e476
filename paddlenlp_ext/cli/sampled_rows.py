"""Make rows for fine-tuning and for preference training from scored answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from paddlenlp_ext.cli.sampling_arguments import ALL, SFT, SamplingArguments
from paddlenlp_ext.data.prediction_prompts import Prompt
from paddlenlp_ext.data.rollouts.rollout import Rollout
from paddlenlp_ext.data.rows.conversation import Message


def training_rows(
    arguments: SamplingArguments,
    prompt: Prompt,
    rollout: Rollout,
    end_tokens: frozenset[int],
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Return the rows of a group of answers, best answer first; an empty list if no answer qualifies.

    Blank answers and answers without a reward are left out. Truncated answers are left out too, except as rejected
    answers.

    Args:
        arguments: how answers are chosen.
        prompt: prompt of the group.
        rollout: the answers.
        end_tokens: tokens that end an answer.
        decode: function that decodes token ids to text.
    """
    texts = [decode(ids) for ids in rollout.completion_ids]
    scored = [index for index, text in enumerate(texts) if text.strip() and not math.isnan(rollout.rewards[index])]
    ranked = sorted(scored, key=lambda index: -rollout.rewards[index])
    is_truncated = rollout.is_truncated(end_tokens)
    finished = [index for index in ranked if not is_truncated[index]]
    if arguments.output_format == SFT:
        least = -math.inf if arguments.min_reward is None else arguments.min_reward
        first: dict[str, int] = {}  # of equal answers, the first is kept
        for index in finished:
            if rollout.rewards[index] >= least:
                first.setdefault(texts[index], index)
        chosen = [*first.values()] if arguments.keep == ALL else [*first.values()][:1]
        return [_row(prompt, rollout, texts, {"completion": index}) for index in chosen]
    if not finished:
        return []
    best, worst = finished[0], ranked[-1]
    margin = rollout.rewards[best] - rollout.rewards[worst]
    if margin <= 0 or margin < arguments.min_margin or texts[best] == texts[worst]:
        return []
    return [_row(prompt, rollout, texts, {"chosen": best, "rejected": worst})]


def _row(prompt: Prompt, rollout: Rollout, texts: Sequence[str], answers: dict[str, int]) -> dict[str, Any]:
    """Return a row of messages; `answers` maps a field to the index of its answer."""
    conversation = prompt.conversation
    row: dict[str, Any] = {"prompt": [_message(message) for message in conversation.messages]}
    row |= {name: [{"role": "assistant", "content": texts[index]}] for name, index in answers.items()}
    if conversation.tools:
        row["tools"] = [dict(tool) for tool in conversation.tools]
    if conversation.template_kwargs:
        row["chat_template_kwargs"] = dict(conversation.template_kwargs)
    return {**row, "rewards": [float(rollout.rewards[index]) for index in answers.values()]}


def _message(message: Message) -> dict[str, Any]:
    reasoning = {} if message.reasoning is None else {"reasoning_content": message.reasoning}
    return {**message.to_json(), **reasoning}
