"""Estimate of the peak memory of a process in a training step, from shapes only.

docs/benchmarks/memory.md compares the estimates with measurements.

Memory peaks at one of three points:

    start of the backward pass    all activations, few gradients
    end of the backward pass      all gradients, no activations
    optimizer update              all gradients, and temporary tensors of the largest parameter's update

The C++ library allocates large results in its own blocks. Blocks and the C heap cannot reuse each other's free memory,
so the estimate adds the peak of the blocks and the peak of the heap.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.linear_cross_entropy.triton import chunk_rows
from paddlenlp_ext.parallel.collectives import BUCKET_BYTES
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.quantize_model import NOTHING_QUANTIZED, PackedSize
from paddlenlp_ext.sharding_spec import is_materialized, is_on_stage, placement_of
from paddlenlp_ext.trainer.memory.layer_activations import ActivationModel, Numerics
from paddlenlp_ext.trainer.memory.process_share import ProcessShare
from paddlenlp_ext.trainer.memory.recurrent_states import training_state_bytes
from paddlenlp_ext.trainer.memory.saved_inputs import has_separate_adapters, saved_inputs
from paddlenlp_ext.trainer.optimizers import adamw_8bit, adamw_mini, muon
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters, updated_parameters

_PROCESS_BYTES = 370e6
"""Bytes that Python, Paddle, the tokenizer and their libraries take before the first tensor is allocated."""
_LOSS_CHUNK = 256
"""Number of target positions per chunk of logits (ops/linear_cross_entropy/__init__.py), except with Triton. In
bfloat16, the C++ library uses chunks of 384 positions without a rounded copy of the gradient. 384 positions without the
copy take as many bytes as 256 positions with the copy."""
_SMALLEST_BLOCK = 1 << 18
"""Minimum size in bytes of a C++ op's result that is allocated in a block (ops/cpp/library.py)."""
_FREE_BLOCKS = 1 / 16
"""Maximum free memory in the C++ library's blocks, as a fraction of the blocks' peak (ops/csrc/buffers.cpp)."""
_MMAP_THRESHOLD = 1 << 25
"""Minimum size in bytes of an allocation that the C library maps separately, and returns to the system when it is
freed (M_MMAP_THRESHOLD in mallopt(3))."""
_FREE_HEAP = 1.0
"""Freed memory that the C heap retains if the C++ library allocates the large results, as a fraction of the heap's peak
without weights and optimizer state. Few freed chunks fit a later allocation."""
_FREE_PLAIN_HEAP, _FREE_PLAIN_HEAP_OF_ADAPTERS = 0.7, 1.75
"""Freed memory that the C heap retains without the C++ library, as a fraction of the heap's peak: first for a model
without adapters, then for a model with adapters. Small results of adapter ops lie between large freed chunks and keep
them from merging. Measured with two model shapes (docs/internals/memory.md)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of a training step in bytes, by purpose.

    Attributes:
        process: Python, Paddle and other libraries, without tensors.
        weights: frozen and trained parameters; quantized weights with their packed size.
        optimizer: moments, and fp32 copies of half-precision weights.
        activations: tensors saved for the backward passes of the micro-batches in flight.
        states: matrices of recurrent layers after the documents, saved if a document continues another document.
        working: temporary tensors: the larger of a chunk of logits and the backward pass of one layer.
        gradients: gradients and temporary tensors of the update, beyond the memory that activations and working tensors
            have freed.
        allocator_cache: freed memory that the allocator retains; 0 on a GPU.
    """

    process: float
    weights: float
    optimizer: float
    activations: float
    states: float
    working: float
    gradients: float
    allocator_cache: float

    @property
    def total(self) -> float:
        """Sum over all purposes in bytes."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class _MemoryUse:
    """Bytes in use at one point of a step, without weights and optimizer state.

    Attributes:
        blocks: large results of C++ ops.
        heap: results of Paddle's ops below `_MMAP_THRESHOLD`.
        mapped: results of Paddle's ops from `_MMAP_THRESHOLD` up, whose memory returns to the system when it is freed.
    """

    blocks: float = 0.0
    heap: float = 0.0
    mapped: float = 0.0

    def __add__(self, other: _MemoryUse) -> _MemoryUse:
        return _MemoryUse(self.blocks + other.blocks, self.heap + other.heap, self.mapped + other.mapped)

    @property
    def total(self) -> float:
        return self.blocks + self.heap + self.mapped

    @staticmethod
    def of_results(sizes: Iterable[float], blocks: float = 0.0) -> _MemoryUse:
        """Return the memory of Paddle's results, given their sizes in bytes, plus `blocks` bytes of C++ results."""
        sizes = list(sizes)
        mapped = sum(size for size in sizes if size >= _MMAP_THRESHOLD)
        return _MemoryUse(blocks, sum(sizes) - mapped, mapped)

    def peak_of_each(self, other: _MemoryUse) -> _MemoryUse:
        """Return the peak over two points of a step if blocks and heap cannot reuse each other's free memory."""
        return _MemoryUse(max(self.blocks, other.blocks), max(self.heap, other.heap), max(self.mapped, other.mapped))

    def peak_of_sum(self, other: _MemoryUse) -> _MemoryUse:
        """Return the peak over two points of a step if all memory is on the heap."""
        return _MemoryUse(0.0, max(self.total, other.total))


