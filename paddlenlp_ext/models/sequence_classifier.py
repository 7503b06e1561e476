"""Reward model: a sequence classifier with one label and a score head in place of lm_head.

Checkpoints have the layout of transformers' `<Family>ForSequenceClassification`. The score head is `score.weight`
[1, D] without bias. The score of a sequence is the score of the last token that differs from `pad_token_id`.

Shapes: D hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.checkpoint.score_head import SCORE_WEIGHT
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.registry import FAMILIES
from paddlenlp_ext.nn.causal_lm_forward import CausalLMOutput, DocumentLengths
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache


class ScoreHead(nn.Layer):
    """Linear map from the hidden state of a token to a score.

    Adapters, quantization and sharding apply to `Linear` layers and skip this class. The head sums each score
    separately, because the rounding of a matmul could depend on the other tokens of the batch.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([1, hidden_size], default_initializer=nn.initializer.Constant())

    def forward(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Map hidden states [..., D] to scores [..., 1], in float32."""
        return (hidden.astype("float32") * self.weight[0].astype("float32")).sum(axis=-1, keepdim=True)


class SequenceClassifier(CausalLM):
    """Decoder with a score head. Parameters have Hugging Face's names."""

    task_type = "SEQ_CLS"
    trained_modules = (SCORE_WEIGHT.partition(".")[0],)

    def __init__(self, config: DecoderConfig) -> None:
        assert config.num_labels == 1, "classifier_config must have set num_labels to 1"
        super().__init__(config)
        self.score = ScoreHead(config.hidden_size)

    def forward(
        self,
        input_ids: paddle.Tensor,
        attention_mask: paddle.Tensor | None = None,
        labels: paddle.Tensor | None = None,
        position_ids: paddle.Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor | CausalLMOutput:
        """Return the scores of all tokens, [B, S, 1]; see `CausalLM.forward` for the arguments.

        Raises:
            ValueError: see `CausalLM.forward`; or labels are given.
        """
        if labels is not None:
            raise ValueError(
                "labels: a reward model has no loss for labels; train the model with paddlenlp_ext.train_reward_model"
            )
        return super().forward(input_ids, attention_mask, None, position_ids, document_lengths, cache)

    def _compute_logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Return the scores [..., 1] instead of logits."""
        return self.score(hidden)

    def head_weight(self) -> paddle.Tensor:
        """Return the weight of the score head, [1, D]."""
        return self.score.weight

    def generate(self, prompts: Any = None, **options: Any) -> list[list[int]] | paddle.Tensor:
        """Raise ValueError, because a reward model has no lm_head."""
        raise ValueError("generate: a reward model has no lm_head; load the language model instead")


def classifier_config(config: DecoderConfig, stored: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration of a reward model with the decoder of `config`.

    Args:
        config: configuration of a language model or of a classifier.
        stored: contents of the config.json of that model.

    Raises:
        ValueError: the model is stored as a classifier with several labels.
    """
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if is_classifier(stored):
        num_labels = len(stored.get("id2label") or ()) or stored.get("num_labels", 2)  # the default of transformers
        if num_labels != 1:
            raise ValueError(
                f"{config.name_or_path}: config.json has {num_labels} labels (id2label), but a reward model has one; "
                "use a model with one label, or the original language model"
            )
        labels = {key: stored[key] for key in labels if key in stored}
    architecture = FAMILIES.get(config.model_type).classifier_architecture
    source = {**config.source, "architectures": [architecture], **labels}
    # As in transformers, logit scale and soft-cap do not apply to scores, and the head is not tied to the embedding.
    return dataclasses.replace(
        config, num_labels=1, logit_scale=1.0, logit_softcap=None, tie_word_embeddings=False, source=source
    )


def is_classifier(stored: Mapping[str, Any]) -> bool:
    """Return whether a config.json dict describes a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in stored.get("architectures") or ())
