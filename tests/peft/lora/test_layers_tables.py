"""LoRA on embedding and lm_head, and trained rows of tokens next to LoRA.

test_lora_golden.py compares them with Hugging Face PEFT.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.low_rank_factors import factors_of
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.adalora import AdaLoRAConfig
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.common.adapters import FAMILIES, INPUT_IDS, LABELS, logits_of, loss_of, tiny_model, train
from tests.golden import DATA
from tests.peft.methods import golden_checks as shared

TOKEN = int(INPUT_IDS[0, 0])
TABLES = {"rank": 3, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}
ROWS = {"rank": 3, "target_modules": ["q_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tables": ("llama", TABLES),
    "tied-tables": ("qwen2", TABLES),
    "tied-head": ("qwen2", {"rank": 3, "target_modules": ["lm_head"]}),
    "rows": ("llama", {**ROWS, "trainable_token_indices": {"embed_tokens": [TOKEN, 3], "lm_head": [7]}}),
    "tied-rows": ("qwen2", {**ROWS, "trainable_token_indices": [TOKEN, 3]}),
}


def adapted(case: str, **options: Any) -> PeftModel:
    """Return a model with an adapter that was trained for two steps."""
    family, arguments = CASES[case]
    model = get_peft_model(tiny_model(family), LoRAConfig(**{**arguments, **options}))
    train(model, steps=2)
    return model


@pytest.mark.parametrize("case", CASES)
def test_lora_of_tables_comes_back_from_files_and_merges(case: str, tmp_path: Path):
    family = CASES[case][0]
    tiny_model(family).save_pretrained(tmp_path / "base")
    model = adapted(case)
    model.config.__dict__["name_or_path"] = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(tiny_model(family), tmp_path / "adapter")
    np.testing.assert_array_equal(logits_of(loaded), logits_of(model))
    with model.disable_adapter():
        np.testing.assert_array_equal(logits_of(model), logits_of(tiny_model(family)))
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", AutoModelForCausalLM.from_pretrained)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), atol=1e-5)
    names = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if family == "llama" else set())
    assert all((merged.state_dict()[name] != tiny_model(family).state_dict()[name]).any() for name in names)


@pytest.mark.parametrize("case", CASES)
def test_lora_of_tables_generates_and_scores_with_the_logits(case: str):
    """Compare cached decoding and log-probabilities of labels with the logits of the full pass."""
    model = adapted(case)
    for name, tensor in model.adapter_state().items():
        if ".lora_B" in name or "lora_embedding_A" in name:  # so that the update decides
            tensor.set_value(tensor * 20)
    logits = paddle.to_tensor(logits_of(model))
    prompt = INPUT_IDS[:1].tolist()
    answer = model.generate(prompt, max_new_tokens=3)[0]
    ids = paddle.to_tensor([prompt[0] + answer])
    assert model(ids)[0, len(prompt[0]) - 1 : -1].argmax(axis=-1).tolist() == answer
    hidden_TD = model.hidden_states(paddle.to_tensor(INPUT_IDS)).flatten(0, 1)
    labels_T = paddle.to_tensor(LABELS.flatten())
    expected = paddle.take_along_axis(
        paddle.nn.functional.log_softmax(logits.flatten(0, 1)), labels_T.unsqueeze(1), axis=1
    )
    np.testing.assert_allclose(
        model.token_logprobs(hidden_TD, labels_T).numpy(), expected.squeeze(1).numpy(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("case", ["tables", "tied-tables", "rows"])
def test_lora_of_tables_over_quantized_base_merges_into_the_dequantized_one(case: str):
    base = tiny_model(CASES[case][0])
    quantize_linears(base, QuantizationConfig(algo="weight_only_int8"))
    model = get_peft_model(base, LoRAConfig(**CASES[case][1]))
    train(model, steps=2)
    logits = logits_of(model)
    np.testing.assert_allclose(logits_of(model.merge_and_unload()), logits, atol=1e-5)


@pytest.mark.parametrize("case", ["tables", "tied-tables", "rows", "tied-rows"])
def test_lora_of_tables_of_a_bf16_base_trains_near_the_float32_one(case: str):
    family, arguments = CASES[case]
    models = [AutoModelForCausalLM.from_config(FAMILIES[family], seed=3, dtype=d) for d in ("bfloat16", "float32")]
    gradients = []
    for model in models:
        peft_model = get_peft_model(model, LoRAConfig(**arguments))
        loss_of(peft_model).backward()
        state = {name: t for name, t in peft_model.adapter_state().items() if "lm_head" in name or "embed" in name}
        assert all(tensor.dtype == paddle.float32 for tensor in state.values())
        gradients.append(np.concatenate([tensor.grad.numpy().ravel() for tensor in state.values()]))
    assert np.linalg.norm(gradients[0] - gradients[1]) <= 0.05 * np.linalg.norm(gradients[1])


def test_lora_head_dropout_changes_the_training_loss_only():
    model = adapted("tied-head", dropout=0.5)
    model.train()
    losses = {float(loss_of(model)) for _ in range(3)}
    model.eval()
    assert len(losses) == 3
    assert float(loss_of(model)) == float(loss_of(model))


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("llama", DoRAConfig(target_modules=["lm_head"]), "lm_head cannot have an adapter of this method"),
        ("llama", LoRAConfig(lora_bias=True, target_modules=["embed_tokens"]), "not available for an embedding"),
        ("llama", LoRAConfig(**{**TABLES, "trainable_token_indices": [3]}), "is also a target of the adapter"),
        (
            "llama",
            LoRAConfig(**ROWS, modules_to_save=["embed_tokens"], trainable_token_indices=[3]),
            "embed_tokens is also in modules_to_save; remove the layer from one of the two",
        ),
        (
            "qwen2",
            LoRAConfig(**ROWS, modules_to_save=["lm_head"], trainable_token_indices=[3]),
            "lm_head, which is tied to model.embed_tokens, is also in modules_to_save",
        ),
        ("llama", LoRAConfig(**ROWS, trainable_token_indices=[61]), "embed_tokens: 61 is not below .* vocab_size 61"),
        ("llama", LoRAConfig(**ROWS, trainable_token_indices={"norm": [3]}), "'norm' does not have one row per token"),
        ("qwen2", LoRAConfig(**ROWS, trainable_token_indices={"lm_head": [3]}), "list tokens only for embed_tokens"),
        (
            "qwen2",
            LoRAConfig(target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
            "modules_to_save: the base ties lm_head to embed_tokens, which is also a target",
        ),
        (
            "qwen2",
            LoRAConfig(target_modules=["lm_head"], ensure_weight_tying=False),
            "the adapter would change only lm_head",
        ),
    ],
)
def test_lora_of_tables_invalid_selection_is_named(family: str, config: PeftConfig, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(family), config)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([3, 3], "trainable_token_indices: 3 is listed twice"),
        ({"lm_head": [-1]}, "trainable_token_indices: lm_head: -1 is negative"),
        ('{"lm_head": [3', "is not JSON"),
        ("3,x", "expected a list of token ids"),
    ],
)
def test_lora_trainable_token_indices_invalid_value_raises(value: object, message: str):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(trainable_token_indices=value)


@pytest.mark.parametrize("written", ['{"lm_head": [5, 2]}', {"lm_head": (5, 2)}, {"lm_head": "5,2"}])
def test_lora_trainable_token_indices_of_file_and_command_line_are_equal(written: object):
    assert LoRAConfig(trainable_token_indices=written) == LoRAConfig(trainable_token_indices={"lm_head": [5, 2]})


def test_lora_trainable_token_indices_of_another_method_are_refused():
    with pytest.raises(ValueError, match=r"trainable_token_indices=.* is not available"):
        AdaLoRAConfig(trainable_token_indices=[3])


def test_lora_resume_with_other_tokens_names_both(tmp_path: Path):
    adapted("rows").save_pretrained(tmp_path)
    model = get_peft_model(tiny_model(), LoRAConfig(**ROWS, trainable_token_indices=[3]))
    with pytest.raises(ValueError, match=r"trainable_token_indices changed from \{'embed_tokens'"):
        model.load_weights(tmp_path)


def test_lora_rows_of_tokens_do_not_decay_and_its_factors_do():
    model = adapted("rows")
    decaying = {name for name in model.adapter_state() if model.allows_weight_decay(name)}
    assert decaying == {name for name in model.adapter_state() if ".lora_" in name}


@pytest.mark.parametrize("key", ["lm_head.lora_A.weight", "lm_head.base_layer.weight"])
def test_from_pretrained_copy_of_tied_factors_that_differs_is_refused(key: str, tmp_path: Path):
    folder = DATA / "adapters" / "qwen2_tied_embedding"
    shutil.copy(folder / "adapter_config.json", tmp_path)
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    tensors = {name: file.read(name) for name in file.names()}
    tensors[f"base_model.model.{key}"] = tensors[f"base_model.model.{key}"] + 1
    write_safetensors(tmp_path / "adapter_model.safetensors", tensors)
    with pytest.raises(ValueError, match=rf"{key.replace('base_layer.', '')} differs from model.embed_tokens"):
        PeftModel.from_pretrained(shared.base_model("qwen2"), tmp_path)


@pytest.mark.parametrize("config", [PiSSAConfig, MoSLoRAConfig])
def test_rows_of_tokens_next_to_a_variant_are_kept_by_its_plain_lora(config: type, tmp_path: Path):
    options = {"mixer_to_lora": True} if config is MoSLoRAConfig else {}
    model = get_peft_model(tiny_model("qwen2"), config(rank=3, trainable_token_indices=[TOKEN], **options))
    train(model, steps=2)
    with pytest.raises(ValueError, match=r"parameters of the base \(model.embed_tokens.trainable_tokens_delta\)"):
        factors_of(model)
    model.save_finished(tmp_path) if options else save_as_lora(model, tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path)
    assert type(loaded.peft_config) is LoRAConfig
    np.testing.assert_allclose(logits_of(loaded), logits_of(model), atol=2e-5)


def test_lora_tables_switch_with_another_adapter():
    model = adapted("tied-tables")
    with_tables, plain = logits_of(model), logits_of(tiny_model("qwen2"))
    model.add_adapter("plain", LoRAConfig(rank=2))
    model.set_adapter("plain")
    np.testing.assert_array_equal(logits_of(model), plain)
    model.set_adapter("default")
    np.testing.assert_array_equal(logits_of(model), with_tables)


def test_lora_written_config_names_tables_and_tokens(tmp_path: Path):
    adapted("tables").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert fields["target_modules"] == ["embed_tokens", "q_proj", "lm_head"]
    assert fields["trainable_token_indices"] is None and "ensure_weight_tying" not in fields
