"""QERA: what quantizing does to a layer's output is made good (Zhang et al. 2024, arXiv 2410.06040).

    R = mean of x^T x over the inputs x of the layer in a few batches
    U S V^T = (W - Q(W)) R^(1/2)
    s B0 A0 = U_r S_r V_r^T R^(-1/2)        y = x Q(W)^T + s (x A0^T) B0^T + s (dropout(x) A^T) B^T

LoRA over a quantized base that is repaired first. Of all updates of rank r s B0 A0 leaves the least error in the
layer's *output* (theorem 1 there); LoftQ's is the nearest to what the weight lost, and inputs are far from alike in all
directions. With `independent` inputs R is its diagonal alone (theorem 2): cheaper, and less is made good.

The paper goes on to train (A0, B0) itself. Here it stays as it is beside a fresh LoRA: trained at the rates at which
LoRA learns it did worse (docs/qlora.md). To the rest of the adapter it is a start that is taken off with the other sign
(offset.py); files are a plain LoRA of rank 2r over the plainly quantized base (offset_files.py).

The batches are the run's first, run once more than training does; the original weights are read a second time, one by
one. Layers that read the same tensor, such as q, k and v, share their R.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.config.options import option
from paddlenlp_ext.ops.lora_linear import lora_linear
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.linalg import leading_svd, require_triplets
from paddlenlp_ext.peft.methods._lora_init import LoRALinearWithInit, LoRAWithInitConfig, set_local_shard
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.option_checks import require_choice, require_whole
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.hf_config import from_quantization_config
from paddlenlp_ext.quantization.linear import QuantizedLinear
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

INPUT_CHOICES = ("correlated", "independent")
"""Whether R is taken whole or as its diagonal."""
_MIN_RELATIVE_EIGENVALUE = 1e-6  # of R's largest eigenvalue: below it sums in float32 say nothing of a direction
_MAX_RELATIVE_ERROR = 0.5  # of a weight's norm: more than this no format loses


class QERAModel(PeftModel):
    """Looks at the inputs of the quantized layers in the first batches before a fresh run."""

    def before_training(self, run_batch: Callable[[], None]) -> None:
        """Repair every layer over a quantized base.

        Raises:
            ValueError: the original weights are not to be had, an input is not finite, or a layer has fewer features
                than the rank.
        """
        if self.peft_config.path:
            return  # the adapter that is gone on with has its repairs
        layers = {
            name: layer
            for name, layer in adapter_layers(self.base_model)
            if layer.is_materialized and layer.is_quantized
        }
        source = _open_original_weights(self.config.name_or_path) if layers else None
        self._record_inputs(layers, run_batch)  # on every stage of a pipeline, with something to repair or without
        lost = left = 0.0
        for name, layer in layers.items():
            error = layer.quantization_error(source, name)
            a, b, before, after = minimize_output_error(error, layer.inputs.root, layer.rank, name)
            layer.set_correction(a, b)
            layer.inputs, lost, left = None, lost + before, left + after
        share = 1 - left / lost if lost else 0.0
        logger.info("QERA: %d layers repaired, %.0f %% of the squared output error made good", len(layers), 100 * share)

    def _record_inputs(self, layers: Mapping[str, QERALinear], run_batch: Callable[[], None]) -> None:
        """Run the batches with all layers looking at what they read."""
        recorder = InputRecorder(self.peft_config.inputs == "correlated")
        for layer in layers.values():
            layer.recorder = recorder
        for _ in range(self.peft_config.batches):
            run_batch()
        for layer in layers.values():
            layer.recorder = None


@PEFT_METHODS.register("qera")
@dataclass(kw_only=True)
class QERAConfig(LoRAWithInitConfig):
    """QERA: LoRA over a quantized base whose layers' outputs are repaired first.

    Raises:
        ValueError: a value out of its range.
    """

    variant: ClassVar[str] = "qera"
    missing_init_reason: ClassVar[str] = "names a start that the file does not hold: train again."
    model_class: ClassVar[type[nn.Layer] | None] = QERAModel
    needs_quantized_base: ClassVar[bool] = True
    paddlenlp_config: ClassVar[str | None] = None  # PaddleNLP has no QERA
    free_on_resume: ClassVar[frozenset[str]] = LoRAConfig.free_on_resume | {"batches", "inputs"}

    batches: int = option(
        8, help="QERA: how many micro-batches the layers' inputs are taken from.", key="qera_batches", minimum=1
    )
    inputs: str = option(
        "correlated",
        help="QERA: correlated looks at how inputs go together, independent at the size of each alone, in less memory.",
        choices=INPUT_CHOICES,
        key="qera_inputs",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("qera_batches", self.batches)
        require_choice("qera_inputs", self.inputs, INPUT_CHOICES)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> QERALinear:
        return QERALinear(base, *self.rank_and_scaling(name), self.dropout, seed, name)

    def warm_start(self, stored: LoRAConfig) -> LoRAConfig:
        return replace(super().warm_start(stored), batches=self.batches, inputs=self.inputs)


class InputCorrelation:
    """R of the layers that read one tensor: float32 [in, in], or [in] for its diagonal.

    Raises:
        ValueError: from `root`: an input was not finite.
    """

    def __init__(self, correlated: bool) -> None:
        self._correlated = correlated
        self._total: paddle.Tensor | None = None
        self._tokens = 0

    @paddle.no_grad()
    def add(self, x_TI: paddle.Tensor) -> None:
        """Add x^T x of a batch's inputs [tokens, in]."""
        x_TI = x_TI.astype("float32")
        if self._correlated:
            part = paddle.matmul(x_TI, x_TI, transpose_x=True)
        else:  # as a product: a sum along an axis loses digits on the CPU
            part = paddle.matmul(paddle.ones([1, x_TI.shape[0]]), x_TI.square())[0]
        self._total = part if self._total is None else self._total.add_(part)
        self._tokens += x_TI.shape[0]

    @cached_property
    def root(self) -> CorrelationRoot:
        """R's root, found once for all layers that share it."""
        if not bool(paddle.isfinite(self._total).all()):
            raise ValueError("an input is not finite in the first batches: look at the first rows of the data.")
        values, eigenvectors = _eigh(self._total) if self._correlated else (self._total, None)
        self._total = None
        mean = values / self._tokens
        return CorrelationRoot(
            mean.clip(min=max(_MIN_RELATIVE_EIGENVALUE * float(mean.max()), 1e-30)).sqrt(), eigenvectors
        )


