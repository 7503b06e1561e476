"""AutoModel classes: load a decoder from a name or a folder, or build it from a config."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import paddle

from paddlenlp_ext.checkpoint.config_json import read_generation_config
from paddlenlp_ext.checkpoint.load_weights import load_weights
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.init_weights import initialize_weights
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.sequence_classifier import SequenceClassifier, classifier_config
from paddlenlp_ext.ops.cpp.huge_pages import use_huge_pages
from paddlenlp_ext.quantization.bitsandbytes_config import BitsAndBytesConfig, dtype_name
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import load_quantized
from paddlenlp_ext.quantization.quantize_weight import BeforeQuantizing

DTYPES = ("float32", "bfloat16", "float16")


class AutoModelForCausalLM:
    """Factory of causal language models. `model_type` in config.json selects the model family."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str] | ModelSource,
        dtype: Any = None,
        use_flash_attention: bool = True,
        quantization_config: QuantizationConfig | BitsAndBytesConfig | None = None,
        before_quantizing: BeforeQuantizing | None = None,
        config_overrides: Mapping[str, Any] | None = None,
        *,
        torch_dtype: Any = None,
        device_map: Any = None,
    ) -> CausalLM:
        """Load a model in evaluation mode. Quantized checkpoints stay quantized.

        Args:
            name_or_path: a Hugging Face folder, a .gguf file, a built-in name, a hub id (needs a network), or a
                resolved `ModelSource`.
            dtype: dtype of the parameters: "float32", "bfloat16", "float16" (GPU only), a Paddle dtype, or "auto" for
                the dtype in config.json. None: the compute dtype of a `BitsAndBytesConfig` if it is set, else float32.
            use_flash_attention: True runs attention on a GPU in flash attention kernels, False in plain Paddle. No
                effect on the CPU.
            quantization_config: quantization to apply to the linear layers while loading. Embeddings, norms and lm_head
                stay in `dtype`.
            before_quantizing: function that transforms each weight before quantization; used by PiSSA and LoftQ.
            config_overrides: config.json keys and their new values, such as `rope_scaling`. `save_pretrained` writes
                the new values. A different `vocab_size` resizes embedding and lm_head. Each new row is the mean of the
                stored rows.
            torch_dtype: alias of `dtype` for transformers code.
            device_map: None, "auto", or Paddle's current device (`paddle.get_device()`). All weights are loaded on the
                current device.

        Raises:
            ValueError: the model does not exist or has an unsupported architecture, its tensors do not match
                config.json, `quantization_config` is given for a quantized checkpoint, dtype is float16 on the CPU,
                two arguments name different dtypes, or `device_map` names another device.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> from paddlenlp_ext import AutoModelForCausalLM, BitsAndBytesConfig
            >>> sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
            >>> tiny = AutoModelForCausalLM.from_config({"model_type": "llama", "num_attention_heads": 2, **sizes})
            >>> with TemporaryDirectory() as folder:
            ...     tiny.save_pretrained(folder)
            ...     nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            ...     model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4)
            >>> model.quantization.describe()
            'nf4, blocks of 64'
        """
        _check_device_map(device_map)
        source = _source_of(name_or_path, quantization_config, config_overrides)
        dtype = _dtype_of(dtype, torch_dtype, quantization_config, source)
        return _load(source, dtype, use_flash_attention, before_quantizing)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, seed: int = 0, dtype: str = "float32", name_or_path: str | None = None
    ) -> CausalLM:
        """Build a model with random weights from a config.json dict; equal seeds give equal weights.

        Args:
            config: contents of config.json.
            seed: seed of the weights.
            dtype: dtype of the parameters: float32, bfloat16 or, on a GPU, float16.
            name_or_path: name of the model in messages and saved adapters; None: unnamed.

        Raises:
            ValueError: the decoder does not support the config or the dtype.

        Example:
            >>> from paddlenlp_ext import AutoModelForCausalLM
            >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
            >>> model = AutoModelForCausalLM.from_config({"model_type": "llama", "num_attention_heads": 4, **sizes})
            >>> len(model.generate([[5, 6, 7]], max_new_tokens=4)[0])
            4
        """
        decoder_config = DecoderConfig.from_dict(config, name_or_path)
        with _default_dtype(dtype):
            model = CausalLM(decoder_config)
        initialize_weights(model, seed, decoder_config.initializer_range)
        return model


