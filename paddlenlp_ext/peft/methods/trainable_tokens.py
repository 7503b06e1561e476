"""Trainable tokens: train only the embedding rows of a few tokens, such as chat markers.

`TrainableTokens` in `peft/trainable_token_indices.py` is the adapter layer. A tied lm_head uses the trained rows of the
embedding. An untied lm_head is adapted only if `target_modules` contains lm_head, which then has separate trained rows.
Merging writes the rows into the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from paddle import nn

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields, required_field
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.peft.target_modules import select_targets, shortest_targets, targets_from_peft
from paddlenlp_ext.peft.trainable_token_indices import TrainableTokens, require_in_vocabulary, token_ids

TARGETS = ("embed_tokens",)
_KEY = "trainable_tokens_indices"


@PEFT_METHODS.register("trainable_tokens")
@dataclass(kw_only=True)
class TrainableTokensConfig(PeftConfig):
    """Options of trainable tokens.

    >>> TrainableTokensConfig(token_indices=[3, 7]).token_indices
    (3, 7)

    Raises:
        ValueError: `token_indices` is not a list of ids, or an id is negative or listed twice.
    """

    peft_type: ClassVar[str] = "TRAINABLE_TOKENS"
    starts_from_weights: ClassVar[bool] = True

    token_indices: object | None = option(
        None,
        help="ids of the tokens to train, such as [3, 7]; required unless trainable_tokens_path is set",
        arguments=("indices",),
        key="trainable_tokens_indices",
    )
    target_modules: tuple[str, ...] | None = option(
        TARGETS, help="matrices with the trained rows: embed_tokens, and lm_head if it is not tied to the embedding"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.token_indices = token_ids(self.token_indices, _KEY)

    def targets(self, model: TrainableModel) -> list[str]:
        ids = token_ids(self.token_indices, _KEY)
        if not ids:
            raise ValueError(f"{_KEY} is empty; list the ids of the tokens to train, such as [128002, 128003]")
        require_in_vocabulary(ids, model, _KEY)
        tables = [name for name, layer in model.named_sublayers() if isinstance(layer, Embedding)]
        tables += [] if model.lm_head is None else ["lm_head"]
        return select_targets(tables, self.target_modules, "trainable_tokens_target_modules", "embedding")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> TrainableTokens:
        assert isinstance(base, (Embedding, Linear))
        return TrainableTokens(base, token_ids(self.token_indices, _KEY))

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "token_indices": list(token_ids(self.token_indices, _KEY)),
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "init_weights": True,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> TrainableTokensConfig:
        refuse_unread_fields(fields, {"token_indices", "target_modules", "init_weights"})
        return cls(
            token_indices=tuple(required_field(fields, "token_indices")), target_modules=targets_from_peft(fields)
        )

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Drop the copy of the rows that PEFT stores for a tied lm_head."""
        is_tied = not any(target.endswith("lm_head") for target in self.target_modules or ())
        return {name: value for name, value in tensors.items() if not (is_tied and name.startswith("lm_head."))}
