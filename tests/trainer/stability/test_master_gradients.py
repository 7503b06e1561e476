"""Gradients of bfloat16 parameters in float32: sums over backward passes, and training."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.parallel.collectives import zero_gradient
from paddlenlp_ext.trainer.single_process import SingleProcess
from paddlenlp_ext.trainer.stability.master_gradients import widen_gradients
from paddlenlp_ext.trainer.trainer import Trainer
from tests.common.marks import needs_cpp
from tests.common.models import TINY_LLAMA
from tests.common.training import Rows, Tokenizer, make_config


def test_widen_gradients_accumulates_in_float32_until_its_end():
    """Compare with sums in NumPy; bfloat16 would lose the small gradients beside the large one."""
    model = paddle.nn.Linear(5, 7).to(dtype="bfloat16")
    parts = [np.full([5, 7], value, np.float32) for value in (256.0, 0.5, 0.5, 0.25)]

    def accumulated() -> paddle.Tensor:
        for part in parts:
            (model.weight.astype("float32") * paddle.to_tensor(part)).sum().backward()
        gradient = model.weight.grad.clone()
        model.weight.clear_gradient(False)
        return gradient

    end = widen_gradients(model.parameters())
    gradient, missing = accumulated(), zero_gradient(model.bias)
    assert gradient.dtype == missing.dtype == paddle.float32
    np.testing.assert_array_equal(gradient.numpy(), sum(parts))
    end()
    gradient, missing = accumulated(), zero_gradient(model.bias)
    assert gradient.dtype == missing.dtype == paddle.bfloat16
    assert (gradient.astype("float32").numpy() != sum(parts)).all()


class Gradients(SingleProcess):
    """Process group that records the gradients that are clipped."""

    def norm(self, parameters):
        self.recorded = [parameter.grad.clone() for parameter in parameters if parameter.ndim == 2]
        return super().norm(parameters)


@needs_cpp
def test_training_with_amp_master_grad_clips_the_float32_sum_of_micro_batches(tmp_path):
    """Compare with runs of one micro-batch each, whose bfloat16 gradients are added in NumPy."""

    def train(rows, **keys) -> list[paddle.Tensor]:
        model, processes = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1, dtype="bfloat16"), Gradients()
        config = make_config(
            tmp_path / "-".join(keys),
            bf16=True,
            fp16_opt_level="O2",
            per_device_train_batch_size=1,
            max_steps=1,
            **keys,
        )
        Trainer(model, config, rows, None, Tokenizer(), process_group=processes).train()
        assert all(zero_gradient(parameter).dtype == parameter.dtype for parameter in model.parameters())
        return processes.recorded

    rows, singles = Rows(3, seed=3), [Rows(3, seed=3) for _ in range(3)]
    total = train(rows, gradient_accumulation_steps=3, amp_master_grad=True)
    parts = []
    for index, single in enumerate(singles):
        single.rows, single.lengths = [rows.rows[index]], rows.lengths[index : index + 1]
        targets = int(single.rows[0].loss_mask[1:].sum())
        parts.append((targets, [each.astype("float32").numpy() for each in train(single, overwrite_output_dir=True)]))
    num_targets = sum(targets for targets, _ in parts)
    for index, gradient in enumerate(total):
        assert gradient.dtype == paddle.float32
        want = sum(targets / num_targets * gradients[index] for targets, gradients in parts)
        assert np.linalg.norm(gradient.numpy() - want) < 2.0**-7 * np.linalg.norm(want)
        assert (gradient.astype("bfloat16").astype("float32") != gradient).any()
