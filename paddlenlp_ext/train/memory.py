"""How much memory a training step takes, part by part, from shapes alone. Measured against in benchmarks/memory.py.

D hidden size, I feed-forward size, N and K query and key-value heads, H head dimension, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from paddlenlp_ext.models.activations import Kept, kept_floats
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.quant.model import NOTHING_PACKED, PackedSize
from paddlenlp_ext.train.optim import trainable_parameters
from paddlenlp_ext.train.optimizers import adamw_8bit, adamw_mini

_PROCESS_BYTES = 450e6
"""Python, Paddle, the tokenizer and the libraries around them, before any tensor."""
_HEAP_SHARE = 1.0
"""Freed buffers that fit no later request, relative to the activations (runtime.py keeps them for speed)."""
_LOSS_CHUNK = 256
"""Learned positions whose logits stand at one time (ops/linear_cross_entropy.py)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part at the fullest moment of a step.

    Attributes:
        process: the program itself.
        weights: frozen and trained parameters; the packed ones as they are stored.
        gradients: of the trained ones, as far as they stand at that moment: one by one they take the place of
            activations, but for those of earlier micro-batches.
        optimizer: its moments, and fp32 copies of weights that are kept in fewer bits.
        activations: what the forward pass keeps for the backward pass, of one micro-batch.
        loss: logits of one chunk of learned positions, their exponentials, and the gradient of a head that trains.
        heap: buffers between the live ones.
    """

    process: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    heap: float

    @property
    def total(self) -> float:
        """All parts, bytes."""
        return sum(getattr(self, part.name) for part in fields(self))


def estimate_memory(
    model: Any,
    *,
    micro_batch_tokens: int,
    learned_tokens: int,
    recompute: RecomputePlan | None,
    accumulates: bool = False,
    bytes_per_weight: int = 4,
    optim: str = "adamw",
    packed: PackedSize = NOTHING_PACKED,
) -> MemoryEstimate:
    """Predict the peak of a training step.

    Args:
        model: a `CausalLM` or `PeftModel`; only shapes are read, so it may be without weights.
        micro_batch_tokens: the most slots of a micro-batch, padding included.
        learned_tokens: the most learned tokens in a micro-batch.
        recompute: what is computed again in the backward pass; None: nothing.
        accumulates: whether a step has several micro-batches.
        bytes_per_weight: 4 for fp32, 2 for bf16; the rest is counted as fp32.
        optim: the optimizer, which decides what is kept of a trained weight.
        packed: the part of the weights that will be quantized, where `model` has them in plain numbers.
    """
    parameters = list(model.parameters())
    trained = sum(math.prod(p.shape) for p in parameters if not p.stop_gradient)
    adapter_rows = sum(min(p.shape) for p in parameters if not p.stop_gradient and len(p.shape) == 2)
    config = model.config
    is_adapted = trained < sum(math.prod(p.shape) for p in parameters)
    adapter = adapter_rows / config.num_hidden_layers if is_adapted else 0.0
    floats = kept_floats(Kept(config, recompute, adapter), range(config.num_hidden_layers))
    activations = 4.0 * micro_batch_tokens * floats
    loss = 4.0 * 2 * min(_LOSS_CHUNK, learned_tokens) * config.vocab_size
    if not is_adapted:  # the head's gradient: a chunk's, their sum, and the sum scaled
        loss += 4.0 * 3 * config.vocab_size * config.hidden_size
    heap = _HEAP_SHARE * (activations + loss)
    gradients = 4.0 * trained
    return MemoryEstimate(
        process=_PROCESS_BYTES,
        weights=float(bytes_per_weight * (sum(math.prod(p.shape) for p in parameters) - packed.num_weights))
        + packed.num_bytes,
        gradients=gradients if accumulates else max(0.0, gradients - activations - loss - heap),
        optimizer=_moment_bytes(model, optim) + (0.0 if bytes_per_weight == 4 else 4.0 * trained),
        activations=activations,
        loss=loss,
        heap=heap,
    )


def _moment_bytes(model: Any, optim: str) -> float:
    """What the optimizer keeps of the gradients."""
    total = 0.0
    for name, parameter in trainable_parameters(model).items():
        if optim == "adamw_mini":
            total += adamw_mini.moment_bytes(name, parameter.shape, model.config.head_dim)
        elif optim == "adamw_8bit":
            total += adamw_8bit.moment_bytes(parameter.shape)
        else:
            total += 8.0 * math.prod(parameter.shape)
    return total
