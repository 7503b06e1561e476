"""Quick starts of TRL's documentation: only the import lines, the names of models and the rows are changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paddle import nn

from paddlenlp_ext import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    LoraConfig,
    PeftModel,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    get_peft_model,
)
from tests.common.hub import FakeHub

CHATS = [
    {"messages": [{"role": "user", "content": "red blue"}, {"role": "assistant", "content": "blue red"}]},
    {"messages": [{"role": "user", "content": "fig lime"}, {"role": "assistant", "content": "lime fig"}]},
]
PAIRS = [
    {"prompt": "red blue", "chosen": "blue red", "rejected": "red blue"},
    {"prompt": "fig lime", "chosen": "lime fig", "rejected": "fig lime"},
]
TEXTS = [{"text": "red blue green"}, {"text": "apple pear plum fig"}]


@pytest.fixture
def model_id(run_folders: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(run_folders)
    return str(run_folders / "model")


def arguments(config_class, folder: str, **changes):
    return config_class(
        folder, **{"max_steps": 2, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True} | changes
    )


def weights(model) -> dict[str, np.ndarray]:
    return {name: parameter.numpy().copy() for name, parameter in model.named_parameters()}


def changed(before, after) -> set[str]:
    return {name for name in before if not np.array_equal(before[name], after[name])}


# -- SFT: the quick start, with PEFT, with a model and its arguments --------------------------------------------------
def test_sft_trainer_with_the_name_of_a_model_trains_all_weights(model_id: str):
    trainer = SFTTrainer(model=model_id, train_dataset=CHATS)
    trainer.train()
    assert trainer.args.output_dir == "model-SFT" and Path("model-SFT/train_results.json").is_file()
    assert trainer.state.step == 3
    before = weights(AutoModelForCausalLM.from_pretrained(model_id))
    assert changed(before, weights(trainer.model)) == set(before)


def test_sft_trainer_with_peft_config_trains_and_saves_an_adapter(model_id: str):
    trainer = SFTTrainer(model_id, arguments(SFTConfig, "out"), train_dataset=CHATS, peft_config=LoraConfig())
    before = weights(trainer.model)
    result = trainer.train()
    assert result.global_step == 2 and result.training_loss == result.metrics["train_loss"]
    assert all("lora_" in name for name in changed(before, weights(trainer.model)))
    trainer.save_model("adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_id), "adapter")
    assert changed(weights(loaded), weights(trainer.model)) == set()


def test_sft_trainer_with_push_to_hub_uploads_after_train_and_again_with_results(hub: FakeHub, model_id: str):
    keys = {"push_to_hub": True, "hub_model_id": "org/name", "hub_private_repo": True}
    trainer = SFTTrainer(model_id, arguments(SFTConfig, "out", **keys), CHATS, CHATS[:1], peft_config=LoraConfig(r=2))
    trainer.train()
    assert hub.repositories == {"org/name": True}
    assert {"adapter_model.safetensors", "train_results.json"} <= set(hub.files["org/name"])
    trainer.evaluate()
    assert trainer.push_to_hub() == "https://huggingface.co/org/name"
    assert "eval_results.json" in hub.files["org/name"]


def test_sft_trainer_with_push_to_hub_without_token_raises_before_the_model_is_loaded(hub: FakeHub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="push_to_hub: no token"):
        SFTTrainer("no-such-model", arguments(SFTConfig, "out", push_to_hub=True), CHATS)


def test_sft_trainer_with_a_loaded_model_equals_the_one_with_its_name(model_id: str):
    trained = []
    for model in (model_id, AutoModelForCausalLM.from_pretrained(model_id)):
        args = arguments(SFTConfig, f"out-{len(trained)}", packing=True, max_length=32)
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=CHATS,
            processing_class=AutoTokenizer.from_pretrained(model_id),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"]),
        )
        trainer.train()
        trained.append(weights(trainer.model))
    assert changed(*trained) == set()


@pytest.mark.parametrize("loaded", [False, True], ids=["name", "model"])
def test_sft_trainer_tokenizes_with_processing_class(model_id: str, loaded: bool):
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    tokenizer.chat_template = "{% for message in messages %}lime {{ message.content }}{% endfor %}"
    model = AutoModelForCausalLM.from_pretrained(model_id) if loaded else model_id
    trainer = SFTTrainer(model, arguments(SFTConfig, "out"), CHATS, processing_class=tokenizer)
    assert trainer.processing_class is tokenizer
    assert tokenizer.decode(trainer.trainer.train_rows[0].tokens).startswith("lime red blue")


def test_sft_trainer_with_two_tokenizers_names_both_arguments(model_id: str):
    args = arguments(SFTConfig, "out", run_keys={"tokenizer_name_or_path": model_id})
    with pytest.raises(ValueError, match="processing_class and tokenizer_name_or_path both select the tokenizer"):
        SFTTrainer(model_id, args, CHATS, processing_class=AutoTokenizer.from_pretrained(model_id))


def test_sft_trainer_around_a_model_reads_the_tokenizer_in_run_keys(model_id: str):
    model = AutoModelForCausalLM.from_pretrained(model_id)
    args = arguments(SFTConfig, "out", run_keys={"tokenizer_name_or_path": "no-such-tokenizer"})
    with pytest.raises(ValueError, match="no-such-tokenizer"):
        SFTTrainer(model, args, CHATS)


def test_sft_trainer_around_a_peft_model_trains_its_adapter(model_id: str):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_id), LoraConfig(r=2))
    before = weights(model)
    SFTTrainer(model, arguments(SFTConfig, "out"), train_dataset=CHATS).train()
    assert changed(before, weights(model)) and all("lora_" in name for name in changed(before, weights(model)))
    with pytest.raises(ValueError, match="has an adapter already"):
        SFTTrainer(model, arguments(SFTConfig, "out"), train_dataset=CHATS, peft_config=LoraConfig())


@pytest.mark.parametrize("as_field", [True, False], ids=["dataset_text_field", "formatting_func"])
def test_sft_trainer_on_text_trains_every_token(model_id: str, as_field: bool):
    rows = [{"story": row["text"]} for row in TEXTS]
    args = arguments(SFTConfig, "out", **({"dataset_text_field": "story"} if as_field else {}))
    function = None if as_field else (lambda row: row["story"])
    trainer = SFTTrainer(model_id, args, train_dataset=rows, formatting_func=function)
    row = trainer.trainer.train_rows[0]
    assert trainer.processing_class.decode(row.tokens).split()[:3] == ["red", "blue", "green"]
    assert row.loss_mask[1:].all()
    trainer.train()


@pytest.mark.parametrize(
    ("field", "function", "named"), [("text", str, "formatting_func"), ("story", None, "dataset_text_field='story'")]
)
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_sft_trainer_on_text_in_a_file_names_the_argument_that_needs_rows(model_id: str, field, function, named, name):
    datasets = {"train_dataset": [{"story": "red"}], name: "rows.jsonl"}
    args = arguments(SFTConfig, "out", dataset_text_field=field)
    with pytest.raises(ValueError, match=f"{named} reads rows in memory, but {name} is a path"):
        SFTTrainer(model_id, args, formatting_func=function, **datasets)


def test_sft_trainer_evaluates_several_datasets_by_name(model_id: str):
    args = arguments(SFTConfig, "out", eval_strategy="steps", eval_steps=1)
    trainer = SFTTrainer(model_id, args, train_dataset=CHATS, eval_dataset={"first": CHATS[:1], "second": CHATS[1:]})
    trainer.train()
    assert {"eval_first_loss", "eval_second_loss"} <= set(trainer.evaluate())


def test_sft_trainer_reads_datasets_objects_and_folders(model_id: str, run_folders: Path):
    class Dataset:  # the interface of datasets.Dataset that is used
        column_names = ("messages", "id")

        def __len__(self) -> int:
            return len(CHATS)

        def __getitem__(self, index: int) -> dict:
            return {**CHATS[index], "id": None}

    trainers = [SFTTrainer(model_id, arguments(SFTConfig, "out"), data) for data in (Dataset(), run_folders / "data")]
    assert len(trainers[0].trainer.train_rows) == 2 and len(trainers[1].trainer.train_rows) > 2


def test_sft_trainer_resumes_from_its_checkpoint_to_the_same_bits(model_id: str):
    def trainer(folder: str, steps: int) -> SFTTrainer:
        args = arguments(SFTConfig, folder, max_steps=steps, save_steps=2, lr_scheduler_type="constant")
        return SFTTrainer(model_id, args, train_dataset=CHATS, peft_config=LoraConfig(r=2))

    whole = trainer("whole", 4)
    whole.train()
    trainer("parts", 2).train()
    resumed = trainer("parts", 4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.step == 4
    assert changed(weights(whole.model), weights(resumed.model)) == set()


# -- DPO, reward models -----------------------------------------------------------------------------------------------
def test_dpo_trainer_raises_the_margin_of_its_pairs(model_id: str):
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_id),
        args=arguments(DPOConfig, "out", max_steps=8, logging_steps=1, beta=0.5),
        processing_class=AutoTokenizer.from_pretrained(model_id),
        train_dataset=PAIRS,
        peft_config=LoraConfig(),
    )
    trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert abs(margins[0]) < 1e-6 and margins[-1] > 0.1


def test_dpo_trainer_refuses_a_reference_model(model_id: str):
    with pytest.raises(ValueError, match="the reference model is the model at the start of the run"):
        DPOTrainer(model_id, ref_model=object(), args=arguments(DPOConfig, "out"), train_dataset=PAIRS)


@pytest.mark.parametrize("loaded", [False, True])
def test_reward_trainer_ranks_its_pairs(model_id: str, loaded: bool):
    model = AutoModelForSequenceClassification.from_pretrained(model_id, seed=42) if loaded else model_id
    args = arguments(RewardConfig, "out", max_steps=12, logging_steps=12, center_rewards_coefficient=0.01)
    trainer = RewardTrainer(model=model, args=args, train_dataset=PAIRS, eval_dataset=PAIRS)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1.0


def test_reward_trainer_with_a_language_model_names_the_class_to_load(model_id: str):
    model = AutoModelForCausalLM.from_pretrained(model_id)
    with pytest.raises(ValueError, match="AutoModelForSequenceClassification"):
        RewardTrainer(model, arguments(RewardConfig, "out"), train_dataset=PAIRS)


@pytest.mark.parametrize("loaded", [False, True], ids=["name", "model"])
@pytest.mark.parametrize(
    ("trainer_class", "config_class", "rows"), [(SFTTrainer, SFTConfig, CHATS), (DPOTrainer, DPOConfig, PAIRS)]
)
def test_trainer_checks_its_training_rows(model_id: str, loaded: bool, trainer_class, config_class, rows, caplog):
    model = AutoModelForCausalLM.from_pretrained(model_id) if loaded else model_id
    with pytest.raises(ValueError, match=r"max_lost_targets 0\.2: .* of the target tokens"):
        trainer_class(model, args=arguments(config_class, "out", max_length=3), train_dataset=rows)
    keys = {"max_length": 3, "run_keys": {"max_lost_targets": 1}}
    assert trainer_class(model, args=arguments(config_class, "out", **keys), train_dataset=rows)


@pytest.mark.parametrize("loaded", [False, True], ids=["name", "model"])
def test_trainer_warns_about_rows_beyond_the_context(model_id: str, loaded: bool, caplog):
    model = AutoModelForCausalLM.from_pretrained(model_id) if loaded else model_id
    SFTTrainer(model, arguments(SFTConfig, "out"), [{"src": "red " * 300, "tgt": "blue"}, *CHATS[:1]])
    assert "1 of 2 training rows are longer than the model's context of 256 positions" in caplog.text


# -- GRPO: the quick start, reward functions for chats and texts, several functions ------------------------------------
def reward_length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


QUESTIONS = [
    {"prompt": [{"role": "user", "content": "red blue"}], "ground_truth": "blue red"},
    {"prompt": [{"role": "user", "content": "fig lime"}], "ground_truth": "lime fig"},
]


def short(folder: str, **changes) -> GRPOConfig:
    return arguments(GRPOConfig, folder, logging_steps=1, max_completion_length=6, **changes)


@pytest.mark.parametrize("loaded", [False, True], ids=["name", "model"])
def test_grpo_trainer_trains_on_the_rewards_of_a_function(model_id: str, loaded: bool):
    def reward_num_unique_letters(completions, **kwargs):  # cannot be imported by its name
        return [float(len(set(completion[0]["content"]))) for completion in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_id) if loaded else model_id,
        reward_funcs=reward_num_unique_letters,
        args=short("out"),
        train_dataset=QUESTIONS,
    )
    before = weights(trainer.model)
    trainer.train()
    assert changed(before, weights(trainer.model))
    entry = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert entry["reward"] == entry["rewards/reward_num_unique_letters/mean"] > 0
    assert len(list(Path("out/rollouts").iterdir())) == 2


def test_grpo_trainer_with_several_functions_weights_their_rewards_and_evaluates(model_id: str):
    def reward_known(completions, ground_truth, **kwargs):
        assert set(ground_truth) <= {"blue red", "lime fig"} and len(ground_truth) == len(completions)
        return [1.0] * len(completions)

    functions = [reward_length, reward_known, "soft_overlong"]
    keys = {"reward_weights": [0.5, 2.0, 0.0], "run_keys": {"overlong_max_length": 300}}
    args = short("out", eval_strategy="steps", eval_steps=1, num_generations_eval=2, **keys)
    trainer = GRPOTrainer(
        model_id, functions, args, train_dataset=QUESTIONS, eval_dataset=QUESTIONS[:1], peft_config=LoraConfig(r=2)
    )
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert entry["reward"] == pytest.approx(0.5 * entry["rewards/reward_length/mean"] + 2.0)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(0.5 * metrics["eval_completions/mean_length"] + 2.0)


def test_grpo_trainer_passes_texts_if_the_prompts_are_texts(model_id: str):
    def reward_text(prompts, completions, **kwargs):
        assert set(prompts) == {"red blue"} and all(isinstance(each, str) for each in completions)
        return [float(len(each)) for each in completions]

    GRPOTrainer(model_id, [reward_text], short("out"), train_dataset=[{"prompt": "red blue"}]).train()


def test_grpo_trainer_resumes_with_its_function_to_the_same_bits(model_id: str):
    def trainer(folder: str, steps: int) -> GRPOTrainer:
        args = short(folder, max_steps=steps, save_steps=1, lr_scheduler_type="constant", num_iterations=2)
        return GRPOTrainer(model_id, reward_length, args, train_dataset=QUESTIONS, peft_config=LoraConfig(r=2))

    whole = trainer("whole", 3)
    whole.train()
    trainer("parts", 1).train()
    resumed = trainer("parts", 3)
    resumed.train(resume_from_checkpoint=True)
    assert changed(weights(whole.model), weights(resumed.model)) == set()


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([reward_length, reward_length], "two functions have the name"),
        ([1.5], "1.5 is not a function"),
        (nn.Linear(2, 1), 'Linear is a model; pass "reward_model"'),
        ("organisation/judge", 'organisation/judge is a model; pass "reward_model"'),
        ("reward_lenth", "Your own function is module.function"),
        ([], "reward_funcs is not set"),
    ],
)
def test_grpo_trainer_with_wrong_functions_is_an_error(model_id: str, functions, message):
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(model_id, functions, short("out"), train_dataset=QUESTIONS)


# -- errors -----------------------------------------------------------------------------------------------------------
def test_trainer_without_training_data_evaluates_and_refuses_to_train(model_id: str):
    trainer = SFTTrainer(model_id, arguments(SFTConfig, "out"), eval_dataset=CHATS)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ValueError, match="train_dataset: not set"):
        trainer.train()


def test_trainer_with_an_invalid_row_names_its_index(model_id: str):
    with pytest.raises(ValueError, match=r"row 1.*tgt is empty"):
        SFTTrainer(model_id, arguments(SFTConfig, "out"), [{"src": "a", "tgt": "b"}, {"src": "a", "tgt": ""}])


def test_trainer_with_a_foreign_peft_config_names_its_class(model_id: str):
    with pytest.raises(ValueError, match="dict is not the config of an adapter method"):
        SFTTrainer(model_id, arguments(SFTConfig, "out"), CHATS, peft_config={"r": 8})
