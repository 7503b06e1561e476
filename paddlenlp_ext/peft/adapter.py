"""`Adapter`: the config, layers, replaced parameters and training hooks of one named adapter of a `PeftModel`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft import compatibility
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, assign_tensors, read_tensors
from paddlenlp_ext.peft.formats.renamed_layers import renamed_key
from paddlenlp_ext.peft.formats.tied_embeddings import without_tied_copies
from paddlenlp_ext.peft.formats.write_adapter import fields_and_tensors, stored_keys, write_adapter
from paddlenlp_ext.peft.layers import AdapterLayer, attach_adapters, detach_adapters
from paddlenlp_ext.peft.modules_to_save import ReplacedParameters
from paddlenlp_ext.peft.trainable_token_indices import ROWS


@dataclass(eq=False)
class Adapter(TrainingHooks):
    """One adapter of a base model; a `PeftModel` delegates to its active adapter.

    A method with a custom forward pass, or custom hooks for training and saving, defines a subclass
    (`PeftConfig.adapter_class`). A subclass with state must be a dataclass that creates the state in `__post_init__`.

    Attributes:
        base_model: base model whose layers are wrapped by the adapter layers.
        peft_config: config of the method.
        injected: layer name -> adapter layer, in the order of the model's layers.
        replaced: base parameters that the adapter replaces.
        own_layers: name -> adapter layer outside the base model, such as a prefix encoder.
        enabled: whether the adapter changes the forward pass.
    """

    base_model: TrainableModel
    peft_config: Any
    injected: dict[str, AdapterLayer]
    replaced: ReplacedParameters
    own_layers: dict[str, nn.Layer] = field(init=False, default_factory=dict)
    enabled: bool = field(init=False, default=True)

    # -- forward pass -------------------------------------------------------------------------------------------------
    def hidden_states(self, *args: Any, **kwargs: Any) -> paddle.Tensor:
        """Return the hidden states [B, S, D] after the final norm; arguments as in `CausalLM.hidden_states`."""
        return self.base_model.hidden_states(*args, **kwargs)

    def decode_tokens(self, tokens_BS: Sequence[Sequence[int]], cache: Any) -> np.ndarray | None:
        """Return the logits of new tokens [B, S, V], or None if the adapter's layers have no fused step."""
        return self.base_model.decode_tokens(tokens_BS, cache)

    def hidden_states_shape(self, batch: int, length: int) -> list[int]:
        """Return the shape of the hidden states between decoder layers, for input ids [batch, length]."""
        return self.base_model.hidden_states_shape(batch, length)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Context manager: use the base model without the adapter within the block."""
        switches: list[Any] = [self, *self.injected.values()]
        previous = [each.enabled for each in switches]
        for each in switches:
            each.enabled = False
        try:
            with self.replaced.base_values() if previous[0] else nullcontext():
                yield
        finally:
            for each, enabled in zip(switches, previous, strict=True):
                each.enabled = enabled

    # -- base model ---------------------------------------------------------------------------------------------------
    def detach(self) -> None:
        """Remove the adapter from the base model; no tensor is copied."""
        self.replaced.swap()
        detach_adapters(self.base_model)

    def attach(self) -> None:
        """Put a detached adapter back into its base model; the base model must not have another adapter."""
        attach_adapters(self.base_model, self.injected)
        self.replaced.swap()

    def parameters(self) -> list[paddle.Tensor]:
        """Return the adapter's parameters, including the parameters that replace parameters of the base."""
        layers = [parameter for layer in self.injected.values() for parameter in layer.own_parameters()]
        own = [parameter for layer in self.own_layers.values() for parameter in layer.parameters()]
        return [*layers, *own, *self.replaced.values().values()]

    # -- tensors ------------------------------------------------------------------------------------------------------
    def adapter_state(self) -> dict[str, paddle.Tensor]:
        """Return a dict of the adapter's tensors, with keys such as "model.layers.0.self_attn.q_proj.lora_A.weight"."""
        state = {
            f"{own_name}.{name}": tensor
            for own_name, layer in self.own_layers.items()
            for name, tensor in layer.state_dict().items()
        }
        for layer_name, layer in self.injected.items():
            for name, tensor in layer.own_state().items():
                state[f"{layer_name}.{name}".replace(".base.", ".")] = tensor
            state.update(layer.shared_state())
        return {**state, **self.replaced.values()}

    def full_state(self, tensors: Mapping[str, Any] | None) -> dict[str, paddle.Tensor]:
        """Return `tensors`, with lazy tensors read from their files; if `tensors` is None, return `adapter_state()`."""
        return self.adapter_state() if tensors is None else read_tensors(tensors)

    def replaced_of(self, state: Mapping[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
        """Return the tensors of `state` that replace base parameters or token rows of the embedding and lm_head."""
        names = set(self.replaced.names)
        return {name: tensor for name, tensor in state.items() if name in names or name.endswith(ROWS)}

    def load_tensors(self, tensors: Mapping[str, np.ndarray], where: str) -> None:
        """Load all tensors of the adapter, keyed as in `adapter_state`; an error leaves the adapter unchanged.

        Args:
            tensors: key -> unsharded tensor.
            where: source of the tensors, for error messages.

        Raises:
            ValueError: tensors are missing, unexpected or have the wrong shape; the message lists the tensors.
        """
        tensors = without_tied_copies(self.base_model, tensors, where)
        assign_tensors(self.adapter_state(), tensors, where)
        self.replaced.are_loaded = True

    def resume_from(self, stored: AdapterFiles) -> None:
        """Load the tensors of a stored adapter, to resume training; warn if the base model has a different name.

        Raises:
            ValueError: the stored adapter has a different method, or a different value of an option that affects the
                computed function; a tensor is missing, unexpected or has the wrong shape; or the base model has a
                different quantization or config.
        """
        model = self.base_model
        stored = stored.for_base(model.config)
        compatibility.require_same_base(stored, model.config, model.quantization)
        compatibility.require_same_function(str(stored.folder), stored.config, self.peft_config)
        self.load_tensors(stored.tensors, str(stored.folder))

    # -- files --------------------------------------------------------------------------------------------------------
    def save_pretrained(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors` in the layout of Hugging Face PEFT.

        Args:
            folder: created if it does not exist.
            tensors: unsharded tensors to save instead of `adapter_state()`, if this process holds only shards.
        """
        write_adapter(folder, *self.file_tensors(tensors))

    def save_finished(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Write the final adapter; with some methods, such as AdaLoRA, it is smaller than the trained adapter."""
        self.save_pretrained(folder, tensors)

    def stored_tensors(self, tensors: Mapping[str, Any] | None = None) -> dict[str, paddle.Tensor]:
        """Convert `tensors` (None: the adapter's tensors) to the stored form; keep the names used in memory."""
        layout = self.base_model.config.file_layout
        state = {name: layout.to_transformers(name, each) for name, each in self.full_state(tensors).items()}
        replaced = self.replaced_of(state)
        layers = {name: tensor for name, tensor in state.items() if name not in replaced}
        return {**self.peft_config.to_stored(layers), **replaced}

    def write_files(
        self,
        folder: str | os.PathLike[str],
        peft_type: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, paddle.Tensor],
    ) -> None:
        """Write tensors as adapter files; adapter_config.json has `fields` and the fields common to all methods."""
        write_adapter(folder, *self._by_keys(peft_type, fields, tensors))

    def file_tensors(self, tensors: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, paddle.Tensor]]:
        """Return the fields of adapter_config.json, and the tensors with the keys of the weights file.

        Args:
            tensors: unsharded tensors to use instead of `adapter_state()`.
        """
        fields = self.peft_config.to_adapter_config(self.base_model)
        return self._by_keys(self.peft_config.peft_type, fields, self.stored_tensors(tensors))

    def _by_keys(
        self, peft_type: str, fields: Mapping[str, Any], tensors: Mapping[str, paddle.Tensor]
    ) -> tuple[dict[str, Any], dict[str, paddle.Tensor]]:
        fields, tensors = fields_and_tensors(self, peft_type, fields, tensors)
        keys, prefix = stored_keys(self), self.peft_config.key_prefix
        stored = {keys.get(name, f"{prefix}{name}"): tensor for name, tensor in tensors.items()}
        return fields, {renamed_key(key, self.base_model.config.file_layout): each for key, each in stored.items()}
