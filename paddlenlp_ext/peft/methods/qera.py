"""QERA: Quantization Error Reconstruction Analysis (Zhang et al. 2024, arXiv:2410.06040).

    R = mean of x^T x over the inputs x of the layer in a few batches
    U S V^T = (W - Q(W)) R^(1/2)
    s B0 A0 = U_r S_r V_r^T R^(-1/2)        y = x Q(W)^T + s (x A0^T) B0^T + s (dropout(x) A^T) B^T

QERA is a LoRA on a quantized base with a frozen correction s B0 A0 of the quantization error. Among all corrections
of rank r, s B0 A0 minimizes the error of the layer's *output* (theorem 1). LoftQ minimizes the error of the weight.
With `inputs` "independent", only the diagonal of R is used (theorem 2). The diagonal costs less time than R, but
corrects less of the error.

The paper trains A0 and B0. In this package, A0 and B0 are frozen, and a new LoRA is trained. Training A0 and B0 at
LoRA's usual learning rate gave a higher loss during most of a run (docs/benchmarks/qlora.md). The correction is stored
as initial factors with the opposite sign (`lora/subtracted_init.py`). Files contain a plain LoRA of rank 2r over the
quantized base.

R is computed from the first batches of the run; training uses these batches again. To compute W - Q(W), the original
weights are read again, one at a time. Layers with the same input, such as q, k and v, share one R.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.file_layouts.fused_projections import split_fused
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.ops.lora_linear import lora_linear
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import adapter_layers_of
from paddlenlp_ext.peft.leading_svd import leading_svd, require_triplets
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.peft.lora.subtracted_init import LoRALinearWithInit, SubtractedInitConfig, set_local_shard
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.quantization.config_json import from_quantization_config
from paddlenlp_ext.quantization.quantized_linear import QuantizedLinear
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")

INPUT_CHOICES = ("correlated", "independent")
"""Values of `inputs`: use the full R, or only its diagonal."""
_MIN_RELATIVE_EIGENVALUE = 1e-6  # relative to the largest eigenvalue; smaller values are float32 rounding errors
_MAX_RELATIVE_ERROR = 0.5  # relative to the norm of the weight; every quantized format has a smaller error


class QERAAdapter(Adapter):
    """Adapter that computes the corrections of quantized layers from the inputs in the first batches of a new run."""

    peft_config: QERAConfig

    def before_training(self, run_batch: Callable[[], None]) -> None:
        """Compute the correction of every layer with a quantized base.

        Args:
            run_batch: function that runs the forward and backward pass of the next batch.

        Raises:
            ValueError: the original weights are unavailable, an input is not finite, or a layer has fewer features
                than the rank.
        """
        if self.peft_config.path:
            return  # a stored adapter already has corrections
        layers = {
            name: layer
            for name, layer in adapter_layers_of(self.base_model, QERALinear)
            if layer.is_on_stage and layer.is_quantized
        }
        source = _open_original_weights(self.base_model.config) if layers else None
        self._record_inputs(layers, run_batch)  # all pipeline stages must run the batches
        error_before = error_after = 0.0
        for name, layer in layers.items():
            assert source is not None and layer.inputs is not None
            error = layer.quantization_error(source, name)
            a, b, before, after = minimize_output_error(error, layer.inputs.root, layer.rank, name)
            layer.set_correction(a, b)
            layer.inputs, error_before, error_after = None, error_before + before, error_after + after
        removed = 1 - error_after / error_before if error_before else 0.0
        logger.info(
            "QERA: corrected %d layers, reducing the squared output error by %.0f %%", len(layers), 100 * removed
        )

    def _record_inputs(self, layers: Mapping[str, QERALinear], run_batch: Callable[[], None]) -> None:
        """Run the first batches while all layers record their inputs."""
        recorder = InputRecorder(self.peft_config.inputs == "correlated")
        for layer in layers.values():
            layer.recorder = recorder
        for _ in range(self.peft_config.batches):
            run_batch()
        for layer in layers.values():
            layer.recorder = None


@PEFT_METHODS.register("qera")
@dataclass(kw_only=True)
class QERAConfig(SubtractedInitConfig):
    """Options of QERA: LoRA on a quantized base, with a frozen correction of the base's output error.

    >>> QERAConfig(r=8, inputs="independent").batches
    8
    """

    variant: ClassVar[str] = "qera"
    missing_init_reason: ClassVar[str] = (
        "needs initial factors, which the file does not contain; train the adapter again"
    )
    adapter_class: ClassVar[type[TrainingHooks] | None] = QERAAdapter
    needs_quantized_base: ClassVar[bool] = True
    free_on_resume: ClassVar[frozenset[str]] = LowRankConfig.free_on_resume | {"batches", "inputs"}

    batches: int = option(
        8, help="QERA: number of micro-batches for the input statistics", key="qera_batches", minimum=1
    )
    inputs: str = option(
        "correlated",
        help="QERA: full second moments of the inputs (correlated), or only the diagonal (independent: less memory)",
        choices=INPUT_CHOICES,
        key="qera_inputs",
    )

    def wrap(self, name: str, base: nn.Layer, seed: int) -> QERALinear:
        rank, scaling = self.rank_and_scaling(name)
        return QERALinear(base, rank, scaling, self.lora_dropout, seed, name)

    def warm_start(self, stored: PeftConfig) -> LowRankConfig:
        return super().warm_start(stored).replace(batches=self.batches, inputs=self.inputs)


class InputCorrelation:
    """Accumulator of R for the layers that share an input: float32 [in, in], or [in] for only the diagonal.

    Args:
        correlated: accumulate the full R; False: only the diagonal.
    """

    def __init__(self, correlated: bool) -> None:
        self._correlated = correlated
        self._total: paddle.Tensor | None = None
        self._tokens = 0

    @paddle.no_grad()
    def add(self, x_TI: paddle.Tensor) -> None:
        """Add x^T x of the inputs x [tokens, in] of a batch."""
        x_TI = x_TI.astype("float32")
        if self._correlated:
            part = paddle.matmul(x_TI, x_TI, transpose_x=True)
        else:  # a matmul, because Paddle's sum along an axis is less accurate on the CPU
            part = paddle.matmul(paddle.ones([1, x_TI.shape[0]]), x_TI.square())[0]
        self._total = part if self._total is None else self._total.add_(part)
        self._tokens += x_TI.shape[0]

    @cached_property
    def root(self) -> CorrelationRoot:
        """Square root of R, computed once for all layers that share the input.

        Raises:
            ValueError: an input was not finite.
        """
        assert self._total is not None, "at least one input must have been recorded"
        if not bool(paddle.isfinite(self._total).all()):
            raise ValueError("qera: an input in the first batches is not finite; check the first rows of the data")
        values, eigenvectors = _eigh(self._total) if self._correlated else (self._total, None)
        self._total = None
        mean = values / self._tokens
        return CorrelationRoot(
            mean.clip(min=max(_MIN_RELATIVE_EIGENVALUE * float(mean.max()), 1e-30)).sqrt(), eigenvectors
        )


class CorrelationRoot(NamedTuple):
    """Square root of R = Q diag(scale^2) Q^T: `scale` [in] and `eigenvectors` Q [in, in] (None if R is diagonal)."""

    scale: paddle.Tensor
    eigenvectors: paddle.Tensor | None

    def times(self, matrix: paddle.Tensor) -> paddle.Tensor:
        """Return matrix Q diag(scale) for a matrix [..., in]."""
        return (matrix if self.eigenvectors is None else paddle.matmul(matrix, self.eigenvectors)) * self.scale

    def times_inverse(self, matrix: paddle.Tensor) -> paddle.Tensor:
        """Return matrix diag(scale)^-1 Q^T for a matrix [..., in] (inverse of `times`)."""
        matrix = matrix / self.scale
        return matrix if self.eigenvectors is None else paddle.matmul(matrix, self.eigenvectors, transpose_y=True)


class InputRecorder:
    """Recorder that shares one `InputCorrelation` among layers with the same input.

    Args:
        correlated: as in `InputCorrelation`.
    """

    def __init__(self, correlated: bool) -> None:
        self._correlated = correlated
        self._last: tuple[paddle.Tensor, InputCorrelation] | None = None

    def record(self, layer: QERALinear, x: paddle.Tensor) -> None:
        """Add a layer's input x [..., in] (row-parallel: this rank's shard), once for all layers that share x."""
        if self._last is None or self._last[0] is not x:
            layer.inputs = layer.inputs or InputCorrelation(self._correlated)
            layer.inputs.add(layer.full_inputs(x.detach().reshape([-1, x.shape[-1]])))
            self._last = (x, layer.inputs)
        layer.inputs = self._last[1]


class QERALinear(LoRALinearWithInit):
    """Linear layer with a low-rank update and a frozen low-rank correction; arguments as in `LoRALinear`.

    Attributes:
        recorder: recorder of the inputs while `before_training` runs the first batches; otherwise None.
        inputs: correlation R of the layer's inputs, until the correction is computed; otherwise None.
        is_quantized: whether the base is quantized.
    """

    recorder: InputRecorder | None = None
    inputs: InputCorrelation | None = None

    def __init__(self, base: nn.Layer, rank: int, scaling: float, dropout: float, seed: int, name: str) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        self.is_quantized = isinstance(base, QuantizedLinear)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out]; without dropout, update and correction are one product of rank 2r."""
        if self.recorder is not None:
            self.recorder.record(self, x)
        base = self.fusable_base()
        if base is None:
            return super().adapter_forward(x)
        a = paddle.concat([self.lora_A.weight, self.lora_A_start])
        b = paddle.concat([self.lora_B.weight, -self.lora_B_start], axis=1)
        return lora_linear(x, base, a, b, self.scaling)

    def set_correction(self, a: paddle.Tensor, b: paddle.Tensor) -> None:
        """Set the frozen correction b a, given a [r, in] and b [out, r] of the unsharded layer."""
        set_local_shard(self.lora_A_start, a)
        set_local_shard(self.lora_B_start, b / -self.scaling)

    def full_inputs(self, x_TI: paddle.Tensor) -> paddle.Tensor:
        """Gather the ranks' shards of the inputs; return the inputs [tokens, in] of the unsharded layer."""
        return x_TI if self.shard_group is None or self.style != "rowwise" else self.shard_group.all_gather(x_TI, 1)

    def quantization_error(self, source: WeightSource, name: str) -> paddle.Tensor:
        """Return W - Q(W) of the unsharded weight, float32 [out, in].

        Args:
            source: original weights.
            name: dotted name of the layer.

        Raises:
            ValueError: the base was not quantized from the weight in `source`.
        """
        stored = self.base.weight_value()
        if self.shard_group is not None and self.style != "replicated":
            stored = self.shard_group.all_gather(stored, 0 if self.style == "colwise" else 1)
        weight = paddle.to_tensor(source.read(f"{name}.weight", "float32"), place=stored.place)
        error = weight - stored
        if not float(error.norm()) <= _MAX_RELATIVE_ERROR * float(weight.norm()):
            raise ValueError(
                f"{name}: this base was not quantized from the weight in {source.path}, so qera cannot compute "
                "the quantization error; train on the stored weights (continue_training: true)"
            )
        return error


