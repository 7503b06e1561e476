"""ReFT in a training run: resuming, the best checkpoint, generated answers, and packing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.training import KillAfter, KilledError, Rows, Tokenizer, assert_same_bits, make_config, make_model

ROWS, DEV = Rows(20, seed=3), Rows(5, seed=4)
PACKED = {"zero_padding": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}


def make_trainer(folder: Path, callbacks: tuple[Callback, ...] = (), seed: int = 42, **keys: object) -> Trainer:
    model = get_peft_model(make_model(), ReFTConfig(rank=3, position="f2+l2", dropout=0.2), seed=seed)
    config = make_config(folder, num_train_epochs=2.0, learning_rate=0.02, **keys)
    dev = DEV if "evaluation_strategy" in keys else None
    return Trainer(model, config, ROWS, dev, Tokenizer(), callbacks=callbacks)


def adapter(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in trainer.model.adapter_state().items()}


@pytest.mark.parametrize("keys", [{}, PACKED], ids=["plain", "packed"])
def test_reft_run_resumes_to_the_same_bits(tmp_path: Path, keys: dict):
    uninterrupted = make_trainer(tmp_path / "straight", **keys)
    uninterrupted.train()
    keys = {**keys, "save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KilledError):
        make_trainer(tmp_path / "run", (KillAfter(3),), **keys).train()
    resumed = make_trainer(tmp_path / "run", seed=7, resume_from_checkpoint=True, **keys)
    resumed.train()
    assert_same_bits(adapter(resumed), adapter(uninterrupted))


def test_reft_run_packed_makes_the_same_updates(tmp_path: Path):
    """Compare packed and padded runs without dropout: positions count within each prompt."""
    ends = []
    for name, keys in (("apart", {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}), ("joint", {})):
        trainer = make_trainer(tmp_path / name, max_steps=3, **{"per_device_train_batch_size": 4, **keys})
        for layer in trainer.model.sublayers():
            if hasattr(layer, "dropout"):
                layer.dropout = 0.0
        trainer.train()
        ends.append(adapter(trainer))
    for name, value in ends[0].items():
        np.testing.assert_allclose(ends[1][name], value, atol=1e-5, err_msg=name)


def test_reft_run_loads_best_checkpoint_and_generates(tmp_path: Path):
    keys = {"evaluation_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path / "run", load_best_model_at_end=True, eval_with_do_generation=True, **keys)
    trainer.train()
    best = trainer.state.best_step
    assert best is not None
    stored = PeftModel.from_pretrained(make_model(), tmp_path / "run" / f"checkpoint-{best}")
    assert_same_bits(adapter(trainer), {name: tensor.numpy() for name, tensor in stored.adapter_state().items()})