def estimate_memory(
    model: Any,
    *,
    micro_batch_tokens: int,
    target_tokens: int,
    recompute: RecomputePlan | None,
    numerics: Numerics,
    num_states: int = 0,
    accumulates: bool = False,
    bytes_per_weight: int = 4,
    optim: str = "adamw",
    master_weight: bool = True,
    float32_gradients: bool = False,
    packed: PackedSize = NOTHING_QUANTIZED,
    share: ProcessShare | None = None,
) -> MemoryEstimate:
    """Predict the peak memory of a process in a training step.

    Args:
        model: a `CausalLM` or `PeftModel`, sharded for the process. Only shapes are read; the parameters may have no
            values.
        micro_batch_tokens: positions of the largest micro-batch, padding included.
        target_tokens: target tokens of the largest micro-batch.
        recompute: recomputation plan; None: no recomputation.
        numerics: dtypes and fused ops of the backend.
        num_states: documents of the largest micro-batch if one continues another, else 0.
        accumulates: whether a step has several micro-batches.
        bytes_per_weight: bytes per element of the decoder's matrices (on a GPU, of all weights): 4 for fp32, 2 for half
            precision.
        optim: name of the optimizer.
        master_weight: whether trained half-precision weights have fp32 copies.
        float32_gradients: whether trained half-precision weights have fp32 gradients.
        packed: size of the quantized weights of the process; `model` has the floating-point shapes of these weights.
        share: the process's share of the step; None: a single process.
    """
    share = share or ProcessShare(tuple(range(model.config.num_hidden_layers)))
    inputs = saved_inputs(model, numerics)
    layers = ActivationModel(model.config, recompute, numerics, inputs, share.tensor, share.sequence_parallel)
    recomputed = layers.recomputed
    # The last stage also saves hidden states, the input of the final norm.
    activations = micro_batch_tokens * (layers.saved(share.layers) - recomputed + share.has_head * layers.hidden)
    states = num_states * training_state_bytes(model, share.layers, recompute)
    stored = _Storage(model, numerics, bytes_per_weight, float32_gradients)
    loss = _loss_bytes(model, numerics, micro_batch_tokens, target_tokens, stored, share)
    backward = micro_batch_tokens * (recomputed + _backward_size(model.config, share.tensor) * numerics.attention)
    working = max(loss, backward)

    # Paddle's ops allocate the residual sums. With separate adapters, Paddle's ops also allocate the sums of base
    # output and adapter output (for gate and up), and about half of the activations that adapters save (measured with
    # DoRA).
    separate = layers.gate + inputs.adapters / 2 if has_separate_adapters(model) and recompute is None else 0.0
    kept: Sequence[int] = share.layers
    if recompute is not None and recompute.offloads_inputs:
        kept = [layer for layer in share.layers if layer in recompute.excluded_layers]
    # The inputs of tensor-parallel layers are copies of the hidden states, or hidden states gathered from all ranks.
    copied = model.config.hidden_size * (inputs.attention + inputs.feed_forward) if share.tensor > 1 else 0.0
    by_layers = len(kept) * layers.hidden + len(share.layers) * (separate + copied * (recompute is None))
    by_paddle = micro_batch_tokens * (by_layers + layers.hidden)
    gradients = _gradients(model, stored, share)
    start_of_backward = _MemoryUse(activations + states - by_paddle + working, by_paddle) + (
        gradients if accumulates else _MemoryUse()
    )
    start_of_backward += _MemoryUse(4.0 * _trained_head_size(model, share))
    # Before the update, the two gradients of a tied embedding are summed into one tensor.
    update = _gradients(model, stored, share, has_both_of_tied=False)
    update += max(
        _update_use(model, optim, stored, master_weight), _bucket_use(model, stored, share), key=lambda use: use.total
    )
    combine = start_of_backward.peak_of_each if numerics.cpp else start_of_backward.peak_of_sum
    needed = combine(max(gradients, update, key=lambda use: use.total))
    return MemoryEstimate(
        process=_PROCESS_BYTES,
        weights=_weight_bytes(model, numerics, stored, packed),
        optimizer=_state_bytes(model, optim, stored, master_weight),
        activations=activations,
        states=states,
        working=working,
        gradients=needed.total - activations - states - working,
        allocator_cache=_free_bytes(needed, numerics, has_adapters=any(adapter_layers(model))),
    )


