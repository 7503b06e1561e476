"""`prepare_model_for_kbit_training`, as Hugging Face PEFT's documentation uses it."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.common.adapters import loss_of, tiny_model


def test_kbit_snippet_of_peft():
    """Written from PEFT's guide "Quantization"; only the import line differs."""
    from paddlenlp_ext.peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    model = tiny_model()
    quantize_linears(model, QuantizationConfig(algo="nf4"))

    model = prepare_model_for_kbit_training(model)
    config = LoraConfig(r=16, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, bias="none")
    model = get_peft_model(model, config)

    assert model.is_gradient_checkpointing
    loss_of(model).backward()
    gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert gradients and all(".lora_" in name for name in gradients)


@pytest.mark.parametrize("options", [{}, {"use_gradient_checkpointing": False}])
def test_prepare_model_freezes_and_recomputes_unless_told_otherwise(options: dict):
    from paddlenlp_ext.peft import prepare_model_for_kbit_training

    model = tiny_model()
    before = loss_of(model)
    assert prepare_model_for_kbit_training(model, **options) is model
    assert all(parameter.stop_gradient for parameter in model.parameters())
    assert model.is_gradient_checkpointing is not bool(options)
    assert np.array_equal(loss_of(model).numpy(), before.numpy())


def test_prepare_model_unknown_option_raises_before_anything_changes():
    from paddlenlp_ext.peft import prepare_model_for_kbit_training

    model = tiny_model()
    prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    with pytest.raises(ValueError, match="preserve is not supported"):
        prepare_model_for_kbit_training(tiny_model(), gradient_checkpointing_kwargs={"preserve": True})