class CorrelationRoot(NamedTuple):
    """R = Q diag(scale^2) Q^T; `scale` [in], `eigenvectors` Q [in, in], None for a diagonal R."""

    scale: paddle.Tensor
    eigenvectors: paddle.Tensor | None

    def times(self, matrix: paddle.Tensor) -> paddle.Tensor:
        """matrix [..., in] Q diag(scale)."""
        return (matrix if self.eigenvectors is None else paddle.matmul(matrix, self.eigenvectors)) * self.scale

    def undone(self, matrix: paddle.Tensor) -> paddle.Tensor:
        """The reverse: matrix diag(scale)^-1 Q^T."""
        matrix = matrix / self.scale
        return matrix if self.eigenvectors is None else paddle.matmul(matrix, self.eigenvectors, transpose_y=True)


class InputRecorder:
    """Gives layers that read the same tensor one sum, which the first of them adds to."""

    def __init__(self, correlated: bool) -> None:
        self._correlated = correlated
        self._last: tuple[paddle.Tensor, InputCorrelation] | None = None

    def record(self, layer: QERALinear, x: paddle.Tensor) -> None:
        """Add what the layer reads, x [..., in], or its part of it."""
        if self._last is None or self._last[0] is not x:
            layer.inputs = layer.inputs or InputCorrelation(self._correlated)
            layer.inputs.add(layer.full_inputs(x.detach().reshape([-1, x.shape[-1]])))
            self._last = (x, layer.inputs)
        layer.inputs = self._last[1]


