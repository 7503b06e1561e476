"""ReFT: Representation Finetuning for Language Models (Wu et al. 2024, arXiv:2404.03592).

    LoReFT    h' = h + R^T (f(W h + b) - R h)        R [r, D] with orthonormal rows, also during training

h is the output of a decoder layer at the first n and last m positions of each prompt. The adapter does not change
weights, so it cannot be merged. `method_internals/reft_interventions.py` implements the variants, and
`method_internals/reft_positions.py` selects the positions.

| pass | prompt |
| --- | --- |
| training | all tokens before the last answer of the document, including earlier turns of a conversation |
| generation | the prompt; generated tokens are not changed |
| other passes | the first `prompt_lengths` tokens; by default, the full document |

Shapes: B batch, S sequence, D hidden size, P selected positions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import paddle
from paddle import nn
from paddle.nn import functional as F

from paddlenlp_ext.config.dataclass_options import option
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.ops.attention import DocumentParents
from paddlenlp_ext.peft.adapter import Adapter
from paddlenlp_ext.peft.config import PeftConfig, refuse_unread_fields
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.peft.method_internals.reft_interventions import (
    ACTIVATIONS,
    INTERVENTION_TYPES,
    TINY,
    build_intervention,
)
from paddlenlp_ext.peft.method_internals.reft_positions import (
    cached_documents,
    packed_documents,
    parse_positions,
    selected_indices,
)
from paddlenlp_ext.peft.registry import PEFT_METHODS

_INTERVENTION_ALIASES = {"LoReftIntervention": "LoreftIntervention"}
_FIELDS = ("layers", "position", "intervention_type", "rank", "act_fn", "add_bias", "dropout")


class ReftAdapter(Adapter):
    """Adapter that selects the positions to change, and passes the positions to the layers."""

    peft_config: ReFTConfig

    def hidden_states(
        self,
        input_ids: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_lengths: Sequence[Sequence[int]] | None = None,
        cache: Any = None,
        prompt_lengths: Sequence[Sequence[int]] | None = None,
        document_parents: DocumentParents | None = None,
        loss_positions: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """Return the last hidden states [B, S, D].

        Args:
            input_ids, position_ids, document_lengths, cache, document_parents, loss_positions: arguments of the base
                model.
            prompt_lengths: prompt length of each document, for each row of the batch; None: the full document, or
                with a cache the positions before `cache.prompt_end`.

        Raises:
            ValueError: the prompt lengths do not match the documents, or both prompt lengths and a cache are passed.
        """
        num_rows, row_length = input_ids.shape
        if cache is None:
            rows = document_lengths or [[row_length]] * num_rows
            documents = packed_documents(rows, prompt_lengths, document_parents)
        elif prompt_lengths is not None:
            raise ValueError(
                "prompt_lengths cannot be combined with a cache, because the cache records the prompts; leave out "
                "prompt_lengths"
            )
        else:
            seen = cache.length
            prompt_end = getattr(cache, "prompt_end", None) or seen or row_length
            prompt_ends = prompt_end if isinstance(prompt_end, list) else [prompt_end] * num_rows
            documents = cached_documents(cache.key_starts.tolist(), seen, row_length, prompt_ends)
        indices = selected_indices(documents, parse_positions(self.peft_config.position))
        chosen = SelectedPositions(paddle.to_tensor(indices) if len(indices) else None)
        decoder = self.base_model.model
        inputs = decoder.attention_inputs(
            *(input_ids, position_ids, document_lengths, cache),
            document_parents=document_parents,
            loss_positions=loss_positions,
        )
        inputs = dataclasses.replace(inputs, adapter_inputs=chosen)
        return decoder.forward_embeddings(decoder.embed(input_ids), inputs)


@PEFT_METHODS.register("reft")
@dataclass(kw_only=True)
class ReFTConfig(PeftConfig):
    """Options of ReFT; PaddleNLP's JSON keys without the prefix "reft_" are accepted too.

    >>> ReFTConfig(position="f2+l2", layers="0;3").rank
    8
    """

    peft_type: ClassVar[str] = "REFT"
    mergeable: ClassVar[bool] = False
    reads_prompts: ClassVar[bool] = True
    adapter_class: ClassVar[type[TrainingHooks] | None] = ReftAdapter
    free_on_resume: ClassVar[frozenset[str]] = PeftConfig.free_on_resume | {"layers"}
    excludes: ClassVar[Mapping[str, str]] = {
        "sequence_parallel": "positions are selected from full sequences, but a process has only a shard of a sequence"
    }

    layers: str = option(
        "all",
        help='decoder layers whose output is changed: "all", or indices from 0 such as "0;1;2"',
        aliases=("layers",),
    )
    position: str = option(
        "f7+l7",
        help="prompt positions to change: f7 (the first 7), l7 (the last 7), f7+l7 (both)",
        aliases=("position",),
    )
    intervention_type: str = option(
        "LoreftIntervention",
        help="type of intervention on the hidden states",
        choices=INTERVENTION_TYPES,
        synonyms=_INTERVENTION_ALIASES,
        aliases=("intervention_type",),
    )
    rank: int = option(
        8,
        help="rank of the subspace in which hidden states are changed",
        minimum=1,
        aliases=("rank",),
        arguments=("r",),
    )
    act_fn: str = option(
        "linear", help="activation f of the intervention", choices=tuple(ACTIVATIONS), aliases=("act_fn",)
    )
    add_bias: bool = option(
        False,
        help="NoreftIntervention: add the bias c to the projection; the bias b is always used",
        aliases=("add_bias",),
    )
    dropout: float = option(
        0.0, help="dropout on the changed hidden states during training", minimum=0, below=1, aliases=("dropout",)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intervention_type == TINY and (self.act_fn != "linear" or self.add_bias):
            raise ValueError(f"{TINY} has neither activation nor bias; leave act_fn at linear and add_bias at false")
        parse_positions(self.position)
        _layer_numbers(self.layers)

    def targets(self, model: TrainableModel) -> list[str]:
        known = [name for name, _ in model.named_sublayers() if re.fullmatch(r"(.*\.)?layers\.\d+", name)]
        numbers = _layer_numbers(self.layers)
        if numbers is None:
            return known
        beyond = [number for number in numbers if number >= len(known)]
        if beyond:
            raise ValueError(
                f"layers={self.layers!r}: layer {beyond[0]} does not exist; this model has layers 0 to {len(known) - 1}"
            )
        return [known[number] for number in numbers]

    def wrap(self, name: str, base: Any, seed: int) -> ReftLayer:
        intervention = build_intervention(
            self.intervention_type,
            base.hidden_size,
            self.rank,
            self.act_fn,
            self.add_bias,
            seed,
            f"{name}.intervention",
        )
        return ReftLayer(base, intervention, self.dropout)

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return {field: getattr(self, field) for field in _FIELDS}

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> ReFTConfig:
        refuse_unread_fields(fields, set(_FIELDS))
        return cls(**{field: fields[field] for field in _FIELDS if field in fields})


@dataclass(frozen=True)
class SelectedPositions:
    """Positions that a forward pass changes: `index` [P] into the flattened batch, int64; None: no positions."""

    index: paddle.Tensor | None


class ReftLayer(AdapterLayer):
    """Decoder layer with an intervention on its output at selected positions.

    Args:
        base: decoder layer.
        intervention: layer that maps hidden states [P, D] to [P, D] (`build_intervention`).
        dropout: dropout probability on the changed hidden states during training.
    """

    def __init__(self, base: nn.Layer, intervention: nn.Layer, dropout: float) -> None:
        super().__init__(base)
        self.intervention = intervention
        self.dropout = dropout

    def adapter_forward(self, x_BSD: paddle.Tensor, inputs: Any) -> paddle.Tensor:
        """Map x [B, S, D] to [B, S, D]; `inputs.adapter_inputs` has the positions to change."""
        h_BSD = self.base(x_BSD, inputs)
        chosen = inputs.adapter_inputs
        assert isinstance(chosen, SelectedPositions), "ReFT layers run only in ReftAdapter.hidden_states"
        if chosen.index is None:
            return h_BSD
        h_TD = h_BSD.flatten(0, 1)
        with paddle.amp.auto_cast(enable=False):
            changed_PD = self.intervention(paddle.gather(h_TD, chosen.index).astype("float32"))
        changed_PD = F.dropout(changed_PD, self.dropout, training=self.training) if self.dropout else changed_PD
        return paddle.scatter(h_TD, chosen.index, changed_PD.astype(h_TD.dtype)).reshape(h_BSD.shape)


def _layer_numbers(layers: str) -> list[int] | None:
    """Return the layer numbers in a string such as "0;1;2", in ascending order; None for "all"."""
    text = layers.replace(" ", "") if isinstance(layers, str) else ""
    if text == "all":
        return None
    if not re.fullmatch(r"\d+([;,]\d+)*", text):
        raise ValueError(f'layers={layers!r} selects no layers; use "all", or indices from 0 such as "0;1;2"')
    return sorted({int(number) for number in re.split("[;,]", text)})
