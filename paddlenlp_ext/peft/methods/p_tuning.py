"""P-tuning: prompt vectors before every document, computed by a small trained network (Liu et al. 2021).

    prompt = MLP(E)                    mlp: D -> F -> F -> D with ReLU; the default, as in Hugging Face PEFT
    prompt = MLP(LSTM(E))              lstm: bidirectional LSTM of width F, then MLP 2 F -> 2 F -> D

arXiv:2103.10385. E [P, D] and the network are trained. The model uses the prompt as in prompt tuning
(prompt_tuning.py). Files of Hugging Face PEFT contain the prompt without the network. Training that starts from a
file of PEFT trains the prompt directly (`encoder_reparameterization_type` "none").

| tensor | start |
| --- | --- |
| E | N(0, 1) |
| weight and bias of a linear map from `in` features | U(-1/sqrt(in), 1/sqrt(in)) |
| weights and biases of the LSTM | U(-1/sqrt(F), 1/sqrt(F)) |

Shapes: P prompt vectors, D hidden, F `encoder_hidden_size`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields, required_field
from paddlenlp_ext.peft.layers import generator_for, new_parameter
from paddlenlp_ext.peft.methods.prompt_tuning import (
    EMBEDDING,
    STORED,
    PromptAdapter,
    PromptConfig,
    PromptLayer,
    num_tokens_option,
    shape_fields,
    shape_fields_read,
)
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.utils.seeds import seed_of

ENCODERS = ("mlp", "lstm", "none")
_PEFT_ENCODERS = {"MLP": "mlp", "LSTM": "lstm"}
_ENCODER = f"{EMBEDDING}.prompt_encoder."


class PTuningAdapter(PromptAdapter):
    """Adapter with prompt vectors that a trained network computes, or that are trained directly (encoder "none")."""

    def hidden_states(self, *args: Any, **kwargs: Any) -> paddle.Tensor:
        """Return the last hidden states of the tokens [B, S, D]; see `PromptAdapter.hidden_states`."""
        decoder = self.base_model.model
        if self.base_model.training and self.peft_config.encoder_dropout and decoder.dropout_seed is not None:
            paddle.seed(seed_of(decoder.dropout_seed, len(decoder.layers)))  # all ranks must draw the same mask
        return super().hidden_states(*args, **kwargs)


@PEFT_METHODS.register("p_tuning")
@dataclass(kw_only=True)
class PTuningConfig(PromptConfig):
    """Options of p-tuning.

    >>> PTuningConfig(num_virtual_tokens=10, encoder_reparameterization_type="LSTM").encoder_num_layers
    2

    Raises:
        ValueError: an option is out of range, or has no effect on the chosen network.
    """

    peft_type: ClassVar[str] = "P_TUNING"
    adapter_class: ClassVar[type[TrainingHooks] | None] = PTuningAdapter
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {
        "encoder_hidden_size",
        "encoder_num_layers",
        "encoder_dropout",
    }

    num_virtual_tokens: int = num_tokens_option("p_tuning_num_tokens")
    encoder_reparameterization_type: str = option(
        "mlp",
        help="network that computes the prompt vectors: mlp, lstm, or none (the vectors are trained directly)",
        choices=ENCODERS,
        synonyms=_PEFT_ENCODERS,
        arguments=("encoder",),
        key="p_tuning_encoder",
    )
    encoder_hidden_size: int | None = option(
        None, help="hidden size of the prompt encoder; unset: the hidden size of the model", minimum=1, maximum=65536
    )
    encoder_num_layers: int = option(
        2, help="number of LSTM layers; the mlp always has three layers", minimum=1, maximum=64
    )
    encoder_dropout: float = option(0.0, help="dropout between the LSTM layers during training", minimum=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoder_reparameterization_type != "lstm" and (self.encoder_num_layers != 2 or self.encoder_dropout):
            raise ValueError(
                f"p_tuning_encoder={self.encoder_reparameterization_type!r} with "
                f"p_tuning_encoder_num_layers={self.encoder_num_layers}, "
                f"p_tuning_encoder_dropout={self.encoder_dropout}: the last two are options of the LSTM; set "
                "p_tuning_encoder to 'lstm', or leave the two options out"
            )

    def wrap(self, name: str, base: nn.Layer, seed: int) -> ComputedPrompt:
        assert isinstance(base, Embedding)
        return ComputedPrompt(base, self, seed, name)

    def warm_start(self, stored: PeftConfig) -> PTuningConfig:
        assert isinstance(stored, PTuningConfig)
        dropout = self.encoder_dropout if stored.encoder_reparameterization_type == "lstm" else 0.0
        return stored.replace(path=self.path, encoder_dropout=dropout)

    # -- files --------------------------------------------------------------------------------------------------------
    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            **shape_fields(model, self.num_virtual_tokens),
            "encoder_reparameterization_type": "LSTM" if self.encoder_reparameterization_type == "lstm" else "MLP",
            "encoder_hidden_size": self.encoder_hidden_size or model.config.hidden_size,
            "encoder_num_layers": self.encoder_num_layers,
            "encoder_dropout": self.encoder_dropout,
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> PTuningConfig:
        of_the_encoder = {"encoder_hidden_size", "encoder_num_layers", "encoder_dropout"}
        read = shape_fields_read(fields) | of_the_encoder | {"encoder_reparameterization_type"}
        refuse_unread_fields(fields, read)
        encoder = _PEFT_ENCODERS.get(fields.get("encoder_reparameterization_type", "MLP"))
        if encoder is None:
            raise ValueError(
                f"encoder_reparameterization_type={fields['encoder_reparameterization_type']!r} is not supported; use "
                "MLP or LSTM"
            )
        of_lstm = {"encoder_num_layers": 2, "encoder_dropout": 0.0} if encoder == "lstm" else {}
        return cls(
            num_virtual_tokens=required_field(fields, "num_virtual_tokens"),
            encoder_reparameterization_type=encoder,
            encoder_hidden_size=fields.get("encoder_hidden_size"),
            **{name: fields.get(name, default) for name, default in of_lstm.items()},
        )

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt [P, D], and the network's tensors, which are needed to continue training."""
        if self.encoder_reparameterization_type == "none":
            return {STORED: tensors[f"{EMBEDDING}.{STORED}"]}
        own = {name.removeprefix(_ENCODER): tensor.astype("float32") for name, tensor in tensors.items()}
        return {STORED: compute_prompt(own), **tensors}

    def for_tensors(self, names: Collection[str]) -> PTuningConfig:
        """Return a config without a network if the file has only the prompt, as in files of PEFT."""
        if any(name.startswith(_ENCODER) for name in names):
            return self
        return self.replace(
            encoder_reparameterization_type="none",
            encoder_hidden_size=None,
            encoder_num_layers=2,
            encoder_dropout=0.0,
        )

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert tensors to the in-memory form (inverse of `to_stored`), without the computed prompt."""
        if self.encoder_reparameterization_type == "none":
            return {f"{EMBEDDING}.{name}" if name == STORED else name: value for name, value in tensors.items()}
        return {name: value for name, value in tensors.items() if name != STORED}


PromptEncoderConfig = PTuningConfig  # the name in Hugging Face PEFT


class ComputedPrompt(PromptLayer):
    """Token embedding with prompt vectors that the prompt network computes, or that are trained directly ("none").

    Args:
        base: token embedding.
        config: options of the method.
        seed: random seed of the initial values.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: Embedding, config: PTuningConfig, seed: int, name: str) -> None:
        super().__init__(base)
        self.shape, self.dropout = (config.num_virtual_tokens, base.weight.shape[1]), config.encoder_dropout
        dtype = activation_dtype(base.weight.dtype)
        if config.encoder_reparameterization_type == "none":
            start = generator_for(seed, f"{name}.{STORED}").standard_normal(self.shape, np.float32)
            self.prompt_embeddings = new_parameter(self, start, dtype)
        else:
            self.prompt_encoder = _PromptEncoder(self.shape, config, seed, name, dtype)

    def vectors(self) -> paddle.Tensor:
        if not self.is_on_stage:
            return paddle.zeros(self.shape, self.own_parameters()[0].dtype)
        if hasattr(self, STORED):
            return self.prompt_embeddings
        return compute_prompt(dict(self.prompt_encoder.named_parameters()), self.dropout if self.training else 0.0)


