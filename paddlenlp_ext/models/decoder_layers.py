"""Decoder layers, selected by `DecoderConfig.layer`: order of norms, token mixer and feed-forward.

The token mixer of a layer is attention or another mixer (nn/token_mixer.py). In the formulas, attention stands for any
token mixer.

| layer | formula | families |
| --- | --- | --- |
| pre-norm | x = x + attention(norm(x)); x = x + mlp(norm(x)) | Llama and most others |
| expert pre-norm | the same with mlp(n) + experts(n), n = norm(x), in place of mlp(norm(x)) | Granite 4 with experts |
| post-norm | x = x + norm(attention(x)); x = x + norm(mlp(x)) | OLMo 2 and 3 |
| sandwich | x = x + norm(attention(norm(x))); x = x + norm(mlp(norm(x))) | Gemma 2 and 3, GLM-4-0414 |
| scaled sandwich | the sandwich layer, with the result multiplied by a stored scalar | Gemma 4 |
| scaled sandwich with a layer embedding e | the same, after x = x + norm(projection(gelu(gate(x)) * e)) | Gemma 4 E |
| expert sandwich | the same with norm(mlp(norm(x))) + norm(experts(x)) in place of mlp(norm(x)) | Gemma 4 26B-A4B |
| parallel | n = norm(x); x = x + attention(n) + mlp(n) | Cohere 2 |
| two mixers | n = norm(x); x = x + attention(n) + mixer(n); x = x + mlp(norm(x)), with factors | Falcon H1 |
| single block | x = x + attention(norm(x)), or x = x + mlp(norm(x)) | Nemotron H |

Shapes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.training_blocks import run_feed_forward_block, run_mixer_block
from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.experts import MixtureOfExperts
from paddlenlp_ext.nn.feed_forward import GATES
from paddlenlp_ext.nn.layer_norm import LayerNorm
from paddlenlp_ext.nn.layer_tensors import call_with_tensors
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.normed_mixture import NormedMixture
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.rms_norm import RMSNorm
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype

NORM_ROLES = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
"""Roles of norms: before and after attention and feed-forward; fields of `DecodeLayer` in api_decoding.h."""


class DecoderLayer(nn.Layer):
    """Base class of decoder layers: token mixer and feed-forward, each with a residual connection.

    Attributes:
        mixer_name: name of the attribute that holds the token mixer; None without a token mixer.
        mlp: feed-forward block or experts; None in a layer with a token mixer alone.
        hidden_size: D.
        residual_multiplier: factor of the outputs of attention and feed-forward before the residual addition.
        norm_names: map from norm role (`NORM_ROLES`) to attribute name.
        skips_unread: whether the feed-forward computes only `AttentionInputs.loss_positions`. Only the last layer can
            skip positions, because later layers attend to all positions. Experts do not skip positions, because every
            token counts in the load balancing loss.
    """

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__()
        self.norm_names: dict[str, str] = {}
        self.hidden_size, self.residual_multiplier = config.hidden_size, config.residual_multiplier
        mixer = config.token_mixer(layer_index)
        self.mixer_name = None if mixer is None else mixer.attribute
        if mixer is not None:
            self.add_sublayer(mixer.attribute, mixer)
        self.mlp: Any = config.feed_forward(layer_index)
        is_last = layer_index == config.num_hidden_layers - 1
        self.skips_unread = is_last and self.mlp is not None and self.mixture is None

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Map hidden states [B, S, D] to [B, S, D]."""
        raise NotImplementedError

    @property
    def mixture(self) -> MixtureOfExperts | None:
        """Expert layer; None in a dense layer."""
        return self.mlp if isinstance(self.mlp, MixtureOfExperts) else None

    @property
    def mixer(self) -> Any:
        """Token mixer of the layer, or the adapter around the token mixer; None without a token mixer."""
        return None if self.mixer_name is None else getattr(self, self.mixer_name)

    @property
    def mixers(self) -> list[Any]:
        """Token mixers of the layer, or the adapters around them."""
        return [] if self.mixer_name is None else [self.mixer]

    @property
    def mixer_scales(self) -> list[tuple[float, float]]:
        """Factors of the input and of the output of each token mixer, without the residual multiplier."""
        return [(1.0, 1.0)] * len(self.mixers)

    def norms_by_role(self) -> dict[str, Any]:
        """Return the norms, or the adapters that replaced them, by role."""
        return {role: getattr(self, name) for role, name in self.norm_names.items()}

    def norms(self) -> list[nn.Layer]:
        """Return the norms of the layer, excluding norms inside attention."""
        return [layer for layer in self.children() if isinstance(layer, RMSNorm | LayerNorm)]

    def scaled(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        """Multiply the output of attention or feed-forward by the residual multiplier."""
        return x_BSD if self.residual_multiplier == 1.0 else x_BSD * self.residual_multiplier

    def _attend(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        return self.scaled(self._mix(self.mixer, x_BSD, inputs))

    def _mix(self, mixer: Any, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        return call_with_tensors(partial(recompute_region, "full_attn"), mixer, x_BSD, inputs)

    def _feed_forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Return the scaled output of the feed-forward; 0 at the positions that the layer skips."""
        positions_R = inputs.loss_positions
        if positions_R is None or not self._skips_positions(inputs):
            return self.scaled(self.mlp(x_BSD))
        x_TD = x_BSD.flatten(0, 1)
        read_RD = self.scaled(self.mlp(paddle.gather(x_TD, positions_R).unsqueeze(0))).squeeze(0)
        return paddle.scatter(paddle.zeros(x_TD.shape, read_RD.dtype), positions_R, read_RD).reshape(x_BSD.shape)

    def _skips_positions(self, inputs: AttentionInputs) -> bool:
        """Return whether the feed-forward computes only `AttentionInputs.loss_positions`."""
        return inputs.loss_positions is not None and self.skips_unread and not self._feed_forward_has_dropout()

    def _feed_forward_has_dropout(self) -> bool:
        """Return whether an adapter of the feed-forward applies dropout in this pass.

        The values of a dropout mask depend on its shape. The layer then computes all positions, so that dropout is the
        same with and without sequence parallelism.
        """
        return self.training and any(getattr(each, "dropout", 0.0) for each in self.mlp.sublayers(include_self=True))


@contextmanager
def all_positions_computed(model: nn.Layer) -> Iterator[None]:
    """Make the last layer compute its feed-forward at all positions within a `with` block.

    Methods that collect the inputs of linear layers need all positions.
    """
    skipping = [each for each in model.sublayers() if isinstance(each, DecoderLayer) and each.skips_unread]
    for layer in skipping:
        layer.skips_unread = False
    try:
        yield
    finally:
        for layer in skipping:
            layer.skips_unread = True


class PreNormLayer(DecoderLayer):
    """Layer with norms before attention and feed-forward."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.norm_names = dict(zip(("attention_norm", "mlp_norm"), config.pre_norms, strict=True))
        for name in config.pre_norms:
            setattr(self, name, config.rms_norm())

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        before_attention, before_mlp = self.norms_by_role().values()
        total_BSD, attended_BSD = run_mixer_block(self, x_BSD, inputs), None
        if total_BSD is None:
            total_BSD, attended_BSD = x_BSD, self._attend(before_attention(x_BSD), inputs)
        out_BSD = None
        if not self._skips_positions(inputs):
            out_BSD = run_feed_forward_block(self, total_BSD, inputs, attended_BSD)
        if out_BSD is not None:
            return out_BSD
        if attended_BSD is None:
            return total_BSD + self._feed_forward(before_mlp(total_BSD), inputs)
        total_BSD, normed_BSD = before_mlp.forward_add(total_BSD, attended_BSD)
        return total_BSD + self._feed_forward(normed_BSD, inputs)


class ExpertPreNormLayer(PreNormLayer):
    """Pre-norm layer with an expert layer beside the feed-forward block; both read one norm (Granite 4)."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        shape = config.expert_shape(layer_index)
        assert shape is not None, "every layer must have experts"
        self.moe = MixtureOfExperts(config.hidden_size, shape)
        self.skips_unread = False

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        before_attention, before_mlp = self.norms_by_role().values()
        attended_BSD = self._attend(before_attention(x_BSD), inputs)
        total_BSD, normed_BSD = before_mlp.forward_add(x_BSD, attended_BSD)
        return total_BSD + self._feed_forward(normed_BSD, inputs) + self.scaled(self.moe(normed_BSD))

    @property
    def mixture(self) -> MixtureOfExperts | None:
        return getattr(self, "moe", None)


class TwoMixerLayer(PreNormLayer):
    """Pre-norm layer with another token mixer beside attention; both read one norm (Falcon H1, arXiv:2507.22448)."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        assert config.side_mixer is not None, "the layer must have a side mixer"
        self.side, side_mixer = config.side_mixer, config.side_mixer.shape.build(layer_index)
        assert side_mixer is not None, "the side mixer must mix positions"
        self.side_name = side_mixer.attribute
        self.add_sublayer(self.side_name, side_mixer)

    @property
    def mixers(self) -> list[Any]:
        return [self.mixer, getattr(self, self.side_name)]

    @property
    def mixer_scales(self) -> list[tuple[float, float]]:
        return [self.side.attention_scales, self.side.scales]

    @property
    def scales_inputs(self) -> bool:
        """True if the mixers read scaled copies of the output of the norm."""
        return (self.side.scales[0], self.side.attention_scales[0]) != (1.0, 1.0)

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        before_attention, before_mlp = self.norms_by_role().values()
        normed_BSD, mixed = before_attention(x_BSD), []
        for mixer, (input_scale, output_scale) in zip(self.mixers, self.mixer_scales, strict=True):
            input_BSD = normed_BSD if input_scale == 1.0 else normed_BSD * input_scale
            mixed.append(self._mix(mixer, input_BSD, inputs) * output_scale)
        total_BSD, normed_BSD = before_mlp.forward_add(x_BSD, mixed[0] + mixed[1])
        return total_BSD + self._feed_forward(normed_BSD, inputs)


class PostNormLayer(DecoderLayer):
    """Layer with norms after attention and feed-forward (OLMo 2, arXiv:2501.00656)."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.norm_names = {
            "attention_out_norm": "post_attention_layernorm",
            "mlp_out_norm": "post_feedforward_layernorm",
        }
        self.post_attention_layernorm = config.rms_norm()
        self.post_feedforward_layernorm = config.rms_norm()

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        x_BSD = x_BSD + self.post_attention_layernorm(self._attend(x_BSD, inputs))
        return x_BSD + self.post_feedforward_layernorm(self._feed_forward(x_BSD, inputs))


class SandwichLayer(DecoderLayer):
    """Layer with norms before and after attention and feed-forward (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.norm_names = dict(zip(NORM_ROLES, config.sandwich_norms, strict=True))
        for name in config.sandwich_norms:
            setattr(self, name, config.rms_norm())

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self.norms_by_role().values()
        attended_BSD = after_attention(self._attend(before_attention(x_BSD), inputs))
        x_BSD, normed_BSD = before_mlp.forward_add(x_BSD, attended_BSD)
        return x_BSD + after_mlp(self._feed(x_BSD, normed_BSD, inputs))

    def _feed(self, x_BSD: paddle.Tensor, normed_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Return the input of the last norm, given the hidden states after attention and their normalized values."""
        return self._feed_forward(normed_BSD, inputs)


class ScaledSandwichLayer(SandwichLayer):
    """Sandwich layer with an output scale, a stored scalar that is not trained (Gemma 4).

    With layer embeddings (models/layer_embeddings.py), the embedding is applied before the output scale.
    """

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        if config.layer_embeddings is not None:
            self.embedding_gate = GATES[config.activation]
            self.per_layer_input_gate = Linear(config.hidden_size, config.layer_embeddings.size)
            self.per_layer_projection = Linear(config.layer_embeddings.size, config.hidden_size)
            self.post_per_layer_input_norm = config.rms_norm()
        one, dtype = nn.initializer.Constant(1.0), activation_dtype(paddle.get_default_dtype())
        self.layer_scalar = self.create_parameter([1], dtype=dtype, default_initializer=one)
        self.layer_scalar.stop_gradient = True

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        y_BSD = super().forward(x_BSD, inputs)
        embedding_BSP = None if inputs.layer is None else inputs.layer.embedding
        if embedding_BSP is not None:
            gated_BSP = self.embedding_gate(self.per_layer_input_gate(y_BSD), embedding_BSP)
            y_BSD = y_BSD + self.post_per_layer_input_norm(self.per_layer_projection(gated_BSP))
        return y_BSD * self.layer_scalar


class ExpertSandwichLayer(ScaledSandwichLayer):
    """Scaled sandwich layer with an expert layer beside the feed-forward block (Gemma 4 26B-A4B)."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        shape = config.expert_shape(layer_index)
        assert shape is not None, "every layer must have experts"
        self.moe = NormedMixture(config.hidden_size, shape, config.rms_norm_eps)
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = config.rms_norm(), config.rms_norm()
        self.skips_unread = False

    @property
    def mixture(self) -> MixtureOfExperts | None:
        return getattr(self, "moe", None)

    def _feed(self, x_BSD: paddle.Tensor, normed_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        fed_BSD = self.post_feedforward_layernorm_1(self._feed_forward(normed_BSD, inputs))
        return fed_BSD + self.post_feedforward_layernorm_2(self.moe(x_BSD))


class ParallelLayer(DecoderLayer):
    """Layer in which attention and feed-forward both read the output of one norm (Cohere 2)."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        self.norm_names = {"attention_norm": "input_layernorm"}
        self.input_layernorm = LayerNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        normed_BSD = self.input_layernorm(x_BSD)
        return x_BSD + self._attend(normed_BSD, inputs) + self._feed_forward(normed_BSD, inputs)


class SingleBlockLayer(DecoderLayer):
    """Layer with a norm and either a token mixer or a feed-forward block (Nemotron H, arXiv:2504.03624)."""

    def __init__(self, config: DecoderConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        assert (self.mixer is None) != (self.mlp is None), "a layer must have one block"
        self.norm_names = {"mlp_norm" if self.mixer is None else "attention_norm": "norm"}
        self.norm = config.rms_norm()

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        block = self._feed_forward if self.mixer is None else self._attend
        return x_BSD + block(self.norm(x_BSD), inputs)


DECODER_LAYERS: dict[str, type[DecoderLayer]] = {
    "pre_norm": PreNormLayer,
    "expert_pre_norm": ExpertPreNormLayer,
    "post_norm": PostNormLayer,
    "sandwich": SandwichLayer,
    "scaled_sandwich": ScaledSandwichLayer,
    "expert_sandwich": ExpertSandwichLayer,
    "parallel": ParallelLayer,
    "single_block": SingleBlockLayer,
    "two_mixers": TwoMixerLayer,
}
