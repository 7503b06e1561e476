"""Train only the embedding and lm_head rows of selected tokens (`trainable_token_indices`).

    E'[t] = delta[k] if t is the k-th trained token, else E[t]        delta [K, D], initialized with the rows of E

`trainable_token_indices` is an adapter method (methods/trainable_tokens.py) and an option of LoRA. A tied lm_head
shares the trained rows of the embedding.

The embedding looks up trained tokens in delta. An lm_head adds an update of rank K to the base's logits. The update
requires neither a copy of the weight nor a gradient of the full weight.

    h E'^T = h E^T + u B^T        u = h (delta - E[t])^T, [.., K]        B [V, K]: B[v, k] = 1 if v is the k-th token

Shapes: V vocabulary, U vocabulary rows of this rank, D hidden, K trained tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np
import paddle

from paddlenlp_ext.nn.causal_lm_forward import AdaptedHead
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.peft.layers import WeightAdapter, has_values, new_parameter
from paddlenlp_ext.sharding_spec import shard_of
from paddlenlp_ext.utils.json_reader import JsonError, read_document
from paddlenlp_ext.utils.layer_name_patterns import has_suffix

EMBEDDING, HEAD = TABLES = ("model.embed_tokens", "lm_head")
"""Names of the tables: layers whose weight has a row for each token of the vocabulary."""
ROWS = "trainable_tokens_delta"
_KEY = "trainable_token_indices"

TokenIndices = tuple[int, ...] | dict[str, tuple[int, ...]]


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """Parse token ids: a list, a command-line string (`3,7` or `[3, 7]`), or None, which yields no ids.

    Raises:
        ValueError: the value is not a list of integers, or an id is negative or listed twice; the message names `key`.
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
        raise ValueError(f"{key}: {problem}; use non-negative ids, each once")
    return ids


def token_indices(value: object) -> TokenIndices | None:
    """Parse `trainable_token_indices`: token ids for the embedding, a dict from layer names to token ids, or None.

    On the command line, a dict is written as JSON.

    Raises:
        ValueError: the value is neither JSON nor a list of token ids.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = read_document(value)
        except JsonError as error:
            raise ValueError(f"{_KEY}: {value!r} is not JSON: {error}") from None
    if isinstance(value, Mapping):
        return {str(table): token_ids(ids, f"{_KEY}: {table}") for table, ids in value.items()} or None
    return token_ids(value, _KEY) or None


def tokens_by_table(value: object) -> dict[str, tuple[int, ...]]:
    """Parse `trainable_token_indices` into a dict from layer names (embedding, lm_head) to trained token ids.

    Raises:
        ValueError: `value` names a different layer, or is neither JSON nor a list of token ids.
    """
    indices = token_indices(value)
    by_name = indices if isinstance(indices, dict) else {EMBEDDING: indices} if indices else {}
    tokens = {}
    for name, ids in by_name.items():
        table = next((table for table in TABLES if has_suffix(table, name)), None)
        if table is None:
            raise ValueError(f"{_KEY}: {name!r} does not have one row per token; use embed_tokens or lm_head")
        tokens[table] = ids
    return tokens


def tokens_of_model(
    value: object, model: TrainableModel, replaced: Collection[str], targets: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Return a dict from layer names (embedding, lm_head) to trained token ids; a tied lm_head has no entry.

    Args:
        value: value of `trainable_token_indices`.
        model: model without an adapter.
        replaced: names of the layers in `modules_to_save`.
        targets: names of the layers that the adapter's method adapts.

    Raises:
        ValueError: an id is outside the vocabulary, tied layers are given different tokens, a layer is also a target or
            in `modules_to_save`, or tokens are given for the lm_head of a reward model, which has none.
    """
    tokens = tokens_by_table(value)
    for table, ids in tokens.items():
        require_in_vocabulary(ids, model, f"{_KEY}: {table.rpartition('.')[2]}")
        same_weight = (table, *TABLES) if model.config.tie_word_embeddings else (table,)
        for names, key in ((replaced, "in modules_to_save"), (targets, "a target of the adapter")):
            found = next((each for each in same_weight if each in names), None)
            if found is not None:
                layer = table if found == table else f"{found}, which is tied to {table},"
                raise ValueError(f"{_KEY}: {layer} is also {key}; remove the layer from one of the two options")
    if model.config.tie_word_embeddings and HEAD in tokens and tokens.pop(HEAD) != tokens.get(EMBEDDING):
        raise ValueError(
            f"{_KEY}: the base ties lm_head to embed_tokens, but different tokens are listed for the two layers; list "
            "tokens only for embed_tokens, whose rows lm_head shares"
        )
    if HEAD in tokens and model.lm_head is None:
        raise ValueError(f"{_KEY}: a reward model has no lm_head; list the tokens of embed_tokens only")
    return tokens


