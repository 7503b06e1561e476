"""Log-likelihoods against transformers, a plain forward pass, and merged adapters."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest

from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.evaluation import log_likelihood as module
from paddlenlp_ext.evaluation.log_likelihood import Continuation, Likelihood, log_likelihoods, row_losses
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.golden import set_golden_weights
from tests.common.models import TINY_LLAMA
from tests.golden import DATA
from tests.golden.cases.likelihood_cases import CASES, MAX_LENGTH, make_pairs
from tests.golden.cases.model_cases import CASES as MODELS

PROMPT = [7, 3, 9, 30, 11]


def pairs(*continuations, prompt=PROMPT):
    return [Continuation(prompt, tokens) for tokens in continuations]


def logprobs(model, requests, batch_size=3, max_length=64, **options):
    found = log_likelihoods(model, requests, batch_size=batch_size, max_length=max_length, **options)
    return [each.logprob for each in found]


def plain(model, prompt, tokens):
    """Return the log-likelihood from a forward pass of one sequence."""
    model.eval()
    ids = paddle.to_tensor(np.array([[*prompt, *tokens][:-1]]))
    with paddle.no_grad():
        logits = model(ids).numpy()[0, len(prompt) - 1 :].astype("float64")
    own = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return sum(own[index, token] for index, token in enumerate(tokens))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_log_likelihoods_match_transformers(case, batch_size):
    """Compare prompts of odd lengths, shared by three continuations, some truncated from the left."""
    model = CausalLM(DecoderConfig.from_dict(MODELS[case]))
    set_golden_weights(model, case)
    requests = [Continuation(prompt, tokens) for prompt, tokens in make_pairs(case)]
    expected = json.loads((DATA / "likelihoods.json").read_text())[case]
    np.testing.assert_allclose(logprobs(model, requests, batch_size, MAX_LENGTH), expected, rtol=2e-6, atol=2e-5)


def test_log_likelihoods_match_a_plain_forward_pass(model, monkeypatch):
    """Compare choices that begin one another, repeated ones, and more of them than share a prompt."""
    monkeypatch.setattr(module, "MAX_SHARING", 2)
    requests = pairs([4], [4, 8], [4, 8, 15, 16], [23], [4, 8]) + pairs([5], [6, 6], prompt=[2])
    expected = [plain(model, each.prompt, each.tokens) for each in requests]
    counted = []
    np.testing.assert_allclose(logprobs(model, requests, advance=counted.append), expected, rtol=1e-6, atol=1e-5)
    assert sum(counted) == len(requests)


def test_log_likelihoods_of_greedy_tokens_say_so(model):
    best = model.generate([PROMPT], max_new_tokens=3, eos_token_id=None)[0]
    other = [*best[:2], (best[2] + 1) % 61]
    found = log_likelihoods(model, pairs(best, other, best[:1]), batch_size=2, max_length=64, with_greedy=True)
    assert [each.is_greedy for each in found] == [True, False, True]


def test_log_likelihoods_that_are_nan_raise():
    """Check that a damaged model is not scored as if its first choices were its answers."""
    damaged = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1)
    damaged.model.norm.weight.set_value(paddle.full_like(damaged.model.norm.weight, float("nan")))
    with pytest.raises(ValueError, match="log-probabilities are NaN"):
        logprobs(damaged, pairs([4]))


def test_log_likelihoods_of_an_empty_continuation_is_zero(model):
    counted = []
    options = {"batch_size": 2, "max_length": 64, "with_greedy": True, "advance": counted.append}
    found = log_likelihoods(model, pairs([], [4]), **options)
    assert found[0] == Likelihood(0.0, True)
    assert found[1].logprob == pytest.approx(plain(model, PROMPT, [4]), rel=1e-5)
    assert sum(counted) == 2


def test_log_likelihoods_truncate_the_prompt_from_the_left(model):
    requests = pairs([4, 8, 15], [4])
    expected = [plain(model, PROMPT[3:], [4, 8, 15]), plain(model, PROMPT[1:], [4])]
    np.testing.assert_allclose(logprobs(model, requests, max_length=4), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Continuation([], [1]), "a prompt of at least one token"),
        (Continuation([1], [1, 2, 3, 4]), "4 tokens, more than max_length 3"),
    ],
)
def test_log_likelihoods_of_impossible_requests_raise(model, request_, message):
    with pytest.raises(ValueError, match=message):
        logprobs(model, [request_], max_length=3)


@pytest.mark.parametrize(
    "config",
    [
        LoRAConfig(rank=3, target_modules=["q_proj", "down_proj", "lm_head"]),
        ReFTConfig(rank=2),
        PromptTuningConfig(num_virtual_tokens=3),
        PrefixTuningConfig(num_virtual_tokens=3),
    ],
    ids=lambda config: type(config).__name__,
)
def test_log_likelihoods_of_adapters_do_not_depend_on_sharing(config):
    """Compare choices that share their prompt with single ones; a merged adapter gives the same values."""
    model = get_peft_model(
        AutoModelForCausalLM.from_config({**TINY_LLAMA, "tie_word_embeddings": False}, seed=1), config
    )
    paddle.seed(3)
    for tensor in model.adapter_state().values():
        tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
    requests = pairs([4], [4, 8, 15], [23, 42])
    together = logprobs(model, requests)
    alone = [logprobs(model, [each])[0] for each in requests]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    if config.mergeable:
        np.testing.assert_allclose(logprobs(model.merge_and_unload(), requests), together, rtol=1e-5)


def test_row_losses_sum_over_the_target_tokens_of_each_row(model):
    generator = np.random.default_rng(2)
    rows = []
    for number, length in enumerate((9, 2, 17, 5)):
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        rows.append(EncodedRow(generator.integers(0, 61, length).astype(np.int32), mask, number))
    expected = [
        -sum(
            plain(model, row.tokens[:end].tolist(), row.tokens[end : end + 1].tolist())
            for end in range(1, len(row.tokens))
            if row.loss_mask[end]
        )
        for row in rows
    ]
    np.testing.assert_allclose(row_losses(model, rows, batch_size=3), expected, rtol=1e-5)
