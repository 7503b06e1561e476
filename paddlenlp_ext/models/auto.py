"""Decoders by name, folder or configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import paddle

from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.load import load_weights
from paddlenlp_ext.checkpoint.model_config import read_generation_config, read_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.models.init_weights import initialize_weights
from paddlenlp_ext.quantization.hf_config import from_quantization_config
from paddlenlp_ext.quantization.model import load_quantized
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.quantization.quantize import BeforeQuantizing

DTYPES = ("float32", "bfloat16", "float16")


class AutoModelForCausalLM:
    """Builds the decoder that a configuration's `model_type` names; never instantiated itself."""

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        dtype: str = "float32",
        use_flash_attention: bool = True,
        quantization_config: QuantizationConfig | None = None,
        before_quantizing: BeforeQuantizing | None = None,
    ) -> CausalLM:
        """Load a model, in evaluation mode. One that was saved quantized comes so.

        Args:
            name_or_path: a Hugging Face folder, a .gguf file, a built-in name, or a hub id where there is a network.
            dtype: format of the parameters: float32, bfloat16 or float16.
            use_flash_attention: False keeps to attention in plain Paddle where a flash kernel could run, on a GPU.
            quantization_config: how linear layers are stored in few bits as they are read; embeddings, norms and head
                are not.
            before_quantizing: an adapter config's, where the adapter changes what is quantized (PiSSA, LoftQ).

        Raises:
            ValueError: no such model, one that the decoder cannot be built from, tensors that are not its own, or
                `quantization_config` of a model that is quantized already.
        """
        model = cls.without_values(name_or_path, dtype, use_flash_attention)
        read_values(model, name_or_path, quantization_config, before_quantizing)
        return model

    @classmethod
    def without_values(
        cls, name_or_path: str | os.PathLike[str], dtype: str = "float32", use_flash_attention: bool = True
    ) -> CausalLM:
        """As `from_pretrained`, but parameters have shapes alone: `read_values` reads what is still there of them.

        Raises:
            ValueError: no such model, or one that the decoder cannot be built from.
        """
        path = resolve_model(name_or_path)
        config = DecoderConfig.from_dict(read_model_config(path), name_or_path=os.fspath(name_or_path))
        with _parameters_in(dtype), paddle.LazyGuard():
            model = CausalLM(config)
        model.generation_config = read_generation_config(path)
        if not use_flash_attention:
            decline_flash_attention(model)
        model.eval()
        return model

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, seed: int = 0, dtype: str = "float32", name_or_path: str | None = None
    ) -> CausalLM:
        """Build a model with random weights from a config.json dict; the same seed gives the same weights.

        `name_or_path` is what the user called the model, if there is such a name.

        Raises:
            ValueError: the configuration is not one that the decoder can be built from.
        """
        decoder_config = DecoderConfig.from_dict(config, name_or_path)
        with _parameters_in(dtype):
            model = CausalLM(decoder_config)
        initialize_weights(model, seed, decoder_config.initializer_range)
        return model


def read_values(
    model: CausalLM,
    name_or_path: str | os.PathLike[str],
    quantization_config: QuantizationConfig | None = None,
    before_quantizing: BeforeQuantizing | None = None,
) -> None:
    """Fill a model of that name which was built without values; arguments as `from_pretrained`'s.

    Of a pipeline's model, the layers of this stage are read and no others.

    Raises:
        ValueError: the stored tensors are not the model's, or `quantization_config` of one that is quantized already.
    """
    path = resolve_model(name_or_path)
    saved = stored_quantization(path)
    if quantization_config is None and saved is None:
        load_weights(model, open_weights(path))
        return
    load_quantized(model, open_weights(path), quantization_config, before_quantizing)
    model.quantization = quantization_config or saved


def stored_quantization(name_or_path: str | os.PathLike[str]) -> QuantizationConfig | None:
    """How a model's weights were quantized before they were saved; None for one in plain numbers.

    Raises:
        ValueError: no such model, or one quantized by a method that is not read here.
    """
    return from_quantization_config(read_model_config(resolve_model(name_or_path)).get("quantization_config"))


def decline_flash_attention(model: CausalLM) -> None:
    """Keep to attention in plain Paddle on an accelerator; the CPU has no flash kernels to decline."""
    if paddle.get_device() != "cpu":
        model.use_attention("blocks")


@contextmanager
def _parameters_in(dtype: str) -> Iterator[None]:
    """Within the block new parameters have this format."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: a model's parameters are kept in one of {', '.join(DTYPES)}.")
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)
