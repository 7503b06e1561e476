"""What a model's linears and adapters keep of the tokens for the way back, read off its layers.

A linear that trains keeps its input as the products read it; a frozen one needs none for itself. LoRA that is one step
with its base keeps the input likewise; every other adapter works on the input as it comes, in full precision.

How much memory a training step takes, part by part, from shapes alone. docs/memory.md holds it against measurements.

Two moments decide: the way back begins, all activations are there and few gradients; the optimizer moves the weights,
all gradients are there and no activations. The native library's blocks and the C heap do not lend each other what is
free, so that each of them is as large as at its own fullest moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from paddle import nn

from paddlenlp_ext.models.decoder import DecoderLayer
from paddlenlp_ext.nn.attention import Attention
from paddlenlp_ext.nn.feed_forward import FeedForward
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.peft.layers import AdapterLayer, LinearAdapter, adapter_layers
from paddlenlp_ext.quantization.model import NOTHING_QUANTIZED, PackedSize
from paddlenlp_ext.trainer.memory.activations import Inputs, Kept, Ops, computed_again, kept_bytes
from paddlenlp_ext.trainer.optimizer import trainable_parameters
from paddlenlp_ext.trainer.optimizers import adamw_8bit, adamw_mini

_DROPPED = 1.25
"""Numbers that dropout keeps of each: the result, and a byte that says whether it stayed."""


def kept_inputs(model: Any, ops: Ops) -> Inputs:
    """What an average layer of the model keeps.

    Args:
        model: a `CausalLM` or `PeftModel`; only shapes are read.
        ops: what computes.
    """
    layers = [layer for _, layer in model.named_sublayers() if isinstance(layer, DecoderLayer)]
    each = [_of_layer(layer, ops) for layer in layers]
    means = {name: math.fsum(getattr(one, name) for one in each) / len(each) for name in vars(each[0])}
    return Inputs(**means)


def has_ops_apart(model: Any) -> bool:
    """Whether adapters compute beside the linears, in Paddle's own ops."""
    return any(_is_apart(layer) for _, layer in adapter_layers(model))


def _of_layer(layer: DecoderLayer, ops: Ops) -> Inputs:
    parts = list(layer.sublayers())
    attention = next(part for part in parts if isinstance(part, Attention))
    feed_forward = next(part for part in parts if isinstance(part, FeedForward))
    adapters = [part for part in parts if isinstance(part, AdapterLayer)]
    into_attention = attention.q_proj, attention.k_proj, attention.v_proj
    into_feed_forward = feed_forward.gate_proj, feed_forward.up_proj
    return Inputs(
        attention=_of_stream(into_attention, ops),
        result=_of_input([attention.o_proj], ops, 0.0, ops.result),
        feed_forward=_of_stream(into_feed_forward, ops),
        gated=_of_input([feed_forward.down_proj], ops, ops.attention, ops.gated),
        adapters=sum(_own(adapter, ops) for adapter in adapters),
    )


def _of_stream(linears: Iterable[nn.Layer], ops: Ops) -> float:
    """Bytes kept of each number of a norm's result, which these read."""
    if not ops.autocast:
        return _of_input(linears, ops, ops.attention, ops.product)
    products = sum(2 if isinstance(linear, LinearAdapter) else 1 for linear in linears if _reads(linear, ops))
    return products * ops.product


def _of_input(linears: Iterable[nn.Layer], ops: Ops, as_it_comes: float, as_read: float) -> float:
    """Bytes kept of each number of a tensor that these read, where it takes so many in each of the two ways to keep it.

    Both ways are one where they take the same.
    """
    readers = [linear for linear in linears if _reads(linear, ops)]
    return sum({as_it_comes if _is_apart(linear) else as_read for linear in readers})


def _reads(linear: nn.Layer, ops: Ops) -> bool:
    """Whether a gradient needs what the linear reads; Paddle's own product keeps it whether one does or not."""
    if isinstance(linear, LinearAdapter):
        return linear.keeps_input
    return not ops.native or not linear.weight.stop_gradient


def _is_apart(linear: nn.Layer) -> bool:
    """Whether it is an adapter with ops of its own beside the base's."""
    return isinstance(linear, LinearAdapter) and not linear.in_one_step()


def _own(adapter: AdapterLayer, ops: Ops) -> float:
    """Bytes a token that an adapter keeps itself."""
    if not isinstance(adapter, LinearAdapter):
        return ops.attention * adapter.saved_activation_size()
    dropped = _DROPPED * adapter.in_features if adapter.dropout else 0.0
    return (ops.attention if _is_apart(adapter) else ops.product) * (adapter.saved_activation_size() + dropped)


