"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum orthogonalized by Newton-Schulz steps.

For the gradient G of a matrix W [m, n],

    M = momentum M + G
    O = orthogonalize(G + momentum M)               approximates U V^T for an argument with the SVD U S V^T
    W = (1 - rate decay) W - rate scale(m, n) O

| `muon_scale` | scale(m, n) | learning rate |
|---|---|---|
| match_rms_adamw | 0.2 sqrt(max(m, n)) | as for AdamW: updates have the same RMS (arXiv:2502.16982) |
| original | sqrt(max(1, m / n)) | as in the original Muon, about 0.02 |

AdamW updates embeddings, lm_head, vectors, stacked matrices, and rotations or reflections of adapters
(`is_muon_matrix`). Adapter factors are separate matrices: Muon orthogonalizes the momentum of LoRA's A and the momentum
of B, not the momentum of B A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle

from paddlenlp_ext.config.sections.optim import OptimConfig
from paddlenlp_ext.ops.adamw.updates import AdamStep
from paddlenlp_ext.ops.gradient_clipping import sum_of_squares
from paddlenlp_ext.sharding_spec import Shard
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding
from paddlenlp_ext.trainer.optimizers.small_state_optimizer import SmallStateOptimizer

GatherShards = Callable[[paddle.Tensor, Shard], paddle.Tensor]
"""Function that returns the full tensor, given this tensor-parallel rank's shard; collective."""

_TABLES = frozenset({"embed_tokens", "embed_tokens_per_layer", "lm_head", "embedding", "oft_R", "hra_u", "reflectors"})
"""Components in the names of two-dimensional parameters that are not linear maps: embeddings, angles, directions."""
_NUM_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


def is_muon_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon (not AdamW) updates a parameter with this name and unsharded shape."""
    return len(shape) == 2 and min(shape) > 1 and _TABLES.isdisjoint(name.split("."))


def moment_bytes(shape: Sequence[int], is_matrix: bool) -> int:
    """Return the size of the moments of a parameter in bytes."""
    return (4 if is_matrix else 8) * math.prod(shape)


def update_bytes(shape: Sequence[int]) -> int:
    """Return the temporary bytes of a matrix update: three matrices of the same shape and two Gram matrices."""
    return 4 * (3 * math.prod(shape) + 2 * min(shape) ** 2)


def orthogonalize(matrix_MN: paddle.Tensor) -> paddle.Tensor:
    """Return a matrix with the singular vectors of `matrix_MN` and singular values near 1.

    The new singular values are between 0.68 and 1.21, except where the old singular value is less than 0.2 % of the
    Frobenius norm.

    The function divides the matrix by its Frobenius norm, and applies five Newton-Schulz steps
    X = a X + b (X X^T) X + c (X X^T)^2 X. With the coefficients of Jordan et al., small singular values grow quickly,
    but do not converge to 1.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x = matrix_MN.t() if is_tall else matrix_MN  # makes X X^T the smaller of the two Gram matrices
    x = x / max(math.sqrt(sum_of_squares([matrix_MN])), _SMALLEST_NORM)
    for _ in range(_NUM_STEPS):
        gram = paddle.matmul(x, x, transpose_y=True)
        x = paddle.addmm(x, paddle.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a, alpha=1.0)
    return x.t() if is_tall else x


class Muon(SmallStateOptimizer):
    """Muon with decoupled weight decay for matrices; AdamW for all other parameters."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        options: OptimConfig,
        rounding: StochasticRounding | None,
        matrices: Mapping[str, Shard | None],
        gather: GatherShards,
    ) -> None:
        """Initialize the base class.

        Args:
            groups: see `SmallStateOptimizer`.
            options: `config.optim`.
            rounding: see `SmallStateOptimizer`.
            matrices: Paddle's name of each parameter that Muon updates -> shard, or None for an unsharded parameter.
            gather: function that gathers the shards of a tensor.
        """
        super().__init__(groups, options, rounding)
        self._momentum, self._scale = options.muon_momentum, options.muon_scale
        self._matrices, self._gather = matrices, gather

    def _new_moments(self, parameter: paddle.Tensor) -> dict[str, paddle.Tensor]:
        names = ("momentum",) if parameter.name in self._matrices else ("moment1", "moment2")
        return {name: paddle.zeros(parameter.shape, "float32") for name in names}

    def _update_parameter(
        self, name: str, value: paddle.Tensor, gradient: paddle.Tensor, state: dict[str, paddle.Tensor], step: AdamStep
    ) -> None:
        if name not in self._matrices:
            step.accumulate(state["moment1"], state["moment2"], gradient)
            value.subtract_(step.quotient(state["moment1"], state["moment2"]).scale_(step.rate))
            return
        momentum, shard = state["momentum"], self._matrices[name]
        momentum.scale_(self._momentum).add_(gradient)
        direction = gradient + momentum * self._momentum
        if shard is not None:  # a shard has different singular vectors, so all ranks orthogonalize the full matrix
            direction = self._gather(direction, shard)
        update = orthogonalize(direction) * (step.rate * self._scale_of(direction.shape))
        value.subtract_(update if shard is None else update[shard.index])

    def _scale_of(self, shape: Sequence[int]) -> float:
        rows, columns = shape
        if self._scale == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))
