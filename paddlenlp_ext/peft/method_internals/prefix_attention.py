"""Layers of prefix tuning: attention with prefix keys and values, and the shared prefix encoder.

Shapes: B batch, S sequence, D hidden, P prefix tokens, K key-value heads, H head dimension, F width of the projection.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.generation.padded_kv_cache import CachePrefix, KVCache
from paddlenlp_ext.nn.attention import AttentionInputs, AttentionLayer
from paddlenlp_ext.ops.attention import KeyValuePrefix
from paddlenlp_ext.peft.layers import AdapterLayer, generator_for, kaiming_uniform, new_parameter
from paddlenlp_ext.sharding_spec import ShardGroup, Style, set_placement

_INIT_STD = (
    0.02  # standard deviation of random initial keys and values, much smaller than the keys and values of a model
)


class PrefixEncoder(nn.Layer):
    """First layer of the prefix projection, shared by all decoder layers; its parameters are E, W_1 and b_1.

    Args:
        num_tokens: P.
        width: K * H.
        hidden_size: F.
        seed: determines the initial values.
        dtype: dtype of the parameters.
    """

    def __init__(self, num_tokens: int, width: int, hidden_size: int, seed: int, dtype: paddle.dtype) -> None:
        super().__init__()
        embedding = generator_for(seed, "prefix_encoder.embedding").standard_normal((num_tokens, width), np.float32)
        weight = kaiming_uniform((hidden_size, width), seed, "prefix_encoder.weight")
        self.embedding = new_parameter(self, embedding, dtype)
        self.weight = new_parameter(self, weight, dtype)
        self.bias = new_parameter(self, np.zeros(hidden_size, np.float32), dtype)

    def forward(self) -> paddle.Tensor:
        """Return tanh(E W_1^T + b_1), [P, F]."""
        return project(self.embedding, self.weight, self.bias).tanh()


class PrefixAttention(AdapterLayer):
    """Attention of one layer with trained prefix keys and values.

    Args:
        base: attention layer.
        num_tokens: P.
        hidden_size: F of the projection; None for a prefix without projection.
        dropout: dropout probability on the prefix during training.
        seed: random seed of the initial values.
        name: name of the layer; the initial values also depend on the name.
    """

    shards_heads: ClassVar[bool] = True
    base: AttentionLayer

    def __init__(
        self, base: AttentionLayer, num_tokens: int, hidden_size: int | None, dropout: float, seed: int, name: str
    ) -> None:
        super().__init__(base)
        self.dropout, self.seed, self.num_tokens, self.hidden_size = dropout, seed, num_tokens, hidden_size
        self.dtype = base.output_layer.compute_dtype
        self.size, self.width = math.prod(base.prefix_shape), prefix_width(base)
        shape = (num_tokens, *base.prefix_shape)
        # A tuple keeps the encoder from being registered as a sublayer, so the model has the parameters only once.
        self.encoder: tuple[PrefixEncoder, ...] = ()
        if hidden_size is None:
            start = _INIT_STD * generator_for(seed, f"{name}.prefix").standard_normal(shape, np.float32)
            self.prefix = new_parameter(self, start, self.dtype)
        else:
            weight = kaiming_uniform((self.size, hidden_size), seed, f"{name}.prefix_weight")
            self.prefix_weight = new_parameter(self, weight, self.dtype)
            self.prefix_bias = new_parameter(self, np.zeros(self.size, np.float32), self.dtype)

    def keys_and_values(self) -> KeyValuePrefix:
        """Return the prefix keys and values, both [P, K, H]; for latent attention, the latents and the shared keys."""
        full_shape = [self.num_tokens, *self.base.prefix_shape]
        if self.hidden_size is None:
            prefix = self.prefix
        else:
            flat = project(self.encoder[0](), self.prefix_weight, self.prefix_bias)
            prefix = self._local_heads(flat.reshape(full_shape))
        if self.dropout and self.training:
            # Every rank draws the mask of all heads, so that results do not depend on the tensor-parallel degree.
            mask = F.dropout(paddle.ones(full_shape, self.dtype), self.dropout)
            prefix = prefix * self._local_heads(mask)
        return self.base.split_prefix(prefix)

    def adapter_forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Map x [B, S, D] to [B, S, D]; in a pass with a cache, the cache contains the prefix."""
        if inputs.cache is None:
            inputs = dataclasses.replace(inputs, prefix=self.keys_and_values())
        return self.base(x_BSD, inputs)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        # A projection is replicated. `keys_and_values` selects this rank's heads of the projected prefix.
        axis = self._head_axis if style == "colwise" else None
        return {name: axis if name == "prefix" else None for name in self.own_state()}

    def set_tensor_parallel_shard(self, style: Style, group: ShardGroup) -> None:
        super().set_tensor_parallel_shard(style, group)
        for encoder in self.encoder:
            for parameter in encoder.parameters():
                set_placement(parameter, needs_tp_reduce=True)  # each rank uses the parameter for different heads

    @property
    def _head_axis(self) -> int | None:
        """Axis of the heads in a prefix [P, ...]; None if the prefix has no heads, as in latent attention."""
        return None if self.base.prefix_head_axis is None else 1 + self.base.prefix_head_axis

    def _local_heads(self, prefix: paddle.Tensor) -> paddle.Tensor:
        """Return this rank's heads of a prefix [P, ...]."""
        if self.shard_group is None or self._head_axis is None:
            return prefix
        return prefix.split(self.shard_group.size, axis=self._head_axis)[self.shard_group.index]


def prefix_width(attention: AttentionLayer) -> int:
    """Return the size of the keys per position: K * H, or the number of values that latent attention caches."""
    return math.prod(attention.prefix_shape[-2:])


def project(x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor) -> paddle.Tensor:
    """Return the linear map x W^T + b."""
    return paddle.matmul(x, weight, transpose_y=True) + bias


@paddle.no_grad()
def decoder_prefix(decoder: Any, vectors_PD: paddle.Tensor) -> CachePrefix:
    """Run input vectors through the decoder at positions 0 to P-1, without gradients, and return the cache contents.

    Args:
        decoder: decoder of the base model.
        vectors_PD: input vectors [P, D].

    Returns:
        Keys and values, or states, of the layers in this process.
    """
    cache = KVCache([0])
    ids_1P = paddle.zeros([1, vectors_PD.shape[0]], "int64")  # only the shape is used
    decoder.forward_embeddings(vectors_PD.unsqueeze(0), decoder.attention_inputs(ids_1P, None, None, cache))
    return cache.as_prefix()
