"""Two answers that continue one prompt against the same answers in rows of their own: loss, gradients, logits."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from tests.common.adapters import FAMILIES, MORE_FAMILIES
from tests.common.arrays import FLOAT32_ROUNDING

PROMPT = np.random.default_rng(0).integers(0, 61, 19)
ANSWERS = [np.random.default_rng(seed).integers(0, 61, size) for seed, size in ((1, 7), (2, 4))]
CONFIGS = {
    "llama": FAMILIES["llama"],
    "tied": FAMILIES["qwen2"],
    "window": {**FAMILIES["llama"], "model_type": "mistral", "sliding_window": 9},
    "latent": MORE_FAMILIES["latent"],
}


def build(config: str) -> CausalLM:
    return AutoModelForCausalLM.from_config(CONFIGS[config], seed=3)


def loss_sum(model: CausalLM, ids: list, labels: list, **documents) -> paddle.Tensor:
    hidden = model.hidden_states(paddle.to_tensor(np.concatenate(ids)[None]), **documents)
    return linear_cross_entropy(hidden.flatten(0, 1), model.head_weight(), paddle.to_tensor(np.concatenate(labels)))[0]


def shared_loss(model: CausalLM) -> paddle.Tensor:
    before = np.full(len(PROMPT) - 1, -100)
    ids = [PROMPT[:-1], *(part for answer in ANSWERS for part in (PROMPT[-1:], answer[:-1]))]
    lengths = [len(PROMPT) - 1, *map(len, ANSWERS)]
    return loss_sum(model, ids, [before, *ANSWERS], document_lengths=[lengths], document_parents=[[None, 0, 0]])


def separate_loss(model: CausalLM) -> paddle.Tensor:
    before = np.full(len(PROMPT) - 1, -100)
    return sum(loss_sum(model, [PROMPT, answer[:-1]], [before, answer]) for answer in ANSWERS)


@pytest.mark.parametrize("backend", [None, "blocks", "reference"])
@pytest.mark.parametrize("config", CONFIGS)
def test_loss_of_answers_after_a_shared_prompt_equals_that_of_separate_rows(config, backend):
    measured = []
    for compute in (shared_loss, separate_loss):
        model = build(config)
        model.use_attention(backend)
        loss = compute(model)
        loss.backward()
        measured.append((float(loss), {name: p.grad.numpy() for name, p in model.named_parameters()}))
    (shared, shared_gradients), (separate, gradients) = measured
    assert shared == pytest.approx(separate, rel=1e-6)
    for name, gradient in gradients.items():
        difference = np.linalg.norm(shared_gradients[name] - gradient)
        assert difference <= FLOAT32_ROUNDING * np.linalg.norm(gradient), name


@pytest.mark.parametrize("backend", [None, "blocks"])
def test_logits_of_an_answer_do_not_change_with_the_other_answer(backend):
    model = build("llama")
    model.use_attention(backend)
    documents = {"document_lengths": [[18, 7, 4]], "document_parents": [[None, 0, 0]]}
    ids = np.concatenate([PROMPT[:18], *ANSWERS])[None]
    changed = ids.copy()
    changed[0, 18:25] = 60 - changed[0, 18:25]
    with paddle.no_grad():
        one, other = (
            model.logits(model.hidden_states(paddle.to_tensor(x), **documents)).numpy() for x in (ids, changed)
        )
    kept = np.r_[0:18, 25:29]
    np.testing.assert_array_equal(one[:, kept], other[:, kept])
    assert (one[:, 18:25] != other[:, 18:25]).any()
