"""LoRA initialized from full-precision weights: the product s B' A' is subtracted from W before quantization.

    quantized: W - s B' A'        y = x Q(W - s B' A')^T + s (dropout(x) A^T) B^T

PiSSA, OLoRA and LoftQ use this module. A' and B' depend on W in full precision, so they are computed when W is loaded,
before quantization. The layer stores A', B', A and B. Files contain the LoRA [A; A'], [B, -B'] of rank 2r
(`subtracted_init.py`).

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, read_adapter
from paddlenlp_ext.peft.leading_svd import leading_svd, require_triplets
from paddlenlp_ext.peft.lora.subtracted_init import A_START, B_START, LoRALinearWithInit, SubtractedInitConfig
from paddlenlp_ext.peft.modules_to_save import excluded_targets
from paddlenlp_ext.quantization.quantize_weight import QuantizeDequantize
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.utils.layer_name_patterns import matches

if TYPE_CHECKING:
    from typing_extensions import Self

SVD_CHOICES = ("fast", "exact")
"""SVD algorithms for the leading singular triplets: random projection (fast) or full SVD (exact)."""


class InitialFactors(NamedTuple):
    """Initial factors A [r, in] and B [out, r] of a layer, and the factors A' and B' to subtract from the base."""

    a: paddle.Tensor
    b: paddle.Tensor
    removed_a: paddle.Tensor
    removed_b: paddle.Tensor


@dataclass(kw_only=True)
class InitBeforeQuantizationConfig(SubtractedInitConfig):
    """Options of LoRA variants that are initialized from the weights before quantization.

    The config object that processes the weights (`before_quantizing`) must also wrap the quantized layers (`wrap`).
    """

    over_residual = False
    """Whether a stored adapter was trained on the residual W - s B' A'."""
    factors_source = "new"
    """Source of the initial factors.

    | value | source |
    | --- | --- |
    | new | computed from the base, and stored with the adapter |
    | stored | read from the adapter's file |
    | recomputed | computed from the base each time the adapter is loaded |
    """

    @cached_property
    def initial_factors(self) -> dict[str, InitialFactors]:
        """Layer name -> initial factors, computed by `before_quantizing` and used by `wrap`."""
        return {}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed options that shares `initial_factors`."""
        changed = super().replace(**changes)
        changed.__dict__["initial_factors"] = self.initial_factors
        return changed

    def with_source(self, factors_source: str, over_residual: bool = False) -> InitBeforeQuantizationConfig:
        """Return a copy with the given `factors_source` and `over_residual`."""
        config = self.replace()
        config.factors_source, config.over_residual = factors_source, over_residual
        return config

    @cached_property
    def _from_path(self) -> AdapterFiles:
        """Stored adapter that the run starts from."""
        assert self.path is not None
        return read_adapter(self.path)

    def before_quantizing(
        self,
        name: str,
        weight: paddle.Tensor,
        quantize_dequantize: QuantizeDequantize,
        stored: Mapping[str, np.ndarray] | None = None,
    ) -> paddle.Tensor:
        """Return W - s B' A', or W if the layer has no factors to subtract.

        Stored factors are preferred to recomputed factors, which may differ between devices.
        """
        keys = [f"{name}.{leaf}" for leaf in (A_START, B_START)]
        if stored is not None and all(key in stored for key in keys):
            if not self.over_residual:
                return weight
            removed_a, removed_b = (paddle.to_tensor(stored[key], place=weight.place) for key in keys)
            return self._subtract(name, weight, removed_a, removed_b)
        if self.path:
            return self._from_path.before_quantizing(name, weight, quantize_dequantize)
        if not self.is_target(name):
            return weight
        factors = self.find_initial_factors(name, weight, quantize_dequantize)
        self.initial_factors[name] = factors
        return self._subtract(name, weight, factors.removed_a, factors.removed_b)

    def _subtract(self, name: str, weight: paddle.Tensor, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        if not bool(b.any()):
            return weight
        return weight - self.rank_and_scaling(name)[1] * paddle.matmul(b, a)

    def find_initial_factors(
        self, name: str, weight: paddle.Tensor, quantize_dequantize: QuantizeDequantize
    ) -> InitialFactors:
        """Compute the initial factors of a layer from its full-precision weight.

        Args:
            name: dotted name of the layer.
            weight: float32 [out, in].
            quantize_dequantize: function that rounds a weight to the values of its quantized format.
        """
        raise NotImplementedError

    def is_target(self, name: str) -> bool:
        """Return whether the linear layer `name` is adapted."""
        if excluded_targets(self, [name]):
            return False
        if self.target_modules is None:
            return True
        return any(matches(entry, name, "lora_target_modules") for entry in self.target_modules)

    def wrap_quantized(self, name: str, base: QuantizedLinear, seed: int) -> LoRALinearWithInit:
        """Return the adapter layer for a quantized base layer.

        Raises:
            ValueError: the base layer was quantized without this config, or for another adapter.
        """
        factors, is_stored = self.initial_factors.pop(name, None), self.factors_source == "stored"
        if (factors is None and not is_stored) or (is_stored and base.is_residual != self.over_residual):
            raise ValueError(
                f"{name}: the weight was quantized without this adapter's config, so the adapter's initial factors are "
                "unknown; load the original model with weight_quantize_algo and this adapter's config together"
            )
        rank, scaling = self.rank_and_scaling(name)
        layer = LoRALinearWithInit(
            base, rank, scaling, self.lora_dropout, seed, name, base_is_residual=base.is_residual
        )
        if factors is not None:
            layer.set_initial_factors(*factors)
        return layer

    # -- files --------------------------------------------------------------------------------------------------------
    def recorded_fields(self, model: TrainableModel) -> dict[str, Any]:
        over_residual = any(isinstance(layer, QuantizedLinear) and layer.is_residual for layer in model.sublayers())
        return {**super().recorded_fields(model), "over_residual": over_residual}

    def with_recorded_options(self, recorded_fields: Mapping[str, Any]) -> SubtractedInitConfig:
        config = super().with_recorded_options(recorded_fields)
        assert isinstance(config, InitBeforeQuantizationConfig)
        return config.with_source("stored", bool(recorded_fields.get("over_residual")))


def principal_factors(
    weight: paddle.Tensor, rank: int, scaling: float, name: str, exact: bool
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return A [r, in] and B [out, r] with s B A = U_r S_r V_r^T, the truncated SVD of a weight [out, in].

    Args:
        weight: float32 [out, in].
        rank: r.
        scaling: s.
        name: dotted name of the layer; seed of the random projection.
        exact: use a full SVD instead of a random projection.

    Raises:
        ValueError: the weight has fewer than `rank` singular triplets.
    """
    require_triplets(rank, weight.shape, name)
    u, s, v_t = leading_svd(weight, rank, name, exact=exact)
    root = (s / scaling).sqrt()
    return v_t * root.unsqueeze(1), u * root
