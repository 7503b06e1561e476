"""Decoder-only transformer for all model families, configured by a `DecoderConfig`.

Shapes: B batch, S sequence, D hidden, V vocabulary, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.decoder_layers import DECODER_LAYERS
from paddlenlp_ext.models.decoding.cpp_layers import run_cpp_layers
from paddlenlp_ext.models.decoding.fused_norms import run_fused_norms
from paddlenlp_ext.models.layer_embeddings import add_layer_embeddings, layer_embeddings, rounded_root
from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.causal_lm_forward import DocumentLengths
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.layer_norm import LayerNorm
from paddlenlp_ext.nn.layer_tensors import LayerExchange, run_layer
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.nn.rotary_embedding import RotaryEmbeddings
from paddlenlp_ext.ops.attention import AttentionLayout, DocumentParents
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.utils.seeds import seed_of


class PipelineStage(Protocol):
    """Interface of the pipeline stage on this rank (parallel/pipeline/runtime.py)."""

    @property
    def is_first(self) -> bool:
        """True for the first stage, which computes the input embeddings."""
        ...

    def forward_embeddings(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run the layers of this stage."""
        ...

    def logits(self, hidden: paddle.Tensor, compute_logits: Callable[[paddle.Tensor], paddle.Tensor]) -> paddle.Tensor:
        """Call `compute_logits(hidden)` on the last stage, and return the logits on every stage."""
        ...

    def union(self, values: dict[str, Any]) -> dict[str, Any]:
        """Merge the dictionaries `values` of all stages."""
        ...


