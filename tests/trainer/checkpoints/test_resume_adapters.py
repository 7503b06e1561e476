"""Every registered adapter method: resuming with the same bits, and loading the best checkpoint at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.adapters import default_config
from tests.common.models import TINY_LLAMA
from tests.common.training import KillAfter, KilledError, Rows, Tokenizer, assert_same_bits, make_config, weights

ROWS, DEV = Rows(14, seed=3), Rows(5, seed=4)
every_method = pytest.mark.parametrize("switch", PEFT_METHODS.names())


def trainer_of(folder: Path, switch: str, callbacks: tuple[Callback, ...] = (), dev: Any = None, **keys: Any):
    model = get_peft_model(AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1), default_config(switch))
    config = make_config(folder, **{"num_train_epochs": 2.0, "learning_rate": 2e-2, **keys})
    return Trainer(model, config, ROWS, dev, Tokenizer(), callbacks=callbacks)


def stored(folder: Path) -> dict[str, Any]:
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    return {name: file.read(name) for name in file.names()}


@every_method
def test_resume_every_method_ends_with_the_same_bits(switch: str, tmp_path: Path):
    """Check a run that is killed twice: after the checkpoint in its first epoch, and after that in its second."""
    uninterrupted = trainer_of(tmp_path / "straight", switch)
    uninterrupted.train()
    uninterrupted.save_model()
    keys = {"save_strategy": "steps", "save_steps": 3}
    with pytest.raises(KilledError):
        trainer_of(tmp_path / "run", switch, (KillAfter(4),), **keys).train()
    with pytest.raises(KilledError):
        trainer_of(tmp_path / "run", switch, (KillAfter(7),), resume_from_checkpoint=True, **keys).train()
    resumed = trainer_of(tmp_path / "run", switch, resume_from_checkpoint=True, **keys)
    resumed.train()
    resumed.save_model()
    assert [entry["step"] for entry in resumed.state.log_history][-1] == 8
    assert_same_bits(weights(resumed.model), weights(uninterrupted.model))
    losses = [[entry["loss"] for entry in trainer.state.log_history] for trainer in (resumed, uninterrupted)]
    assert losses[0] == losses[1]
    assert_same_bits(stored(tmp_path / "run"), stored(tmp_path / "straight"))


@every_method
def test_load_best_model_every_method_ends_with_the_best_adapter(switch: str, tmp_path: Path):
    keys = {"evaluation_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_of(tmp_path, switch, dev=DEV, max_steps=6, **keys)  # treats the highest loss as the best
    trainer.train()
    best = max((entry for entry in trainer.state.log_history if "eval_loss" in entry), key=lambda e: e["eval_loss"])
    assert trainer.state.best_step == best["step"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best["eval_loss"], rel=1e-6)
