"""Tokens that a run adds: tokenizer, rows of the tables, training of the rows, files of models and adapters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext import finetune
from paddlenlp_ext.api import AutoPeftModelForCausalLM, merge_adapter
from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.trainable_tokens import TrainableTokensConfig
from paddlenlp_ext.trainer.added_tokens import extend_vocabulary, with_trained_tokens
from tests.common.adapters import run_keys
from tests.common.training import make_config

ADDED = {"add_tokens": ["<think>", "</think>"], "add_special_tokens": ["<|tool|>"]}
NEW_IDS = (61, 62, 63)
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folders(run_folders: Path) -> Path:
    """Fill the tiny model's tokenizer, so that new tokens need new rows, and use one new token in each row."""
    tokenizer = load_tokenizer(run_folders / "model")
    tokenizer.add_tokens([f"w{index}" for index in range(61 - len(tokenizer))])
    tokenizer.save_pretrained(run_folders / "model")
    for split in ("train", "dev"):
        file = run_folders / "data" / f"{split}.json"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        text = "".join(json.dumps({**row, "tgt": f" <think> </think>{row['tgt']} <|tool|>"}) + "\n" for row in rows)
        file.write_text(text)
    return run_folders


def untie(folder: Path) -> None:
    """Give the model an lm_head of its own."""
    config = {**read_model_config(folder), "tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(config, seed=1).save_pretrained(folder)


def resized(source: ModelSource, **options: Any) -> tuple[ModelSource, Any]:
    tokenizer = load_tokenizer(source.path)
    return extend_vocabulary(source, tokenizer, ModelConfig(**options)), tokenizer


@pytest.mark.parametrize(
    ("options", "num_rows", "new_ids"),
    [
        ({}, None, ()),
        (ADDED, 64, NEW_IDS),
        ({**ADDED, "resize_to_multiple_of": 16}, 64, NEW_IDS),
        ({"add_tokens": ["<think>", "red"], "resize_to_multiple_of": 5}, 65, (61,)),
        ({"resize_to_multiple_of": 16}, 64, ()),
        ({"resize_vocab": True}, None, ()),
        ({"add_tokens": ["red"]}, None, ()),
    ],
)
def test_extend_vocabulary_gives_every_token_a_row(folders: Path, options: dict, num_rows: int | None, new_ids: tuple):
    source, tokenizer = resized(ModelSource.resolve(folders / "model"), **options)
    assert source.new_token_ids == new_ids
    assert source.config_overrides == ({} if num_rows is None else {"vocab_size": num_rows})
    assert source.config["vocab_size"] == (num_rows or 61)
    assert [tokenizer.convert_ids_to_tokens(index) for index in new_ids] == [
        token for key in ("add_tokens", "add_special_tokens") for token in options.get(key, ()) if token != "red"
    ]
    assert tokenizer.decode([62, 63], skip_special_tokens=True).split() == (["</think>"] if len(new_ids) == 3 else [])


def test_extend_vocabulary_takes_spare_rows_first(run_folders: Path):
    """The tokenizer of the tiny model has 15 tokens, and the model 61 rows."""
    source, _ = resized(ModelSource.resolve(run_folders / "model"), **ADDED)
    assert source.new_token_ids == (15, 16, 17) and not source.config_overrides


def test_extend_vocabulary_resize_vocab_adds_rows_for_tokens_without_one(folders: Path):
    tokenizer = load_tokenizer(folders / "model")
    tokenizer.add_tokens(["x", "y"])
    tokenizer.save_pretrained(folders / "model")
    source, _ = resized(ModelSource.resolve(folders / "model"), resize_vocab=True)
    assert source.new_token_ids == (61, 62) and source.config["vocab_size"] == 63


@pytest.mark.parametrize("token", ["", "<a>,<b>"])
def test_extend_vocabulary_refuses_what_is_not_a_token(run_folders: Path, token: str):
    with pytest.raises(ValueError, match=r"add_special_tokens: .* is not a token, because it is empty or has a comma"):
        resized(ModelSource.resolve(run_folders / "model"), add_special_tokens=[token])


def test_finetune_row_with_a_token_without_row_names_resize_vocab(folders: Path):
    tokenizer = load_tokenizer(folders / "model")
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folders / "model")
    with pytest.raises(ValueError, match=r"has the token id 61, but .* 61 tokens; .* set resize_vocab: true"):
        finetune(run_keys(folders))