class QERALinear(LoRALinearWithInit):
    """A linear with a low-rank update beside a frozen one that repairs its base; arguments as `LoRALinear`'s.

    Attributes:
        sight: while inputs are looked at, what looks.
        inputs: R of what the layer reads, while it is needed.
        loses: whether the base is quantized.
    """

    recorder: InputRecorder | None = None
    inputs: InputCorrelation | None = None

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        self.is_quantized = isinstance(base, QuantizedLinear)

    @property
    def rank(self) -> int:
        """r."""
        return self.lora_A.weight.shape[0]

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., in] to [..., out]; both updates in one product of rank 2r where there is no dropout between them."""
        if self.recorder is not None:
            self.recorder.record(self, x)
        base = self.fusable_base()
        if base is None:
            return super().adapter_forward(x)
        a = paddle.concat([self.lora_A.weight, self.lora_A_start])
        b = paddle.concat([self.lora_B.weight, -self.lora_B_start], axis=1)
        return lora_linear(x, base, a, b, self.scaling)

    def set_correction(self, a: paddle.Tensor, b: paddle.Tensor) -> None:
        """Add b a to the whole weight for good, a [r, in] and b [out, r]."""
        set_local_shard(self.lora_A_start, a)
        set_local_shard(self.lora_B_start, b / -self.scaling)

    def full_inputs(self, x_TI: paddle.Tensor) -> paddle.Tensor:
        """All inputs, of which this layer may read a part."""
        return x_TI if self.shard_group is None or self.style != "rowwise" else self.shard_group.all_gather(x_TI, 1)

    def quantization_error(self, source: WeightSource, name: str) -> paddle.Tensor:
        """What quantizing took from the whole weight, float32 [out, in].

        Raises:
            ValueError: the weight in `source` is not the one that was quantized.
        """
        stored = self.base.weight_value()
        if self.shard_group is not None:
            stored = self.shard_group.all_gather(stored, 0 if self.style == "colwise" else 1)
        weight = paddle.to_tensor(source.read(f"{name}.weight", "float32"), place=stored.place)
        error = weight - stored
        if not float(error.norm()) <= _MAX_RELATIVE_ERROR * float(weight.norm()):
            raise ValueError(
                f"{name}: the weight in {source.path} is not the one that this base was quantized from, and qera "
                "starts from the difference of the two: train over the stored weights (continue_training: true)."
            )
        return error


def _open_original_weights(name_or_path: str | None) -> WeightSource:
    """Where the weights are in plain numbers.

    Raises:
        ValueError: nowhere.
    """
    remedy = "load the original model with weight_quantize_algo, or train with lora alone."
    if not name_or_path:
        raise ValueError(f"qera starts from the original weights, and this model came from no folder: {remedy}")
    path = resolve_model(name_or_path)
    if from_quantization_config(read_model_config(path).get("quantization_config")) is not None:
        raise ValueError(f"{name_or_path} is stored quantized, and qera starts from what quantizing took: {remedy}")
    return open_weights(path)


def minimize_output_error(
    error: paddle.Tensor, root: CorrelationRoot, rank: int, name: str
) -> tuple[paddle.Tensor, paddle.Tensor, float, float]:
    """A [r, in] and B [out, r] whose product leaves the least of `error` [out, in] in the output.

    error R^(1/2) has the triplets of error Q diag(scale), its right vectors turned by Q. Factors share the root of the
    singular values.

    Args:
        error: W - Q(W).
        root: of R, the layer's inputs.
        rank: r.
        name: of the layer.

    Returns:
        A, B, and the squared output error without them and with them.

    Raises:
        ValueError: the layer has no `rank` triplets.
    """
    require_triplets(rank, error.shape, name)
    seen = root.times(error)
    u, s, v_t = leading_svd(seen, rank, name)
    before = float(seen.square().sum())
    after = max(before - float(s.square().sum()), 0.0)
    share = s.sqrt()
    return root.undone(v_t) * share.unsqueeze(1), u * share, before, after


def _eigh(matrix: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Eigenvalues and eigenvectors of a symmetric matrix, found in float64: by NumPy on the CPU, where Paddle takes
    fifteen times as long.
    """
    if not matrix.place.is_cpu_place():
        values, vectors = paddle.linalg.eigh(matrix.astype("float64"))
        return values.astype("float32"), vectors.astype("float32")
    values, vectors = np.linalg.eigh(matrix.numpy().astype(np.float64))
    return paddle.to_tensor(values.astype(np.float32)), paddle.to_tensor(vectors.astype(np.float32))
