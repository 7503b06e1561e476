"""Quick tours of PEFT and PaddleNLP as programs of this package, with only the import lines changed.

Models on a hub are replaced by local folders, and PyTorch's tensors by NumPy arrays (`return_tensors="np"`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest


@pytest.fixture
def model_name(run_folders: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Change to a temporary working directory for the output of programs; return the name of the model folder in it."""
    monkeypatch.chdir(run_folders)
    return "model"


@pytest.fixture
def adapters(model_name: str) -> dict[str, str]:
    """Save two trained LoRA adapters of the model, "sft" and "dpo"."""
    from paddlenlp_ext import AutoModelForCausalLM, LoraConfig, get_peft_model

    for seed, name in enumerate(("sft", "dpo")):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_name), LoraConfig(r=4), seed=seed)
        train(model)
        model.save_pretrained(name)
    return {"sft": "sft", "dpo": "dpo"}


def train(model: paddle.nn.Layer, steps: int = 3) -> list[float]:
    """Train on a padded batch with labels, as in the tours; return the losses."""
    batch = {
        "input_ids": paddle.to_tensor([[5, 10, 4, 10, 5], [6, 11, 4, 0, 0]]),
        "attention_mask": paddle.to_tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "labels": paddle.to_tensor([[-100, -100, -100, 10, 5], [-100, 11, 4, -100, -100]]),
    }
    optimizer = paddle.optimizer.AdamW(
        learning_rate=0.05, parameters=[p for p in model.parameters() if not p.stop_gradient]
    )
    model.train()
    losses = []
    for _ in range(steps):
        outputs = model(**batch)
        loss = outputs.loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    return losses


def logits(model: paddle.nn.Layer) -> np.ndarray:
    model.eval()
    with paddle.no_grad():
        return model(paddle.to_tensor([[5, 10, 4, 10]])).numpy()


# -- PEFT, quicktour: https://huggingface.co/docs/peft/quicktour ---------------------------------------------------
def test_peft_quicktour_train_saves_an_adapter(model_name: str, capsys: pytest.CaptureFixture[str]):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import LoraConfig, TaskType, get_peft_model

    peft_config = LoraConfig(
        target_modules=["q_proj"],
        task_type=TaskType.CAUSAL_LM,
        inference_mode=False,
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
    )
    model = AutoModelForCausalLM.from_pretrained(model_name)
    peft_model = get_peft_model(model, peft_config)
    peft_model.print_trainable_parameters()
    losses = train(peft_model, steps=8)
    peft_model.save_pretrained("output_dir")

    assert "trainable params: 1,024 || all params: " in capsys.readouterr().out
    assert losses[-1] < losses[0]
    assert {path.name for path in Path("output_dir").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_peft_quicktour_inference_generates_text(model_name: str, adapters: dict[str, str]):
    from paddlenlp_ext import AutoPeftModelForCausalLM, AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained("sft")
    tokenizer = AutoTokenizer.from_pretrained(model_name)

    model = model.to("cpu")
    model.eval()
    inputs = tokenizer("red apple =", return_tensors="np")

    outputs = model.generate(input_ids=inputs["input_ids"], max_new_tokens=5)
    text = tokenizer.batch_decode(outputs.detach().cpu().numpy(), skip_special_tokens=True)[0]

    assert text.startswith("red apple =") and outputs.shape[1] <= 3 + 5


def test_peft_quicktour_config_names_the_base_of_an_adapter(adapters: dict[str, str]):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained("sft")
    model = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    plain = logits(model)
    lora_model = PeftModel.from_pretrained(model, "sft", is_trainable=True)

    assert config.rank == 4
    assert not np.array_equal(logits(lora_model), plain)


# -- PEFT, several adapters: quicktour and the guides on LoRA and on merging ------------------------------------------
def test_peft_adapters_are_loaded_added_and_switched(model_name: str, adapters: dict[str, str]):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import LoraConfig, PeftModel

    base_model = AutoModelForCausalLM.from_pretrained(model_name)
    model = PeftModel.from_pretrained(base_model, "sft", adapter_name="sft")
    model.load_adapter("dpo", adapter_name="dpo")
    sft = logits(model)
    model.set_adapter("dpo")
    dpo = logits(model)
    model.add_adapter(adapter_name="new_adapter", peft_config=LoraConfig(r=8))
    model.set_adapter("new_adapter")
    new = logits(model)
    with model.disable_adapter():
        plain = logits(model)
    model.set_adapter("sft")
    model.delete_adapter("dpo")

    assert not np.array_equal(sft, dpo)
    assert np.array_equal(new, plain)
    assert np.array_equal(logits(model), sft)


# -- PEFT, guides on LoRA and QLoRA: https://huggingface.co/docs/peft/developer_guides/quantization -------------------
@pytest.mark.parametrize("method", ["LoraConfig", "PiSSAConfig", "LoHaConfig", "IA3Config"])
def test_peft_all_linear_adapts_every_linear_layer_but_lm_head(model_name: str, method: str):
    import paddlenlp_ext
    from paddlenlp_ext.peft.target_modules import linear_names

    base_model = paddlenlp_ext.AutoModelForCausalLM.from_pretrained(model_name)
    names = linear_names(base_model)
    config = getattr(paddlenlp_ext, method)(target_modules="all-linear")
    assert list(paddlenlp_ext.get_peft_model(base_model, config).injected) == names


@pytest.mark.parametrize("pattern", [{}, {"layers_pattern": "layers"}])
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj"], "all-linear"])
@pytest.mark.parametrize("layers", [1, [1], [0, 1]])
def test_peft_layers_to_transform_selects_decoder_layers(model_name: str, pattern: dict, targets, layers):
    from paddlenlp_ext import AutoModelForCausalLM, LoraConfig, get_peft_model

    base_model = AutoModelForCausalLM.from_pretrained(model_name)
    everywhere = get_peft_model(base_model, LoraConfig(target_modules=targets)).injected
    config = LoraConfig(target_modules=targets, layers_to_transform=layers, **pattern)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_name), config)
    numbers = [layers] if isinstance(layers, int) else layers
    assert list(model.injected) == [name for name in everywhere if int(name.split(".")[2]) in numbers]


