"""Decoders by name, folder or configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import paddle

from paddlenlp_ext.checkpoint.load import load_weights
from paddlenlp_ext.checkpoint.model_config import read_generation_config, read_model_config
from paddlenlp_ext.checkpoint.resolve import resolve_model
from paddlenlp_ext.checkpoint.weights import open_weights
from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.models.initialize import initialize_weights

DTYPES = ("float32", "bfloat16", "float16")


class AutoModelForCausalLM:
    """Builds the decoder that a configuration's `model_type` names; never instantiated itself."""

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], dtype: str = "float32", use_flash_attention: bool = True
    ) -> CausalLM:
        """Load a model, in evaluation mode.

        Args:
            name_or_path: a Hugging Face folder, a .gguf file, a built-in name, or a hub id where there is a network.
            dtype: format of the parameters: float32, bfloat16 or float16.
            use_flash_attention: False keeps to attention in plain Paddle where a flash kernel could run.

        Raises:
            ValueError: no such model, one that the decoder cannot be built from, or tensors that are not its own.
        """
        model = cls._build(name_or_path, dtype, use_flash_attention)
        load_weights(model, open_weights(resolve_model(name_or_path)))
        return model

    @classmethod
    def without_values(
        cls, name_or_path: str | os.PathLike[str], dtype: str = "float32", use_flash_attention: bool = True
    ) -> CausalLM:
        """As `from_pretrained`, but parameters have shapes alone, to be cut before anything is read.

        Raises:
            ValueError: no such model, or one that the decoder cannot be built from.
        """
        with paddle.LazyGuard():
            return cls._build(name_or_path, dtype, use_flash_attention)

    @classmethod
    def _build(cls, name_or_path: str | os.PathLike[str], dtype: str, use_flash_attention: bool) -> CausalLM:
        path = resolve_model(name_or_path)
        config = DecoderConfig.from_dict(read_model_config(path), name_or_path=os.fspath(name_or_path))
        with _parameters_in(dtype):
            model = CausalLM(config)
        model.generation_config = read_generation_config(path)
        if not use_flash_attention:
            model.use_attention("blocks")
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
