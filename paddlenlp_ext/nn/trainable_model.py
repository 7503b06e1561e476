"""Interface of a causal language model for the training loop, implemented by `CausalLM` and `PeftModel`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.load_balancing_loss import LoadBalance
from paddlenlp_ext.nn.training_hooks import TrainingHooks
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy, token_logprobs
from paddlenlp_ext.ops.linear_divergence import DivergenceOptions, LossParts, linear_divergence
from paddlenlp_ext.ops.linear_divergence.teacher_rows import TeacherRows


class TrainableModel(nn.Layer):
    """Base class of the models that the trainer accepts.

    Subclasses implement the methods that raise NotImplementedError.

    Attributes:
        config: sizes of the decoder (`DecoderConfig`).
        vocab_parallel: object that computes losses with a vocabulary-parallel lm_head; None if lm_head is not sharded.
        quantization: quantization of the linear layers; None for floating-point weights.
        remote_parameters: names of parameters that only other ranks hold.
        generation_config: keys and values of generation_config.json.
        model: the decoder without lm_head (`models.decoder.Decoder`).
        lm_head: layer that computes the logits; None if lm_head is tied to the embedding.
        reads_prompts: whether `hidden_states` accepts the argument `prompt_lengths`.
        task_type: task of the model, named as in Hugging Face PEFT.
        trained_modules: modules that every adapter of the model trains in full, such as a classification head.
    """

    config: Any
    generation_config: Any
    model: Any
    vocab_parallel: Any
    quantization: Any
    remote_parameters: set[str]
    lm_head: Any
    reads_prompts: bool = False
    task_type: str = "CAUSAL_LM"
    trained_modules: tuple[str, ...] = ()

    def get_base_model(self) -> TrainableModel:
        """Return the base model of a `PeftModel`, or the model itself if it has no adapter."""
        return self

    # -- model --------------------------------------------------------------------------------------------------------
    def hidden_states(self, *args: Any, **kwargs: Any) -> paddle.Tensor:
        """Return the hidden states [B, S, D] after the final norm."""
        raise NotImplementedError

    def hidden_states_shape(self, batch: int, length: int) -> list[int]:
        """Return the shape of the hidden states between two layers, for input ids [batch, length]."""
        raise NotImplementedError

    def decode_tokens(self, tokens_BS: Sequence[Sequence[int]], cache: Any) -> np.ndarray | None:
        """Return the logits of new tokens, or None if the model has no fused decoding step (prefill_and_decode.py)."""
        return None

    def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Map hidden states [..., D] to logits [..., V]."""
        raise NotImplementedError

    def head_weight(self) -> paddle.Tensor:
        """Return the weight [V, D] of lm_head, or of the embedding if the two are tied."""
        raise NotImplementedError

    def head_updates(self, hidden: paddle.Tensor) -> Sequence[tuple[paddle.Tensor, paddle.Tensor]]:
        """Return the low-rank updates of an lm_head adapter. A pair u [..., K], B [V, K] adds u B^T to the logits.

        Args:
            hidden: input of lm_head, [..., D].
        """
        return ()

    def set_dropout_seed(self, seed: int | None) -> None:
        """Set the random seed of dropout for the next forward pass; None continues Paddle's random state."""
        raise NotImplementedError

    @property
    def eos_token_ids(self) -> list[int]:
        """Return the token ids at which generation ends."""
        raise NotImplementedError

    def add_eos_token_ids(self, token_ids: Iterable[int]) -> None:
        """Add tokens at which generation ends."""
        raise NotImplementedError

    def generate(self, prompts: Any = None, **options: Any) -> list[list[int]] | paddle.Tensor:
        """Generate a continuation of each prompt of token ids."""
        raise NotImplementedError

    def tensors_to_save(self) -> dict[str, Any]:
        """Return the tensors to save in a checkpoint, keyed by their names in checkpoint files."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | os.PathLike[str], *, tensors: Mapping[str, Any] | None = None) -> None:
        """Write the model or adapter. On a rank that holds shards, pass the gathered `tensors`."""
        raise NotImplementedError

    def load_weights(self, folder: str | os.PathLike[str]) -> None:
        """Load the tensors of a checkpoint of the same model.

        Raises:
            ValueError: the stored tensors do not match the model.
        """
        raise NotImplementedError

    @property
    def load_balance(self) -> LoadBalance | None:
        """Load-balancing state of the experts; None for a model without experts."""
        return getattr(self.model, "load_balance", None)

    # -- losses -------------------------------------------------------------------------------------------------------
    def cross_entropy(self, hidden_TD: paddle.Tensor, labels_T: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """Return the cross entropy summed over the labels other than -100, and the number of correct predictions.

        The loss is computed in chunks, so that the full logits [T, V] are never in memory
        (ops/linear_cross_entropy/__init__.py).
        """
        run = linear_cross_entropy if self.vocab_parallel is None else self.vocab_parallel.cross_entropy
        options = {"softcap": self.config.logit_softcap, "updates": self.head_updates(hidden_TD)}
        return run(hidden_TD, self.head_weight(), labels_T, **options)

    def token_logprobs(
        self, hidden_TD: paddle.Tensor, labels_T: paddle.Tensor, temperature: float = 1.0
    ) -> paddle.Tensor:
        """Return the log-probability of each label, float32 [T]; 0 where the label is -100.

        Args:
            hidden_TD: input of lm_head.
            labels_T: labels.
            temperature: divisor of the logits.
        """
        run = token_logprobs if self.vocab_parallel is None else self.vocab_parallel.token_logprobs
        softcap = self.config.logit_softcap
        if temperature != 1.0:  # c tanh(x / c) / t = c' tanh((x / t) / c') with c' = c / t
            hidden_TD, softcap = hidden_TD / temperature, softcap and softcap / temperature
        options = {"softcap": softcap, "updates": self.head_updates(hidden_TD)}
        return run(hidden_TD, self.head_weight(), labels_T, **options)

    def divergence(
        self, hidden_TD: paddle.Tensor, labels_T: paddle.Tensor, teacher: TeacherRows, options: DivergenceOptions
    ) -> tuple[paddle.Tensor, LossParts]:
        """Return the loss of distillation, summed over the labels other than -100, and its parts.

        The logits of student and teacher are computed in chunks (ops/linear_divergence/__init__.py).

        Args:
            hidden_TD: input of lm_head.
            labels_T: labels.
            teacher: distributions of the teacher at the positions with a label.
            options: options of the loss.
        """
        assert self.vocab_parallel is None, "distillation needs an lm_head that is not sharded"
        softcap, updates = self.config.logit_softcap, self.head_updates(hidden_TD)
        return linear_divergence(
            hidden_TD, self.head_weight(), labels_T, teacher, options, softcap=softcap, updates=updates
        )

    # -- training -----------------------------------------------------------------------------------------------------
    @property
    def hooks(self) -> TrainingHooks:
        """Training-loop hooks of the adapter method; no-ops for a model without an adapter."""
        return TrainingHooks()

    def learning_rate_scale(self, parameter_name: str) -> float:
        """Return the factor that multiplies a parameter's learning rate."""
        return 1.0

    def allows_weight_decay(self, parameter_name: str) -> bool:
        """Return whether weight decay applies to a parameter."""
        return True

    def save_finished(self, folder: str | os.PathLike[str], tensors: Mapping[str, Any] | None = None) -> None:
        """Write the final weights of a run. Adapter methods may override this method to save a smaller adapter."""
        self.save_pretrained(folder, tensors=tensors)