class Decoder(nn.Layer):
    """Embedding, layers and final norm: map token ids to hidden states.

    Attributes:
        stage: pipeline stage on this rank; None if the rank runs all layers.
        recompute_plan: activations to recompute in the backward pass; None: save all activations.
        load_balance: token counts of the experts and auxiliary loss; None for a model without experts.
        dropout_seed: dropout seed of a training pass. Layers derive their seeds from `dropout_seed` and the layer
            index, so that dropout is independent of the pipeline stages. None: continue Paddle's random state.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.windows = config.windows
        self.embedding_multiplier, self.logit_scale = config.embedding_multiplier, config.logit_scale
        self.stage: PipelineStage | None = None
        self.recompute_plan: RecomputePlan | None = None
        self.dropout_seed: int | None = None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.embedding_scale = rounded_root(config.hidden_size) if config.scales_embeddings else None
        self.sources = [shape.source for shape in config.layer_shapes]
        self.has_layer_embeddings = config.layer_embeddings is not None
        if config.layer_embeddings is not None:
            add_layer_embeddings(self, config, config.layer_embeddings)
        kinds = (config.layer,) * config.num_hidden_layers if isinstance(config.layer, str) else config.layer
        self.layers = nn.LayerList([DECODER_LAYERS[kind](config, index) for index, kind in enumerate(kinds)])
        self.load_balance = config.load_balance()
        for index, layer in enumerate(self.layers):
            if self.load_balance is not None and layer.mixture is not None:
                layer.mixture.router_layer.observe = partial(self.load_balance.observe, index)
        parallel = config.layer == "parallel"
        self.query_scale = config.query_scale
        self.norm = LayerNorm(config.hidden_size, config.rms_norm_eps) if parallel else config.rms_norm()
        self.rotary = RotaryEmbeddings(config.ropes)
        self.has_linear_biases = config.has_linear_biases

    def forward(
        self,
        input_ids_BS: paddle.Tensor,
        position_ids_BS: paddle.Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        cache: KeyValueCache | None = None,
        document_parents: DocumentParents | None = None,
        loss_positions: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Return the hidden states [B, S, D] after the final norm; see `CausalLM.hidden_states` for the arguments."""
        inputs = self.attention_inputs(
            *(input_ids_BS, position_ids_BS, document_lengths, cache),
            document_parents=document_parents,
            loss_positions=loss_positions,
        )
        return self.forward_embeddings(self.embed(input_ids_BS), inputs)

    def embed(self, input_ids_BS: paddle.Tensor) -> paddle.Tensor:
        """Map token ids [B, S] to input embeddings [B, S, D]; later pipeline stages return zeros."""
        if self.stage is None or self.stage.is_first:
            x_BSD = self.embed_tokens(input_ids_BS)
            return x_BSD if self.embedding_scale is None else x_BSD * self.embedding_scale
        return paddle.zeros([*input_ids_BS.shape, *self.norm.weight.shape], self.norm.weight.dtype)

    def forward_embeddings(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Map input embeddings [B, S, D] to the input of lm_head, [B, S, D]."""
        if self.embedding_multiplier != 1.0:
            x_BSD = x_BSD * self.embedding_multiplier
        if self.load_balance is not None:
            self.load_balance.begin()
        if self.stage is not None:
            return self.stage.forward_embeddings(x_BSD, inputs)
        hidden_BSD = self.final_norm(self.run_layers(x_BSD, inputs, 0, len(self.layers)))
        return hidden_BSD if self.load_balance is None else self.load_balance.attach_loss(hidden_BSD)

    def final_norm(self, x_BSD: paddle.Tensor) -> paddle.Tensor:
        """Map the hidden states after the last layer to the input of lm_head, [B, S, D].

        The logit scale is applied to the hidden states, so that lm_head and the fused loss need not apply it.
        """
        x_BSD = self.norm(x_BSD)
        return x_BSD if self.logit_scale == 1.0 else x_BSD * self.logit_scale

    def run_layers(self, x_BSD: paddle.Tensor, inputs: AttentionInputs, start: int, stop: int) -> paddle.Tensor:
        """Run layers `start` to `stop` - 1 on hidden states [B, S, D]."""
        if inputs.cache is not None:
            for run in (run_cpp_layers, run_fused_norms):
                decoded_BSD = run(self.layers, start, stop, x_BSD, inputs)
                if decoded_BSD is not None:
                    return decoded_BSD
        plan = self.recompute_plan if self.training and paddle.is_grad_enabled() else None
        if plan is not None:
            # Paddle's recompute computes weight gradients only if an input of the block requires a gradient. The output
            # of a frozen embedding requires no gradient by default.
            x_BSD.stop_gradient = False
        exchange = self.layer_exchange(x_BSD, inputs)
        for index in range(start, stop):
            if self.dropout_seed is not None and self.training:
                paddle.seed(seed_of(self.dropout_seed, index))
            x_BSD = run_layer(exchange, self.layers[index], index, x_BSD, inputs, plan)
        return x_BSD

    def layer_exchange(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> LayerExchange | None:
        """Return the `LayerExchange` for input embeddings [B, S, D]; None if layers do not exchange tensors."""
        if not self.has_layer_embeddings and not any(source is not None for source in self.sources):
            return None
        embeddings_BSLP = layer_embeddings(self, x_BSD, inputs.input_ids) if self.has_layer_embeddings else None
        return LayerExchange(embeddings_BSLP, self.sources)

    def attention_inputs(
        self,
        input_ids_BS: paddle.Tensor,
        position_ids_BS: paddle.Tensor | None,
        document_lengths: DocumentLengths | None,
        cache: KeyValueCache | None,
        first_position: int = 0,
        document_parents: DocumentParents | None = None,
        loss_positions: paddle.Tensor | None = None,
    ) -> AttentionInputs:
        """Build the inputs that all layers share: RoPE tables, and either the document layouts or the cache.

        `first_position` is added to every position id.

        Raises:
            ValueError: both document lengths and a cache are given, the lengths do not sum to the row length, the
                parents do not match the documents, or the model has ALiBi and the position ids of a document do not
                count from 0.
        """
        batch, length = input_ids_BS.shape
        if cache is not None:
            if document_lengths is not None:
                raise ValueError("pass document_lengths or cache, not both; a cache stores one document per row")
            if position_ids_BS is None:
                position_ids_BS = cache.next_positions(length)
            if first_position != 0:
                position_ids_BS = position_ids_BS + first_position
            cache.begin_pass(length)
            cache.note_frequency_sets(self.rotary.frequency_sets(position_ids_BS))
            return AttentionInputs(
                self.rotary(position_ids_BS),
                {},
                cache,
                query_scale=self._query_scale(position_ids_BS),
                input_ids=input_ids_BS if self.has_layer_embeddings else None,
            )
        rows = [[length]] * batch if document_lengths is None else document_lengths
        layouts = {
            window: AttentionLayout.from_documents(rows, window, document_parents) for window in set(self.windows)
        }
        layout = next(iter(layouts.values()))
        if len(rows) != batch or layout.row_length != length:
            raise ValueError(
                f"document_lengths {rows} do not match input_ids of shape {[batch, length]}; give {batch} lists of "
                f"lengths, each with the sum {length}"
            )
        if position_ids_BS is None:
            position_ids_BS = paddle.to_tensor(layout.positions())
        elif self.has_linear_biases and not np.array_equal(position_ids_BS.numpy(), layout.positions()):
            raise ValueError(
                "position_ids do not count from 0 in each document, and ALiBi does not support other positions; "
                "leave position_ids out"
            )
        position_ids_BS = position_ids_BS + first_position
        return AttentionInputs(
            self.rotary(position_ids_BS),
            layouts,
            loss_positions=loss_positions,
            query_scale=self._query_scale(position_ids_BS),
            input_ids=input_ids_BS if self.has_layer_embeddings else None,
        )

    def _query_scale(self, position_ids_BS: paddle.Tensor) -> paddle.Tensor | None:
        return None if self.query_scale is None else self.query_scale(position_ids_BS)
