"""Estimate the bytes per token that decoder layers save for the backward pass, from shapes only.

The estimate ignores tensors with one element per position, such as the scale of a norm or the sum of a softmax.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import paddle

from paddlenlp_ext.nn.recompute import RecomputePlan


@dataclass(frozen=True)
class Numerics:
    """Dtypes and fused ops of a backend that determine the size of saved activations.

    Attributes:
        hidden: bytes per element of the hidden states between layers, which the norms save.
        attention: bytes per element of queries, keys, values, attention output, and other outputs of linear layers.
        product: bytes per element of the inputs of matmuls and of the gate op (the matmul dtype).
        cpp: whether the C++ library runs the ops. The library recomputes act(gate) * up in the
            backward pass (ops/recompute_functions.py), and frozen linear layers do not save their input.
        on_gpu: whether a GPU runs the ops. The estimate for a GPU assumes that norms, rotary embedding and gate
            consist of several ops, each of which saves its input.
        autocast: whether each matmul casts its input and saves the cast copy.
        triton: whether Triton kernels compute the loss, in larger chunks than other backends
            (ops/linear_cross_entropy/triton.py).
    """

    hidden: float = 4.0
    attention: float = 4.0
    product: float = 4.0
    cpp: bool = False
    on_gpu: bool = False
    autocast: bool = False
    triton: bool = False

    @property
    def linear_dtype(self) -> paddle.dtype:
        """Dtype of the outputs of linear layers; bfloat16 stands for both dtypes of 16 bits."""
        return paddle.float32 if self.attention == 4.0 else paddle.bfloat16

    @property
    def result(self) -> float:
        """Bytes per element of the attention output that o_proj saves, in addition to the copy that attention saves."""
        return 0.0 if self.product == self.attention else self.product

    @property
    def gated(self) -> float:
        """Bytes per element of act(gate) * up that down_proj saves."""
        return 0.0 if self.cpp else self.product


CPU_PADDLE = Numerics()
"""Paddle's ops on the CPU, without the C++ library."""
CPU_CPP = Numerics(cpp=True)
"""The C++ library on the CPU in float32."""
CPU_BF16 = Numerics(product=2.0, cpp=True)
"""The C++ library on the CPU with matmuls in bfloat16 (ops/cpp/bf16.py)."""
GPU = Numerics(on_gpu=True)
"""A GPU in float32."""
GPU_HALF = Numerics(hidden=2.0, attention=2.0, product=2.0, on_gpu=True)
"""A GPU with weights in half precision (O2)."""
GPU_AUTOCAST = Numerics(attention=2.0, product=2.0, on_gpu=True, autocast=True)
"""A GPU with float32 weights and matmuls in half precision (O1)."""


@dataclass(frozen=True)
class SavedInputs:
    """Inputs that the linear layers and adapters of a decoder layer save for the backward pass.

    Attributes:
        attention: bytes per element of the input of q, k and v.
        result: bytes per element of the input of o_proj, in addition to the copy that attention saves.
        feed_forward: bytes per element of the input of gate and up.
        gated: bytes per element of the input of down_proj.
        latents: bytes per element of the latents of multi-head latent attention, the input of linear layers.
        embedding: bytes per element of the gated layer embedding, the input of a linear layer.
        adapters: bytes per token of other tensors that adapters save.
        exchanged: bytes per token of the hidden states received from other expert-parallel processes.
        norms: number of norms and scales that save hidden states.
    """

    attention: float
    result: float
    feed_forward: float
    gated: float
    latents: float = 0.0
    embedding: float = 0.0
    adapters: float = 0.0
    exchanged: float = 0.0
    norms: float = 2.0


def all_inputs(numerics: Numerics) -> SavedInputs:
    """Return the saved inputs of a decoder layer in full fine-tuning, where every linear layer is trained."""
    attention, feed_forward = (3, 2) if numerics.autocast else (1, 1)
    product = numerics.product
    return SavedInputs(
        attention * product, numerics.result, feed_forward * product, numerics.gated, product, numerics.gated
    )


