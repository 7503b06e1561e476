"""From files to files over the real rooms: rows on disk, a tiny model folder, training, generation, reloading."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import paddle
import pytest
from tiny_training import MODEL, make_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.base import PeftModel
from paddlenlp_ext.peft.lora import LoRAConfig
from paddlenlp_ext.train.build import build_trainer, load_data

WORDS = ["red", "blue", "green", "white", "black", "apple", "pear", "plum", "fig", "lime"]


@pytest.fixture
def folders(tmp_path):
    """A model folder with a tokenizer, and a dataset whose answers are the question's words the other way round."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "=", *WORDS])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    model = tmp_path / "model"
    AutoModelForCausalLM.from_config({**MODEL, "eos_token_id": 2}, seed=1).save_pretrained(model)
    tokenizer.save_pretrained(model)
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"src": f"{a} {b} =", "tgt": f" {b} {a}"} for a in WORDS[:4] for b in WORDS[5:8]]
    for split in ("train", "dev"):
        (data / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_for(folders, **keys):
    return make_config(
        folders / "out",
        model_name_or_path=str(folders / "model"),
        dataset_name_or_path=str(folders / "data"),
        data_cache_dir=str(folders / "cache"),
        chat_template="none",
        do_eval=True,
        device="cpu",
        **keys,
    )


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_learns_its_rows_and_its_output_loads_again(folders, lora):
    config = config_for(
        folders,
        num_train_epochs=60.0 if lora else 30.0,
        per_device_train_batch_size=1 if not lora else 4,
        zero_padding=not lora,
        gradient_accumulation_steps=1,
        learning_rate=2e-2 if lora else 5e-3,
        logging_steps=10,
        lr_scheduler_type="cosine",
        eval_with_do_generation=True,
        save_generation_output=True,
        max_new_tokens=6,
    )
    if lora:
        config = dataclasses.replace(config, peft=LoRAConfig(rank=8), peft_switch="lora")
    trainer = build_trainer(config, load_data(config))
    before = trainer.evaluate()
    trainer.train()
    trainer.save_model()
    after = trainer.evaluate()
    assert before["eval_exact_match"] < 0.2
    assert (after["eval_exact_match"], after["eval_rougel"], after["eval_accuracy"]) == (1.0, 1.0, 1.0)
    assert after["eval_loss"] < 0.3 < before["eval_loss"]
    lines = [json.loads(line) for line in (folders / "out" / "generated_output.json").read_text().splitlines()]
    assert len(lines) == 12 and all(line["output"].split() == line["tgt"].split() for line in lines)

    if lora:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders / "model"), folders / "out")
    else:
        model = AutoModelForCausalLM.from_pretrained(folders / "out")
    ids = paddle.to_tensor([[5, 10, 4, 10, 5]])
    trainer.model.eval()
    model.eval()
    assert np.array_equal(model(ids).numpy(), trainer.model(ids).numpy())
    resolved = json.loads((folders / "out" / "run_config.json").read_text())
    assert resolved.get("lora", False) == lora
