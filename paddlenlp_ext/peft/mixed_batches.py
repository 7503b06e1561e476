"""Mixed batches (multi-LoRA): each row of a batch can use a different adapter of the same base model.

Adapters with low-rank updates share a forward pass: the factors of all adapters are concatenated, and a mask m selects
the products of each row's adapter:

    y = x W^T + ((x A^T) * m) B^T        A = [A_1; A_2; ...]        B = [B_1, B_2, ...]

    m           ranks of A_1   ranks of A_2
    row 0       1 1 1 1        0 0              adapter 1
    row 1       0 0 0 0        1 1              adapter 2
    row 2       0 0 0 0        0 0              base

Any other adapter runs its rows in a separate forward pass, during which the adapter's layers are in the model.

Shapes: B rows, S positions, in/out features, R sum of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.nn.submodules import layer_at, replace_layer
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles
from paddlenlp_ext.peft.layers import AdapterLayer, as_linear, attach_adapters, detach_adapters
from paddlenlp_ext.peft.low_rank_factors import Factors, factors_of
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")
SHARED = ""
"""Name of the group that contains the base model and all adapters whose rows can share a forward pass."""


class RowAdapters:
    """Adapter name of each row in the current batch, shared by all `RowLoRALinear` layers."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._masks: dict[tuple[tuple[str, int], ...], paddle.Tensor | None] = {}

    def select(self, names: Sequence[str]) -> None:
        """Set the adapter of each row; an unknown name selects the base model."""
        if list(names) != list(self._names):
            self._names, self._masks = list(names), {}

    @property
    def num_rows(self) -> int:
        """Number of rows B in the batch."""
        return len(self._names)

    def mask(self, ranks: tuple[tuple[str, int], ...], dtype: paddle.dtype) -> paddle.Tensor | None:
        """Return the mask [B, 1, R] for the concatenated factors of a layer; None if no row uses the layer's adapters.

        Args:
            ranks: name and rank of each adapter of the layer, in the order of the concatenated factors.
            dtype: dtype of the mask, the same for all layers of a model.
        """
        if ranks not in self._masks:
            columns = [np.array(self._names) == name for name, rank in ranks for _ in range(rank)]
            mask_BR = np.stack(columns, axis=1)
            self._masks[ranks] = paddle.to_tensor(mask_BR[:, None]).astype(dtype) if mask_BR.any() else None
        return self._masks[ranks]


class RowLoRALinear(AdapterLayer):
    """Linear layer with a different low-rank update for each row.

    Args:
        base: linear layer, quantized or not.
        factors: adapter name -> factors of this layer.
        rows: adapters of the current batch.
    """

    def __init__(self, base: Any, factors: Mapping[str, Factors], rows: RowAdapters) -> None:
        super().__init__(base)
        dtype = as_linear(base).compute_dtype
        self.ranks = tuple((name, pair.a.shape[0]) for name, pair in factors.items())
        self.a = paddle.concat([pair.a for pair in factors.values()]).astype(dtype)
        self.b = paddle.concat([pair.b for pair in factors.values()], axis=1).astype(dtype)
        self.rows = rows

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [B, S, in] to [B, S, out], or [B * S, in] to [B * S, out]."""
        y = self.base(x)
        mask_B1R = self.rows.mask(self.ranks, self.a.dtype)
        if mask_B1R is None:
            return y
        inner_BSR = linear(x, self.a).reshape([self.rows.num_rows, -1, self.a.shape[0]]) * mask_B1R
        return y + linear(inner_BSR, self.b).reshape(y.shape).astype(y.dtype)


class AdapterGroups:
    """Base model with named adapters; implements `generation.continuous_batching.AdapterModels`.

    Args:
        model: base model without an adapter.
        adapters: name -> stored adapter.

    Raises:
        ValueError: an adapter does not fit the model, or has non-finite factors.
    """

    def __init__(self, model: TrainableModel, adapters: Mapping[str, AdapterFiles]) -> None:
        self._base, self._rows = model, RowAdapters()
        self._models: dict[str, Any] = {SHARED: model}
        self._row_layers: dict[str, AdapterLayer] = {}
        shared: dict[str, dict[str, Factors]] = {}
        for name, stored in adapters.items():
            adapted = PeftModel.from_files(model, stored, is_trainable=False)
            factors = _factors_by_row(adapted, name)
            adapted.adapter.detach()
            if factors is None:
                self._models[name] = adapted
                logger.info("adapter %s (%s) runs in separate forward passes", name, stored.config.peft_type)
            for layer, pair in (factors or {}).items():
                shared.setdefault(layer, {})[name] = pair
        for layer, by_name in shared.items():
            replace_layer(model, layer, RowLoRALinear(layer_at(model, layer), by_name, self._rows))
        self._active = SHARED
        model.eval()

    @property
    def config(self) -> Any:
        """Config of the decoder."""
        return self._base.config

    def group_of(self, adapter: str) -> str:
        """Return the group of an adapter; the base model and unknown names are in the shared group."""
        return adapter if adapter in self._models else SHARED

    def prepare(self, group: Any, adapters: Sequence[str]) -> Any:
        """Return the model for a forward pass over rows with the given adapters, which must all belong to `group`."""
        if group != self._active:
            if self._active == SHARED:
                self._row_layers = detach_adapters(self._base)
            else:
                self._models[self._active].adapter.detach()
            if group == SHARED:
                attach_adapters(self._base, self._row_layers)
            else:
                self._models[group].adapter.attach()
            self._active = group
        self._rows.select(adapters)
        return self._models[group]


def _factors_by_row(adapted: PeftModel, name: str) -> dict[str, Factors] | None:
    """Return the factors of an adapter; None if the adapter cannot share a forward pass with other adapters.

    Adapters of lm_head or kv_b_proj cannot share a forward pass, because the model also uses the weights of these
    layers directly.
    """
    try:
        factors = factors_of(adapted)
    except ValueError:  # the update is not low-rank, or the adapter has tensors that are not factors
        return None
    if any(layer.rpartition(".")[2] in ("lm_head", "kv_b_proj") for layer in factors):
        return None
    for layer, pair in factors.items():
        if not all(bool(paddle.isfinite(factor).all()) for factor in (pair.a, pair.b)):
            raise ValueError(f"adapter {name}: {layer} has NaN or infinite weights; train the adapter again")
    return factors