class _PromptEncoder(nn.Layer):
    """Parameters of the prompt network, named as in PyTorch, with "_" instead of "."; see `compute_prompt`."""

    def __init__(
        self, shape: tuple[int, int], config: PTuningConfig, seed: int, name: str, dtype: paddle.dtype | str
    ) -> None:
        super().__init__()
        width = shape[1]
        hidden = config.encoder_hidden_size or width
        shapes: dict[str, tuple[tuple[int, ...], int]] = {}  # name -> shape, number of inputs
        if config.encoder_reparameterization_type == "lstm":
            for index in range(config.encoder_num_layers):
                inputs = width if index == 0 else 2 * hidden
                for suffix in (f"l{index}", f"l{index}_reverse"):
                    shapes[f"lstm_weight_ih_{suffix}"] = (4 * hidden, inputs), hidden
                    shapes[f"lstm_weight_hh_{suffix}"] = (4 * hidden, hidden), hidden
                    shapes[f"lstm_bias_ih_{suffix}"] = shapes[f"lstm_bias_hh_{suffix}"] = (4 * hidden,), hidden
            sizes = (2 * hidden, 2 * hidden, width)
        else:
            sizes = (width, hidden, hidden, width)
        for index, (inputs, outputs) in enumerate(pairwise(sizes)):
            shapes[f"mlp_{2 * index}_weight"] = (outputs, inputs), inputs
            shapes[f"mlp_{2 * index}_bias"] = (outputs,), inputs
        start = generator_for(seed, f"{name}.embedding").standard_normal(shape, np.float32)
        self.embedding = new_parameter(self, start, dtype)
        for own, (own_shape, inputs) in shapes.items():
            bound = inputs**-0.5
            start = generator_for(seed, f"{name}.{own}").uniform(-bound, bound, own_shape).astype(np.float32)
            setattr(self, own, new_parameter(self, start, dtype))