_PROCESS_BYTES = 400e6
"""Python, Paddle, the tokenizer and the libraries around them, before any tensor."""
_LOSS_CHUNK = 256
"""Learned positions whose logits stand at one time (ops/linear_cross_entropy/__init__.py). Native products in
bfloat16 take half as many again, and need no second place for the rounded gradient: the same bytes."""
_SMALLEST_BLOCK = 1 << 18
"""Bytes from which on a native op's result lies in a block (ops/cpu/library.py)."""
_FREE_BLOCKS = 1 / 16
"""Native blocks that are free, at most, relative to the most in use at once (ops/csrc/buffers.cpp)."""
_FREE_HEAP = 1.0
"""Freed pieces of the C heap, which runtime.py keeps for speed, relative to the most in use at once besides weights and
optimizer: few fit a later request. Measured without the native library, where all tensors lie there."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of each part at the fullest moment of a step.

    Attributes:
        process: the program itself.
        weights: frozen and trained parameters; the packed ones as they are stored.
        optimizer: its moments, and fp32 copies of weights that are kept in fewer bits.
        activations: what the forward pass keeps for the backward pass, of one micro-batch.
        working: what stands beside them for a while: the logits of a chunk of learned positions, or what one layer
            needs on the way back, whichever is more.
        gradients: those of what trains, as far as they find no room where activations were before.
        kept_free: what was freed and is kept for the next request; left out on a GPU.
    """

    process: float
    weights: float
    optimizer: float
    activations: float
    working: float
    gradients: float
    kept_free: float

    @property
    def total(self) -> float:
        """All parts, bytes."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class _Use:
    """Bytes in use at a moment, besides what stays from step to step.

    Attributes:
        blocks: of the native library, whose large results lie there.
        heap: whatever Paddle's own ops give.
    """

    blocks: float = 0.0
    heap: float = 0.0

    def __add__(self, other: _Use) -> _Use:
        return _Use(self.blocks + other.blocks, self.heap + other.heap)

    def apart(self, other: _Use) -> _Use:
        """What two moments take, where neither kind lends the other what is free."""
        return _Use(max(self.blocks, other.blocks), max(self.heap, other.heap))

    def together(self, other: _Use) -> _Use:
        """The same where all lies in one place."""
        return _Use(0.0, max(self.blocks + self.heap, other.blocks + other.heap))


def estimate_memory(
    model: Any,
    *,
    micro_batch_tokens: int,
    learned_tokens: int,
    recompute: RecomputePlan | None,
    ops: Ops,
    accumulates: bool = False,
    bytes_per_weight: int = 4,
    optim: str = "adamw",
    packed: PackedSize = NOTHING_QUANTIZED,
) -> MemoryEstimate:
    """Predict the peak of a training step.

    Args:
        model: a `CausalLM` or `PeftModel`; only shapes are read, so it may be without weights.
        micro_batch_tokens: the most slots of a micro-batch, padding included.
        learned_tokens: the most learned tokens in a micro-batch.
        recompute: what is computed again in the backward pass; None: nothing.
        ops: what computes.
        accumulates: whether a step has several micro-batches.
        bytes_per_weight: of a matrix that is frozen, and on a GPU of every weight: 4 for fp32, 2 for bf16.
        optim: the optimizer, which decides what is kept of a trained weight.
        packed: the part of the weights that will be quantized, where `model` has them in plain numbers.
    """
    num_layers = model.config.num_hidden_layers
    inputs = kept_inputs(model, ops)
    kept = Kept(model.config, recompute, ops, inputs)
    again = computed_again(kept)
    activations = micro_batch_tokens * (kept_bytes(kept, range(num_layers)) - again + kept.stream)  # the final norm's
    loss = _loss_bytes(model, ops, micro_batch_tokens, learned_tokens)
    working = max(loss, micro_batch_tokens * (again + _way_back_numbers(model.config) * ops.attention))

    # Paddle adds to the stream, and what an adapter apart has to add to gate and up. Of what that keeps itself about
    # half is Paddle's too, the rest the results of linears (DoRA).
    apart = kept.gate + inputs.adapters / 2 if has_ops_apart(model) and recompute is None else 0.0
    by_paddle = micro_batch_tokens * (num_layers * (kept.stream + apart) + kept.stream)
    gradients = _gradients(model)
    back = _Use(activations - by_paddle + working, by_paddle) + (gradients if accumulates else _Use())
    back += _Use(4.0 * _trained_head(model))
    update = gradients + _Use(0.0, _update_bytes(model, optim))
    needed = back.apart(update) if ops.native else back.together(update)
    return MemoryEstimate(
        process=_PROCESS_BYTES,
        weights=_weight_bytes(model, ops, bytes_per_weight, packed),
        optimizer=_state_bytes(model, ops, optim, bytes_per_weight),
        activations=activations,
        working=working,
        gradients=needed.blocks + needed.heap - activations - working,
        kept_free=0.0 if ops.on_gpu else _FREE_BLOCKS * needed.blocks + _FREE_HEAP * needed.heap,
    )


def _loss_bytes(model: Any, ops: Ops, tokens: int, learned: int) -> float:
    """Logits of a chunk, the hidden states that are learned and their gradients; where the head trains, the head as
    products read it, or a chunk's part of its gradient.
    """
    config = model.config
    rounded = 0.0 if ops.product == 4.0 else ops.product
    logits = (4.0 + rounded) * min(_LOSS_CHUNK, learned) * config.vocab_size
    hidden = 4.0 * (tokens + 2 * learned) * config.hidden_size
    beside = rounded if ops.native else 4.0  # a native product adds a chunk's part of the head's gradient to the rest
    return logits + hidden + beside * _trained_head(model)


def _way_back_numbers(config: Any) -> float:
    """Numbers a token that a layer's gate needs to go back, the most of all ops: gradients of its product, of gate and
    up, of the stream before and after.
    """
    return 3 * config.intermediate_size + 2 * config.hidden_size


def _trained_head(model: Any) -> int:
    """Numbers of the output head where it trains: its gradient is made in the forward pass."""
    head = model.head_weight()
    return 0 if head.stop_gradient else math.prod(head.shape)


def _gradients(model: Any) -> _Use:
    """All of them, and what is tied a second time: the embedding's is made while the head's waits for it.

    Native ops make those of the linears and of the head. Paddle makes the embedding's, and the small ones of adapters.
    """
    trained = trainable_parameters(model)
    sizes = {name: 4.0 * math.prod(parameter.shape) for name, parameter in trained.items()}
    by_paddle = sum(size for name, size in sizes.items() if "embed_tokens" in name or size < _SMALLEST_BLOCK)
    head = 4.0 * _trained_head(model) if model.config.tie_word_embeddings else 0.0
    return _Use(sum(sizes.values()) - by_paddle + head, by_paddle)


def _update_bytes(model: Any, optim: str) -> float:
    """What an optimizer needs to move the largest weight, beside its gradient."""
    copies = 2 if optim == "adamw_mini" else 0
    return copies * 4.0 * max(math.prod(parameter.shape) for parameter in trainable_parameters(model).values())


def _weight_bytes(model: Any, ops: Ops, bytes_per_weight: int, packed: PackedSize) -> float:
    """All weights as they are stored, and under autocast the linears' as the products read them."""
    stored = sum(_stored_bytes(parameter, ops, bytes_per_weight) for parameter in model.parameters())
    stored += packed.num_bytes - bytes_per_weight * packed.num_weights
    if not ops.autocast:
        return stored
    vocabulary = model.config.vocab_size
    matrices = (p for p in model.parameters() if len(p.shape) == 2 and p.shape[0] != vocabulary)
    return stored + ops.product * (sum(math.prod(p.shape) for p in matrices) - packed.num_weights)


def _stored_bytes(parameter: Any, ops: Ops, bytes_per_weight: int) -> float:
    """On the CPU nothing is stored in half precision but frozen matrices."""
    may_be_half = ops.on_gpu or (parameter.stop_gradient and len(parameter.shape) == 2)
    return float(math.prod(parameter.shape) * (bytes_per_weight if may_be_half else 4))


def _state_bytes(model: Any, ops: Ops, optim: str, bytes_per_weight: int) -> float:
    """What the optimizer keeps of each gradient, and of a weight that is stored in half precision."""
    total = 0.0
    for name, parameter in trainable_parameters(model).items():
        if optim == "adamw_mini":
            total += adamw_mini.moment_bytes(name, parameter.shape, model.config.head_dim)
        elif optim == "adamw_8bit":
            total += adamw_8bit.moment_bytes(parameter.shape)
        else:
            total += 8.0 * math.prod(parameter.shape)
        if ops.on_gpu and bytes_per_weight < 4:
            total += 4.0 * math.prod(parameter.shape)
    return total