def _free_bytes(needed: _MemoryUse, numerics: Numerics, has_adapters: bool) -> float:
    """Return the bytes of freed memory that the allocators retain after a peak of `needed`."""
    if numerics.on_gpu:
        return 0.0
    if numerics.cpp:
        return _FREE_BLOCKS * needed.blocks + _FREE_HEAP * needed.heap
    return (_FREE_PLAIN_HEAP_OF_ADAPTERS if has_adapters else _FREE_PLAIN_HEAP) * needed.heap


@dataclass(frozen=True)
class _Storage:
    """Storage dtype of each parameter. On the CPU, only the decoder's matrices are stored in half precision."""

    model: Any
    numerics: Numerics
    bytes_per_weight: int
    float32_gradients: bool

    def bytes_per_element(self, parameter: Any) -> int:
        """Return the bytes per element of a parameter."""
        is_adapter = isinstance(self.model, PeftModel) and not parameter.stop_gradient
        may_be_half = self.numerics.on_gpu or (len(parameter.shape) >= 2 and not is_adapter)
        return self.bytes_per_weight if may_be_half else 4

    def num_bytes(self, parameter: Any) -> float:
        """Return the size of a parameter in bytes."""
        return float(math.prod(parameter.shape) * self.bytes_per_element(parameter))

    def gradient_bytes(self, parameter: Any) -> float:
        """Return the size of a parameter's gradient in bytes."""
        return 4.0 * math.prod(parameter.shape) if self.float32_gradients else self.num_bytes(parameter)

    def is_half(self, parameter: Any) -> bool:
        """Return whether a parameter is stored in half precision."""
        return self.bytes_per_element(parameter) < 4


def _loss_bytes(
    model: Any, numerics: Numerics, tokens: int, targets: int, stored: _Storage, share: ProcessShare
) -> float:
    """Return the peak bytes of the loss: a chunk of logits, and float32 tensors of hidden states.

    If lm_head is trained, the loss also needs a copy of lm_head in the matmul dtype. Without the C++ library, the loss
    needs a chunk's contribution to the fp32 gradient of lm_head instead of the copy.
    """
    if not share.has_head:
        return 0.0
    config = model.config
    logits = _logit_bytes(config.num_outputs / share.tensor, targets, numerics, config.logit_softcap is not None)
    hidden = 4.0 * (tokens + 2 * targets) * config.hidden_size
    copied = 0.0 if stored.is_half(model.head_weight()) else _rounded_bytes(numerics)
    per_head_weight = copied if numerics.cpp else 4.0  # the C++ matmul accumulates the gradient of lm_head in place
    return logits + hidden + per_head_weight * _trained_head_size(model, share)


def _logit_bytes(columns: float, targets: int, numerics: Numerics, is_capped: bool) -> float:
    """Return the bytes of a chunk's logits and their gradient on a process with `columns` columns of lm_head.

    With Triton, logits have the matmul dtype, and the gradient overwrites the logits. Without Triton, logits are
    float32 and the gradient has a copy rounded to the matmul dtype. Without the C++ library, the derivative of a logit
    soft-cap needs another float32 tensor.
    """
    if numerics.triton:
        return numerics.product * min(chunk_rows(math.ceil(columns), int(numerics.product)), targets) * columns
    capped = 4.0 if is_capped and not numerics.cpp else 0.0
    return (4.0 + _rounded_bytes(numerics) + capped) * min(_LOSS_CHUNK, targets) * columns


def _rounded_bytes(numerics: Numerics) -> float:
    """Return the bytes per element of a copy rounded to the matmul dtype; 0 for float32, which needs no copy."""
    return 0.0 if numerics.product == 4.0 else numerics.product


def _backward_size(config: Any, tensor: int) -> float:
    """Return the number of elements per token that the gate's backward op holds, the maximum over a layer's ops.

    While the op runs, five gradients exist: the gradients of the gate's output, of gate, of up, and of the hidden
    states before and after the feed-forward layer.
    """
    shapes = [shape for shape in config.experts or () if shape is not None]
    rows = 2 * max((shape.router.top_k for shape in shapes), default=0)  # hidden states sorted by expert
    return 3 * config.active_size / tensor + (2 + rows) * config.hidden_size


def _trained_head_size(model: Any, share: ProcessShare) -> int:
    """Return the number of elements in the gradient of lm_head; 0 if this process does not compute the gradient."""
    head = model.head_weight()
    return math.prod(head.shape) if share.has_head and not head.stop_gradient else 0