def compute_prompt(tensors: Mapping[str, paddle.Tensor], dropout: float = 0.0) -> paddle.Tensor:
    """Compute the prompt [P, D] from the tensors of the prompt network.

    Args:
        tensors: tensors of the prompt network by name.
        dropout: dropout probability between the layers of the LSTM.
    """
    x, index = tensors["embedding"], 0
    while f"lstm_weight_ih_l{index}" in tensors:
        if index and dropout:
            x = F.dropout(x, dropout)
        x = paddle.concat([_lstm(x, tensors, f"l{index}"), _lstm(x.flip(0), tensors, f"l{index}_reverse").flip(0)], 1)
        index += 1
    for index in (0, 2, 4):
        if f"mlp_{index}_weight" in tensors:
            x = x if index == 0 else F.relu(x)
            x = paddle.matmul(x, tensors[f"mlp_{index}_weight"], transpose_y=True) + tensors[f"mlp_{index}_bias"]
    return x


def _lstm(x: paddle.Tensor, tensors: Mapping[str, paddle.Tensor], suffix: str) -> paddle.Tensor:
    """Run one direction of an LSTM layer over x [P, in]; return its hidden states [P, F]."""
    weight_ih, weight_hh, bias_ih, bias_hh = (
        tensors[f"lstm_{kind}_{suffix}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    from_inputs = paddle.matmul(x, weight_ih, transpose_y=True) + (bias_ih + bias_hh)
    hidden = cell = paddle.zeros([1, weight_hh.shape[1]], x.dtype)
    states = []
    for step in range(x.shape[0]):
        gates = from_inputs[step : step + 1] + paddle.matmul(hidden, weight_hh, transpose_y=True)
        entry, forget, value, output = gates.split(4, axis=1)
        cell = F.sigmoid(forget) * cell + F.sigmoid(entry) * value.tanh()
        hidden = F.sigmoid(output) * cell.tanh()
        states.append(hidden)
    return paddle.concat(states)
