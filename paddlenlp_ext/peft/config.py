"""`PeftConfig`, the base class of adapter configs.

Every method implements `peft_type`, `targets`, `wrap`, `to_adapter_config` and `from_adapter_config`. The defaults of
all other members suit adapters of linear layers; other methods override them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.config.dataclass_options import Option, OptionGroup, option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.peft.constructor_arguments import ConfigType, field_of
from paddlenlp_ext.peft.formats.adapter_config import PaddleNLPFiles, find_config, read_config
from paddlenlp_ext.peft.layers import AdapterLayer

if TYPE_CHECKING:
    from typing_extensions import Self

# Fields of adapter_config.json that a method may ignore, because other code reads them or they do not affect results.
_INFORMATIVE = frozenset(
    {
        "auto_mapping",
        "base_config_overrides",
        "base_model_name_or_path",
        "base_quantization",
        "inference_mode",
        "peft_type",
        "peft_version",
        "revision",
        "split_layers",
        "task_type",
    }
)


_EFFECTS = {
    "alora_invocation_tokens": "activates the adapter after certain tokens",
    "arrow_config": "routes tokens among several adapters",
    "fan_in_fan_out": "transposes the weights",
    "kasa_config": "adds trained singular values",
    "layer_replication": "repeats decoder layers",
    "megatron_config": "adapts Megatron layers",
    "monteclora_config": "samples the adapter's weights",
    "lora_bias": "trains a bias of B; supported only by plain LoRA",
    "target_parameters": "adapts experts or routers; supported only by plain LoRA",
    "trainable_token_indices": "trains rows of the embedding",
    "use_bdlora": "makes A or B block-diagonal",
    "use_qalora": "pools the inputs of quantized layers",
    "velora_config": "compresses saved activations",
}
"""Unsupported field of Hugging Face PEFT -> its effect, for error messages."""

BIASES = ("none", "all", "adapted")
"""Allowed values of the option `bias`."""


@dataclass(kw_only=True)
class PeftConfig(OptionGroup, metaclass=ConfigType):
    """Base config of an adapter method; `PEFT_METHODS` registers each subclass under the method's JSON key.

    The constructor also accepts aliases of the options (peft/constructor_arguments.py).

    Class attributes:
        peft_type: name of the method in adapter_config.json; equal to Hugging Face PEFT's name if PEFT has the method.
        mergeable: whether the adapter layers are `WeightAdapter`s and can be merged into the weights.
        reads_prompts: whether the method treats prompt and answer tokens differently. `hidden_states` then gets
            `prompt_lengths`: for each row of the batch, the prompt length of each document.
        starts_from_weights: whether initialization needs the values of the base weights, and not only their shapes.
        adapter_class: subclass of `Adapter`, for a custom forward pass, loss or step hook; None: `Adapter`.
        refines: for a variant such as DoRA, the JSON key of the method that it refines ("lora"). A run must set this
            key and the variant's own key. The keys of the variant's options start with the refined method's prefix
            (config/run_config.py). `claims` recognizes the variant's files.
        needs_quantized_base: whether the method requires a quantized base.
        paddlenlp_files: PaddleNLP's file names for the method; None if PaddleNLP does not have the method.
        own_keys: name of a tensor that belongs to no layer -> full key of the tensor in Hugging Face PEFT's files.
        key_prefix: prefix of the keys in Hugging Face PEFT's files, except for `own_keys`.
        changes_bias: whether merging also changes biases.
        unavailable_keys: for a variant, JSON key of the refined method that the variant does not support -> reason.
        excludes: JSON key that cannot be combined with the method (such as sequence_parallel) -> reason.
        free_on_resume: fields that may differ between a run and the checkpoint that it resumes. These fields affect
            only training or initialization, or follow from the tensors' names and shapes.

    Raises:
        ValueError: an option is out of range.
    """

    peft_type: ClassVar[str]
    mergeable: ClassVar[bool] = True
    reads_prompts: ClassVar[bool] = False
    starts_from_weights: ClassVar[bool] = False
    adapter_class: ClassVar[type[TrainingHooks] | None] = None
    refines: ClassVar[str | None] = None
    needs_quantized_base: ClassVar[bool] = False
    paddlenlp_files: ClassVar[PaddleNLPFiles | None] = None
    own_keys: ClassVar[Mapping[str, str]] = {}
    key_prefix: ClassVar[str] = "base_model.model."
    changes_bias: ClassVar[bool] = False
    unavailable_keys: ClassVar[Mapping[str, str]] = {}
    excludes: ClassVar[Mapping[str, str]] = {}
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {"path", "dropout", "target_modules"}
        | {"exclude_modules", "modules_to_save", "bias", "saved_embeddings", "ensure_weight_tying"}
    )

    trainable_token_indices: ClassVar[object | None] = None
    """Tokens whose embedding and lm_head rows are trained with the adapter; a LoRA option."""
    adapts_tables: ClassVar[bool] = False
    """Whether the embedding and lm_head can be targets."""

    path: str | None = option(
        None, help="folder of a saved adapter to start from; the run uses the saved rank, targets and similar options"
    )
    base_model_name_or_path: str | None = field(default=None, compare=False, repr=False)
    """Name or path of the base model, as recorded in the adapter's config file."""
    exclude_modules: tuple[str, ...] | None = None
    """Targets to leave out, as name suffixes or regular expressions."""
    modules_to_save: tuple[str, ...] | None = None
    """Modules to train in full and save with the adapter, as name suffixes such as "lm_head" or "norm"."""
    bias: str = "none"
    """Biases of the base to train and save with the adapter: "none", "all", or "adapted" (in adapted layers only)."""
    ensure_weight_tying: bool = False
    """Whether tied modules in `modules_to_save` stay tied; Hugging Face PEFT has this option in LoRA and AdaLoRA."""
    saved_embeddings: tuple[str, ...] = ()
    """Names of the layers (embedding, lm_head) whose frozen weights are in the adapter's file."""

    @property
    def corrects_quantization(self) -> bool:
        """Return whether the update corrects the base's quantization error, and so requires the same format."""
        return self.needs_quantized_base

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("exclude_modules", "modules_to_save"):
            entries = getattr(self, name)
            if entries is not None:
                setattr(self, name, (entries,) if isinstance(entries, str) else tuple(entries) or None)
        if self.bias.endswith("_only"):  # Hugging Face PEFT's values: lora_only, oft_only, ...
            self.bias = "adapted"
        if self.bias not in BIASES:
            raise ValueError(f"bias={self.bias!r} is not one of: {', '.join(BIASES)}")

    def name_in_errors(self, option_: Option) -> str:
        """Return an option's name for error messages: class, field, and the JSON key if it differs from the field."""
        name = f"{type(self).__name__}.{option_.attribute}"
        return name if option_.key == option_.attribute else f"{name}: {option_.key}"

    if not TYPE_CHECKING:  # type checkers see only the fields, without aliases

        def __getattr__(self, name):
            """Return the value of the option with the alias `name`, such as `rank` for `r`."""
            field_name = field_of(type(self), name)
            if field_name is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self, field_name)

        def __setattr__(self, name, value):
            """Set the option with the field name or alias `name`."""
            super().__setattr__(field_of(type(self), name) or name, value)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed options, validated like a new config."""
        changed = copy.copy(self)
        for name in list(vars(self)):
            if isinstance(getattr(type(self), name, None), cached_property):
                del changed.__dict__[name]
        for name, value in changes.items():
            setattr(changed, name, value)
        changed.__post_init__()
        return changed

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> PeftConfig:
        """Read the config of an adapter folder; the result is an instance of the stored method's config class.

        Raises:
            ValueError: the folder has no adapter, or the adapter's method or a field is not supported.
        """
        config, fields = read_config(find_config(folder))
        config.base_model_name_or_path = fields.get("base_model_name_or_path")
        return config

    def targets(self, model: TrainableModel) -> list[str]:
        """Return the dotted names of the layers to wrap, or an empty list if the method wraps no layers.

        Raises:
            ValueError: a requested layer is not in the model.
        """
        raise NotImplementedError

    def before_quantizing(
        self,
        name: str,
        weight: paddle.Tensor,
        quantize_dequantize: Callable[[paddle.Tensor], paddle.Tensor],
        stored: Mapping[str, np.ndarray] | None = None,
    ) -> paddle.Tensor:
        """Return the weight to quantize: `weight`, or `weight` minus the initial update of a method such as PiSSA.

        The loader calls `before_quantizing` for every layer to quantize, and later `wrap` on the same config object.

        Args:
            name: name of the layer.
            weight: float32 [out, in]; must not be modified.
            quantize_dequantize: function that rounds a weight to the values of the layer's quantized format.
            stored: tensors of a stored adapter, including the factors to subtract; None for a new adapter.
        """
        return weight

    def wrap(self, name: str, base: nn.Layer, seed: int) -> AdapterLayer:
        """Return a new adapter layer around `base`; random values depend only on the seed and the layer's name."""
        raise NotImplementedError

    def wrapper(self, bases: Mapping[str, Any], seed: int) -> Callable[[str, nn.Layer], AdapterLayer]:
        """Return a function that maps (name, base) to the adapter layer; methods with shared tensors override it.

        Args:
            bases: name -> layer, for all layers to wrap; only `in_features` and `out_features` are used.
            seed: seed of the random values.
        """
        return lambda name, base: self.wrap(name, base, seed)

    def warm_start(self, stored: PeftConfig) -> PeftConfig:
        """Return the config of a run that starts from the adapter at `path`.

        By default, all options are taken from `stored`, except options whose names end with "path" or "dropout".

        Args:
            stored: config of the adapter at `path`.
        """
        assert isinstance(stored, type(self))
        names = [field.name for field in dataclasses.fields(self) if field.name.endswith(("path", "dropout"))]
        return stored.replace(**{name: getattr(self, name) for name in names})

    def learning_rate_scale(self, parameter_name: str) -> float:
        """Return the factor that multiplies the learning rate of an adapter parameter."""
        return 1.0

    def decays(self, parameter_name: str) -> bool:
        """Return whether weight decay applies to an adapter parameter.

        Weight decay pulls parameters toward 0. Parameters whose neutral value is not 0 are therefore excluded, such as
        trained token rows, which are initialized with rows of the base.
        """
        return not parameter_name.endswith(".trainable_tokens_delta")

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        """Return the method's fields of adapter_config.json, given the model with the adapter."""
        raise NotImplementedError

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        """Return whether fields of an adapter config file, or constructor arguments, select this variant."""
        return False

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the adapter's tensors from the in-memory form to the stored form."""
        return dict(tensors)

    def for_tensors(self, names: Collection[str]) -> PeftConfig:
        """Return the config with options, such as the targets, derived from the names of the stored tensors."""
        return self

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert the adapter's tensors from the stored form to the in-memory form (inverse of `to_stored`)."""
        return dict(tensors)

    def for_base(self, tensors: Mapping[str, np.ndarray], base: Any) -> tuple[PeftConfig, dict[str, np.ndarray]]:
        """Return the config and tensors of a stored adapter, with the layer names of the base model.

        Args:
            tensors: name in the file -> tensor.
            base: config of the base (`DecoderConfig`).

        Raises:
            ValueError: the adapter does not fit the base.
        """
        return self, dict(tensors)

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> PeftConfig:
        """Build the config from the fields of adapter_config.json.

        Raises:
            ValueError: a field has an unsupported value.
        """
        raise NotImplementedError

    @classmethod
    def from_paddlenlp(cls, fields: Mapping[str, Any]) -> PeftConfig:
        """Build the config from the fields of PaddleNLP's config file; only for methods with `paddlenlp_files`."""
        raise NotImplementedError

    @classmethod
    def tensors_from_paddlenlp(cls, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert PaddleNLP's tensors to this package's names and layout; only for methods with `paddlenlp_files`.

        Args:
            tensors: stored tensors keyed by names that start with "model."; for a NumPy file, the array keyed by the
                file's name.
        """
        raise NotImplementedError


def required_field(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a required field of a config file.

    Raises:
        ValueError: the field is missing or null.
    """
    if fields.get(name) is None:
        raise ValueError(f"{name} is missing")
    return fields[name]


def field_or(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of a field of a config file, or `default` if the field is missing or null."""
    value = fields.get(name)
    return default if value is None else value


def refuse_unread_fields(fields: Mapping[str, Any], read: set[str]) -> None:
    """Check that the config-file fields that a method does not read have no effect.

    Raises:
        ValueError: an unread field has a value other than None, False, 0, "", "none", [] or {}. Fields in
            `_INFORMATIVE` may have any value.
    """
    unsupported = [
        f"{name}={value!r}" + (f" ({_EFFECTS[name]})" if name in _EFFECTS else "")
        for name, value in fields.items()
        if name not in read and name not in _INFORMATIVE and value not in (None, False, 0, "", "none", [], {})
    ]
    if unsupported:
        raise ValueError(
            f"unsupported fields: {', '.join(unsupported)}; only adapters without these fields can be loaded"
        )
