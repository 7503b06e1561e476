"""Causal language model: a decoder with an lm_head, for training, generation, saving and loading.

Shapes: B batch, S sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.config_json import read_model_config, write_generation_config, write_model_config
from paddlenlp_ext.checkpoint.hub_upload import PushToHub
from paddlenlp_ext.checkpoint.load_weights import load_weights
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import DEFAULT_SHARD_BYTES, save_sharded
from paddlenlp_ext.generation.transformers_generate import GenerationDefaults, generate_for
from paddlenlp_ext.models.decoder import Decoder
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.decoding.cpp_model import run_cpp_model
from paddlenlp_ext.nn.causal_lm_forward import AdaptedHead, CausalLMOutput, DocumentLengths, causal_lm_forward
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.attention import DocumentParents
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.ops.soft_cap import soft_cap
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.config_json import with_quantization
from paddlenlp_ext.quantization.quantize_model import named_tensors


class ShardedLMHead(Protocol):
    """Interface of an lm_head that is sharded along the vocabulary (parallel/vocab_parallel.py)."""

    def join(self, logits_U: paddle.Tensor) -> paddle.Tensor:
        """Gather the logits over the full vocabulary from all ranks."""
        ...

    def cross_entropy(
        self,
        hidden_TD: paddle.Tensor,
        weight_UD: paddle.Tensor,
        labels_T: paddle.Tensor,
        *,
        softcap: float | None = None,
        updates: Any = (),
    ) -> tuple[paddle.Tensor, int]:
        """Compute the result of `linear_cross_entropy` from this rank's shard of the lm_head weight."""
        ...

    def token_logprobs(
        self,
        hidden_TD: paddle.Tensor,
        weight_UD: paddle.Tensor,
        labels_T: paddle.Tensor,
        *,
        softcap: float | None = None,
        updates: Any = (),
    ) -> paddle.Tensor:
        """Compute the result of `token_logprobs` from this rank's shard of the lm_head weight."""
        ...


