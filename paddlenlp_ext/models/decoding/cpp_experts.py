"""Experts in the decoding step of several layers (csrc/decode_experts.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from paddlenlp_ext.models.decoding.cpp_matrices import single_matrix, stacked_matrices
from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.training_blocks import AdaptedLinear


class CppExperts:
    """Struct of the router and the routed experts of a layer; the shared expert is the layer's feed-forward block.

    Args:
        mixture: expert layer that can run in C++; its weights must not be replaced.
        linear: function that returns the address of the struct of a linear layer.

    Attributes:
        address: address of the `DecodeExperts` struct.
    """

    def __init__(self, mixture: MixtureOfExperts, linear: Callable[[Any], int]) -> None:
        router, experts, shared_gate = mixture.router_layer, mixture.experts, mixture.shared_expert_gate
        options, correction = router.options, router.e_score_correction_bias
        *gates, ups = stacked_matrices(experts.input_layer)
        (downs,) = stacked_matrices(experts.down_proj)
        logits = single_matrix(AdaptedLinear(router.weight, router.bias))
        self._kept = gates, ups, downs, logits, correction
        if options.kind == "softmax_of_chosen":
            weighing = {"normalizes": True, "smallest_sum": 0.0, "sum_offset": 0.0, "scale": 1.0}
        else:
            weighing = {name: getattr(options, name) for name in ("normalizes", "smallest_sum", "sum_offset", "scale")}
        self._struct = struct("DecodeExperts")(
            router=logits.address,
            gates=gates[0].address if gates else None,
            ups=ups.address,
            downs=downs.address,
            shared_gate=None if shared_gate is None else linear(shared_gate),
            correction=None if correction is None else library.pointer(correction),
            experts=mixture.shape.num_experts,
            top_k=options.top_k,
            has_sigmoid_scores=options.kind == "sigmoid",
            has_softmax_scores=options.kind == "softmax",
            **weighing,
        )
        self.address = ctypes.addressof(self._struct)