class AutoModelForSequenceClassification:
    """Factory of reward models: decoders with a score head."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str] | ModelSource,
        dtype: Any = None,
        use_flash_attention: bool = True,
        quantization_config: QuantizationConfig | BitsAndBytesConfig | None = None,
        before_quantizing: BeforeQuantizing | None = None,
        config_overrides: Mapping[str, Any] | None = None,
        seed: int = 0,
        *,
        torch_dtype: Any = None,
        device_map: Any = None,
    ) -> SequenceClassifier:
        """Load a reward model in evaluation mode.

        Args:
            name_or_path: a sequence classifier with one label, or a language model, to which a score head is added.
            dtype, use_flash_attention, quantization_config, before_quantizing, config_overrides, torch_dtype,
                device_map: see `AutoModelForCausalLM.from_pretrained`.
            seed: seed of a new score head, whose weights are drawn from normal(0, initializer_range).

        Raises:
            ValueError: see `AutoModelForCausalLM.from_pretrained`; or the model has several labels.
        """
        _check_device_map(device_map)
        source = _source_of(name_or_path, quantization_config, config_overrides).as_classifier(seed)
        dtype = _dtype_of(dtype, torch_dtype, quantization_config, source)
        model = _load(source, dtype, use_flash_attention, before_quantizing)
        assert isinstance(model, SequenceClassifier), "the source must describe a classifier (as_classifier)"
        return model


def load_for_task(
    name_or_path: str | os.PathLike[str] | ModelSource, *, task_type: str = "CAUSAL_LM", **options: Any
) -> CausalLM:
    """Load a language model, or a reward model for the task SEQ_CLS; `options` are arguments of `from_pretrained`."""
    auto = AutoModelForSequenceClassification if task_type == SequenceClassifier.task_type else AutoModelForCausalLM
    return auto.from_pretrained(name_or_path, **options)


def _check_device_map(device_map: Any) -> None:
    """Check that a transformers `device_map` places the whole model on Paddle's current device.

    Raises:
        ValueError: the map names another device, or splits the model over devices.
    """
    device = paddle.get_device()
    index = device.partition(":")[2]
    wanted = device_map[""] if isinstance(device_map, Mapping) and set(device_map) == {""} else device_map
    known = [None, "auto", device, *((f"cuda:{index}", int(index)) if index else ())]
    if wanted not in known:
        raise ValueError(
            f"device_map={device_map!r}: models are loaded on Paddle's current device, which is {device}; pass None, "
            f"'auto' or '{device}', or first choose another device with paddle.set_device"
        )


def _source_of(
    name_or_path: str | os.PathLike[str] | ModelSource,
    quantization: QuantizationConfig | BitsAndBytesConfig | None,
    config_overrides: Mapping[str, Any] | None,
) -> ModelSource:
    if isinstance(quantization, BitsAndBytesConfig):
        quantization = quantization.to_quantization_config()
    source = name_or_path if isinstance(name_or_path, ModelSource) else ModelSource.resolve(name_or_path)
    if quantization is not None:
        source = replace(source, requested_quantization=quantization)
    return replace(source, config_overrides=dict(config_overrides)) if config_overrides else source


def _dtype_of(
    dtype: Any, torch_dtype: Any, quantization: QuantizationConfig | BitsAndBytesConfig | None, source: ModelSource
) -> str:
    """Return the dtype name of the parameters from the arguments of `from_pretrained`.

    Raises:
        ValueError: two arguments name different dtypes.
    """
    compute_dtype = quantization.compute_dtype if isinstance(quantization, BitsAndBytesConfig) else None
    arguments = {"dtype": dtype, "torch_dtype": torch_dtype, "bnb_4bit_compute_dtype": compute_dtype}
    given = {name: dtype_name(each) for name, each in arguments.items() if each is not None}
    named = {"auto": source.config.get("dtype") or source.config.get("torch_dtype") or "float32"}
    names = {name: dtype_name(named.get(each, each)) for name, each in given.items()}
    if len(set(names.values())) > 1:
        pairs = ", ".join(f"{name}={each}" for name, each in names.items())
        raise ValueError(f"{pairs}: parameters and activations have the same dtype; set these arguments to one dtype")
    return next(iter(names.values()), "float32")


def _load(
    source: ModelSource, dtype: str, use_flash_attention: bool, before_quantizing: BeforeQuantizing | None
) -> CausalLM:
    model = build_skeleton(source, dtype, use_flash_attention)
    load_values(model, source, before_quantizing)
    use_huge_pages([*model.parameters(), *model.buffers()])
    return model


def build_skeleton(source: ModelSource, dtype: str = "float32", use_flash_attention: bool = True) -> CausalLM:
    """Build a model with unallocated parameters. `load_values` allocates and reads the parameters.

    Raises:
        ValueError: the architecture or the dtype is not supported, or the model is a classifier with several labels.
    """
    config = source.decoder_config()
    with _default_dtype(dtype), paddle.LazyGuard():
        if source.score_seed is None:
            model = CausalLM(config)
        else:
            model = SequenceClassifier(classifier_config(config, source.config))
    model.generation_config = read_generation_config(source.path)
    if not use_flash_attention:
        disable_flash_attention(model)
    model.eval()
    return model


def load_values(model: CausalLM, source: ModelSource, before_quantizing: BeforeQuantizing | None = None) -> None:
    """Read the parameters of a model that `build_skeleton` returned, and apply `source.requested_quantization`.

    Under pipeline parallelism, a rank reads only the layers of its stage.

    Raises:
        ValueError: the stored tensors do not match the model, quantization is requested for weights that are already
            quantized, or a weight cannot be quantized.
    """
    if source.quantization is None:
        load_weights(model, source.open_weights())
    else:
        load_quantized(model, source.open_weights(), source.requested_quantization, before_quantizing)
        model.quantization = source.quantization


def disable_flash_attention(model: CausalLM) -> None:
    """Compute attention in plain Paddle instead of a flash attention kernel. No effect on the CPU."""
    if not capabilities(paddle.get_device()).cpp:
        model.use_attention("blocks")


@contextmanager
def _default_dtype(dtype: str) -> Iterator[None]:
    """Create parameters in `dtype` inside a `with` block."""
    if dtype == "float16" and not capabilities(device := paddle.get_device()).fp16:
        remedy = "use bfloat16 or float32" if device == "cpu" else "use float32"
        raise ValueError(f"dtype float16: Paddle has no float16 arithmetic on the device {device}; {remedy}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)
