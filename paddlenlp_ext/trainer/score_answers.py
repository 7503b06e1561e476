"""Score answers with a reward model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.preference.collate_reward_pairs import collate_reward_pairs
from paddlenlp_ext.data.preference.tokenize_reward_pairs import ScoringEncoder
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow
from paddlenlp_ext.data.templates.base import ChatTemplate
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.data.tokenization.truncation import LengthLimits
from paddlenlp_ext.trainer.evaluate import evaluation_mode
from paddlenlp_ext.trainer.forward_backward import hidden_states
from paddlenlp_ext.trainer.objectives.reward_objective import answer_scores
from paddlenlp_ext.utils.json_reader import Location


def score(
    model: Any,
    tokenizer: Any,
    rows: Iterable[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    max_length: int = 4096,
    batch_size: int = 8,
) -> list[list[float]]:
    """Return the rewards of each row's answers: [chosen, rejected] for a preference pair, else one reward.

    Args:
        model: a reward model from `AutoModelForSequenceClassification` or `AutoPeftModelForSequenceClassification`.
        tokenizer: the model's tokenizer.
        rows: rows of preference data or fine-tuning data, in a format of docs/reference/data_formats.md.
        chat_template: template that renders the conversations; use the template from training. None: the tokenizer's
            template.
        max_length: maximum number of tokens of a prompt with all its answers.
        batch_size: number of rows in a forward pass.

    Raises:
        ValueError: the model has no score head, or rows are invalid or too long.

    Examples:
        >>> from paddlenlp_ext import AutoModelForSequenceClassification, AutoTokenizer, score
        >>> model = AutoModelForSequenceClassification.from_pretrained("reward_model")  # doctest: +SKIP
        >>> tokenizer = AutoTokenizer.from_pretrained("reward_model")  # doctest: +SKIP
        >>> score(model, tokenizer, [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}])  # doctest: +SKIP
        [[1.25, -0.5]]
    """
    located = (SourceRow(Location("rows", number, 1), dict(row)) for number, row in enumerate(rows, start=1))
    template = load_template(chat_template, tokenizer)
    return score_rows(model, template, located, max_length=max_length, batch_size=batch_size)


def score_rows(
    model: Any, template: ChatTemplate, rows: Iterable[SourceRow | InvalidRow], *, max_length: int, batch_size: int
) -> list[list[float]]:
    """Return the rewards of each row's answers, for rows with source locations; see `score`."""
    if model.config.num_labels is None:
        raise ValueError(
            f"{model.config.name_or_path} is a language model without a score head; load a reward model with "
            "AutoModelForSequenceClassification"
        )
    limits = LengthLimits(max_length, max_length, "error")
    encoded = ScoringEncoder(template, limits, False, ()).pairs(rows)
    rewards: list[list[float]] = [[] for _ in encoded]
    plan = PackingPlan([row.length for row in encoded], batch_size=batch_size, shuffle=False)
    for micro_batch in plan.epoch(0):
        packs = [[encoded[index] for index in pack] for pack in micro_batch]
        batch = collate_reward_pairs(packs, unscored_token_id=model.config.source.get("pad_token_id"))
        with evaluation_mode(model):
            scores = iter(answer_scores(model, hidden_states(model, batch), batch).numpy().tolist())
        for index in batch.row_indices:
            rewards[index] = [next(scores) for _ in encoded[index].answer_starts]
    return rewards
