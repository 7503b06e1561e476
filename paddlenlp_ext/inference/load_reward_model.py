"""Load a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.inference.arguments import LoadArguments
from paddlenlp_ext.inference.load_model import load_unmerged
from paddlenlp_ext.models.auto import AutoModelForSequenceClassification
from paddlenlp_ext.models.sequence_classifier import is_classifier
from paddlenlp_ext.nn.trainable_model import TrainableModel


def load_reward_model(arguments: LoadArguments, base: str, adapter: str | None) -> TrainableModel:
    """Load a reward model, or a base model with the adapter of a reward model.

    Raises:
        ValueError: the model has no score head, or model or adapter cannot be loaded.
    """

    def check(config: Mapping[str, Any]) -> None:
        check_score_head(base, adapter, config)

    return load_unmerged(arguments, base, adapter, check, AutoModelForSequenceClassification)


def check_score_head(base: str, adapter: str | None, config: Mapping[str, Any]) -> None:
    """Check that a model without an adapter has a score head; an adapter brings its own.

    Raises:
        ValueError: the model is a language model.
    """
    if adapter is None and not is_classifier(config):
        raise ValueError(
            f"{base} is a language model, without a score head; pass a model or an adapter that pnx reward trained"
        )
