"""Model for lm-eval, called as the harness calls it; tests/golden/peer_checks/check_lm_eval.py runs the harness."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paddlenlp_ext.evaluation.lm_eval_harness import LMEvalModel, generation_options, register_lm_eval_model
from paddlenlp_ext.evaluation.log_likelihood import Continuation, log_likelihoods
from paddlenlp_ext.evaluation.perplexity_task import rolling_windows
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel
from tests.evaluation.tiny_model import MAX_LENGTH, write_model
from tests.llm.test_run_evaluation import save_adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return LMEvalModel(str(folder), batch_size="auto", device="cpu")


def requests(*arguments):
    return [SimpleNamespace(args=own) for own in arguments]


def direct(model, prompt, tokens):
    pair = [Continuation(prompt, tokens)]
    return log_likelihoods(model.model, pair, batch_size=1, max_length=MAX_LENGTH)[0].logprob


def test_lm_eval_model_loglikelihood_follows_the_harness_in_empty_and_merged_contexts(model):
    ids = model.tokenizer.convert_tokens_to_ids
    pairs = [("xa", "bok"), ("x ", "yok"), ("", "ok"), ("", "<s>ok"), ("<s>x", "ok")]
    expected = [
        (ids(["x", "a"]), ids(["ok"])),
        (ids(["x"]), ids(["Ġy", "ok"])),
        *[(ids(["<s>"]), ids(["ok"]))] * 2,
        (ids(["<s>", "x"]), ids(["ok"])),
    ]
    found = model.loglikelihood(requests(*pairs))
    assert [each[0] for each in found] == pytest.approx([direct(model, *pair) for pair in expected], rel=1e-5)
    assert {type(each[1]) for each in found} == {bool}


def test_lm_eval_model_rolling_sums_the_windows_of_each_text(model):
    texts = [" ".join(f"ok{number}" for number in range(30)), "a"]
    expected = []
    for text in texts:
        windows = rolling_windows(model.tokenizer(text).input_ids, 259, MAX_LENGTH)
        expected.append(sum(direct(model, each.prompt, each.tokens) for each in windows))
    assert model.loglikelihood_rolling(requests(*((text,) for text in texts))) == pytest.approx(expected, rel=1e-5)


def test_lm_eval_model_generate_until_ends_at_the_first_stop(model):
    free, cut, sampled = model.generate_until(
        requests(
            ("ok a", {"until": [], "max_gen_toks": 9}),
            ("ok a", {"until": "y", "max_gen_toks": 9}),
            ("long " * 30, {"do_sample": True, "temperature": 0.7, "max_gen_toks": 3, "until": None}),
        )
    )
    assert "y" in free and cut == free.partition("y")[0]
    assert isinstance(sampled, str)


def test_lm_eval_model_merges_an_adapter_and_writes_chats(folder, tmp_path, model):
    adapter = save_adapter(tmp_path / "lora", folder, LoRAConfig(rank=2))
    adapted = LMEvalModel(str(folder), lora_path=str(adapter), max_length=40, device="cpu")
    assert not isinstance(adapted.model, PeftModel) and adapted.max_length == 40
    request = requests(("x", "ok"))
    assert abs(adapted.loglikelihood(request)[0][0] - model.loglikelihood(request)[0][0]) > 1e-3
    assert model.apply_chat_template([{"role": "user", "content": "a"}]) == "<s>user\na</s>\n<s>assistant\n"
    assert model.chat_template(True).startswith("{% for m") and model.chat_template() == ""


def test_generation_options_of_the_harness_become_those_of_generate():
    given = {"until": ["a", ""], "max_gen_toks": None, "max_tokens": 7, "temperature": 0.0, "do_sample": False}
    assert generation_options(given) == (["a"], {"max_new_tokens": 7})
    stops, options = generation_options({"temperature": 0.5, "top_p": 0.9})
    assert (stops, options["decode_strategy"], options["top_p"]) == ([], "sampling", 0.9)
    with pytest.raises(ValueError, match="unknown generation option 'num_beams'"):
        generation_options({"num_beams": 4})


def test_register_lm_eval_model_without_lm_eval_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install 'paddlenlp-ext\[lm-eval\]'"):
        register_lm_eval_model()