@pytest.mark.parametrize("is_tied", [True, False])
def test_finetune_with_added_tokens_saves_rows_config_and_tokenizer(folders: Path, is_tied: bool):
    if not is_tied:
        untie(folders / "model")
    keys = run_keys(folders, **ADDED, save_strategy="steps", save_steps=2)
    before = open_weights(folders / "model").read(EMBEDDING)
    result = finetune(keys)
    for folder in (folders / "out", folders / "out" / "checkpoint-2"):
        assert read_model_config(folder)["vocab_size"] == 64 and len(load_tokenizer(folder)) == 64
        assert open_weights(folder).shape(EMBEDDING) == (64, 32)
    assert is_tied or open_weights(folders / "out").shape("lm_head.weight") == (64, 32)
    table = AutoModelForCausalLM.from_pretrained(folders / "out").model.embed_tokens.weight.numpy()
    assert (np.abs(table[61:] - before.mean(axis=0)).max(axis=1) > 1e-6).all()
    np.testing.assert_array_equal(table, result.model.model.embed_tokens.weight.numpy())
    uninterrupted = open_weights(folders / "out").read(EMBEDDING)
    finetune(keys, resume_from_checkpoint=str(folders / "out" / "checkpoint-2"), overwrite_output_dir=True)
    np.testing.assert_array_equal(open_weights(folders / "out").read(EMBEDDING), uninterrupted)


