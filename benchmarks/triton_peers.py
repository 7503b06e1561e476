"""Patches of other packages for the Llama of transformers, applied before PEFT (benchmarks/triton_model.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def with_liger(model: Any) -> None:
    """Use Liger-Kernel's norms, rotation, gates, and loss of the lm_head."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)


def in_bitsandbytes(model: Any, dtype: torch.dtype) -> None:
    """Replace the linear layers of the decoder with nf4 layers of bitsandbytes, whose scales have 8 bits."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"quant_type": "nf4", "compress_statistics": True}
    for parent in model.model.modules():
        for name, linear in parent.named_children():
            if isinstance(linear, nn.Linear):
                sizes = linear.in_features, linear.out_features
                packed = Linear4bit(*sizes, bias=False, compute_dtype=dtype, device="meta", **options)
                packed.weight = Params4bit(linear.weight.data, requires_grad=False, **options)
                setattr(parent, name, packed.to(linear.weight.device))
    model.is_loaded_in_4bit = True  # PEFT then chooses its layers for bitsandbytes
