"""The training loop: windows of micro-batches in, optimizer steps, evaluations and checkpoints out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paddlenlp_ext.train.callbacks import Callback


class Trainer:
    """Trains a `CausalLM` or `PeftModel` on tokenized rows.

    Args:
        model: what trains; parameters with `stop_gradient` are left alone.
        config: the run's `RunConfig`.
        train_rows: `TokenizedDataset` of the split train, or None where only `evaluate` is called.
        dev_rows: `TokenizedDataset` of the split dev, or None without evaluation.
        tokenizer: saved beside the weights; decodes generated text.
        callbacks: listeners besides the trainer's own (logs, progress, picture).
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        train_rows: Sequence[Any] | None,
        dev_rows: Sequence[Any] | None,
        tokenizer: Any,
        *,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        raise NotImplementedError

    def train(self) -> dict[str, float]:
        """Run (or resume) the training; returns what train_results.json holds."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """Loss, accuracy, perplexity (and generation metrics) on the dev rows; writes eval_results.json."""
        raise NotImplementedError

    def save_model(self) -> None:
        """Write the model or adapter and the tokenizer into `output_dir`."""
        raise NotImplementedError
