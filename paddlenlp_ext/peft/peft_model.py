"""`PeftModel`, a model with named adapters, and `get_peft_model`, which creates one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.generation.transformers_generate import generate_for
from paddlenlp_ext.nn.causal_lm_forward import CausalLMOutput, causal_lm_forward
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.paddle_compat import registered_member
from paddlenlp_ext.peft import compatibility
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.combination_types import combined_factors
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.formats.read_adapter import AdapterFiles, read_adapter
from paddlenlp_ext.peft.inject import adapter_from_factors, new_adapter, stored_adapter
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.peft.low_rank_factors import Factors, factors_of
from paddlenlp_ext.peft.merge.in_memory import merge_in_place
from paddlenlp_ext.peft.named_adapters import NamedAdapters
from paddlenlp_ext.peft.parameter_count import count_parameters, describe_parameters
from paddlenlp_ext.peft.peft_model_files import PeftModelFiles
from paddlenlp_ext.utils.prompt_lengths import compute_prompt_lengths

_INPUTS = {"position_ids", "document_lengths", "document_parents", "cache", "prompt_lengths"}
"""Keyword arguments that `PeftModel.forward` passes to `hidden_states`."""


def get_peft_model(
    model: TrainableModel, peft_config: PeftConfig, seed: int = 42, *, adapter_name: str = "default"
) -> PeftModel:
    """Add an adapter to a model, in place, and freeze all other parameters.

    Args:
        model: decoder from `AutoModelForCausalLM`.
        peft_config: config of a method, such as `LoRAConfig`. If `peft_config.path` is set, training starts from the
            adapter at this path, with the stored rank, targets and similar options. Ignored options are logged.
        seed: random seed; the adapter's initial values depend only on the seed and on the parameter names.
        adapter_name: name of the adapter for `set_adapter`.

    Raises:
        ValueError: a target matches no layer, the model already has an adapter, or the adapter at `path` does not fit;
            the model is unchanged.

    Examples:
        >>> from paddlenlp_ext import AutoModelForCausalLM, LoRAConfig, get_peft_model
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> base = AutoModelForCausalLM.from_config({"model_type": "llama", "vocab_size": 32, **sizes})
        >>> model = get_peft_model(base, LoRAConfig(r=4, target_modules=["q_proj", "v_proj"]))
        >>> model.get_nb_trainable_parameters()[0]
        256
    """
    adapter = new_adapter(model, peft_config, seed)
    return PeftModel(model, adapter, adapter_name)


class PeftModel(PeftModelFiles, TrainableModel):
    """Model with named adapters, accepted wherever its base model is accepted.

    One adapter is active, and the model delegates to this adapter. Switching adapters does not copy tensors.

    Args:
        model: base model whose layers are wrapped by the adapter.
        adapter: adapter to activate.
        adapter_name: name of the adapter.

    Attributes:
        base_model: the base model.
        adapters: all adapters of the model, active or not.
    """

    def __init__(self, model: TrainableModel, adapter: Adapter, adapter_name: str = "default") -> None:
        super().__init__()
        self.base_model = model
        self.adapters = NamedAdapters(adapter_name, {adapter_name: adapter})
        self._register_own_layers(adapter)

    def _register_own_layers(self, adapter: Adapter) -> None:
        """Register the adapter's layers outside the base model as sublayers of this model."""
        self.reads_prompts = adapter.peft_config.reads_prompts
        for name, layer in adapter.own_layers.items():
            self.add_sublayer(name, layer)

    @property
    def adapter(self) -> Adapter:
        """The active adapter."""
        return self.adapters.active

    @property
    def active_adapter(self) -> str:
        """Name of the active adapter."""
        return self.adapters.active_name

    @property
    def injected(self) -> dict[str, AdapterLayer]:
        """Layers of the active adapter, by name."""
        return self.adapter.injected

    @property
    def peft_config(self) -> Any:
        """Config of the active adapter."""
        return self.adapter.peft_config

    # -- interface of the base model ----------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base model, such as `config`, `quantization` or `eos_token_ids`."""
        try:
            return registered_member(self, name)
        except AttributeError:
            if name == "base_model" or name.startswith("_"):
                raise
        try:
            return getattr(self.base_model, name)
        except AttributeError as error:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from error

    def get_base_model(self) -> TrainableModel:
        """Return the base model."""
        return self.base_model

    def forward(
        self,
        input_ids: paddle.Tensor,
        attention_mask: paddle.Tensor | None = None,
        labels: paddle.Tensor | None = None,
        **inputs: Any,
    ) -> paddle.Tensor | CausalLMOutput:
        """Return logits [B, S, V], or a `CausalLMOutput` if `labels` is given; arguments as in `CausalLM.forward`.

        The loss of the output does not include `auxiliary_loss`, which the trainer adds.
        """
        if unknown := inputs.keys() - _INPUTS:
            raise TypeError(f"{type(self).__name__}.forward() has no argument {min(unknown)!r}")
        prompts = compute_prompt_lengths if self.reads_prompts else None
        return causal_lm_forward(self, input_ids, attention_mask, labels, compute_prompt_lengths=prompts, **inputs)

    def hidden_states(self, *args: Any, **kwargs: Any) -> paddle.Tensor:
        return self.adapter.hidden_states(*args, **kwargs)

    def decode_tokens(self, tokens_BS: Sequence[Sequence[int]], cache: Any) -> np.ndarray | None:
        return self.adapter.decode_tokens(tokens_BS, cache)

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return self.base_model.logits(hidden)

    def head_weight(self) -> paddle.Tensor:
        return self.base_model.head_weight()

    def head_updates(self, hidden: paddle.Tensor) -> Sequence[tuple[paddle.Tensor, paddle.Tensor]]:
        return self.base_model.head_updates(hidden)

    @property
    def eos_token_ids(self) -> list[int]:
        return self.base_model.eos_token_ids

    def add_eos_token_ids(self, token_ids: Iterable[int]) -> None:
        self.base_model.add_eos_token_ids(token_ids)

    def generate(self, prompts: Any = None, **options: Any) -> list[list[int]] | paddle.Tensor:
        """Generate with the active adapter; arguments as in `generation.transformers_generate.generate_for`."""
        return generate_for(self, prompts, **options)

    def set_dropout_seed(self, seed: int | None) -> None:
        self.base_model.set_dropout_seed(seed)

    def hidden_states_shape(self, batch: int, length: int) -> list[int]:
        return self.adapter.hidden_states_shape(batch, length)

    # -- training -----------------------------------------------------------------------------------------------------
    @property
    def hooks(self) -> TrainingHooks:
        """Training-loop hooks of the active adapter.

        Raises:
            ValueError: the adapter is merged.
        """
        self.adapters.require_unmerged("training")
        return self.adapter

    def auxiliary_loss(self) -> paddle.Tensor | None:
        """Return the auxiliary loss of the active adapter's method; None if the method has no auxiliary loss."""
        return self.hooks.auxiliary_loss()

    def learning_rate_scale(self, parameter_name: str) -> float:
        return self.peft_config.learning_rate_scale(parameter_name)

    def allows_weight_decay(self, parameter_name: str) -> bool:
        return self.peft_config.decays(parameter_name)

    def mark_only_adapter_as_trainable(self) -> None:
        """Freeze all parameters except the active adapter's parameters."""
        own = {id(parameter) for parameter in self.adapter.parameters()}
        for parameter in self.base_model.parameters():
            if id(parameter) not in own:
                parameter.stop_gradient = True

    mark_only_lora_as_trainable = mark_only_adapter_as_trainable  # PaddleNLP's names
    mark_only_prefix_as_trainable = mark_only_adapter_as_trainable

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the trainable and total parameter counts; each element of a quantized weight counts as one."""
        return count_parameters(self)

    def print_trainable_parameters(self) -> None:
        """Print the trainable and total parameter counts, and the adapted layers."""
        print(describe_parameters(self))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Context manager: use the base model without the adapter, whether or not the adapter is merged."""
        with self.adapters.unmerged() as adapter, adapter.disabled():
            yield

    # -- several adapters ---------------------------------------------------------------------------------------------
    def add_adapter(self, adapter_name: str, peft_config: PeftConfig, seed: int = 42) -> None:
        """Add an adapter of any method without activating it; arguments as in `get_peft_model`.

        Raises:
            ValueError: the name is taken, the active adapter is merged, or the new adapter cannot be added (see
                `get_peft_model`); the model is unchanged.
        """
        self.adapters.add(adapter_name, lambda: new_adapter(self.base_model, peft_config, seed))

    def load_adapter(self, folder: str | os.PathLike[str], adapter_name: str, is_trainable: bool = True) -> None:
        """Add a stored adapter without activating it; arguments as in `from_pretrained`.

        Raises:
            ValueError: the name is taken, the active adapter is merged, or the stored adapter cannot be loaded (see
                `from_pretrained`); the model is unchanged.
        """
        self.adapters.add(
            adapter_name,
            lambda: PeftModel.from_pretrained(self.base_model, folder, is_trainable=is_trainable).adapter,
        )

    def set_adapter(self, adapter_name: str) -> None:
        """Activate another adapter; the model stays in training or evaluation mode.

        Raises:
            ValueError: no adapter has this name, or the active adapter is merged.
        """
        previous = self.adapter
        self.adapters.switch(adapter_name)
        if self.adapter is not previous:
            for name in previous.own_layers:
                delattr(self, name)
            self._register_own_layers(self.adapter)
            self.train() if self.training else self.eval()

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter that is not active.

        Raises:
            ValueError: no adapter has this name, or it is active.
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
            weights: weight of each adapter.
            adapter_name: name of the new adapter.
            combination_type: "cat" for the exact weighted sum of the updates, whose rank is the sum of the ranks;
                "linear" for a weighted sum of the factors, which requires plain LoRAs of equal rank.

        Raises:
            ValueError: `adapter_name` is taken, an adapter is unknown or not low-rank, or the adapters cannot be
                combined (`combined_factors`).
        """
        updates = [factors_of(self.adapters[name]) for name in adapters]
        factors = combined_factors(updates, weights, combination_type)
        self.adapters.add(adapter_name, lambda: adapter_from_factors(self.base_model, factors))

    @classmethod
    def from_factors(cls, model: TrainableModel, factors: Mapping[str, Factors]) -> PeftModel:
        """Add a plain LoRA with scale 1 and the given factors, which are trainable; the model is in evaluation mode."""
        adapted = PeftModel(model, adapter_from_factors(model, factors))
        adapted.eval()
        return adapted

    # -- files --------------------------------------------------------------------------------------------------------
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
            model: base model without an adapter.
            folder: folder of an adapter saved by this package, Hugging Face PEFT or PaddleNLP, without pickled weights.
            adapter_name: name of the adapter for `set_adapter`.
            is_trainable: whether the adapter can be trained; False freezes it.

        Raises:
            ValueError: the folder has no adapter, a field is not supported, the adapter does not fit the base model or
                its config, or the model already has an adapter; the model is unchanged.
        """
        stored = read_adapter(folder)
        adapted = cls.from_files(model, stored, adapter_name, is_trainable)
        compatibility.warn_of_other_quantization(stored, adapted.quantization)
        return adapted

    @classmethod
    def from_files(
        cls, model: TrainableModel, stored: AdapterFiles, adapter_name: str = "default", is_trainable: bool = True
    ) -> PeftModel:
        """Add the stored adapter to its base model; arguments as in `from_pretrained`."""
        peft_model = PeftModel(model, stored_adapter(model, stored), adapter_name)
        if not is_trainable:
            for parameter in peft_model.parameters():
                parameter.stop_gradient = True
        peft_model.eval()
        return peft_model

    # -- merging ------------------------------------------------------------------------------------------------------
    def merge_adapter(self, adapter_names: Sequence[str] | None = None, safe_merge: bool = False) -> None:
        """Merge the active adapter into the base's weights, in place; `unmerge_adapter` undoes the merge.

        The base's weights stay in memory next to the merged weights. Modules in `modules_to_save` stay in the model.

        Args:
            adapter_names: None, or a list with the active adapter's name.
            safe_merge: check that the merged weights are finite.

        Raises:
            ValueError: the adapter is already merged or cannot be merged, the base is quantized, `adapter_names`
                contains an inactive adapter, or a merged weight is not finite; the model is unchanged.
        """
        self.adapters.merge(adapter_names, safe_merge)

    def unmerge_adapter(self) -> None:
        """Undo `merge_adapter` exactly.

        Raises:
            ValueError: no adapter is merged.
        """
        if not self.adapters.is_merged:
            raise ValueError("no adapter is merged; call merge_adapter() before unmerge_adapter()")
        self.adapters.unmerge()

    def merge_and_unload(self) -> TrainableModel:
        """Merge the adapter into the (dequantized) weights and return the base model.

        The `PeftModel` must not be used afterwards.

        Raises:
            ValueError: the adapter cannot be merged.
        """
        self.adapters.unmerge()
        merge_in_place(self.adapter)
        return self.base_model

    def unload(self) -> TrainableModel:
        """Remove the adapter and return the base model; the `PeftModel` must not be used afterwards."""
        self.adapters.unmerge()
        self.adapter.detach()
        return self.base_model


PeftModelForCausalLM = PeftModel  # the name in Hugging Face PEFT