def _open_original_weights(config: Any) -> WeightSource:
    """Open the full-precision weights of the model that has the given config."""
    remedy = "load the original model with weight_quantize_algo, or train with lora only"
    name_or_path = config.name_or_path
    if not name_or_path:
        raise ValueError(f"qera needs the original weights, but this model was not loaded from a directory; {remedy}")
    path = resolve_model(name_or_path)
    if from_quantization_config(read_model_config(path).get("quantization_config")) is not None:
        raise ValueError(f"{name_or_path} has quantized weights, but qera needs the original weights; {remedy}")
    return split_fused(open_weights(path), config.fused_layers)


def minimize_output_error(
    error: paddle.Tensor, root: CorrelationRoot, rank: int, name: str
) -> tuple[paddle.Tensor, paddle.Tensor, float, float]:
    """Return A [r, in] and B [out, r] that minimize the output error, and the squared error without and with B A.

    The SVD of error R^(1/2) follows from the SVD of error Q diag(scale), because Q only rotates the right singular
    vectors. A and B are both multiplied by the square roots of the singular values.

    Args:
        error: W - Q(W), float32 [out, in].
        root: square root of R.
        rank: r.
        name: dotted name of the layer; seed of the randomized SVD.

    Raises:
        ValueError: the layer has fewer than `rank` singular triplets.
    """
    require_triplets(rank, error.shape, name)
    weighted_error = root.times(error)
    u, s, v_t = leading_svd(weighted_error, rank, name)
    before = float(weighted_error.square().sum())
    after = max(before - float(s.square().sum()), 0.0)
    half = s.sqrt()
    return root.times_inverse(v_t) * half.unsqueeze(1), u * half, before, after


def _eigh(matrix: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return the eigenvalues and eigenvectors of a symmetric matrix, computed in float64.

    On the CPU, NumPy is used, because Paddle takes fifteen times as long as NumPy.
    """
    if not matrix.place.is_cpu_place():
        values, vectors = paddle.linalg.eigh(matrix.astype("float64"))
        return values.astype("float32"), vectors.astype("float32")
    values, vectors = np.linalg.eigh(matrix.numpy().astype(np.float64))
    return paddle.to_tensor(values.astype(np.float32)), paddle.to_tensor(vectors.astype(np.float32))
