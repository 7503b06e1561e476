"""Base class of the adapter methods' configs, the interface to implement when adding a method.

Required: `peft_type`, `targets`, `wrap`, `warm_start`, `to_adapter_config` and `from_adapter_config`. All other members
have a default that fits an adapter of linear layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.options import OptionGroup, option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.arguments import ConfigType
from paddlenlp_ext.peft.config_files import find_config, read_config
from paddlenlp_ext.peft.layers import AdapterLayer

# Fields of adapter_config.json that say where a file comes from and change no number.
_INFORMATIVE = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "base_quantization",
        "inference_mode",
        "peft_type",
        "peft_version",
        "revision",
        "task_type",
    }
)


@dataclass(kw_only=True)
class PeftConfig(OptionGroup, metaclass=ConfigType):
    """Base config of an adapter method; a subclass registers in `PEFT_METHODS` under its JSON switch.

    The constructor also accepts the argument names of Hugging Face PEFT and PaddleNLP (peft/arguments.py).

    Class attributes:
        peft_type: the method's name in adapter_config.json; Hugging Face PEFT's where PEFT has the method.
        mergeable: whether its layers are `LinearAdapter`s, so that it can be folded into the weights.
        reads_prompts: whether prompts and answers are treated differently: `hidden_states` then takes `prompt_lengths`,
            for each row of the batch how many positions of each document are its prompt.
        starts_from_weights: whether a fresh adapter looks at the base's values, and not at its shapes alone.
        model_class: what `get_peft_model` returns, where a method needs more than layers: a forward of its own, a
            loss beside the model's, something to do at the start or after a step. None means `PeftModel`.
        refines: set only by a variant of another method: that method's switch, which has to be on as well and whose
            key prefix the variant shares (config/run_config.py reads it). Its files may have that method's `peft_type`;
            `claims` tells them apart.
        paddlenlp_config: the name of PaddleNLP's config file for the method, where PaddleNLP has it.
        needs_quantized_base: whether a run over a base in full precision makes no sense.
        paddlenlp_array: the name of a NumPy file beside it that holds the whole adapter; where it is there, it is read,
            by `from_paddlenlp_array`.
        changes_bias: whether it changes biases too.
        excludes: key that cuts layers or sequences over processes (tensor_parallel_degree, sequence_parallel) -> why
            the method's mathematics does not allow it.
        free_on_resume: fields in which a run may differ from the checkpoint that it resumes: how training goes, how
            the adapter began, and what the tensors' names and shapes say better than the spelling of an option.
        own_keys: name of a tensor that belongs to no layer of the model -> its whole key in the file, where Hugging
            Face PEFT has such tensors.
    """

    peft_type: ClassVar[str]
    mergeable: ClassVar[bool] = True
    reads_prompts: ClassVar[bool] = False
    starts_from_weights: ClassVar[bool] = False
    model_class: ClassVar[type[TrainableModel] | None] = None
    refines: ClassVar[str | None] = None
    needs_quantized_base: ClassVar[bool] = False
    paddlenlp_config: ClassVar[str | None] = None
    paddlenlp_array: ClassVar[str | None] = None
    own_keys: ClassVar[Mapping[str, str]] = {}
    changes_bias: ClassVar[bool] = False
    excludes: ClassVar[Mapping[str, str]] = {}
    free_on_resume: ClassVar[frozenset[str]] = frozenset({"path", "dropout", "target_modules"})

    path: str | None = option(None, help="folder of an adapter to start from; its structure (rank, targets) is used")
    base_model_name_or_path: str | None = field(default=None, compare=False, repr=False)
    """Base model that a stored adapter names."""

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> PeftConfig:
        """Read the config of an adapter folder.

        Args:
            folder: as `PeftModel.from_pretrained`'s.

        Returns:
            The config of the stored method, whichever class this is called on.

        Raises:
            ValueError: no adapter there, or a method or a field that is not available.
        """
        config, fields = read_config(find_config(folder))
        config.base_model_name_or_path = fields.get("base_model_name_or_path")
        return config

    def targets(self, model: TrainableModel) -> list[str]:
        """Return the dotted names of the layers to wrap; empty for a method that wraps none.

        Raises:
            ValueError: the config asks for a layer that the model lacks.
        """
        raise NotImplementedError

    def before_quantizing(
        self, name: str, weight: paddle.Tensor, quantize_dequantize: Callable[[paddle.Tensor], paddle.Tensor]
    ) -> paddle.Tensor:
        """Return the weight to quantize: the weight itself, unless the adapter starts with a part of it.

        Called for every layer that is quantized while the base is loaded, on the object whose `wrap` is called later.

        Args:
            name: of the layer.
            weight: float32 [out, in], not to be written to.
            quantize_dequantize: what a weight of that layer becomes when it is quantized and dequantized.
        """
        return weight

    def before_quantizing_again(
        self,
        name: str,
        weight: paddle.Tensor,
        quantize_dequantize: Callable[[paddle.Tensor], paddle.Tensor],
        tensors: Mapping[str, np.ndarray],
    ) -> paddle.Tensor:
        """Return the weight to quantize under a stored adapter, whose `tensors` contain the part to subtract."""
        return self.before_quantizing(name, weight, quantize_dequantize)

    def wrap(self, name: str, base: nn.Layer, seed: int) -> AdapterLayer:
        """Return the new adapter of one layer; random values depend only on the seed and the layer's name."""
        raise NotImplementedError

    def wrapper(self, bases: Mapping[str, Any], seed: int) -> Callable[[str, nn.Layer], AdapterLayer]:
        """Return the function (name, base) -> adapter; `wrap`, unless the layers share tensors.

        Args:
            bases: name -> layer of all that will be wrapped, or whatever has the layer's `in_features` and
                `out_features`.
            seed: as `wrap`'s.
        """
        return lambda name, base: self.wrap(name, base, seed)

    def warm_start(self, stored: PeftConfig) -> PeftConfig:
        """Return the config of a run that starts from `path`: structure from `stored`, the rest from this config."""
        raise NotImplementedError

    def learning_rate_scale(self, parameter_name: str) -> float:
        """Return the factor of an adapter parameter's learning rate."""
        return 1.0

    def decays(self, parameter_name: str) -> bool:
        """Return whether weight decay may act on an adapter parameter; False if 0 is not its neutral value."""
        return True

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        """Return the method's fields of adapter_config.json; `model` carries the adapter."""
        raise NotImplementedError

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        """Return whether a config file of the refined method is this variant's; only for methods with `refines`."""
        return False

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the adapter's tensors to those of its files."""
        return dict(tensors)

    def for_tensors(self, names: Collection[str]) -> PeftConfig:
        """Return the config adjusted to the names of the stored tensors."""
        return self

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert the tensors of a file to the adapter's own: the exact inverse of `to_stored`."""
        return dict(tensors)

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> PeftConfig:
        """Build the config from the fields of adapter_config.json.

        Raises:
            ValueError: a field asks for something that is not available here.
        """
        raise NotImplementedError

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> PeftConfig:
        """Build the config from PaddleNLP's file; only for methods with `paddlenlp_config`."""
        raise NotImplementedError

    @classmethod
    def from_paddlenlp_array(cls, value: np.ndarray) -> dict[str, np.ndarray]:
        """Return the adapter's tensors from the NumPy file; only for methods with `paddlenlp_array`."""
        raise NotImplementedError

    @classmethod
    def tensor_from_paddlenlp(cls, name: str, value: np.ndarray) -> tuple[str, np.ndarray] | None:
        """Return PaddleNLP's tensor with this package's name and layout, or None if it is not needed."""
        raise NotImplementedError


def required_field(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field that a file has to have.

    Raises:
        ValueError: it has not.
    """
    if fields.get(name) is None:
        raise ValueError(f"{name} is missing")
    return fields[name]


def refuse_unread_fields(fields: Mapping[str, Any], read: set[str]) -> None:
    """Check that whatever a file asks for beyond the fields that were read is nothing at all.

    Raises:
        ValueError: a field that nobody reads has a value other than None, False, 0, "", "none", [] or {}; all such
            fields are named.
    """
    asked = [
        f"{name}={value!r}"
        for name, value in fields.items()
        if name not in read and name not in _INFORMATIVE and value not in (None, False, 0, "", "none", [], {})
    ]
    if asked:
        raise ValueError(f"asks for {', '.join(asked)}: not available yet. Adapters without it can be loaded.")
