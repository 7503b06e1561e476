"""Forward pass of a causal language model with transformers' arguments: attention mask and labels.

    input_ids         . .  a b c d  . .        padding on the left and on the right
    attention_mask    0 0  1 1 1 1  0 0
    document_lengths  [2,  4,       2]         padding becomes a separate document, so that no token attends to it
    labels            - -  - b c d  - -        -: -100
    targets           - -  b c d -  - -        labels shifted left by one; a document's first token is never a target

Shapes: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.utils.labels import IGNORED_LABEL

DocumentLengths = Sequence[Sequence[int]]
PromptLengths = Callable[[np.ndarray, DocumentLengths | None], DocumentLengths]


class CausalLMOutput:
    """Loss and logits of a forward pass with labels.

    The output behaves like a transformers output (`output.loss`, `output.logits`), like PaddleNLP's tuple
    (`loss, logits = output`, `output[0]`), and like the loss tensor (`output.backward()`, `float(output)`).

    Attributes:
        loss: mean cross entropy of the target tokens plus the auxiliary loss of the routers, a float32 scalar.
        logits: [B, S, V], computed on first access.
    """

    def __init__(self, loss: paddle.Tensor, make_logits: Callable[[], paddle.Tensor]) -> None:
        self.loss = loss
        self._make_logits = make_logits

    @functools.cached_property
    def logits(self) -> paddle.Tensor:
        return self._make_logits()

    def __iter__(self) -> Iterator[paddle.Tensor]:
        yield self.loss
        yield self.logits

    def __getitem__(self, key: int | str) -> paddle.Tensor:
        if key in ("loss", 0):
            return self.loss
        if key in ("logits", 1):
            return self.logits
        raise (KeyError if isinstance(key, str) else IndexError)(key)

    def __len__(self) -> int:
        return 2

    def __float__(self) -> float:
        return float(self.loss)

    def __mul__(self, factor: Any) -> paddle.Tensor:
        return self.loss * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> paddle.Tensor:
        return self.loss / divisor

    def __add__(self, other: Any) -> paddle.Tensor:
        return self.loss + other

    __radd__ = __add__

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loss, such as `backward` or `item`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.loss, name)


def causal_lm_forward(
    model: TrainableModel,
    input_ids: paddle.Tensor,
    attention_mask: paddle.Tensor | None,
    labels: paddle.Tensor | None,
    document_lengths: DocumentLengths | None = None,
    compute_prompt_lengths: PromptLengths | None = None,
    **inputs: Any,
) -> paddle.Tensor | CausalLMOutput:
    """Return logits [B, S, V], or a `CausalLMOutput` if labels are given.

    Args:
        input_ids: [B, S]. `input_ids`, `attention_mask` and `labels` may also be NumPy arrays.
        attention_mask: [B, S], 1 for tokens and 0 for padding on the left, on the right, or on both sides.
        labels: [B, S], unshifted: the input ids, with -100 for tokens that are not targets.
        document_lengths: lengths of the documents in each row, as an alternative to `attention_mask`.
        compute_prompt_lengths: function that computes the argument `prompt_lengths` of `hidden_states` from targets
            [B, S] and document lengths; None for models without this argument.
        inputs: further arguments of `hidden_states`.

    Raises:
        ValueError: the mask has gaps or is combined with a cache or document lengths, or the mask or the labels do not
            have the shape of `input_ids`.
    """
    input_ids = _as_tensor(input_ids)
    attention_mask = None if attention_mask is None else _as_tensor(attention_mask)
    labels = None if labels is None else _as_tensor(labels)
    if attention_mask is not None:
        if document_lengths is not None or inputs.get("cache") is not None:
            raise ValueError("attention_mask is combined with document_lengths or a cache; pass only one of the three")
        document_lengths = _documents_of(attention_mask, input_ids.shape)
    if document_lengths is not None:
        inputs["document_lengths"] = document_lengths
    targets_BS = None if labels is None else _targets(labels, input_ids.shape, document_lengths)
    if compute_prompt_lengths is not None and targets_BS is not None and "prompt_lengths" not in inputs:
        inputs["prompt_lengths"] = compute_prompt_lengths(targets_BS.numpy(), document_lengths)
    balance = model.load_balance
    ignoring = nullcontext() if balance is None else balance.without_padding(_as_numpy(attention_mask))
    with ignoring:
        hidden_BSD = model.hidden_states(input_ids, **inputs)
    if targets_BS is None:
        return model.logits(hidden_BSD)
    targets_T = targets_BS.reshape([-1])
    loss_sum, _ = model.cross_entropy(hidden_BSD.reshape([-1, hidden_BSD.shape[-1]]), targets_T)
    loss = loss_sum / (targets_T != IGNORED_LABEL).sum().astype(loss_sum.dtype)
    if balance is not None and balance.loss is not None:
        loss = loss + balance.loss
    return CausalLMOutput(loss, lambda: model.logits(hidden_BSD))


class AdaptedHead:
    """Interface of an lm_head adapter that adds low-rank products to the logits."""

    def logit_updates(self, hidden: paddle.Tensor) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the low-rank factors (u, B) of the updates; see `TrainableModel.head_updates`."""
        raise NotImplementedError


def _as_tensor(x: paddle.Tensor | np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(x) if isinstance(x, np.ndarray) else x


def _as_numpy(x: paddle.Tensor | None) -> np.ndarray | None:
    return None if x is None else x.numpy()


def _documents_of(attention_mask: paddle.Tensor, shape: Sequence[int]) -> list[list[int]] | None:
    """Return the document lengths of padded rows, or None if no row has padding.

    Raises:
        ValueError: the shape of the mask differs from `shape`, or a row has padding between tokens.
    """
    if list(attention_mask.shape) != list(shape):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; it must have the shape of input_ids, {shape}"
        )
    mask_BS = attention_mask.astype("bool").numpy()
    if mask_BS.all():
        return None
    rows = []
    for number, mask_S in enumerate(mask_BS):
        length, tokens = len(mask_S), int(mask_S.sum())
        left = int(mask_S.argmax()) if tokens else length
        if not mask_S[left : left + tokens].all():
            raise ValueError(
                f"attention_mask: row {number} has padding between tokens; pad on the left or on the right"
            )
        rows.append([part for part in (left, tokens, length - left - tokens) if part])
    return rows


def _targets(labels: paddle.Tensor, shape: Sequence[int], document_lengths: DocumentLengths | None) -> paddle.Tensor:
    """Return the target of each position, int64 [B, S]: the labels shifted left by one.

    Raises:
        ValueError: the shape of the labels differs from `shape`.
    """
    if list(labels.shape) != list(shape):
        raise ValueError(f"labels have shape {list(labels.shape)}; they must have the shape of input_ids, {shape}")
    end_B1 = paddle.full([shape[0], 1], IGNORED_LABEL, dtype="int64")
    targets_BS = paddle.concat([labels.astype("int64")[:, 1:], end_B1], axis=1)
    if document_lengths is None:
        return targets_BS
    ends_BS = np.zeros(list(shape), bool)
    for row, documents in enumerate(document_lengths):
        ends_BS[row, np.cumsum(documents) - 1] = True
    return paddle.where(paddle.to_tensor(ends_BS), paddle.full_like(targets_BS, IGNORED_LABEL), targets_BS)