def test_peft_layers_to_transform_that_selects_nothing_is_an_error(model_name: str):
    from paddlenlp_ext import AutoModelForCausalLM, LoraConfig, get_peft_model

    base_model = AutoModelForCausalLM.from_pretrained(model_name)
    with pytest.raises(ValueError, match="matches no linear layer"):
        get_peft_model(base_model, LoraConfig(target_modules=["q_proj"], layers_to_transform=[7]))
    with pytest.raises(ValueError, match="layers are counted from 0"):
        LoraConfig(target_modules=["q_proj"], layers_to_transform=[-1])
    with pytest.raises(ValueError, match="layers_pattern='layers' has no effect without layers_to_transform"):
        LoraConfig(target_modules=["q_proj"], layers_pattern="layers")


def test_peft_model_names_itself_in_errors(model_name: str):
    from paddlenlp_ext import AutoModelForCausalLM, LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_name), LoraConfig())
    with pytest.raises(AttributeError, match="'PeftModel' object has no attribute 'nonsense'"):
        model.nonsense  # noqa: B018
    with pytest.raises(TypeError, match=r"PeftModel.forward\(\) has no argument 'nonsense'"):
        model(paddle.to_tensor([[5]]), nonsense=1)


@pytest.mark.parametrize("combination_type", ["linear", "cat"])
def test_peft_add_weighted_adapter_changes_logits(model_name: str, adapters: dict[str, str], combination_type: str):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import PeftModel

    base_model = AutoModelForCausalLM.from_pretrained(model_name)
    model = PeftModel.from_pretrained(base_model, "sft", adapter_name="sft")
    model.load_adapter("dpo", adapter_name="dpo")
    weighted_adapter_name = "sft-dpo"
    model.add_weighted_adapter(
        adapters=["sft", "dpo"],
        weights=[0.7, 0.3],
        adapter_name=weighted_adapter_name,
        combination_type=combination_type,
    )
    first = logits(model)
    model.set_adapter(weighted_adapter_name)

    assert np.isfinite(logits(model)).all() and not np.array_equal(logits(model), first)


