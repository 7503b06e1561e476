"""Trainable tokens: the rows of a few tokens in the embedding, such as chat markers, are trained alone.

    E'[t] = delta[k] if t is the k-th trained token, else E[t]        delta [K, D], at the start the rows of E

The method of Hugging Face PEFT of this name. If lm_head is tied to the embedding, its rows are replaced too. An lm_head
of its own is adapted only if `target_modules` names it, with rows of its own. Merging writes the rows into the table.

The embedding looks the replaced rows up. An lm_head needs the full table, so each of its uses copies the table, and the
backward pass computes a gradient for all of it.

Shapes: V vocabulary, U this rank's rows of it, D hidden, K trained tokens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.options import option
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.module_utils import new_parameter
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpu.bf16 import activation_dtype
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields, required_field
from paddlenlp_ext.peft.inject import select_targets, shortest_targets, targets_from_peft
from paddlenlp_ext.peft.layers import WeightAdapter, adapter_layers, has_values
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.sharding_spec import shard_of

TARGETS = ("embed_tokens",)
_KEY = "trainable_tokens_indices"


@PEFT_METHODS.register("trainable_tokens")
@dataclass(kw_only=True)
class TrainableTokensConfig(PeftConfig):
    """Options of trainable tokens.

    Raises:
        ValueError: a token is listed twice, or negative.
    """

    peft_type: ClassVar[str] = "TRAINABLE_TOKENS"
    starts_from_weights: ClassVar[bool] = True

    indices: object | None = option(
        None,
        help="ids of the tokens to train, such as [3, 7]; required, except with trainable_tokens_path",
        arguments=("token_indices",),
    )
    target_modules: tuple[str, ...] | None = option(
        TARGETS, help="tables to adapt: embed_tokens, and lm_head where it is not tied to the embedding"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.indices = token_ids = _token_ids(self.indices)
        twice = sorted({token_id for token_id in token_ids if token_ids.count(token_id) > 1})
        if twice or min(token_ids, default=0) < 0:
            problem = f"{twice[0]} is listed twice" if twice else f"{min(token_ids)} is negative"
            raise ValueError(f"{_KEY}: {problem}; list each token id once")

    def targets(self, model: TrainableModel) -> list[str]:
        token_ids, vocab_size = _token_ids(self.indices), model.config.vocab_size
        if not token_ids:
            raise ValueError(f"{_KEY} is empty; list the ids of the tokens to train, such as [128002, 128003]")
        if max(token_ids) >= vocab_size:
            raise ValueError(
                f"{_KEY}: {max(token_ids)} is not below the model's vocab_size {vocab_size}; use ids of its tokens"
            )
        tables = [name for name, layer in model.named_sublayers() if isinstance(layer, Embedding)]
        tables += [] if model.lm_head is None else ["lm_head"]
        return select_targets(tables, self.target_modules, "trainable_tokens_target_modules", "embedding")

    def wrap(self, name: str, base: nn.Layer, seed: int) -> TrainableTokens:
        assert isinstance(base, (Embedding, Linear))
        return TrainableTokens(base, _token_ids(self.indices))

    def warm_start(self, stored: PeftConfig) -> TrainableTokensConfig:
        assert isinstance(stored, TrainableTokensConfig)
        return dataclasses.replace(stored, path=self.path)

    def decays(self, parameter_name: str) -> bool:
        """Return False: weight decay would pull the rows to 0, away from the base's."""
        return False

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            "token_indices": list(_token_ids(self.indices)),
            "target_modules": shortest_targets([name for name, _ in adapter_layers(model)], model),
            "init_weights": True,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> TrainableTokensConfig:
        refuse_unread_fields(fields, {"token_indices", "target_modules", "init_weights"})
        return cls(indices=tuple(required_field(fields, "token_indices")), target_modules=targets_from_peft(fields))

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Drop the second copy of the rows that PEFT stores for an lm_head tied to the embedding."""
        is_tied = not any(target.endswith("lm_head") for target in self.target_modules or ())
        return {name: value for name, value in tensors.items() if not (is_tied and name.startswith("lm_head."))}


def _token_ids(value: object) -> tuple[int, ...]:
    """Return a list of token ids, which the command line writes as `3,7` or `[3, 7]`; None is an empty list.

    Raises:
        ValueError: it is not a list of whole numbers.
    """
    elements: object = value
    if isinstance(value, str):
        words = [word.strip() for word in value.strip("[] ").split(",")]
        elements = [int(word) if re.fullmatch(r"-?\d{1,18}", word) else word for word in words if word]
    elements = () if elements is None else elements
    if not isinstance(elements, (list, tuple)) or not all(type(element) is int for element in elements):
        raise ValueError(f"{_KEY}: expected a list of token ids such as [3, 7], got {value!r}")
    return tuple(int(element) for element in elements)


class TrainableTokens(WeightAdapter):
    """Embedding or lm_head with trained rows in place of some of the base's.

    Args:
        base: token embedding, or an lm_head that is not tied to it.
        indices: ids of the trained tokens, K.
    """

    base: Embedding | Linear
    row_of_token: paddle.Tensor
    indices: paddle.Tensor

    def __init__(self, base: Embedding | Linear, indices: tuple[int, ...]) -> None:
        super().__init__(base)
        vocab_size, width = base.weight.shape
        rows = np.zeros((len(indices), width), np.float32)
        if has_values(base):
            rows = paddle.gather(base.weight, paddle.to_tensor(indices)).astype("float32").numpy()
        self.trainable_tokens_delta = new_parameter(self, rows, activation_dtype(base.weight.dtype))
        row_of_token = np.full(vocab_size, -1, np.int64)
        row_of_token[list(indices)] = np.arange(len(indices))
        self.register_buffer("row_of_token", paddle.to_tensor(row_of_token), persistable=False)
        self.register_buffer("indices", paddle.to_tensor(indices, dtype="int64"), persistable=False)

    @property
    def weight(self) -> paddle.Tensor:
        """Table [U, D] with the trained rows, for an lm_head; the base's while the adapter is disabled."""
        if not self.enabled or not has_values(self.base):
            return self.base.weight
        table_UD, delta_KD, shard = self.base.weight, self.trainable_tokens_delta, shard_of(self.base.weight)
        if shard is None:
            return _with_rows(table_UD, self.indices, delta_KD)
        # Every rank replaces only its own rows; the others go to a row that is dropped, so that all ranks have the same
        # graph. Each rank computes the gradient of its own rows.
        assert self.shard_group is not None, "a shard belongs to a group"
        delta_KD = self.shard_group.copy(delta_KD)
        is_own = (self.indices >= shard.start) & (self.indices < shard.stop)
        num_rows = table_UD.shape[0]
        rows = paddle.where(is_own, self.indices - shard.start, paddle.full_like(self.indices, num_rows))
        padded = paddle.concat([table_UD, paddle.zeros([1, table_UD.shape[1]], table_UD.dtype)])
        return _with_rows(padded, rows, delta_KD)[:num_rows]

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map ids [...] to embeddings [..., D], or hidden states [..., D] to logits [..., V]."""
        if isinstance(self.base, Linear):
            return linear(x, self.weight)
        vectors = self.base(x)
        rows = paddle.gather(self.row_of_token, x.flatten())
        trained = paddle.gather(self.trainable_tokens_delta, paddle.clip(rows, min=0)).astype(vectors.dtype)
        return paddle.where((rows >= 0).unsqueeze(1), trained, vectors.flatten(0, -2)).reshape(vectors.shape)

    def merged_weight(self) -> paddle.Tensor:
        """Return the table with the trained rows, float32 [V, D]."""
        table_VD = self.base.weight.astype("float32")
        return paddle.scatter(table_VD, self.indices, self.trainable_tokens_delta.astype("float32"))


def _with_rows(table_UD: paddle.Tensor, rows: paddle.Tensor, values_KD: paddle.Tensor) -> paddle.Tensor:
    """Return a copy of a table with other values in some rows, in the table's dtype."""
    dtype = table_UD.dtype
    if dtype == paddle.bfloat16 and table_UD.place.is_cpu_place():  # for which Paddle's scatter has no kernel
        return paddle.scatter(table_UD.astype("float32"), rows, values_KD.astype("float32")).astype(dtype)
    return paddle.scatter(table_UD, rows, values_KD.astype(dtype))
