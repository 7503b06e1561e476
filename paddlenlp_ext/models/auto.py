"""Decoders by name, folder or configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.models.initialize import initialize_weights


class AutoModelForCausalLM:
    """Builds the decoder that a configuration's `model_type` names; never instantiated itself."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, seed: int = 0) -> CausalLM:
        """Build a model with random weights from a config.json dict; the same seed gives the same weights.

        Raises:
            ValueError: the configuration is not one that the decoder can be built from.
        """
        decoder_config = DecoderConfig.from_dict(config)
        model = CausalLM(decoder_config)
        initialize_weights(model, seed, decoder_config.initializer_range)
        return model
