"""Source of a model: the files with config, weights and tokenizer. A run locates these files once.

name      what the user wrote            ./my-model, model.gguf, smollm2-135m-instruct, Qwen/Qwen3-0.6B
|  resolve (unpacks a built-in model; downloads a hub's model without its weights)
v
path ---> config, stored quantization, weights (downloaded when they are opened)
tokenizer_path ---> tokenizer
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.resized_embeddings import with_vocab_size
from paddlenlp_ext.checkpoint.score_head import SCORE_WEIGHT, ClassifierWeights
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.models.context_extension import context_overrides
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.init_weights import random_weight
from paddlenlp_ext.models.moe_config import router_overrides
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.config_json import from_quantization_config


@dataclass(frozen=True)
class ModelSource:
    """Files of a model and the quantization to load them with. Files are read on first use.

    Attributes:
        name: name of the model as the user wrote it, for messages and saved adapters.
        path: Hugging Face folder or .gguf file.
        tokenizer_path: folder or file to load the tokenizer from.
        requested_quantization: quantization to apply while loading; None loads the weights as stored.
        config_overrides: replaced keys of config.json (models/context_extension.py). A different `vocab_size` resizes
            embedding and lm_head.
        score_seed: seed of the score head of a classifier, if the files have no score head; None: a language model.
        new_token_ids: ids of tokens without a stored embedding row, such as tokens that the run adds.
    """

    name: str
    path: Path
    tokenizer_path: Path
    requested_quantization: QuantizationConfig | None = None
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    score_seed: int | None = None
    new_token_ids: tuple[int, ...] = ()

    @classmethod
    def resolve(
        cls,
        name_or_path: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        quantization: QuantizationConfig | None = None,
    ) -> ModelSource:
        """Find the files of a model.

        Args:
            name_or_path: folder, .gguf file, built-in name or hub id (`resolve_model`).
            tokenizer: name or path of the model whose tokenizer is used; None: `name_or_path`.
            quantization: quantization to apply to the linear layers while loading.

        Raises:
            ValueError: the model does not exist; the message names the places that were searched.
        """
        name, path = os.fspath(name_or_path), resolve_model(name_or_path, weights=False)
        has_own_tokenizer = tokenizer is None or os.fspath(tokenizer) == name
        return cls(name, path, path if has_own_tokenizer else resolve_model(tokenizer, weights=False), quantization)

    @classmethod
    def from_config(cls, config: ModelConfig) -> ModelSource:
        """Find the files of a run's `model_name_or_path`, read config.json, and apply the model options of the run.

        Raises:
            ValueError: see `resolve`; or the quantization, long-sequence strategy or router options are invalid.
        """
        assert config.model_name_or_path is not None, "validation requires model_name_or_path"
        quantization = None
        if config.weight_quantize_algo is not None:
            quantization = QuantizationConfig(
                algo=config.weight_quantize_algo,
                block_size=config.weight_blocksize,
                double_quant=config.weight_double_quant,
                double_quant_block_size=config.weight_double_quant_block_size,
            )
        source = cls.resolve(config.model_name_or_path, config.tokenizer_name_or_path, quantization)
        if config.int8_training and source.quantization is None:
            source = replace(source, requested_quantization=QuantizationConfig(algo="weight_only_int8"))
        overrides = router_overrides(source.config, config.router_aux_loss_coef)
        return replace(source, config_overrides={**context_overrides(source.config, config), **overrides})

    def as_classifier(self, seed: int, pad_token_id: int | None = None) -> ModelSource:
        """Return a source that loads these files as a reward model (sequence classifier with one label).

        Args:
            seed: seed of the score head, if the files have no score head.
            pad_token_id: padding token; None: `pad_token_id` of config.json.
        """
        changed = pad_token_id is not None and pad_token_id != self.config.get("pad_token_id")
        overrides = {**self.config_overrides, "pad_token_id": pad_token_id} if changed else self.config_overrides
        return replace(self, score_seed=seed, config_overrides=overrides)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of config.json, or of equivalent GGUF metadata, after applying `config_overrides`."""
        return {**read_model_config(self.path), **self.config_overrides}

    def decoder_config(self) -> DecoderConfig:
        """Build the config of the decoder from `config`.

        Raises:
            ValueError: see `DecoderConfig.from_dict`.
        """
        return DecoderConfig.from_dict(self.config, self.name, self.config_overrides)

    @cached_property
    def stored_quantization(self) -> QuantizationConfig | None:
        """Quantization of the stored weights; None for floating-point weights.

        Raises:
            ValueError: the weights were quantized by an unsupported method.
        """
        return from_quantization_config(self.config.get("quantization_config"))

    @property
    def quantization(self) -> QuantizationConfig | None:
        """Requested quantization; if none is requested, the quantization of the stored weights."""
        return self.requested_quantization or self.stored_quantization

    def open_weights(self) -> WeightSource:
        """Open the stored tensors under the decoder's parameter names, with embeddings resized to `vocab_size`.

        The weights of a model on a hub are downloaded first.

        Raises:
            ValueError: see `DecoderConfig.from_files`; or `path` has no readable weights, the config is not supported,
                the download failed, or the model on the hub changed after config.json was read.
        """
        config = self.decoder_config()
        if resolve_model(self.name) != self.path:
            raise ValueError(
                f"{self.name}: the files on the hub changed after config.json was read; run the program again"
            )
        weights = config.from_files(open_weights(self.path))
        weights = with_vocab_size(weights, self.config_overrides.get("vocab_size"))
        if self.score_seed is None:
            return weights
        shape = (1, config.hidden_size)
        return ClassifierWeights(weights, random_weight(SCORE_WEIGHT, shape, self.score_seed, config.initializer_range))