def require_in_vocabulary(ids: Collection[int], model: TrainableModel, key: str) -> None:
    """Check that token ids are within the model's vocabulary.

    Raises:
        ValueError: an id is outside the vocabulary; the message starts with `key`.
    """
    vocab_size = model.config.vocab_size
    if max(ids, default=0) >= vocab_size:
        raise ValueError(
            f"{key}: {max(ids)} is not below the model's vocab_size {vocab_size}; use ids from the model's vocabulary"
        )


class TrainableTokens(WeightAdapter, AdaptedHead):
    """Embedding or lm_head with trained rows that replace the base's rows for some tokens.

    Args:
        base: token embedding, or an untied lm_head.
        indices: ids of the K trained tokens.
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
        """Weight [U, D] of the base, without the trained rows."""
        return self.base.weight

    def logit_updates(self, hidden: paddle.Tensor) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the factors of the logit update: h (delta - W[t])^T, and one-hot columns for the trained tokens t.

        Return an empty list if the adapter is disabled.
        """
        if not self.enabled:
            return []
        difference_KD = self.trainable_tokens_delta - self._base_rows().astype(self.trainable_tokens_delta.dtype)
        inner = paddle.matmul(hidden, difference_KD.astype(hidden.dtype), transpose_y=True)
        shard = shard_of(self.base.weight)
        rows_U = paddle.arange(self.base.weight.shape[0]) + (0 if shard is None else shard.start)
        return [(inner, (rows_U.unsqueeze(1) == self.indices.unsqueeze(0)).astype(inner.dtype))]

    @paddle.no_grad()
    def _base_rows(self) -> paddle.Tensor:
        """Return the base's rows of the trained tokens, float32 [K, D]; collective if the weight is sharded."""
        table_UD, shard = self.base.weight, shard_of(self.base.weight)
        if shard is None:
            return paddle.gather(table_UD, self.indices).astype("float32")
        assert self.shard_group is not None, "a shard must belong to a group"
        is_own_K = (self.indices >= shard.start) & (self.indices < shard.stop)
        own_K = paddle.where(is_own_K, self.indices - shard.start, paddle.zeros_like(self.indices))
        rows_KD = paddle.gather(table_UD, own_K).astype("float32") * is_own_K.unsqueeze(1).astype("float32")
        return self.shard_group.all_reduce(rows_KD)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map ids [...] to embeddings [..., D], or hidden states [..., D] to logits [..., U]."""
        if isinstance(self.base, Linear):
            logits = linear(x, self.weight)
            return logits + paddle.add_n([linear(*update) for update in self.logit_updates(x)])
        vectors = self.base(x)
        rows = paddle.gather(self.row_of_token, x.flatten())
        trained = paddle.gather(self.trainable_tokens_delta, paddle.clip(rows, min=0)).astype(vectors.dtype)
        return paddle.where((rows >= 0).unsqueeze(1), trained, vectors.flatten(0, -2)).reshape(vectors.shape)

    def merged_weight(self) -> paddle.Tensor:
        """Return the base's weight with the trained rows, float32 [V, D]."""
        table_VD = self.base.weight.astype("float32")
        return paddle.scatter(table_VD, self.indices, self.trainable_tokens_delta.astype("float32"))
