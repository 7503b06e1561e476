"""Prompt tuning: trained input vectors before every document (Lester et al. 2021, arXiv:2104.08691).

    decoder([prompt; E(tokens)])        prompt [P, D] trained, E the frozen embedding

The prompt has the positions 0 to P-1, and the positions of a document begin at P. Attention is causal, so the hidden
states of the prompt do not depend on the documents. A packed row contains the prompt once, and all documents attend to
the prompt:

    row        | prompt | document 1 | document 2 |
    positions  | 0..P-1 | P..        | P..        |

In generation, the prompt's keys, values and states are computed once and stored in the cache.

Shapes: B batch, S sequence, D hidden, P prompt vectors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields, required_field
from paddlenlp_ext.peft.layers import AdapterLayer, generator_for, has_values
from paddlenlp_ext.peft.method_internals.prefix_attention import decoder_prefix
from paddlenlp_ext.peft.registry import PEFT_METHODS

STORED = "prompt_embeddings"
INIT_CHOICES = ("vocab", "random", "text")
_PEFT_INITS = {"SAMPLE_VOCAB": "vocab", "RANDOM": "random", "TEXT": "text"}
EMBEDDING = "model.embed_tokens"


class PromptAdapter(Adapter):
    """Adapter with prompt vectors before every document; the embedding is wrapped by a `PromptLayer`."""

    peft_config: Any

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_lengths: Any = None,
        cache: Any = None,
        document_parents: Any = None,
        loss_positions: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Return the last hidden states of the tokens [B, S, D]; arguments as in `CausalLM.hidden_states`.

        Raises:
            ValueError: the sum of the document lengths differs from the row length.
        """
        if not self.enabled:
            return super().hidden_states(
                input_ids, position_ids, document_lengths, cache, document_parents, loss_positions
            )
        decoder = self.base_model.model
        prompt_PD = decoder.embed_tokens.vectors()
        num_prompt = prompt_PD.shape[0]
        if cache is not None:
            if cache.is_new:
                cache.set_prefix(*decoder_prefix(decoder, prompt_PD))
            inputs = decoder.attention_inputs(
                input_ids, position_ids, document_lengths, cache, first_position=num_prompt
            )
            return decoder.forward_embeddings(decoder.embed(input_ids), inputs)
        batch, length = input_ids.shape
        rows = [[length]] * batch if document_lengths is None else document_lengths
        if [sum(row) for row in rows] != [length] * batch:
            raise ValueError(f"document_lengths {rows} do not add up to input_ids of shape {[batch, length]}")
        layout = AttentionLayout.from_documents(rows, document_parents=document_parents)
        documents, parents = layout.documents()[1], layout.parents()
        inputs = decoder.attention_inputs(
            input_ids.reshape([1, -1]),
            None,
            [documents.tolist()],
            None,
            document_parents=[[None if parent < 0 else parent for parent in parents.tolist()]],
            loss_positions=None if loss_positions is None else loss_positions + num_prompt,
        )
        if position_ids is None:
            position_ids = paddle.to_tensor(layout.positions())
        positions_1T = position_ids.reshape([1, -1]) + num_prompt
        # One call for prompt and documents, because the angles of some RoPE scalings depend on the largest position.
        rotations = decoder.rotary(paddle.concat([paddle.arange(num_prompt).unsqueeze(0), positions_1T], axis=1))
        inputs = dataclasses.replace(inputs, rotations=rotations, num_shared=num_prompt)
        tokens_BSD = decoder.embed(input_ids)
        tokens_1TD = tokens_BSD.reshape([1, batch * length, -1])
        x_1XD = paddle.concat([prompt_PD.unsqueeze(0).astype(tokens_1TD.dtype), tokens_1TD], axis=1)
        return decoder.forward_embeddings(x_1XD, inputs)[:, num_prompt:].reshape(tokens_BSD.shape)

    def hidden_states_shape(self, batch: int, length: int) -> list[int]:
        """Return the shape of the hidden states between decoder layers: one sequence of the prompt and all tokens."""
        return [1, self.peft_config.num_virtual_tokens + batch * length, self.base_model.config.hidden_size]


