"""`PeftModel`, a model with adapters, and `get_peft_model`, which creates one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.generation.transformers_generate import generate_for
from paddlenlp_ext.nn.causal_lm_forward import CausalLMOutput, causal_lm_forward
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.paddle_compat import registered_member
from paddlenlp_ext.peft import compatibility, modules_to_save
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.fused_projections import join_adapter, with_parts
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, assign_tensors, read_adapter, read_tensors
from paddlenlp_ext.peft.formats.write_adapter import write_adapter
from paddlenlp_ext.peft.inject import inject, undone_on_failure
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.low_rank_factors import Factors, factors_of
from paddlenlp_ext.peft.merge.in_memory import merge_in_place
from paddlenlp_ext.peft.multi_adapter import MultiAdapterModel
from paddlenlp_ext.peft.parameter_count import count_parameters, describe_parameters
from paddlenlp_ext.peft.save_as_lora import lora_config_for, lora_tensors
from paddlenlp_ext.peft.target_modules import without_foreign_targets
from paddlenlp_ext.peft.trainable_token_indices import ROWS
from paddlenlp_ext.peft.weighted_adapters import combined_factors
from paddlenlp_ext.quantization.quantized_grouped_linear import AnyGroupedLinear
from paddlenlp_ext.utils.labels import prompt_lengths_of
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


def get_peft_model(
    model: TrainableModel, peft_config: PeftConfig, seed: int = 42, *, adapter_name: str = "default"
) -> PeftModel:
    """Add an adapter to a model, in place, and freeze all other parameters.

    Args:
        model: decoder from `AutoModelForCausalLM`.
        peft_config: config of a method, such as `LoRAConfig`. With `path`, training starts from that adapter, whose
            structure (rank, targets) replaces that of `peft_config`; differences are logged.
        seed: seed of the adapter's initial values, which depend only on it and on the names of the parameters.
        adapter_name: name of the adapter for `set_adapter`.

    Raises:
        ValueError: see `inject` and `PeftModel.load_weights`; the model is unchanged.
    """
    own_config = with_parts(peft_config, model.config.fused_layers)
    config = peft_config = modules_to_save.with_trained_modules(own_config, model)
    stored = read_adapter(config.path).for_base(model.config) if config.path else None
    if stored is not None:
        compatibility.require_same_model(stored, model)
        config = compatibility.continued_config(stored, peft_config, without_foreign_targets(stored.config, model))
    with undone_on_failure(model):
        inject(model, config, seed)
        _log_frozen_experts(model, config)
        peft_model = _model_class(config)(model, config)
        peft_model.adapters = MultiAdapterModel(adapter_name)
        if stored is not None:
            peft_model.load_tensors(stored.tensors, str(stored.folder))
            compatibility.warn_of_other_quantization(stored, peft_model.quantization)
    return peft_model


def _log_frozen_experts(model: TrainableModel, config: PeftConfig) -> None:
    """Log that the default targets exclude experts and routers, as those of Hugging Face PEFT do."""
    is_default = getattr(config, "target_modules", ()) is None and not getattr(config, "target_parameters", None)
    if is_default and any(isinstance(layer, AnyGroupedLinear) for layer in model.sublayers()):
        logger.info("experts and routers are not adapted; name them in target_parameters to adapt them with LoRA")


def _model_class(config: PeftConfig) -> type[PeftModel]:
    model_class = config.model_class or PeftModel
    assert issubclass(model_class, PeftModel)
    return model_class


class PeftModel(TrainableModel):
    """Model with an adapter; accepted wherever its base model is.

    A method that needs more than layers derives from this class in its own file (`PeftConfig.model_class`) and
    overrides `hidden_states`, through which every forward pass goes, or hooks of the training loop (`TrainableModel`).
    """

    def __init__(self, model: TrainableModel, peft_config: PeftConfig) -> None:
        super().__init__()
        self.base_model = model
        self.peft_config: Any = peft_config  # subclasses declare the config of their method
        self.reads_prompts = peft_config.reads_prompts
        self.adapter_enabled = True
        self.adapters = MultiAdapterModel("default")

    # -- interface of the base model ----------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        """Return the base model's attribute, such as `config`, `quantization` or `eos_token_ids`."""
        try:
            return registered_member(self, name)
        except AttributeError:
            if name == "base_model" or name.startswith("_"):
                raise
            return getattr(self.base_model, name)

    def forward(
        self,
        input_ids: paddle.Tensor,
        attention_mask: paddle.Tensor | None = None,
        labels: paddle.Tensor | None = None,
        **inputs: Any,
    ) -> paddle.Tensor | CausalLMOutput:
        """Return logits [B, S, V], or a `CausalLMOutput` if labels are given; arguments are those of the base model.

        The loss excludes `auxiliary_loss`, which the trainer adds.
        """
        prompts = prompt_lengths_of if self.reads_prompts else None
        return causal_lm_forward(self, input_ids, attention_mask, labels, prompt_lengths_of=prompts, **inputs)

    def hidden_states(self, *args: Any, **kwargs: Any) -> paddle.Tensor:
        """Return the hidden states [B, S, D] after the final norm; arguments are those of the base model."""
        return self.base_model.hidden_states(*args, **kwargs)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Map hidden states [..., D] to logits [..., V]."""
        return self.base_model.logits(hidden)

    def head_weight(self) -> paddle.Tensor:
        """Return the weight [V, D] of lm_head."""
        return self.base_model.head_weight()

    def head_updates(self, hidden: paddle.Tensor) -> Sequence[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the factors of the update of the logits."""
        return self.base_model.head_updates(hidden)

    def add_eos_token_ids(self, token_ids: Iterable[int]) -> None:
        """Add tokens at which generation ends."""
        self.base_model.add_eos_token_ids(token_ids)

    def generate(self, prompts: Any = None, **options: Any) -> list[list[int]] | paddle.Tensor:
        """Continue prompts with the active adapter; arguments as in `generation.transformers_generate.generate_for`."""
        return generate_for(self, prompts, **options)

    def set_dropout_seed(self, seed: int | None) -> None:
        """Set the seed of the next forward pass's random numbers."""
        self.base_model.set_dropout_seed(seed)

    def hidden_states_shape(self, batch: int, length: int) -> list[int]:
        """Return the shape of the hidden states between two layers."""
        return self.base_model.hidden_states_shape(batch, length)

    # -- training -----------------------------------------------------------------------------------------------------
    def learning_rate_scale(self, parameter_name: str) -> float:
        """Return the factor of the learning rate for a parameter."""
        return self.peft_config.learning_rate_scale(parameter_name)

    def allows_weight_decay(self, parameter_name: str) -> bool:
        """Return whether weight decay may act on a parameter."""
        return self.peft_config.decays(parameter_name)

    def mark_only_adapter_as_trainable(self) -> None:
        """Freeze the base model, as `get_peft_model` does."""
        own = {id(parameter) for _, layer in adapter_layers(self) for parameter in layer.own_parameters()}
        own |= {id(parameter) for parameter in modules_to_save.replaced_parameters(self.base_model).values()}
        for parameter in self.base_model.parameters():
            if id(parameter) not in own:
                parameter.stop_gradient = True

    mark_only_lora_as_trainable = mark_only_adapter_as_trainable  # PaddleNLP's names
    mark_only_prefix_as_trainable = mark_only_adapter_as_trainable

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the numbers of trainable and of all parameters; a quantized weight counts its elements."""
        return count_parameters(self)

    def print_trainable_parameters(self) -> None:
        """Print the numbers of trainable and of all parameters, and the adapted layers."""
        print(describe_parameters(self))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the adapter within a `with` block."""
        switches = [(self, "adapter_enabled"), *((layer, "enabled") for _, layer in adapter_layers(self))]
        previous = [getattr(owner, name) for owner, name in switches]
        for owner, name in switches:
            setattr(owner, name, False)
        try:
            with modules_to_save.base_values(self.base_model) if previous[0] else nullcontext():
                yield
        finally:
            for (owner, name), value in zip(switches, previous, strict=True):
                setattr(owner, name, value)

    # -- several adapters ---------------------------------------------------------------------------------------------
    @property
    def active_adapter(self) -> str:
        """Name of the active adapter."""
        return self.adapters.active

    def add_adapter(self, adapter_name: str, peft_config: PeftConfig, seed: int = 42) -> None:
        """Add an adapter of any method without activating it; arguments are those of `get_peft_model`.

        Raises:
            ValueError: the name is taken, or see `get_peft_model`; nothing has changed.
        """
        self.adapters.add(self, adapter_name, lambda: get_peft_model(self.base_model, peft_config, seed))

    def load_adapter(self, folder: str | os.PathLike[str], adapter_name: str, is_trainable: bool = True) -> None:
        """Add a stored adapter without activating it; arguments are those of `from_pretrained`.

        Raises:
            ValueError: the name is taken, or see `from_pretrained`; nothing has changed.
        """
        self.adapters.add(
            self, adapter_name, lambda: PeftModel.from_pretrained(self.base_model, folder, is_trainable=is_trainable)
        )

    def set_adapter(self, adapter_name: str) -> None:
        """Activate another adapter; the model stays in training or evaluation mode. No tensor is copied.

        Raises:
            ValueError: there is no such adapter.
        """
        training = self.training
        self.adapters.switch(self, adapter_name)
        self.train() if training else self.eval()

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter that is not active.

        Raises:
            ValueError: there is no such adapter, or it is active.
        """
        self.adapters.delete(adapter_name)

    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "cat",
    ) -> None:
        """Add a weighted combination of adapters as a plain LoRA, without activating it.

        Args:
            adapters: names of low-rank adapters.
            combination_type: "cat" for the exact weighted sum of the updates, whose rank is the sum of the ranks;
                "linear" for the weighted sum of the factors of LoRAs with equal ranks.

        Raises:
            ValueError: there is no such adapter or combination type, or an update is not low-rank.
        """
        parts, active = [], self.active_adapter
        try:
            for name in adapters:
                self.set_adapter(name)
                parts.append(factors_of(self))
        finally:
            self.set_adapter(active)
        factors = combined_factors(parts, weights, combination_type)
        self.adapters.add(self, adapter_name, lambda: PeftModel.from_factors(self.base_model, factors))

    @classmethod
    def from_factors(cls, model: TrainableModel, factors: Mapping[str, Factors]) -> PeftModel:
        """Add a plain LoRA of scale 1 with the given factors; the result is trainable, and in evaluation mode."""
        config = lora_config_for(factors)
        inject(model, config)
        adapted = PeftModel(model, config)
        adapted.load_tensors({name: tensor.numpy() for name, tensor in lora_tensors(factors).items()}, "combined")
        adapted.eval()
        return adapted

    # -- files --------------------------------------------------------------------------------------------------------
    def adapter_state(self) -> dict[str, paddle.Tensor]:
        """Return the adapter's tensors by their names in files."""
        state = {name: t for name, t in self.state_dict().items() if not name.startswith("base_model.")}
        for layer_name, layer in adapter_layers(self.base_model):
            for name, tensor in layer.own_state().items():
                state[f"{layer_name}.{name}".replace(".base.", ".")] = tensor
            state.update(layer.shared_state())
        return {**state, **modules_to_save.replaced_parameters(self.base_model)}

    def tensors_to_save(self) -> dict[str, paddle.Tensor]:
        """Return the tensors to save by name, before the method converts them to its file format."""
        return self.adapter_state()

    def save_pretrained(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors` in the layout of Hugging Face PEFT.

        Args:
            folder: created if it does not exist.
            tensors: full tensors in place of `tensors_to_save()`, if this process holds only shards.
        """
        fields, layout = self.peft_config.to_adapter_config(self.base_model), self.config.file_layout
        state = {name: layout.to_transformers(name, each) for name, each in self.full_state(tensors).items()}
        replaced = self.replaced_of(state)
        layers = {name: tensor for name, tensor in state.items() if name not in replaced}
        tensors = {**self.peft_config.to_stored(layers), **replaced}
        self.write_files(folder, self.peft_config.peft_type, fields, tensors)

    def full_state(self, tensors: Mapping[str, Any] | None) -> dict[str, paddle.Tensor]:
        """Return `adapter_state()`, or `tensors` in its place; lazy tensors are read."""
        return self.adapter_state() if tensors is None else read_tensors(tensors)

    def replaced_of(self, state: Mapping[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
        """Return the tensors of `full_state` that replace parameters of the base, or rows of its tables."""
        return {name: each for name, each in state.items() if name in self.base_model.set_aside or name.endswith(ROWS)}

    def write_files(
        self,
        folder: str | os.PathLike[str],
        peft_type: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, paddle.Tensor],
    ) -> None:
        """Write an adapter of this model; `fields` are added to the fields that every method has."""
        config, model = self.peft_config, self.base_model
        shared = {"peft_type": peft_type, "task_type": model.task_type, "inference_mode": True}
        shared |= {"base_model_name_or_path": model.config.name_or_path}
        shared |= compatibility.base_fields(self.config, self.quantization) | modules_to_save.common_fields(
            model, config
        )
        tensors = modules_to_save.with_tied_copies(model, config, tensors)
        fields, tensors = join_adapter({**fields, **shared}, tensors, self.config.fused_layers)
        keys = {**config.own_keys, **modules_to_save.stored_keys(model, config)}
        write_adapter(folder, fields, tensors, keys, config.key_prefix)

    @classmethod
    def from_pretrained(
        cls,
        model: TrainableModel,
        folder: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = True,
    ) -> PeftModel:
        """Add a stored adapter to its base model; the result is in evaluation mode.

        Args:
            folder: written by `save_pretrained`, by Hugging Face PEFT, or by PaddleNLP (as safetensors).
            adapter_name: name of the adapter for `set_adapter`.
            is_trainable: whether the adapter can be trained; False freezes it.

        Raises:
            ValueError: no adapter, unsupported fields, or another base model or config; the model is unchanged.
        """
        stored = read_adapter(folder)
        adapted = cls.from_files(model, stored, adapter_name, is_trainable)
        compatibility.warn_of_other_quantization(stored, adapted.quantization)
        return adapted

    @classmethod
    def from_files(
        cls, model: TrainableModel, stored: AdapterFiles, adapter_name: str = "default", is_trainable: bool = True
    ) -> PeftModel:
        """Add an adapter whose files are already read; otherwise like `from_pretrained`."""
        stored = stored.for_base(model.config)
        compatibility.require_same_model(stored, model)
        with undone_on_failure(model):
            config = without_foreign_targets(stored.config, model)
            inject(model, config)
            peft_model = _model_class(config)(model, config)
            peft_model.load_tensors(stored.tensors, str(stored.folder))
        peft_model.adapters = MultiAdapterModel(adapter_name)
        if not is_trainable:
            for parameter in peft_model.parameters():
                parameter.stop_gradient = True
        peft_model.eval()
        return peft_model

    def load_weights(self, folder: str | os.PathLike[str]) -> None:
        """Load the tensors of a saved adapter of the same structure, to resume training.

        Raises:
            ValueError: options that change the function differ, or tensors do not match; the message names them.
        """
        self.resume_from(read_adapter(folder))

    def resume_from(self, stored: AdapterFiles) -> None:
        """Load the tensors of an adapter whose files are already read; warn if its base has another name.

        Raises:
            ValueError: see `load_weights`; or the base is quantized differently or has another config.
        """
        stored = stored.for_base(self.config)
        compatibility.require_same_base(stored, self.config, self.quantization)
        compatibility.require_same_function(str(stored.folder), stored.config, self.peft_config)
        self.load_tensors(stored.tensors, str(stored.folder))

    def load_tensors(self, tensors: Mapping[str, np.ndarray], where: str) -> None:
        """Load tensors by their names in files: all of them, or none on an error.

        Raises:
            ValueError: see `load_weights`.
        """
        tensors = modules_to_save.without_tied_copies(self.base_model, tensors, where)
        assign_tensors(self.adapter_state(), tensors, where)
        self.base_model.has_loaded_replacements = True

    # -- merging ------------------------------------------------------------------------------------------------------
    def merge_and_unload(self) -> TrainableModel:
        """Merge the adapter into the (dequantized) weights and return the base model; do not use this object after.

        Raises:
            ValueError: adapters of the method cannot be merged.
        """
        merge_in_place(self.base_model, self.peft_config)
        return self.base_model

    def unload(self) -> TrainableModel:
        """Remove the adapter and return the base model; this object must not be used afterwards."""
        modules_to_save.detach_adapter(self.base_model)
        return self.base_model


PeftModelForCausalLM = PeftModel  # the name in Hugging Face PEFT