def test_peft_merge_and_unload_gives_the_same_logits(model_name: str, adapters: dict[str, str]):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import PeftModel

    base_model = AutoModelForCausalLM.from_pretrained(model_name)
    plain = logits(base_model)
    model = PeftModel.from_pretrained(base_model, "sft")
    adapted = logits(model)
    merged_model = model.merge_and_unload()
    merged_model.save_pretrained("merged-model")

    merged = logits(AutoModelForCausalLM.from_pretrained("merged-model"))
    np.testing.assert_allclose(merged, adapted, rtol=0, atol=1e-5)
    unloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_name), "sft").unload()
    assert np.array_equal(logits(unloaded), plain)


def test_peft_soft_prompts_train(model_name: str):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import (
        PrefixTuningConfig,
        PromptTuningConfig,
        PromptTuningInit,
        TaskType,
        get_peft_model,
    )

    prompt_tuning = PromptTuningConfig(
        task_type=TaskType.CAUSAL_LM,
        prompt_tuning_init=PromptTuningInit.TEXT,
        num_virtual_tokens=8,
        prompt_tuning_init_text="red blue green",
        tokenizer_name_or_path=model_name,
    )
    prefix_tuning = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=20)
    for peft_config in (prompt_tuning, prefix_tuning):
        model = AutoModelForCausalLM.from_pretrained(model_name)
        model = get_peft_model(model, peft_config)
        losses = train(model, steps=6)
        assert losses[-1] < losses[0]


# -- PaddleNLP, quick start of generation: README. `max_length` counts the prompt, and the result is one tensor, as in
# transformers; in PaddleNLP, `max_length` counts the new tokens, and the result is (new tokens, scores). --------------
def test_paddlenlp_quick_start_generates_text(model_name: str):
    from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="bfloat16")
    input_features = tokenizer("red apple =", return_tensors="pd")
    outputs = model.generate(**input_features, max_length=128)
    assert tokenizer.batch_decode(outputs, skip_special_tokens=True)[0].startswith("red apple =")


# -- PaddleNLP, quick start of its PEFT API: docs/peft.md --------------------------------------------------------------
def test_paddlenlp_lora_trains_and_reloads(model_name: str, capsys: pytest.CaptureFixture[str]):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import LoRAConfig, LoRAModel

    target_modules = [".*q_proj.*", ".*v_proj.*", ".*k_proj.*"]
    lora_rank = 8
    lora_config = LoRAConfig(
        target_modules=target_modules,
        r=lora_rank,
        lora_alpha=2 * lora_rank,
        merge_weights=True,
        dtype=paddle.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(model_name)
    model = LoRAModel(model, lora_config)
    model.mark_only_lora_as_trainable()
    model.print_trainable_parameters()
    losses = train(model)
    model.save_pretrained("lora_path")
    trained = logits(model)

    config = LoRAConfig.from_pretrained("lora_path")
    model = AutoModelForCausalLM.from_pretrained(model_name)
    model = LoRAModel.from_pretrained(model, "lora_path")
    model.eval()

    assert losses[-1] < losses[0] and "q_proj x2, k_proj x2, v_proj x2" in capsys.readouterr().out
    assert config.rank == lora_rank
    assert np.array_equal(logits(model), trained)


def test_paddlenlp_prefix_tuning_trains_and_reloads(model_name: str, capsys: pytest.CaptureFixture[str]):
    from paddlenlp_ext import AutoModelForCausalLM
    from paddlenlp_ext.peft import PrefixConfig, PrefixModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_name)
    prefix_config = PrefixConfig(
        num_prefix_tokens=64,
        num_attention_heads=model.config.n_head,
        num_hidden_layers=model.config.n_layer,
        hidden_size=model.config.hidden_size,
        prefix_projection=False,
        prefix_projection_hidden_size=model.config.hidden_size,
    )
    model = PrefixModelForCausalLM(model=model, prefix_config=prefix_config)
    model.mark_only_prefix_as_trainable()
    model.print_trainable_parameters()
    losses = train(model)
    model.save_pretrained("prefix_path")
    trained = logits(model)

    config = PrefixConfig.from_pretrained("prefix_path")
    model = AutoModelForCausalLM.from_pretrained(model_name)
    model = PrefixModelForCausalLM.from_pretrained(model, "prefix_path")
    model.eval()

    assert losses[-1] < losses[0] and "trainable params: 4,096 " in capsys.readouterr().out
    assert config.num_tokens == 64
    np.testing.assert_allclose(logits(model), trained, rtol=0, atol=1e-6)
