"""Rows of a few tokens in the embedding and the lm_head that are trained in place of the base's.

    E'[t] = delta[k] if t is the k-th trained token, else E[t]        delta [K, D], at the start the rows of E

They are an adapter of their own (methods/trainable_tokens.py), or an option next to another adapter
(`trainable_token_indices` of Hugging Face PEFT). A tied lm_head shares the rows of the embedding.

The embedding looks the replaced rows up. An lm_head needs the full table, so each of its uses copies the table, and the
backward pass computes a gradient for all of it.

Shapes: V vocabulary, U this rank's rows of it, D hidden, K trained tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

import numpy as np
import paddle

from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.module_utils import new_parameter
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpu.bf16 import activation_dtype
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.peft.layers import WeightAdapter, has_values
from paddlenlp_ext.sharding_spec import shard_of

EMBEDDING, HEAD = TABLES = ("model.embed_tokens", "lm_head")
"""Layers that have a row for each token of the vocabulary."""
ROWS = "trainable_tokens_delta"
_KEY = "trainable_token_indices"

TokenIndices = tuple[int, ...] | dict[str, tuple[int, ...]]


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """Return a list of token ids, which the command line writes as `3,7` or `[3, 7]`; None is an empty list.

    Raises:
        ValueError: it is not a list of integers, or an id is negative or listed twice; the message names `key`.
    """
    elements: object = value
    if isinstance(value, str):
        words = [word.strip() for word in value.strip("[] ").split(",")]
        elements = [int(word) if re.fullmatch(r"-?\d{1,18}", word) else word for word in words if word]
    elements = () if elements is None else elements
    if not isinstance(elements, (list, tuple)) or not all(type(element) is int for element in elements):
        raise ValueError(f"{key}: expected a list of token ids such as [3, 7], got {value!r}")
    ids = tuple(int(element) for element in elements)
    twice = sorted({token_id for token_id in ids if ids.count(token_id) > 1})
    if twice or min(ids, default=0) < 0:
        problem = f"{twice[0]} is listed twice" if twice else f"{min(ids)} is negative"
        raise ValueError(f"{key}: {problem}; list each token id once")
    return ids


def token_indices(value: object) -> TokenIndices | None:
    """Return a value of `trainable_token_indices`: ids of the embedding, or an object from tables to ids; or None.

    The command line writes an object as JSON.

    Raises:
        ValueError: it is neither, or see `token_ids`.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_KEY}: {value!r} is not JSON: {error}") from None
    if isinstance(value, Mapping):
        return {str(table): token_ids(ids, f"{_KEY}: {table}") for table, ids in value.items()} or None
    return token_ids(value, _KEY) or None


def tokens_by_table(value: object) -> dict[str, tuple[int, ...]]:
    """Return the trained tokens of each layer of TABLES, by its name; `value` is that of `trainable_token_indices`.

    Raises:
        ValueError: `value` names another layer, or see `token_indices`.
    """
    indices = token_indices(value)
    by_name = indices if isinstance(indices, dict) else {EMBEDDING: indices} if indices else {}
    tokens = {}
    for name, ids in by_name.items():
        table = next((table for table in TABLES if f".{table}".endswith(f".{name}")), None)
        if table is None:
            raise ValueError(f"{_KEY}: {name!r} has no row for each token; use embed_tokens or lm_head")
        tokens[table] = ids
    return tokens


def tokens_of_model(
    value: object, model: TrainableModel, replaced: Collection[str], targets: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return the trained tokens of each table that holds rows of its own in the model.

    Args:
        value: value of `trainable_token_indices`.
        model: model without an adapter.
        replaced: names of the layers in `modules_to_save`.
        targets: names of the layers that the adapter's method adapts.

    Raises:
        ValueError: an id is outside the vocabulary, two tied tables have different tokens, or a table is trained in
            another way too.
    """
    tokens = tokens_by_table(value)
    for table, ids in tokens.items():
        require_in_vocabulary(ids, model, f"{_KEY}: {table.rpartition('.')[2]}")
        for names, key in ((replaced, "modules_to_save"), (targets, "a target of the adapter")):
            if table in names or (model.config.tie_word_embeddings and any(tied in names for tied in TABLES)):
                raise ValueError(f"{_KEY}: {table} is also {key}; train the rows of the table in one way only")
    if model.config.tie_word_embeddings and HEAD in tokens and tokens.pop(HEAD) != tokens.get(EMBEDDING):
        raise ValueError(
            f"{_KEY}: the base ties lm_head to embed_tokens, and their tokens differ; list the tokens of embed_tokens "
            "only, which lm_head shares"
        )
    if HEAD in tokens and model.lm_head is None:
        raise ValueError(f"{_KEY}: a reward model has no lm_head; list the tokens of embed_tokens only")
    return tokens


def require_in_vocabulary(ids: Collection[int], model: TrainableModel, key: str) -> None:
    """Check that token ids have rows in the model's tables.

    Raises:
        ValueError: one has none; the message names `key`.
    """
    vocab_size = model.config.vocab_size
    if max(ids, default=0) >= vocab_size:
        raise ValueError(f"{key}: {max(ids)} is not below the model's vocab_size {vocab_size}; use ids of its tokens")


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