def _gradients(model: Any, stored: _Storage, share: ProcessShare, has_both_of_tied: bool = True) -> _MemoryUse:
    """Return the memory of all gradients.

    C++ ops allocate the gradients of linear layers and lm_head. Paddle allocates the gradients of the embedding and of
    small adapters, and computes the gradient of a half-precision embedding in fp32 first. With `has_both_of_tied`, a
    tied embedding has two gradients, one from the embedding and one from lm_head.
    """
    trained = (updated_parameters if share.shards_gradients else trainable_parameters)(model)
    sizes = {name: stored.gradient_bytes(parameter) for name, parameter in trained.items()}
    by_paddle = [size for name, size in sizes.items() if "embed_tokens" in name or size < _SMALLEST_BLOCK]
    wide = [4.0 * math.prod(p.shape) for name, p in trained.items() if "embed_tokens" in name and stored.is_half(p)]
    head = 0.0
    if model.config.tie_word_embeddings and has_both_of_tied:
        head = stored.gradient_bytes(model.head_weight()) if _trained_head_size(model, share) else 0.0
    return _MemoryUse.of_results([*by_paddle, *wide], sum(sizes.values()) - sum(by_paddle) + head)


def _bucket_use(model: Any, stored: _Storage, share: ProcessShare) -> _MemoryUse:
    """Return the memory for reducing gradients over replicas: a bucket, and the reduced bucket split by parameter."""
    if share.replicas == 1:
        return _MemoryUse()
    sizes = [stored.gradient_bytes(parameter) for parameter in trainable_parameters(model).values()]
    joined = sum(size for size in sizes if size < BUCKET_BYTES)
    return _MemoryUse.of_results([min(joined, BUCKET_BYTES)] * 2)


def _update_use(model: Any, optim: str, stored: _Storage, master_weight: bool) -> _MemoryUse:
    """Return the largest temporary memory of a parameter's update, without the gradient of the parameter.

    Every optimizer except AdamW converts half-precision gradients to fp32, and also parameters without an fp32 copy.
    """
    updates = []
    for name, parameter in updated_parameters(model).items():
        size = 4.0 * math.prod(parameter.shape)
        widened = (not stored.float32_gradients) + (not master_weight)
        widened *= optim != "adamw" and stored.is_half(parameter)
        sizes = [size] * (widened + (optim == "adamw_mini"))
        if optim == "muon" and muon.is_muon_matrix(name, parameter.shape):
            sizes.append(muon.update_bytes(parameter.shape))
        updates.append(sizes)
    return _MemoryUse.of_results(max(updates, key=sum))


def _weight_bytes(model: Any, numerics: Numerics, stored: _Storage, packed: PackedSize) -> float:
    """Return the bytes of this process's weights, of weights gathered by ZeRO-3, and of matrices cast by autocast."""
    total = sum(stored.num_bytes(parameter) for parameter in model.parameters() if is_materialized(parameter))
    total += _gathered_bytes(model, stored)
    total += packed.num_bytes - stored.bytes_per_weight * packed.num_weights
    if not numerics.autocast:
        return total
    vocab_size = model.config.vocab_size
    held = (parameter for parameter in model.parameters() if is_on_stage(parameter))
    matrices = (p for p in held if len(p.shape) >= 2 and p.shape[0] != vocab_size)
    return total + numerics.product * (sum(math.prod(p.shape) for p in matrices) - packed.num_weights)


def _gathered_bytes(model: Any, stored: _Storage) -> float:
    """Return the peak bytes of weights that ZeRO-3 gathers from other processes.

    At the peak, two decoder layers and all weights outside the decoder layers are gathered (parallel/zero.py).
    """
    by_layer: dict[str, float] = defaultdict(float)
    for name, parameter in model.named_parameters():
        if placement_of(parameter).is_gathered_copy:
            layer = re.search(r"\.layers\.(\d+)\.", name)
            by_layer["" if layer is None else layer[1]] += stored.num_bytes(parameter)
    outside = by_layer.pop("", 0.0)
    return outside + sum(sorted(by_layer.values())[-2:])


def _state_bytes(model: Any, optim: str, stored: _Storage, master_weight: bool) -> float:
    """Return the bytes of the optimizer's moments and of the fp32 copies of half-precision parameters."""
    total = 0.0
    for name, parameter in updated_parameters(model).items():
        if optim == "adamw_mini":
            total += adamw_mini.moment_bytes(name, parameter.shape, adamw_mini.head_dim_of(name, model.config))
        elif optim == "adamw_8bit":
            total += adamw_8bit.moment_bytes(parameter.shape)
        elif optim == "muon":
            total += muon.moment_bytes(parameter.shape, muon.is_muon_matrix(name, parameter.shape))
        else:
            total += 8.0 * math.prod(parameter.shape)
        if master_weight and stored.is_half(parameter):
            total += 4.0 * math.prod(parameter.shape)
    return total
