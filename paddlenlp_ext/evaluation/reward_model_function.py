"""Score completions with a reward model, with the interface of a reward function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import paddle

from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.inference.choose_chat_template import choose_template
from paddlenlp_ext.inference.load_model import find_model_and_adapter, load_tokenizer
from paddlenlp_ext.inference.load_reward_model import check_score_head, load_reward_model
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.rewards.registry import text_of
from paddlenlp_ext.trainer.score_answers import score_rows
from paddlenlp_ext.utils.json_reader import Location

_BATCH_SIZE = 8
_MAX_LENGTH = 4096


class ModelReward:
    """Reward function that a reward model computes; an empty completion has no reward.

    The weights are loaded by the first call, because programs create the function early to check its keys.

    Args:
        folder: folder of a reward model or of its adapter.

    Raises:
        ValueError: the folder does not have a reward model.
    """

    def __init__(self, folder: str) -> None:
        arguments = ModelArguments(model_name_or_path=folder)
        self._base, self._adapter = find_model_and_adapter(arguments)
        check_score_head(self._base, self._adapter, ModelSource.resolve(self._base).config)
        tokenizer = load_tokenizer(self._base, self._adapter)
        self._template = choose_template(arguments, [self._adapter, self._base], tokenizer)
        self._folder = folder

    @cached_property
    def _model(self) -> TrainableModel:
        arguments = ModelArguments(model_name_or_path=self._folder, device=paddle.get_device())
        return load_reward_model(arguments, self._base, self._adapter)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float | None]:
        """Return the reward of each completion."""
        pairs = list(enumerate(zip(prompts, completions, strict=True)))
        rows = {index: _row(*pair) for index, pair in pairs if text_of(pair[1]).strip()}
        located = [SourceRow(Location("completions", index + 1, 1), row) for index, row in rows.items()]
        scores = score_rows(self._model, self._template, located, max_length=_MAX_LENGTH, batch_size=_BATCH_SIZE)
        found = {index: own[-1] for index, own in zip(rows, scores, strict=True)}
        return [found.get(index) for index, _ in pairs]


def _row(prompt: Any, completion: Any) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt, "completion": text_of(completion)}
    return {"messages": [*prompt, {"role": "assistant", "content": text_of(completion)}]}
