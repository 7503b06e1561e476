"""How many bytes a token the layers keep for the way back, from shapes alone.

Numbers of which there is one a row (a norm's scale, a softmax's sum) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.nn.recompute import RecomputePlan


@dataclass(frozen=True)
class Ops:
    """How wide the implementations that run keep a number, and what they do not keep at all.

    Attributes:
        stream: bytes of a number between the layers, which the norms keep.
        attention: of queries, keys, values, their result, and whatever else a linear gives.
        product: of a number as matrix products and the gate read it.
        native: whether they are the native library's, in which a feed-forward's inner product is made again on the way
            back (ops/saved_tensors.py) and a frozen linear keeps nothing.
        on_gpu: whether they are a GPU's, whose norms, rotation and gate are several ops each that keep what they read.
        autocast: whether each product rounds what it reads, and keeps a copy of its own.
    """

    stream: float = 4.0
    attention: float = 4.0
    product: float = 4.0
    native: bool = False
    on_gpu: bool = False
    autocast: bool = False

    @property
    def result(self) -> float:
        """Bytes of a number of attention's result as o_proj reads it, beyond what attention keeps."""
        return 0.0 if self.product == self.attention else self.product

    @property
    def gated(self) -> float:
        """Bytes of a number of the gate's product as down_proj reads it."""
        return 0.0 if self.native else self.product


PLAIN = Ops()
"""Plain Paddle on the CPU."""
NATIVE = Ops(native=True)
"""The native library."""
NATIVE_HALF = Ops(product=2.0, native=True)
"""The native library with products in bfloat16 (ops/cpu/bf16.py)."""
GPU = Ops(on_gpu=True)
"""A GPU in float32."""
GPU_HALF = Ops(stream=2.0, attention=2.0, product=2.0, on_gpu=True)
"""A GPU with weights in half precision (O2)."""
GPU_AUTOCAST = Ops(attention=2.0, product=2.0, on_gpu=True, autocast=True)
"""A GPU with products alone in half precision (O1)."""


@dataclass(frozen=True)
class Inputs:
    """Bytes kept of each number that a layer's linears read, and what stands beside these.

    Attributes:
        attention: of what q, k and v read.
        result: of what o_proj reads, beyond what attention keeps of it.
        feed_forward: of what gate and up read.
        gated: of what down_proj reads.
        adapters: bytes a token that the layer's adapters keep themselves.
    """

    attention: float
    result: float
    feed_forward: float
    gated: float
    adapters: float = 0.0


def all_inputs(ops: Ops) -> Inputs:
    """Where every linear keeps what it read, as one does that trains."""
    attention, feed_forward = (3, 2) if ops.autocast else (1, 1)
    return Inputs(attention * ops.product, ops.result, feed_forward * ops.product, ops.gated)


@dataclass(frozen=True)
class Kept:
    """What decides how much a layer keeps.

    Attributes:
        config: the decoder's sizes.
        plan: what is computed again, None for nothing.
        ops: what computes.
        inputs: what the linears keep of their inputs; None: all of them theirs.
        tensor: devices that share each layer; heads and inner features are divided among them.
        sequence_parallel: whether they divide the stream between the cut layers too.
    """

    config: Any
    plan: RecomputePlan | None = None
    ops: Ops = PLAIN
    inputs: Inputs | None = None
    tensor: int = 1
    sequence_parallel: bool = False

    @property
    def stream(self) -> float:
        """The stream between two layers, which is the input of a norm."""
        return self.ops.stream * self.config.hidden_size / (self.tensor if self.sequence_parallel else 1)

    @property
    def queries(self) -> float:
        """Queries alone; the result of attention is as many."""
        return self.ops.attention * self._queries

    @property
    def attention(self) -> float:
        """Queries, keys, values and the result of attention."""
        return self.ops.attention * 2 * (self._queries + self._keys)

    @property
    def inner(self) -> float:
        """What gate, up or their product is, as a linear gives it."""
        return self.ops.attention * self._inner

    @property
    def gate(self) -> float:
        """Gate and up, as they are kept."""
        return 2 * self.ops.product * self._inner

    @property
    def layer(self) -> float:
        """All that a layer keeps: the inputs of its norms, linears, attention and gate."""
        inputs = self.inputs or all_inputs(self.ops)
        hidden = self.config.hidden_size  # the linears' inputs are whole, however the stream is divided
        read = hidden * (inputs.attention + inputs.feed_forward) + self._queries * inputs.result
        gate = self.gate + self._inner * inputs.gated
        return 2 * self.stream + read + self.attention + gate + self._pieces + inputs.adapters

    @property
    def _pieces(self) -> float:
        """What ops that consist of several keep in addition."""
        turned = self._queries + self._keys
        normed = self.ops.stream * turned if self.config.qk_norm else 0.0
        if not self.ops.on_gpu:
            return normed
        # A norm keeps its input in float32 in place of the stream itself, and its result before it is scaled; rotation
        # keeps what it turns in float32, as it is and with its halves exchanged; silu keeps its result.
        norms = 2 * self.stream * 4.0 / self.ops.stream
        return norms + 2 * normed + 8.0 * turned + self.ops.product * self._inner

    @property
    def _queries(self) -> float:
        return self.config.head_dim * self.config.num_attention_heads / self.tensor

    @property
    def _keys(self) -> float:
        return self.config.head_dim * self.config.num_key_value_heads / self.tensor

    @property
    def _inner(self) -> float:
        return self.config.intermediate_size / self.tensor


def kept_bytes(kept: Kept, layers: Iterable[int]) -> float:
    """Bytes a token that these layers keep, and what of one of them stands while it is computed again."""
    return sum(_of_layer(kept, index) for index in layers) + computed_again(kept)


def computed_again(kept: Kept) -> float:
    """Bytes a token that one layer keeps for as long as it takes to go back through it."""
    if kept.plan is None or kept.plan.granularity == "core_attn":
        return 0.0
    return kept.attention if kept.plan.granularity == "full_attn" else kept.layer


def _of_layer(kept: Kept, index: int) -> float:
    plan = kept.plan
    if plan is None or index in plan.excluded_layers or plan.granularity == "core_attn":
        return kept.layer  # attention keeps its inputs and its result, and no scores: nothing of it can go
    if plan.granularity == "full_attn":
        return kept.layer - kept.attention
    hidden = kept.ops.stream * kept.config.hidden_size
    staying = {  # what goes into a place and what comes out
        "attention_column_ln": hidden + kept.attention - kept.queries,
        "flash_attn": kept.attention,
        "attention_row_ln": kept.queries + hidden,
        "mlp_column_ln": hidden + 2 * kept.inner,
        "mlp_row_ln": kept.inner + hidden,
    }
    return kept.stream + sum(size for place, size in staying.items() if plan.saves(place, index))
