"""ReFT interventions on hidden states: one layer class per kind of `intervention_type`.

| type | output | parameters |
| --- | --- | --- |
| LoreftIntervention | h + R^T (f(W h + b) - R h) | R [r, D] with orthonormal rows |
| DireftIntervention | h + R^T f(W h + b) | R [r, D] with orthonormal rows |
| NoreftIntervention | h + P^T (f(W h + b) - (P h + c)) | any P ("no basis"), c with `add_bias` |
| NodireftIntervention | h + P^T f(W h + b) | any P |
| TinyIntervention | h + h A diag(a) B diag(b) | |

The first four types are from pyreft, the library of Wu et al. 2024 (arXiv:2404.03592). The last type is from PaddleNLP.
f is `act_fn`. Parameters and computations are in float32, because R would not stay orthonormal in bfloat16. Float32
costs little, because few positions are changed.

`OrthonormalColumns` parametrizes R^T [D, r] by Householder reflections:

    R^T = H(frame) (-H(reflectors))[:, :r]      H(A) = H_1 ... H_r,  H_i = I - 2 v_i v_i^T / (v_i^T v_i)
    v_i = e_i + (column i of A, below the diagonal of A)

A product of reflections is orthogonal, so the columns of R^T stay orthonormal after every optimizer step. `frame` is
frozen and determines the initial R^T. `reflectors` is trained and starts at zero, where H(0)[:, i] = -e_i. The
parametrization equals `torch.nn.utils.parametrizations.orthogonal` for a tall matrix (Householder map with dynamic
trivialization: Lezcano-Casado 2019, arXiv:1909.09501), but `frame` has D x r values and PyTorch's frame has D x D.

The product H(A) is computed in compact form: H = I - V T V^T. T^-1 is the strict upper triangle of V^T V, plus half
the diagonal of V^T V (Puglisi 1992; Joffrain et al. 2006).

Shapes: P selected positions, D hidden size, r rank, r <= D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.peft.layers import kaiming_uniform, new_parameter


class OrthonormalColumns(nn.Layer):
    """Trained matrix R^T [D, r], float32, with orthonormal columns: R R^T = I.

    Args:
        start: initial R^T, [D, r] with orthonormal columns.
    """

    frame: paddle.Tensor

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        shape = list(start.shape)
        assert shape[0] >= shape[1], f"{shape[1]} columns of length {shape[0]} cannot be orthonormal"
        zeros = nn.initializer.Constant(0.0)
        self.reflectors = self.create_parameter(shape, dtype="float32", default_initializer=zeros)
        self.register_buffer("frame", paddle.to_tensor(reflectors_of(start)))

    def matrix(self) -> paddle.Tensor:
        """Return R^T [D, r]."""
        unit = paddle.eye(*self.reflectors.shape)
        return reflect(self.frame, -reflect(self.reflectors, unit))


def reflect(reflectors_Dr: paddle.Tensor, x_Dk: paddle.Tensor) -> paddle.Tensor:
    """Return H(reflectors) x [D, k]; only the entries of `reflectors` below the diagonal are used."""
    num_rows, rank = reflectors_Dr.shape
    v_Dr = paddle.tril(reflectors_Dr, -1) + paddle.eye(num_rows, rank)
    products_rr = paddle.matmul(v_Dr, v_Dr, transpose_x=True)
    inverse_t_rr = paddle.triu(products_rr) - 0.5 * paddle.diag(paddle.diagonal(products_rr))
    inner_rk = paddle.linalg.triangular_solve(inverse_t_rr, paddle.matmul(v_Dr, x_Dk, transpose_x=True), upper=True)
    return x_Dk - paddle.matmul(v_Dr, inner_rk)


def random_orthonormal(values: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the column space of `values` [D, r], with the signs that `reflectors_of` needs."""
    rest = np.linalg.qr(values.astype(np.float64))[0]
    start = rest.copy()
    for index in range(values.shape[1]):
        if rest[index, index] > 0:
            start[:, index] *= -1
            rest[:, index] *= -1
        _reflect_away(rest, index)
    return start


def reflectors_of(orthonormal: np.ndarray) -> np.ndarray:
    """Return A, float32 [D, r], zero on and above the diagonal, with H(A)[:, :r] = `orthonormal`.

    Args:
        orthonormal: [D, r] from `random_orthonormal`, which chooses the sign of each column. With the opposite sign,
            a column may already equal its unit vector, and the reflection would be undefined.
    """
    rest = orthonormal.astype(np.float64)
    vectors = [_reflect_away(rest, index) for index in range(rest.shape[1])]
    return np.tril(np.stack(vectors, axis=1), -1).astype(np.float32)


def _reflect_away(rest: np.ndarray, index: int) -> np.ndarray:
    """Reflect the columns of `rest` in place so that column i = `index` becomes e_i; return the vector v (v_i = 1)."""
    vector = -rest[:, index]
    vector[:index] = 0.0
    vector[index] += 1.0
    vector /= vector[index]
    rest -= 2.0 / (vector @ vector) * np.outer(vector, vector @ rest)
    return vector


ACTIVATIONS: dict[str, Callable[[paddle.Tensor], paddle.Tensor]] = {
    "linear": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": paddle.tanh,
}
TINY = "TinyIntervention"