@dataclass(frozen=True)
class ActivationModel:
    """Saved activations of a decoder, in bytes per token.

    Attributes:
        config: the decoder's `DecoderConfig`.
        plan: recomputation plan; None: no recomputation.
        numerics: dtypes and fused ops of the backend.
        inputs: saved inputs of the linear layers; None: every linear layer saves its input.
        tensor: tensor-parallel degree; attention heads and feed-forward features are sharded.
        sequence_parallel: whether the hidden states between the sharded layers are sharded along the sequence.
    """

    config: Any
    plan: RecomputePlan | None = None
    numerics: Numerics = CPU_PADDLE
    inputs: SavedInputs | None = None
    tensor: int = 1
    sequence_parallel: bool = False

    @property
    def hidden(self) -> float:
        """Bytes per token of the hidden states between two layers, the input of a norm."""
        return self.numerics.hidden * self.config.hidden_size / (self.tensor if self.sequence_parallel else 1)

    @property
    def result(self) -> float:
        """Bytes per token of a token mixer's output (for attention, the input of o_proj), averaged over the layers."""
        return self.numerics.attention * self._num_results

    @property
    def attention(self) -> float:
        """Bytes per token that token mixers save (attention: queries, keys, values, output), averaged over layers."""
        others = self._mean_of_others(mixer.saved_size(self.numerics.cpp) for mixer in self.config.other_mixers)
        saved = self._num_queries + self._num_keys + self._num_values + others
        return self.numerics.attention * saved + self.result

    @property
    def embedding(self) -> float:
        """Bytes per token of a layer embedding, and of the input of its norm (models/layer_embeddings.py)."""
        return self._num_embedded * (self.numerics.product + self.numerics.hidden)

    @property
    def inner(self) -> float:
        """Bytes per token of one tensor of the intermediate size: gate, up, or act(gate) * up."""
        return self.numerics.attention * self._num_inner

    @property
    def gate(self) -> float:
        """Bytes per token of gate and up, both saved by the gate op; without a gate, bytes per token of up."""
        return (2 if self.config.gated else 1) * self.numerics.product * self._num_inner

    @property
    def layer(self) -> float:
        """Bytes per token of all activations of a layer: the inputs of its norms, linear layers, attention and gate."""
        inputs = self.inputs or all_inputs(self.numerics)
        hidden = self.config.hidden_size  # not divided by `tensor`: ranks gather the input of a linear layer
        linears = hidden * (inputs.attention + inputs.feed_forward) + self._num_results * inputs.result
        linears += self.config.latent_size * inputs.latents
        gate = self.gate + self._num_inner * inputs.gated
        others = self._unfused + inputs.adapters + inputs.exchanged
        others += self.embedding + self._num_embedded * (self.numerics.product + inputs.embedding)
        return inputs.norms * self.hidden + linears + self.attention + gate + others

    @property
    def _unfused(self) -> float:
        """Bytes per token that the norms of heads or latents save; on a GPU, also the bytes that unfused ops save."""
        rotated = self._num_queries + self._num_keys
        normed = rotated + self._num_normed_values if self.config.qk_norm else self.config.latent_size
        normed *= self.numerics.hidden
        if not self.numerics.on_gpu:
            return normed
        # A norm saves a float32 copy of its input instead of the input, and also its output before scaling. The rotary
        # embedding saves its input in float32 twice, once with the halves swapped. silu saves its output.
        norms = 2 * self.hidden * 4.0 / self.numerics.hidden
        return norms + 2 * normed + 8.0 * rotated + self.numerics.product * self._num_inner

    @property
    def _num_embedded(self) -> int:
        """Size of a layer embedding; 0 without layer embeddings."""
        return 0 if self.config.layer_embeddings is None else self.config.layer_embeddings.size

    @property
    def _num_heads(self) -> float:
        return self.config.num_attention_heads / self.tensor

    @property
    def _num_queries(self) -> float:
        size = fmean(shape.head_dim for shape in self.config.layer_shapes)
        return self.config.attention_share * self._num_heads * size

    @property
    def _num_keys(self) -> float:
        return self.config.attention_share * fmean(shape.key_size for shape in self.config.layer_shapes) / self.tensor

    @property
    def _num_values(self) -> float:
        return self.config.attention_share * fmean(shape.value_size for shape in self.config.layer_shapes) / self.tensor

    @property
    def _num_normed_values(self) -> float:
        """Number of values whose norm saves its input; without v_proj, the input is the saved output of k_proj."""
        if not self.config.norms_values:
            return 0.0
        return fmean(shape.value_size * shape.has_v_proj for shape in self.config.layer_shapes) / self.tensor

    @property
    def _num_results(self) -> float:
        attention = self._num_heads * fmean(shape.value_dim for shape in self.config.layer_shapes)
        others = self._mean_of_others(mixer.output_size for mixer in self.config.other_mixers)
        return self.config.attention_share * attention + others

    def _mean_of_others(self, sizes: Iterable[float]) -> float:
        """Return the mean size of token mixers other than attention over all layers; attention layers count as 0."""
        return sum(sizes) / self.config.num_hidden_layers / self.tensor

    @property
    def _num_inner(self) -> float:
        return self.config.active_size / self.tensor

    def saved(self, layers: Iterable[int]) -> float:
        """Return the bytes per token that `layers` save, plus the activations that one layer recomputes."""
        return sum(self._saved_by_layer(index) for index in layers) + self.recomputed

    @property
    def recomputed(self) -> float:
        """Bytes per token that one layer recomputes and holds during its backward pass."""
        if self.plan is None or self.plan.granularity == "core_attn":
            return 0.0
        return self.attention if self.plan.granularity == "full_attn" else self.layer

    def _saved_by_layer(self, index: int) -> float:
        plan = self.plan
        if plan is None or index in plan.excluded_layers or plan.granularity == "core_attn":
            return self.layer  # attention saves no scores, so recomputing attention frees nothing
        if plan.granularity == "full_attn":
            return self.layer - self.attention
        hidden = self.numerics.hidden * self.config.hidden_size
        region_bytes = {  # bytes of the inputs and outputs of each region
            "attention_column_ln": hidden + self.attention - self.result,
            "flash_attn": self.attention,
            "attention_row_ln": self.result + hidden,
            "mlp_column_ln": hidden + (2 if self.config.gated else 1) * self.inner,
            "mlp_row_ln": self.inner + hidden,
        }
        saved_input = self.embedding + (0.0 if plan.offloads_inputs else self.hidden)
        return saved_input + sum(size for region, size in region_bytes.items() if plan.saves(region, index))