class CausalLM(TrainableModel, PushToHub):
    """Decoder with an lm_head. Parameters have Hugging Face's names.

    Attributes:
        quantization: quantization of the linear layers; None for floating-point weights.
        vocab_parallel: sharded lm_head; None if lm_head is not sharded.
        remote_parameters: names of parameters that only other ranks hold.
        generation_config: settings in generation_config.json, also readable as attributes. A dict or transformers'
            `GenerationConfig` can be assigned.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        has_lm_head = config.num_labels is None and not config.tie_word_embeddings
        self.lm_head = Linear(config.hidden_size, config.vocab_size) if has_lm_head else None
        self.quantization: QuantizationConfig | None = None
        self.vocab_parallel: ShardedLMHead | None = None
        self.remote_parameters: set[str] = set()
        self.generation_config = {"eos_token_id": config.source.get("eos_token_id")}

    def forward(
        self,
        input_ids: paddle.Tensor,
        attention_mask: paddle.Tensor | None = None,
        labels: paddle.Tensor | None = None,
        position_ids: paddle.Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor | CausalLMOutput:
        """Return logits [B, S, V], or a `CausalLMOutput` with loss and logits if labels are given.

        Args:
            input_ids: [B, S].
            attention_mask: [B, S], 1 for tokens and 0 for padding; a row can have padding on the left, right or both
                sides.
            labels: [B, S], unshifted: the input ids, with -100 for tokens that are not targets. The loss is the mean
                cross entropy of the target tokens, plus the auxiliary loss of the routers.
            position_ids: [B, S]; None: count from 0 in each document, or continue from the cache.
            document_lengths: lengths of the documents in each row, summing to S; None: each row is one document.
            cache: keys and values of earlier positions; updated in place.

        Raises:
            ValueError: the mask has padding between tokens, or is combined with document lengths or a cache; or a shape
                does not match.
        """
        return causal_lm_forward(
            self,
            input_ids,
            attention_mask,
            labels,
            document_lengths=document_lengths,
            position_ids=position_ids,
            cache=cache,
        )

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        cache: KeyValueCache | None = None,
        document_parents: DocumentParents | None = None,
        loss_positions: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Return the hidden states after the final norm [B, S, D], which are the input of lm_head.

        Args:
            input_ids, position_ids, document_lengths, cache: see `forward`.
            document_parents: for each document of a row, the index of the document that it continues, or None
                (ops/attention/document_layout.py). A prompt that several answers share is stored and computed once.
            loss_positions: unique indices into the flattened batch [B * S], int64 [R]. The last layer may skip the
                feed-forward at all other positions, whose hidden states are then unspecified. None: all positions.

        Raises:
            ValueError: the lengths do not sum to the row length, or the parents do not match the documents.
        """
        return self.model(input_ids, position_ids, document_lengths, cache, document_parents, loss_positions)

    def decode_tokens(self, tokens_BS: Sequence[Sequence[int]], cache: KeyValueCache) -> np.ndarray | None:
        """Compute the logits of new tokens in one C++ call, or return None if the model does not support the call."""
        return run_cpp_model(self, tokens_BS, cache)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Map hidden states [..., D] to logits [..., V] over the full vocabulary."""
        stage = self.model.stage
        return self._compute_logits(hidden) if stage is None else stage.logits(hidden, self._compute_logits)

    def _compute_logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Compute the logits [..., V] on this rank, without communication between pipeline stages."""
        logits = linear(hidden, self.head_weight())
        for inner, b in self.head_updates(hidden):
            logits = logits + linear(inner, b)
        logits = soft_cap(logits, self.config.logit_softcap)
        return logits if self.vocab_parallel is None else self.vocab_parallel.join(logits)

    def head_weight(self) -> paddle.Tensor:
        """Return the weight [V, D] of lm_head, or of the embedding if the two are tied."""
        return self._head_layer().weight

    def head_updates(self, hidden: paddle.Tensor) -> Sequence[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the low-rank logit updates of an lm_head adapter; see `TrainableModel.head_updates`."""
        layer = self._head_layer()
        return layer.logit_updates(hidden) if isinstance(layer, AdaptedHead) else ()

    def _head_layer(self) -> Any:
        """Return lm_head, or the embedding if the two are tied."""
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def enable_recompute(self, plan: RecomputePlan | None = None) -> None:
        """Recompute activations in the backward pass. Without a plan, all layers are recomputed.

        Raises:
            ValueError: the plan names a layer that the model does not have.
        """
        plan = plan or RecomputePlan()
        plan.check_layers(len(self.model.layers))
        self.model.recompute_plan = plan

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None) -> None:
        """Recompute the activations of every layer in the backward pass (transformers' name for `enable_recompute`).

        Args:
            gradient_checkpointing_kwargs: options of transformers. Only `use_reentrant` is accepted, and has no effect.

        Raises:
            ValueError: an option other than `use_reentrant` is given.
        """
        unknown = sorted({*(gradient_checkpointing_kwargs or ())} - {"use_reentrant"})
        if unknown:
            raise ValueError(f"gradient_checkpointing_kwargs: {unknown[0]} is not supported; supported: use_reentrant")
        self.enable_recompute()

    def gradient_checkpointing_disable(self) -> None:
        """Save all activations of the forward pass for the backward pass."""
        self.model.recompute_plan = None

    @property
    def is_gradient_checkpointing(self) -> bool:
        """True if activations are recomputed in the backward pass."""
        return self.model.recompute_plan is not None

    def set_dropout_seed(self, seed: int | None) -> None:
        """Set the dropout seed of the next training pass; None continues Paddle's random state."""
        self.model.dropout_seed = seed

    def hidden_states_shape(self, batch: int, length: int) -> list[int]:
        """Return the shape of the hidden states between layers for input ids [batch, length]."""
        return [batch, length, self.config.hidden_size]

    def use_attention(self, implementation: str | None) -> None:
        """Select the attention backend of every layer (ops/attention/__init__.py); None: the best available backend."""
        for layer in self.model.layers:
            for mixer in layer.mixers:
                mixer.implementation = implementation

    @property
    def generation_config(self) -> Any:
        return self._generation_config

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        keys = GenerationDefaults(config if isinstance(config, Mapping) else config.to_dict())
        self._generation_config = GenerationDefaults(keys, eos_token_id=_as_list(keys.eos_token_id))

    @property
    def eos_token_ids(self) -> list[int]:
        """Token ids at which generation ends."""
        return _as_list(self.generation_config.eos_token_id)

    def add_eos_token_ids(self, token_ids: Iterable[int]) -> None:
        """Add token ids at which generation ends, in this model and in its saved generation_config.json."""
        self.generation_config["eos_token_id"] = sorted({*self.eos_token_ids, *token_ids})

    def generate(self, prompts: Any = None, **options: Any) -> list[list[int]] | paddle.Tensor:
        """Generate continuations of prompts, which are given as token ids.

        Args:
            prompts: lists of token ids, or a padded batch [B, S].
            options: keyword arguments of `generation.transformers_generate.generate_for` and
                `generation.generate.generate`, such as `max_new_tokens`.

        Returns:
            The new tokens of each list; for a padded batch, the prompts and the new tokens, int64 [B, S + N].

        Example:
            >>> from paddlenlp_ext import AutoModelForCausalLM
            >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
            >>> model = AutoModelForCausalLM.from_config({"model_type": "llama", "num_attention_heads": 4, **sizes})
            >>> answers = model.generate([[5, 6, 7], [8]], max_new_tokens=3)
            >>> [len(tokens) for tokens in answers]
            [3, 3]
        """
        return generate_for(self, prompts, **options)

    @property
    def device(self) -> Any:
        """Device of the parameters, a `paddle.Place`, for `paddle.to_tensor(..., place=model.device)`."""
        return self.model.embed_tokens.weight.place

    @property
    def dtype(self) -> paddle.dtype:
        """Dtype of the unquantized matrices, such as the embedding."""
        return self.model.embed_tokens.weight.dtype

    @property
    def dtype_name(self) -> str:
        """Name of `dtype`, such as "bfloat16"."""
        return str(self.dtype).removeprefix("paddle.")

    def tensors_to_save(self) -> dict[str, Any]:
        """Return the tensors that `save_pretrained` writes, by parameter name."""
        return dict(named_tensors(self, self.dtype_name))

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        tensors: Mapping[str, Any] | None = None,
    ) -> None:
        """Write config.json, safetensors and, for a language model, generation_config.json in transformers' format.

        A tied lm_head is not written. The single projections of a fused checkpoint layer are joined
        (file_layouts/fused_projections.py). Quantized weights stay quantized (quantization/checkpoint_tensors.py).

        Args:
            folder: created if it does not exist.
            max_shard_bytes: maximum size of a safetensors file.
            tensors: tensors to write, such as tensors gathered from shards; None: `tensors_to_save()`.

        Raises:
            ValueError: the projections of a fused layer are quantized in a format that cannot be joined, or the factors
                of an adapter (PiSSA, LoftQ) were subtracted from a weight before quantization.
        """
        dtype = self.dtype_name
        written = self.config.to_files(self.tensors_to_save() if tensors is None else tensors)
        write_model_config(folder, with_quantization(self.config.source, self, dtype), dtype)
        if self.task_type == "CAUSAL_LM":
            write_generation_config(folder, self.generation_config)
        save_sharded(folder, written, max_shard_bytes)

    def load_weights(self, folder: str | os.PathLike[str]) -> None:
        """Load the weights of a saved model with the same configuration.

        Raises:
            ValueError: the saved model has different rope settings, or the stored tensors do not match the model. The
                message lists missing tensors, unexpected tensors and tensors with a wrong shape.
        """
        if DecoderConfig.from_dict(read_model_config(folder)).ropes != self.config.ropes:
            raise ValueError(
                f"{folder}: config.json and this model have different rope settings; set use_long_sequence_strategies "
                "and its keys as in training"
            )
        load_weights(self, self.config.from_files(open_weights(folder)), self.remote_parameters)


def _as_list(token_ids: int | list[int] | None) -> list[int]:
    return token_ids if isinstance(token_ids, list) else [] if token_ids is None else [token_ids]