@dataclass(eq=False)
class PromptTuningAdapter(PromptAdapter):
    """Adapter with directly trained prompt vectors."""

    def __post_init__(self) -> None:
        embedding = self.base_model.model.embed_tokens
        if self.peft_config.prompt_tuning_init == "text" and has_values(embedding):
            embedding.init_from_tokens(_token_ids(self.peft_config, self.base_model.config.name_or_path))


def shape_fields(model: TrainableModel, num_tokens: int) -> dict[str, Any]:
    """Return the fields of adapter_config.json that describe the shapes of the prompt [num_tokens, D] and the model."""
    shape = model.config
    return {
        "num_virtual_tokens": num_tokens,
        "num_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "token_dim": shape.hidden_size,
        "num_transformer_submodules": 1,
    }


def shape_fields_read(fields: Mapping[str, Any]) -> set[str]:
    """Return the field names of `shape_fields`, without `num_transformer_submodules` if its value is not supported."""
    read = {"num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim"}
    return read | {"num_transformer_submodules"} if fields.get("num_transformer_submodules") in (None, 1) else read


def num_tokens_option(key: str) -> Any:
    """Declare the option for the number of prompt vectors, with the JSON key `key`."""
    help = "number of virtual tokens"
    return option(20, help=help, minimum=1, maximum=65536, key=key, arguments=("num_tokens",))


@dataclass(kw_only=True)
class PromptConfig(PeftConfig):
    """Options shared by the methods with prompt vectors before every document."""

    mergeable: ClassVar[bool] = False
    own_keys: ClassVar[Mapping[str, str]] = {STORED: STORED}
    key_prefix: ClassVar[str] = "base_model."

    num_virtual_tokens: int

    def targets(self, model: TrainableModel) -> list[str]:
        if model.config.layer_embeddings is not None:
            raise ValueError(
                "prompt tuning: the layers of this model read embeddings of token ids, and prompt vectors have no ids; "
                "use LoRA"
            )
        return [EMBEDDING]


@PEFT_METHODS.register("prompt_tuning")
@dataclass(kw_only=True)
class PromptTuningConfig(PromptConfig):
    """Options of prompt tuning.

    >>> PromptTuningConfig(num_virtual_tokens=8, prompt_tuning_init="RANDOM").prompt_tuning_init
    'random'

    Raises:
        ValueError: an option is out of range, or only one of `prompt_tuning_init="text"` and
            `prompt_tuning_init_text` is set.
    """

    starts_from_weights: ClassVar[bool] = True
    peft_type: ClassVar[str] = "PROMPT_TUNING"
    adapter_class: ClassVar[type[TrainingHooks] | None] = PromptTuningAdapter
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {
        "prompt_tuning_init",
        "prompt_tuning_init_text",
        "tokenizer_name_or_path",
    }

    num_virtual_tokens: int = num_tokens_option("prompt_tuning_num_tokens")
    prompt_tuning_init: str = option(
        "vocab",
        help="initialization: embeddings of random tokens (vocab) or of a text (text), or random values (random)",
        choices=INIT_CHOICES,
        synonyms=_PEFT_INITS,
        key="prompt_tuning_init",
        arguments=("init",),
    )
    prompt_tuning_init_text: str | None = option(
        None,
        help='initial text for prompt_tuning_init "text"; truncated or repeated to prompt_tuning_num_tokens tokens',
        key="prompt_tuning_init_text",
        arguments=("init_text",),
    )
    tokenizer_name_or_path: str | None = option(
        None, help="tokenizer for prompt_tuning_init_text; unset: the tokenizer of the model"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt_tuning_init == "text") != bool(self.prompt_tuning_init_text):
            raise ValueError(
                f"prompt_tuning_init={self.prompt_tuning_init!r} with "
                f"prompt_tuning_init_text={self.prompt_tuning_init_text!r}: "
                "set prompt_tuning_init to 'text' and pass a text, or leave both out"
            )

    def wrap(self, name: str, base: nn.Layer, seed: int) -> PromptEmbedding:
        assert isinstance(base, Embedding)
        return PromptEmbedding(base, self.num_virtual_tokens, self.prompt_tuning_init, seed, name)

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {
            **shape_fields(model, self.num_virtual_tokens),
            "prompt_tuning_init": "RANDOM",  # the stored tensors replace the initial values
        }

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> PromptTuningConfig:
        of_start = {"prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"}
        read = shape_fields_read(fields) | of_start
        refuse_unread_fields(fields, read)
        return cls(num_virtual_tokens=required_field(fields, "num_virtual_tokens"), prompt_tuning_init="random")

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {STORED: tensors[f"{EMBEDDING}.{STORED}"]}

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {f"{EMBEDDING}.{name}" if name == STORED else name: value for name, value in tensors.items()}


