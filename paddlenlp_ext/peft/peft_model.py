"""A model with an adapter: made, switched off, saved, loaded, merged."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.generation.padded import generate_for
from paddlenlp_ext.nn.causal_lm import CausalLMOutput, causal_lm_forward
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.paddle_compat import registered_member
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.factors import Factors, combined_factors, factors_of, lora_config_for, lora_tensors
from paddlenlp_ext.peft.inject import drop_unmatched_targets, inject, linear_names, undone_on_failure
from paddlenlp_ext.peft.layers import AdapterLayer, adapter_layers, detach_adapters
from paddlenlp_ext.peft.merge.in_memory import fold_in_place
from paddlenlp_ext.peft.multi_adapter import MultiAdapterModel
from paddlenlp_ext.peft.resume import (
    require_same_base,
    require_same_function,
    require_same_method,
    warn_of_other_quantization,
)
from paddlenlp_ext.peft.save_and_load import AdapterFiles, assign_tensors, read_adapter, read_tensors, write_adapter
from paddlenlp_ext.quantization.hf_config import options_to_dict
from paddlenlp_ext.quantization.model import quantized_linears
from paddlenlp_ext.utils.labels import prompt_lengths_of
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.peft")


def get_peft_model(
    model: TrainableModel, peft_config: PeftConfig, seed: int = 42, *, adapter_name: str = "default"
) -> PeftModel:
    """Add an adapter to a model, in place. Only the adapter trains from then on.

    Args:
        model: a decoder from `AutoModelForCausalLM`.
        peft_config: a method's config, such as `LoRAConfig`. With `path`, the adapter there is the start, and the
            fields that shape it are the folder's; each one that differs from `peft_config` is logged.
        seed: fixes the adapter's random values, together with each parameter's name.
        adapter_name: what `set_adapter` calls it, where more adapters are added.

    Raises:
        ValueError: as `inject` and `PeftModel.load_weights`; the model is as it was then.
    """
    config = peft_config
    stored = read_adapter(config.path) if config.path else None
    if stored is not None:
        require_same_method(str(stored.folder), stored.config, config)
        asked, config = config, config.warm_start(_fitted(stored.config, model))
        for field in dataclasses.fields(config):
            taken, wanted = getattr(config, field.name), getattr(asked, field.name)
            if field.compare and taken != wanted:
                logger.info("%s is %r, as in %s (not %r)", field.name, taken, stored.folder, wanted)
    with undone_on_failure(model):
        inject(model, config, seed)
        peft_model = _model_class(config)(model, config)
        peft_model.adapters = MultiAdapterModel(adapter_name)
        if stored is not None:
            peft_model.load_tensors(stored.tensors, str(stored.folder))
            warn_of_other_quantization(stored, peft_model.quantization)
    return peft_model


def _fitted(config: PeftConfig, model: TrainableModel) -> PeftConfig:
    """A stored config without targets that this model lacks, as long as it has some of them.

    PaddleNLP lists the layers of all variants of a family; whether the adapter is this model's, its tensors say.
    """
    targets = getattr(config, "target_modules", None)
    if not targets:
        return config
    fitting: dict[str, Any] = {"target_modules": drop_unmatched_targets(linear_names(model), targets)}
    return dataclasses.replace(config, **fitting)


def _model_class(config: PeftConfig) -> type[PeftModel]:
    model_class = config.model_class or PeftModel
    assert issubclass(model_class, PeftModel)
    return model_class


class PeftModel(TrainableModel):
    """A model and its adapter; used wherever the model itself is.

    A method that needs more than layers derives from this class in its own file (`PeftConfig.model_class`) and
    overrides `hidden_states` (all paths lead through it), `plan_steps`, `before_training`, `auxiliary_loss`,
    `after_step`, `training_state` with `restore_training_state`, or `save_finished`.
    """

    def __init__(self, model: TrainableModel, peft_config: PeftConfig) -> None:
        super().__init__()
        self.base_model = model
        self.peft_config = peft_config
        self.reads_prompts = peft_config.reads_prompts
        self.adapter_enabled = True
        self.adapters = MultiAdapterModel("default")

    # -- the model's own interface ------------------------------------------------------------------------------------
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
        """Return logits [B, S, V], or a `CausalLMOutput` where labels are given; arguments as the model's.

        The loss is the model's alone: what a method adds to it is `auxiliary_loss`.
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
        """The output head [V, D]."""
        return self.base_model.head_weight()

    def add_eos_token_ids(self, token_ids: Iterable[int]) -> None:
        """Let generation end at these tokens too."""
        self.base_model.add_eos_token_ids(token_ids)

    def generate(self, prompts: Any = None, **options: Any) -> list[list[int]] | paddle.Tensor:
        """Continue prompts with the adapter on; arguments as `generation.padded.generate_for`'s."""
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
        """Freeze the base; `get_peft_model` has done so already."""
        own = {id(parameter) for _, layer in adapter_layers(self) for parameter in layer.own_parameters()}
        for parameter in self.base_model.parameters():
            if id(parameter) not in own:
                parameter.stop_gradient = True

    mark_only_lora_as_trainable = mark_only_adapter_as_trainable  # PaddleNLP's names
    mark_only_prefix_as_trainable = mark_only_adapter_as_trainable

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return how many parameters train and how many there are; a quantized weight counts its elements."""
        trainable = sum(p.size for p in self.parameters() if not p.stop_gradient)
        packed = sum(layer.in_features * layer.out_features for layer in quantized_linears(self).values())
        return trainable, sum(p.size for p in self.parameters()) + packed

    def print_trainable_parameters(self) -> None:
        """Print how much trains, and in which layers."""
        trainable, total = self.get_nb_trainable_parameters()
        leaves: dict[str, int] = {}
        for name, _ in adapter_layers(self):
            leaf = next(part for part in reversed(name.split(".")) if not part.isdigit())
            leaves[leaf] = leaves.get(leaf, 0) + 1
        where = ", ".join(f"{leaf} x{count}" for leaf, count in leaves.items())
        share = 100 * trainable / total
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {share:.4f} || in: {where}")

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Within the block the model is its base."""
        layers = [layer for _, layer in adapter_layers(self)]
        was_enabled, were_enabled = self.adapter_enabled, [layer.enabled for layer in layers]
        self._enable(False, layers, [False] * len(layers))
        try:
            yield
        finally:
            self._enable(was_enabled, layers, were_enabled)

    def _enable(self, adapter: bool, layers: list[AdapterLayer], each: list[bool]) -> None:
        self.adapter_enabled = adapter
        for layer, enabled in zip(layers, each, strict=True):
            layer.enabled = enabled

    # -- several adapters ---------------------------------------------------------------------------------------------
    @property
    def active_adapter(self) -> str:
        """Name of the adapter that is on."""
        return self.adapters.active

    def add_adapter(self, adapter_name: str, peft_config: PeftConfig, seed: int = 42) -> None:
        """Add a new adapter, of any method; the active one stays on. Arguments as `get_peft_model`'s.

        Raises:
            ValueError: the name is taken, or as `get_peft_model`; nothing has changed then.
        """
        self.adapters.add(self, adapter_name, lambda: get_peft_model(self.base_model, peft_config, seed))

    def load_adapter(self, folder: str | os.PathLike[str], adapter_name: str, is_trainable: bool = True) -> None:
        """Add a stored adapter; the active one stays on. Arguments as `from_pretrained`'s.

        Raises:
            ValueError: the name is taken, or as `from_pretrained`; nothing has changed then.
        """
        self.adapters.add(
            self,
            adapter_name,
            lambda: PeftModel.from_pretrained(self.base_model, folder, is_trainable=is_trainable),
        )

    def set_adapter(self, adapter_name: str) -> None:
        """Switch to another adapter, in the mode (training or evaluation) that the model is in. Nothing is copied.

        Raises:
            ValueError: there is no such adapter.
        """
        training = self.training
        self.adapters.switch(self, adapter_name)
        self.train() if training else self.eval()

    def delete_adapter(self, adapter_name: str) -> None:
        """Forget an adapter that is not active.

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
        """Add the weighted combination of some adapters as a plain LoRA; the active adapter stays on.

        Args:
            adapters: names of low-rank adapters.
            weights: one each.
            adapter_name: of the combination.
            combination_type: "cat" for the exact weighted sum of the updates, whose rank is the sum of the ranks;
                "linear" for the weighted sum of the factors, of LoRAs of one rank.

        Raises:
            ValueError: no such adapter or combination, or one whose update is not low-rank.
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
        """Add a plain LoRA of scale 1 with these factors. The result is in evaluation mode, and can be trained."""
        config = lora_config_for(factors)
        inject(model, config)
        adapted = PeftModel(model, config)
        adapted.load_tensors({name: tensor.numpy() for name, tensor in lora_tensors(factors).items()}, "combined")
        adapted.eval()
        return adapted

    # -- files --------------------------------------------------------------------------------------------------------
    def adapter_state(self) -> dict[str, paddle.Tensor]:
        """The adapter's tensors by the names they have in files."""
        state = {name: t for name, t in self.state_dict().items() if not name.startswith("base_model.")}
        for layer_name, layer in adapter_layers(self.base_model):
            for name, tensor in layer.own_state().items():
                state[f"{layer_name}.{name}".replace(".base.", ".")] = tensor
        for _, layer in adapter_layers(self.base_model):
            state.update(layer.shared_state())
        return state

    def tensors_to_save(self) -> dict[str, paddle.Tensor]:
        """Return the tensors that `save_pretrained` and `save_finished` write, before the method converts them."""
        return self.adapter_state()

    def save_pretrained(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Write `adapter_config.json` and `adapter_model.safetensors` as Hugging Face PEFT lays them out.

        `tensors` stand for `tensors_to_save` where these are parts.
        """
        fields = self.peft_config.to_adapter_config(self.base_model)
        stored = self.peft_config.to_stored(self.full_state(tensors))
        self.write_files(folder, self.peft_config.peft_type, fields, stored)

    def full_state(self, tensors: Mapping[str, Any] | None) -> dict[str, paddle.Tensor]:
        """Return `adapter_state()`, or `tensors` in its place, read where they are lazy."""
        return self.adapter_state() if tensors is None else read_tensors(tensors)

    def write_files(
        self,
        folder: str | os.PathLike[str],
        peft_type: str,
        fields: Mapping[str, Any],
        tensors: Mapping[str, paddle.Tensor],
    ) -> None:
        """Write an adapter of this model, `fields` beside those that every method has."""
        shared = {
            "peft_type": peft_type,
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.config.name_or_path,
            "inference_mode": True,
        }
        if self.quantization is not None:  # our own field: merging and predicting need the base that was trained over
            shared["base_quantization"] = options_to_dict(self.quantization)
        write_adapter(folder, {**shared, **fields}, tensors, self.peft_config.own_keys)

    @classmethod
    def from_pretrained(
        cls,
        model: TrainableModel,
        folder: str | os.PathLike[str],
        adapter_name: str = "default",
        is_trainable: bool = True,
    ) -> PeftModel:
        """Add the adapter of a folder to its base model. The result is in evaluation mode.

        Args:
            model: the base.
            folder: written by `save_pretrained`, by Hugging Face PEFT, or by PaddleNLP (as safetensors).
            adapter_name: what `set_adapter` calls it, where more adapters are added.
            is_trainable: False freezes the adapter too.

        Raises:
            ValueError: no such adapter, one that asks for what is not available here, or one of another model; the
                model is as it was then.
        """
        stored = read_adapter(folder)
        adapted = cls.from_files(model, stored, adapter_name, is_trainable)
        warn_of_other_quantization(stored, adapted.quantization)
        return adapted

    @classmethod
    def from_files(
        cls, model: TrainableModel, stored: AdapterFiles, adapter_name: str = "default", is_trainable: bool = True
    ) -> PeftModel:
        """Add an adapter that was read already; otherwise like `from_pretrained`."""
        with undone_on_failure(model):
            config = _fitted(stored.config, model)
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
        """Take the tensors of a saved adapter of the same structure, to resume.

        Raises:
            ValueError: its options make another function of them, or its tensors are not this adapter's; the message
                names the options, or the tensors missing, surplus and misshapen.
        """
        self.resume_from(read_adapter(folder))

    def resume_from(self, stored: AdapterFiles) -> None:
        """Load the tensors of an adapter that was read already; warn if its base has another name.

        Raises:
            ValueError: as `load_weights`, or the base is now quantized otherwise than it was.
        """
        require_same_base(stored, self.config.name_or_path, self.quantization)
        require_same_function(str(stored.folder), stored.config, self.peft_config)
        self.load_tensors(stored.tensors, str(stored.folder))

    def load_tensors(self, tensors: Mapping[str, np.ndarray], where: str) -> None:
        """Take tensors by their names in files; all or none.

        Raises:
            ValueError: as `load_weights`.
        """
        assign_tensors(self.adapter_state(), tensors, where)

    # -- merging ------------------------------------------------------------------------------------------------------
    def merge_and_unload(self) -> TrainableModel:
        """Fold the adapter into the weights and give the plain model back; this object is of no use afterwards.

        Raises:
            ValueError: the method cannot be merged, or the base's weights are no plain numbers (quantized).
        """
        fold_in_place(self.base_model, self.peft_config)
        return self.base_model

    def unload(self) -> TrainableModel:
        """Take the adapter off and return the base as it was; this object is of no use afterwards."""
        detach_adapters(self.base_model)
        return self.base_model


PeftModelForCausalLM = PeftModel  # the name in Hugging Face PEFT
