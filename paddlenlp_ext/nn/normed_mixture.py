"""Expert layer that normalizes the inputs of its router and of its experts separately (Gemma 4).

    y = experts(norm(x)); each router weight is multiplied by a trained factor of its expert
    router input = x / rms(x) * router_scale / sqrt(D)

Shapes: T tokens, K chosen experts, E experts, D hidden.
"""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.nn.experts import ExpertShape, MixtureOfExperts
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.rms_norm import rms_norm
from paddlenlp_ext.paddle_compat import axis_sizes


class NormedMixture(MixtureOfExperts):
    """Expert layer with an RMS norm before the experts, and another before the router."""

    def __init__(self, hidden_size: int, shape: ExpertShape, epsilon: float) -> None:
        super().__init__(hidden_size, shape)
        self.norm = RMSNorm(hidden_size, epsilon)
        one, dtype = nn.initializer.Constant(1.0), activation_dtype(paddle.get_default_dtype())
        self.router_scale = self.create_parameter([hidden_size], dtype=dtype, default_initializer=one)
        self.per_expert_scale = self.create_parameter([shape.num_experts], dtype=dtype, default_initializer=one)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map [..., D] to [..., D]."""
        hidden_size = x.shape[-1]
        x_TD = x.reshape([-1, hidden_size])
        routed_TD = rms_norm(x_TD, self.router_scale * hidden_size**-0.5, self.norm.epsilon)
        weights_TK, experts_TK = self.router_layer(routed_TD)
        factors_TK = paddle.gather(self.per_expert_scale, experts_TK.flatten()).reshape(axis_sizes(experts_TK))
        y_TD = self.experts(self.norm(x_TD), weights_TK * factors_TK.astype(weights_TK.dtype), experts_TK)
        return y_TD.reshape(axis_sizes(x))