class PromptLayer(AdapterLayer):
    """Token embedding that also holds the prompt vectors; the embeddings of tokens are unchanged."""

    base: Embedding

    @property
    def weight(self) -> paddle.Tensor:
        """Embedding table of the base, which a tied lm_head also uses."""
        return self.base.weight

    def vectors(self) -> paddle.Tensor:
        """Return the prompt vectors [P, D]; zeros on later pipeline stages, which do not use the prompt."""
        raise NotImplementedError

    def adapter_forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        return self.base(input_ids)


class PromptEmbedding(PromptLayer):
    """Token embedding with trained prompt vectors.

    Args:
        base: token embedding.
        num_tokens: P.
        start: one of `INIT_CHOICES`.
        seed: random seed of the initial values.
        name: name of the layer; the initial values also depend on the name.
    """

    def __init__(self, base: Embedding, num_tokens: int, start: str, seed: int, name: str) -> None:
        super().__init__(base)
        shape = (num_tokens, base.weight.shape[1])
        self.prompt_embeddings = self.create_parameter(
            list(shape), dtype=activation_dtype(base.weight.dtype), default_initializer=nn.initializer.Constant()
        )
        if not has_values(base):
            return
        generator = generator_for(seed, f"{name}.{STORED}")
        if start == "random":
            spread = float(base.weight.astype("float32").std())
            self._set(spread * generator.standard_normal(shape, np.float32))
        else:
            self.init_from_tokens(generator.integers(0, base.weight.shape[0], num_tokens))

    def vectors(self) -> paddle.Tensor:
        prompt_PD = self.prompt_embeddings
        return prompt_PD if self.is_on_stage else paddle.zeros(prompt_PD.shape, prompt_PD.dtype)

    def init_from_tokens(self, token_ids: np.ndarray) -> None:
        """Set each prompt vector to the embedding of a token."""
        self._set(self.base(paddle.to_tensor(token_ids)).astype("float32").numpy())

    def _set(self, value: np.ndarray) -> None:
        self.prompt_embeddings.set_value(paddle.to_tensor(value).astype(self.prompt_embeddings.dtype))


def _token_ids(config: PromptTuningConfig, model_name: str | None) -> np.ndarray:
    """Return the token ids of the initial text, truncated or repeated to the number of prompt vectors."""
    name = config.tokenizer_name_or_path or model_name
    if name is None:
        raise ValueError(
            "prompt_tuning_init='text': the model has no tokenizer; set prompt_tuning_tokenizer_name_or_path"
        )
    token_ids = load_tokenizer(name)(config.prompt_tuning_init_text)["input_ids"]
    if not token_ids:
        raise ValueError(f"prompt_tuning_init_text={config.prompt_tuning_init_text!r} has no tokens; use a longer text")
    return np.resize(np.asarray(token_ids, np.int64), config.num_virtual_tokens)
