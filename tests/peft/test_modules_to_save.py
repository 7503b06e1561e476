"""Parameters of the base that an adapter replaces: biases, modules to save, saved embeddings; and excluded targets.

tests/peft/methods/test_lora_golden.py compares them with Hugging Face PEFT.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.load_weighted_sum import load_combined
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.adalora import AdaLoRAConfig
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.moslora import MoSLoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.methods.sora import SoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears, quantized_layers
from tests.common.adapters import logits_of, loss_of, state_of, tiny_model, train
from tests.common.marks import needs_cpp
from tests.golden import DATA
from tests.golden.cases.peft_cases import CASES
from tests.peft.methods import golden_checks as shared

SAVED = ("lm_head", "k_proj", "norm")
CONFIGS = {
    "lora": LoRAConfig(rank=2, modules_to_save=SAVED),
    "pissa": PiSSAConfig(rank=2, modules_to_save=SAVED),
    "adalora": AdaLoRAConfig(init_r=3, target_r=2, modules_to_save=SAVED),
    "ia3": IA3Config(modules_to_save=SAVED),
    "sora": SoRAConfig(rank=3, modules_to_save=SAVED),
    "moslora": MoSLoRAConfig(rank=2, mixer_to_lora=True, modules_to_save=SAVED),
    "prompt": PromptTuningConfig(num_tokens=2, modules_to_save=("lm_head", "norm")),
}
QWEN2_BIASES = LoRAConfig(rank=2, target_modules=["q_proj"], trainable_bias="adapted", lora_bias=True)


def trained(family: str, config: object) -> PeftModel:
    model = get_peft_model(tiny_model(family), config)
    train(model, steps=2)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_modules_to_save_train_return_and_come_back_from_files(name: str, tmp_path: Path):
    model, base = trained("llama", CONFIGS[name]), tiny_model()
    before = state_of(base)
    changed = {key for key in before if not np.array_equal(model.adapter_state().get(key, before[key]), before[key])}
    linears = {key for key in before if key.endswith("k_proj.weight")} if name != "prompt" else set()
    norms = {key for key in before if key.endswith("norm.weight")}
    assert changed == {"lm_head.weight", *norms, *linears}
    assert not any("k_proj" in layer for layer, _ in adapter_layers(model))
    logits = logits_of(model)
    with model.disable_adapter():
        assert np.array_equal(logits_of(model), logits_of(base))
    assert np.array_equal(logits_of(model), logits)
    model.save_pretrained(tmp_path / "last")
    assert np.array_equal(logits_of(PeftModel.from_pretrained(base, tmp_path / "last")), logits)
    model.save_finished(tmp_path / "finished")
    finished = PeftModel.from_pretrained(tiny_model(), tmp_path / "finished")
    np.testing.assert_allclose(logits_of(finished), logits, atol=1e-4)
    if type(finished.peft_config).mergeable:
        merged = finished.merge_and_unload()
        np.testing.assert_allclose(logits_of(merged), logits, atol=1e-4)
        assert state_of(merged).keys() == before.keys()
        assert all(not parameter.stop_gradient for parameter in merged.parameters())


@pytest.mark.parametrize("case", ["qwen2_lora_biases", "llama_modules_to_save", "qwen2_tied_modules_to_save"])
def test_merge_adapter_writes_replaced_parameters(case: str, tmp_path: Path):
    base, theirs = CASES[case]["base"], DATA / "adapters" / case
    shared.base_model(base).save_pretrained(tmp_path / "base")
    merge_adapter(theirs, tmp_path / "merged", AutoModelForCausalLM.from_pretrained, base=tmp_path / "base")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    shared.close(merged(shared.ids_of(base)), shared.golden_of(theirs)["logits"])


def test_lora_bias_without_base_bias_computes_and_does_not_merge():
    model = trained("llama", LoRAConfig(rank=2, target_modules=["q_proj"], lora_bias=True))
    bias = model.adapter_state()["model.layers.0.self_attn.q_proj.lora_B.bias"]
    assert bias.abs().sum() > 0
    with pytest.raises(ValueError, match="lora_bias: the base layer has no bias"):
        model.merge_and_unload()


@pytest.mark.parametrize("config", [QWEN2_BIASES, LoRAConfig(rank=2, trainable_bias="all", modules_to_save=["norm"])])
@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8"])
def test_biases_over_quantized_base_train_as_over_dequantized(algo: str, config: LoRAConfig):
    gradients = []
    for dequantized in (False, True):
        model = tiny_model("qwen2")
        quantize_linears(model, QuantizationConfig(algo=algo))
        if dequantized:
            plain = get_peft_model(model, LoRAConfig(rank=1))
            model = plain.merge_and_unload()
            model.eval()
        adapted = get_peft_model(model, config)
        loss_of(adapted).backward()
        state = adapted.adapter_state()
        gradients.append({name: tensor.grad.numpy() for name, tensor in state.items() if "lora" not in name})
    assert any(name.endswith("q_proj.bias") for name in gradients[0])
    for name, gradient in gradients[1].items():
        np.testing.assert_allclose(gradients[0][name], gradient, rtol=1e-3, atol=1e-4, err_msg=name)


def test_excluded_modules_of_a_quantized_base_keep_their_full_weight():
    """A part of the other weights is subtracted before they are quantized."""
    config, model = PiSSAConfig(rank=2, exclude_modules=["k_proj"]), tiny_model()
    quantize_linears(model, QuantizationConfig(algo="nf4"), config.before_quantizing)
    adapted = get_peft_model(model, config)
    residual = {name: layer.is_residual for name, layer in quantized_layers(adapted.base_model).items()}
    assert all(is_residual == ("k_proj" not in name) for name, is_residual in residual.items())
    assert sum(residual.values()) == 12


@needs_cpp
def test_modules_to_save_of_a_bf16_base_train_in_float32(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    adapted = get_peft_model(model, LoRAConfig(rank=2, modules_to_save=["lm_head", "embed_tokens", "gate_proj"]))
    assert all(p.dtype == paddle.float32 for p in adapted.parameters() if not p.stop_gradient)
    start = logits_of(adapted)
    train(adapted, steps=2)
    assert np.isfinite(logits_of(adapted)).all() and not np.array_equal(logits_of(adapted), start)
    logits = logits_of(adapted)
    merged = adapted.merge_and_unload()
    assert merged.head_weight().dtype == merged.model.embed_tokens.weight.dtype == paddle.bfloat16
    np.testing.assert_allclose(logits_of(merged), logits, atol=0.05 * np.abs(logits).max())


def test_set_adapter_switches_replaced_parameters():
    model, base = trained("llama", CONFIGS["lora"]), logits_of(tiny_model())
    first = logits_of(model)
    model.add_adapter("other", LoRAConfig(rank=1))
    model.set_adapter("other")
    np.testing.assert_allclose(logits_of(model), base, atol=1e-5)
    assert model.base_model.lm_head.weight.stop_gradient
    model.set_adapter("default")
    assert np.array_equal(logits_of(model), first)
    assert not model.base_model.lm_head.weight.stop_gradient
    assert np.array_equal(logits_of(model.unload()), base)


def test_failed_load_restores_replaced_parameters(tmp_path: Path):
    trained("llama", CONFIGS["lora"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    model = tiny_model()
    before, ids = state_of(model), [id(parameter) for parameter in model.parameters()]
    with pytest.raises(ValueError, match="misshapen"):
        PeftModel.from_pretrained(model, tmp_path)
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert all(np.array_equal(value, before[name]) for name, value in state_of(model).items())


def test_get_peft_model_with_path_continues_replaced_parameters(tmp_path: Path):
    model = trained("llama", CONFIGS["lora"])
    model.save_pretrained(tmp_path)
    warm = get_peft_model(tiny_model(), LoRAConfig(path=str(tmp_path)))
    assert warm.peft_config.modules_to_save == SAVED
    assert np.array_equal(logits_of(warm), logits_of(model))
    assert not warm.head_weight().stop_gradient


def test_save_as_lora_keeps_replaced_parameters_and_a_sum_refuses_them(tmp_path: Path):
    model = trained("llama", CONFIGS["lora"])
    save_as_lora(model, tmp_path / "plain")
    plain = PeftModel.from_pretrained(tiny_model(), tmp_path / "plain")
    np.testing.assert_allclose(logits_of(plain), logits_of(model), atol=1e-5)
    with pytest.raises(
        ValueError, match=r"also replaces parameters of the base \(model.layers.0.self_attn.k_proj.weight"
    ):
        load_combined(tiny_model(), {tmp_path / "plain": 1.0})


def test_dropped_base_values_make_disabling_an_error():
    model = trained("llama", CONFIGS["lora"])
    model.adapter.replaced.drop_base_values()
    with (
        pytest.raises(ValueError, match=r"base's values of .* are not available in a training run"),
        model.disable_adapter(),
    ):
        pass
    assert model.merge_and_unload().head_weight() is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LoRAConfig(modules_to_save=["lm_haed"]),
            "modules_to_save: 'lm_haed' matches no module.*did you mean 'lm_head'",
        ),
        (LoRAConfig(modules_to_save=["proj"], exclude_modules=["mlp.*"]), "leave no layer to adapt"),
    ],
)
def test_inject_invalid_selection_is_named(config: LoRAConfig, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(), config)


def test_stored_modules_to_save_of_other_models_are_ignored(tmp_path: Path):
    model = trained("llama", CONFIGS["lora"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "modules_to_save": [*SAVED, "score"]}))
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert loaded.peft_config.modules_to_save == SAVED
    assert np.array_equal(logits_of(loaded), logits_of(model))


def test_modules_to_save_next_to_a_prompt_have_peft_keys(tmp_path: Path):
    trained("llama", CONFIGS["prompt"]).save_pretrained(tmp_path)
    keys = set(SafetensorsFile(tmp_path / "adapter_model.safetensors").names())
    assert {"prompt_embeddings", "base_model.lm_head.weight", "base_model.model.norm.weight"} <= keys


def test_quantized_module_to_save_is_refused():
    model = tiny_model()
    quantize_linears(model, QuantizationConfig(algo="weight_only_int8"))
    with pytest.raises(ValueError, match="'q_proj' matches no module with floating-point parameters"):
        get_peft_model(model, LoRAConfig(target_modules=["v_proj"], modules_to_save=["q_proj"]))


def test_exclude_modules_leaves_layers_out(tmp_path: Path):
    model = get_peft_model(tiny_model(), LoRAConfig(exclude_modules=["mlp.down_proj", r".*layers\.0.*"]))
    names = [name for name, _ in adapter_layers(model.base_model)]
    leaves = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    assert names == [f"model.layers.1.{leaf}" for leaf in (*leaves, "mlp.gate_proj", "mlp.up_proj")]
    model.save_pretrained(tmp_path)
    continued = get_peft_model(tiny_model(), LoRAConfig(path=str(tmp_path)))
    assert [name for name, _ in adapter_layers(continued.base_model)] == names


def test_exclude_modules_with_an_entry_that_matches_no_target_raises():
    with pytest.raises(ValueError, match=r"exclude_modules: down_porj matches no target .*did you mean 'down_proj'"):
        get_peft_model(tiny_model(), LoRAConfig(exclude_modules=["q_proj", "down_porj"]))


@pytest.mark.parametrize("config", [IA3Config(modules_to_save=["lm_head"]), LoRAConfig(modules_to_save=["lm_head"])])
def test_modules_to_save_of_a_tied_base_stay_tied_or_are_refused(config: object, tmp_path: Path):
    if isinstance(config, IA3Config):  # Hugging Face PEFT has no tying for it
        with pytest.raises(ValueError, match=r"the base ties lm_head to embed_tokens.*ensure_weight_tying=True"):
            get_peft_model(tiny_model("qwen2"), config)
        return
    model = trained("qwen2", config)
    model.save_pretrained(tmp_path)
    stored = SafetensorsFile(tmp_path / "adapter_model.safetensors")
    one, other = (stored.read(f"base_model.model.{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    assert np.array_equal(one, other)
    config_file = tmp_path / "adapter_config.json"
    fields = json.loads(config_file.read_text())
    assert fields["ensure_weight_tying"] is True
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path)), logits_of(model))
    config_file.write_text(json.dumps({**fields, "ensure_weight_tying": False}))
    with pytest.raises(ValueError, match="ties lm_head to embed_tokens"):
        PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path)


def test_saved_embeddings_of_peft_replace_those_of_another_base(tmp_path: Path):
    """Load PEFT's file with full embeddings; a base with other embeddings then computes the same."""
    theirs = shutil.copytree(DATA / "adapters" / "llama_saved_embeddings", tmp_path / "theirs")
    base = shared.base_model(CASES["llama_saved_embeddings"]["base"])
    for weight in (base.model.embed_tokens.weight, base.head_weight()):
        weight.set_value(weight * 0.5)
    model = PeftModel.from_pretrained(base, theirs)
    shared.close(model(shared.ids_of("llama_odd_sizes")), shared.golden_of(theirs)["logits"])
    assert model.head_weight().stop_gradient and model.peft_config.saved_embeddings == ("model.embed_tokens", "lm_head")