@dataclass(frozen=True)
class _InterventionKind:
    """Formula of a low-rank intervention: whether R is orthonormal, and whether R h is subtracted."""

    orthonormal: bool
    subtracts: bool


_KINDS = {
    "LoreftIntervention": _InterventionKind(orthonormal=True, subtracts=True),
    "NoreftIntervention": _InterventionKind(orthonormal=False, subtracts=True),
    "DireftIntervention": _InterventionKind(orthonormal=True, subtracts=False),
    "NodireftIntervention": _InterventionKind(orthonormal=False, subtracts=False),
}
INTERVENTION_TYPES = (*_KINDS, TINY)


def build_intervention(
    intervention_type: str, hidden_size: int, rank: int, act_fn: str, add_bias: bool, seed: int, name: str
) -> nn.Layer:
    """Build the layer that changes hidden states [P, D].

    Args:
        intervention_type: one of `INTERVENTION_TYPES`.
        hidden_size: D.
        rank: r.
        act_fn: one of `ACTIVATIONS`; only "linear" for TinyIntervention.
        add_bias: use the bias c in NoreftIntervention.
        seed: random seed of the initial values.
        name: name of the layer, which also determines the initial values.

    Raises:
        ValueError: the rank exceeds the hidden size.
    """
    if rank > hidden_size:
        raise ValueError(f"rank={rank} is out of range; allowed: at most the model's hidden size, {hidden_size}")
    if intervention_type == TINY:
        return TinyIntervention(hidden_size, rank, seed, name)
    return LowRankIntervention(_KINDS[intervention_type], hidden_size, rank, act_fn, add_bias, seed, name)


class LowRankIntervention(nn.Layer):
    """Intervention that changes hidden states within a subspace of dimension r.

    | type | start | initial intervention |
    | --- | --- | --- |
    | Loreft, linear | W = R | identity |
    | Loreft with an activation | W random | not the identity |
    | Direft | W = 0 | identity |
    | Direft, relu | W random, because the gradient is 0 at W = 0 | not the identity |
    | Noreft, Nodireft | P = 0 | identity |
    """

    def __init__(
        self, kind: _InterventionKind, hidden_size: int, rank: int, act_fn: str, add_bias: bool, seed: int, name: str
    ) -> None:
        super().__init__()
        self.subtracts, self.activation = kind.subtracts, ACTIVATIONS[act_fn]
        source_rD = kaiming_uniform((rank, hidden_size), seed, f"{name}.learned_source.weight")
        self.basis: OrthonormalColumns | _Projection
        if kind.orthonormal:
            start_Dr = random_orthonormal(kaiming_uniform((hidden_size, rank), seed, f"{name}.basis"))
            self.basis = OrthonormalColumns(start_Dr)
            if kind.subtracts and act_fn == "linear":
                source_rD = start_Dr.T.astype(np.float32)
            elif not kind.subtracts and act_fn != "relu":
                source_rD = np.zeros_like(source_rD)
        else:
            self.basis = _Projection(np.zeros((rank, hidden_size), np.float32), bias=add_bias and kind.subtracts)
        self.learned_source = _Projection(np.ascontiguousarray(source_rD), bias=True)

    def forward(self, h_PD: paddle.Tensor) -> paddle.Tensor:
        """Map h [P, D] to [P, D]."""
        basis_Dr = self.basis.matrix()
        change_Pr = self.activation(self.learned_source(h_PD))
        if self.subtracts:
            projected_Pr = paddle.matmul(h_PD, basis_Dr)
            bias = getattr(self.basis, "bias", None)
            change_Pr = change_Pr - (projected_Pr if bias is None else projected_Pr + bias)
        return h_PD + paddle.matmul(change_Pr, basis_Dr, transpose_y=True)


class TinyIntervention(nn.Layer):
    """PaddleNLP's low-rank intervention with a scale after each matrix; the initial B = 0 gives the identity."""

    def __init__(self, hidden_size: int, rank: int, seed: int, name: str) -> None:
        super().__init__()
        param_A = kaiming_uniform((rank, hidden_size), seed, f"{name}.param_A").T
        self.param_A = new_parameter(self, np.ascontiguousarray(param_A), "float32")
        self.param_B = new_parameter(self, np.zeros((rank, hidden_size), np.float32), "float32")
        self.param_a = new_parameter(self, np.ones(rank, np.float32), "float32")
        self.param_b = new_parameter(self, np.ones(hidden_size, np.float32), "float32")

    def forward(self, h_PD: paddle.Tensor) -> paddle.Tensor:
        """Map h [P, D] to [P, D]."""
        inner_Pr = paddle.matmul(h_PD, self.param_A) * self.param_a
        return h_PD + paddle.matmul(inner_Pr, self.param_B) * self.param_b


class _Projection(nn.Layer):
    """Linear map x weight^T + bias, with weight [r, D]."""

    def __init__(self, weight_rD: np.ndarray, bias: bool) -> None:
        super().__init__()
        self.weight = new_parameter(self, weight_rD, "float32")
        self.bias = new_parameter(self, np.zeros(len(weight_rD), np.float32), "float32") if bias else None

    def matrix(self) -> paddle.Tensor:
        """Return the transposed weight [D, r]."""
        return self.weight.t()

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = paddle.matmul(x, self.weight, transpose_y=True)
        return y if self.bias is None else y + self.bias