@pytest.mark.parametrize(
    ("keys", "is_tied"),
    [
        ({"lora": True}, True),
        ({"lora": True}, False),
        ({"lora": True, "lora_target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"lora": True, "lora_modules_to_save": ["embed_tokens", "lm_head"]}, True),
        ({"lora": True, "weight_quantize_algo": "weight_only_int8", "trainable_token_indices": [5, 62]}, False),
        ({"trainable_tokens": True, "trainable_tokens_target_modules": ["embed_tokens", "lm_head"]}, False),
        ({"trainable_tokens": True}, True),
    ],
    ids=["rows-tied", "rows", "target", "saved-tied", "quantized", "trainable-tokens", "trainable-tokens-tied"],
)
def test_finetune_adapter_with_added_tokens_trains_their_rows_and_merges(folders: Path, keys: dict, is_tied: bool):
    if not is_tied:
        untie(folders / "model")
    model = finetune(run_keys(folders, **ADDED, **keys)).model
    ids = paddle.to_tensor([[5, 61, 62, 63, 6]])
    model.eval()
    logits = model(ids).numpy()
    base_table = ModelSource.resolve(folders / "model")
    base_table = dataclasses.replace(base_table, config_overrides={"vocab_size": 64}).open_weights().read(EMBEDDING)
    loaded = AutoPeftModelForCausalLM.from_pretrained(folders / "out")
    np.testing.assert_array_equal(loaded(ids).numpy(), logits)
    merge_adapter(folders / "out", folders / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folders / "merged")
    np.testing.assert_allclose(merged(ids).numpy(), logits, atol=1e-5)
    assert len(load_tokenizer(folders / "merged")) == 64
    table = merged.model.embed_tokens.weight.numpy()
    assert table.shape == (64, 32) and (np.abs(table - base_table)[61:].max(axis=1) > 0).all()
    if not is_tied:
        assert merged.lm_head.weight.shape == [64, 32]
        changed = np.abs(merged.lm_head.weight.numpy()[61:] - merged.lm_head.weight.numpy()[:61].mean(axis=0))
        assert (changed.max(axis=1) > 1e-7).all()


def test_finetune_adapter_with_added_tokens_resumes_to_the_same_rows(folders: Path):
    untie(folders / "model")
    keys = run_keys(folders, **ADDED, lora=True, save_strategy="steps", save_steps=2)
    finetune(keys)
    tensors = (folders / "out" / "adapter_model.safetensors").read_bytes()
    fields = json.loads((folders / "out" / "adapter_config.json").read_text())
    assert fields["trainable_token_indices"] == {"embed_tokens": [61, 62, 63], "lm_head": [61, 62, 63]}
    finetune({**keys, "resume_from_checkpoint": str(folders / "out" / "checkpoint-2"), "overwrite_output_dir": True})
    assert (folders / "out" / "adapter_model.safetensors").read_bytes() == tensors


@pytest.mark.parametrize(
    ("config", "is_tied", "changes"),
    [
        (LoRAConfig(), True, {"trainable_token_indices": {"embed_tokens": (61, 62)}}),
        (
            LoRAConfig(trainable_token_indices=[5, 62]),
            False,
            {"trainable_token_indices": {"embed_tokens": (5, 62, 61), "lm_head": (61, 62)}},
        ),
        (LoRAConfig(modules_to_save=["lm_head"]), True, {}),
        (LoRAConfig(modules_to_save=["lm_head"]), False, {"trainable_token_indices": {"embed_tokens": (61, 62)}}),
        (LoRAConfig(target_modules=["lm_head"]), True, {"saved_embeddings": ("model.embed_tokens",)}),
        (IA3Config(modules_to_save=["embed_tokens"]), True, {}),
        (TrainableTokensConfig(token_indices=[4]), True, {"token_indices": (4, 61, 62)}),
    ],
)
def test_with_trained_tokens_adds_the_rows_that_no_option_trains(
    folders: Path, config: Any, is_tied: bool, changes: dict
):
    if not is_tied:
        untie(folders / "model")
    source = dataclasses.replace(ModelSource.resolve(folders / "model"), new_token_ids=(61, 62))
    run = dataclasses.replace(make_config(folders / "out"), peft=config)
    changed = with_trained_tokens(run, source)
    assert changed.peft == dataclasses.replace(config, **changes)
    assert with_trained_tokens(changed, source).peft == changed.peft
    assert with_trained_tokens(run, dataclasses.replace(source, new_token_ids=())).peft is config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (IA3Config(), r"IA3 \(IA3Config\) does not train the rows of the new tokens 61 in embed_tokens, lm_head; use"),
        (PrefixTuningConfig(num_tokens=3), "does not train the rows"),
        (TrainableTokensConfig(indices=[4]), "does not train the rows of the new tokens 61 in embed_tokens, lm_head"),
    ],
)
def test_with_trained_tokens_of_a_method_without_rows_raises(folders: Path, config: Any, message: str):
    untie(folders / "model")
    source = dataclasses.replace(ModelSource.resolve(folders / "model"), new_token_ids=(61,))
    with pytest.raises(ValueError, match=message):
        with_trained_tokens(dataclasses.replace(make_config(folders / "out"), peft=config), source)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]], ids=["rows", "target"])
def test_finetune_from_an_adapter_has_its_tokens_or_raises(folders: Path, targets: list[str]):
    keys = run_keys(folders, lora=True, lora_target_modules=targets)
    finetune({**keys, "add_tokens": ADDED["add_tokens"]})
    keys |= {"lora_path": str(folders / "out"), "output_dir": str(folders / "second")}
    if targets == ["q_proj"]:
        with pytest.raises(ValueError, match="out: this adapter does not train the rows of the new tokens 61, 62, 63"):
            finetune({**keys, **ADDED})
    finetune({**keys, "add_tokens": ADDED["add_tokens"]})
    assert AutoPeftModelForCausalLM.from_pretrained(folders / "second").config.vocab_size == 63
