"""Configuration of llm/run_dpo.py: PaddleNLP's keys, its files, and the rules between keys."""

from __future__ import annotations

import pytest

from paddlenlp_ext.config import ConfigError, RunConfig, load_run_config
from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.known_keys import known_keys
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS
from paddlenlp_ext.config.sections.distillation import DistillationConfig
from paddlenlp_ext.config.sections.preference import LOSS_TYPES, PreferenceConfig
from paddlenlp_ext.config.validation import check_trainer_config
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.scripts import ROOT, load_script
from tests.config.config_cases import SMALLEST, problems, write
from tests.config.paddlenlp_files import COMMON, OTHER

METHODS = peft_methods()
SMALLEST_DPO = {
    "model_name_or_path": "m",
    "output_dir": "out",
    "do_train": True,
    "train_dataset_path": "train.jsonl",
}


def load(**keys) -> RunConfig:
    return run_config_from(SMALLEST_DPO | keys, {}, METHODS, PREFERENCE_SECTIONS)


def refused(**keys) -> dict[str, str]:
    """Return key -> message of the problems of a configuration."""
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    return {problem.key: problem.message for problem in caught.value.problems}


def test_preference_defaults_are_those_of_paddlenlp():
    config = load()
    preference, data = config.preference, config.data
    assert (preference.loss_type, preference.beta, preference.simpo_gamma) == ("sigmoid", 0.1, 0.5)
    assert (preference.dpop_lambda, preference.label_smoothing) == (50.0, 0.0)
    assert (preference.pref_loss_ratio, preference.sft_loss_ratio) == (1.0, 0.0)
    assert (preference.reference_free, preference.ref_model_update_steps) == (False, -1)
    assert (data.max_length, data.src_length) == (4096, 2048)
    assert config.notes == []


def test_preference_file_of_paddlenlp_loads(tmp_path):
    """Load the keys of PaddleNLP's llm/config/llama/dpo_argument.json, with its values."""
    file = {
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
        "train_dataset_path": "./data/train.jsonl",
        "dev_dataset_path": "./data/dev.jsonl",
        "output_dir": "./checkpoints/dpo_ckpts",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "per_device_eval_batch_size": 1,
        "num_train_epochs": 1,
        "max_steps": 100,
        "learning_rate": 1e-06,
        "warmup_steps": 10,
        "logging_steps": 1,
        "evaluation_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 100,
        "save_steps": 500,
        "max_seq_len": 2000,
        "max_prompt_len": 1000,
        "bf16": True,
        "fp16_opt_level": "O2",
        "do_train": True,
        "do_eval": True,
        "disable_tqdm": True,
        "load_best_model_at_end": True,
        "tensor_parallel_degree": 8,
        "sharding": "stage1",
        "use_flash_attention": True,
        "flash_mask": True,
        "recompute": False,
        "recompute_granularity": "full",
        "benchmark": False,
        "unified_checkpoint": True,
        "autotuner_benchmark": False,
        "beta": 0.1,
        "loss_type": "sigmoid",
        "label_smoothing": 0.0,
        "seed": 42,
        "lazy": False,
    }
    config = load_run_config([write(tmp_path, file)], METHODS, PREFERENCE_SECTIONS)
    assert (config.data.max_length, config.data.src_length) == (2000, 1000)
    assert config.data.eval_dataset_path == ("./data/dev.jsonl",) and config.data.zero_padding
    again = load_run_config([write(tmp_path, config.to_flat_dict(), "again.json")], METHODS, PREFERENCE_SECTIONS)
    assert again == config or again.to_flat_dict() == config.to_flat_dict()


@pytest.mark.parametrize("name", ["dpo", "dpo_lora", "simpo", "kto"])
def test_preference_file_of_paddlenlp_loads_with_notes_only(tmp_path, name):
    difference, _ = OTHER[name]
    fine_tuning = ("src_length", "max_length", "metric_for_best_model")
    written = {key: value for key, value in (COMMON | difference).items() if key not in fine_tuning}
    config = load_run_config([write(tmp_path, written)], METHODS, PREFERENCE_SECTIONS)
    assert config.preference.beta == written.get("beta", 0.1)
    assert config.preference.loss_type == written.get("loss_type", "sigmoid")
    if name == "dpo_lora":
        lora = config.peft
        assert (lora.rank, lora.rslora, lora.alpha, lora.plus_scale) == (64, True, 4, 4.0)
        assert any(note.startswith("rslora_plus sets rslora: true") for note in config.notes)


def test_preference_spellings_are_one_key():
    assert load(loss_type="or").preference.loss_type == "orpo"
    assert load(max_length=512, src_length=300).data.max_length == 512
    assert "max_seq_len" in refused(max_length=512, max_seq_len=600)
    with_folder = run_config_from(
        SMALLEST_DPO | {"train_dataset_path": None, "dataset_name_or_path": "data"}, {}, METHODS, PREFERENCE_SECTIONS
    )
    assert with_folder.data.dataset_name_or_path == "data"


def test_preference_rules_are_reported_together():
    found = refused(
        dataset_name_or_path="data",
        do_eval=True,
        autoregressive=True,
        loss_type="kto",
        per_device_train_batch_size=1,
    )
    assert "keep one of them" in found["train_dataset_path"]
    assert "for plain text" in found["autoregressive"]
    assert "needs several rows" in found["per_device_train_batch_size"]
    assert "reads preference data" in refused(eval_with_do_generation=True)["eval_with_do_generation"]


def test_preference_data_is_neither_a_stream_nor_a_mixture():
    config = load(lazy=True)
    (note,) = config.notes
    assert note.startswith("lazy has no effect") and not config.data.is_stream
    assert "cannot be mixed by weights" in refused(train_dataset_prob="0.5,0.5")["train_dataset_prob"]
    assert "reads no test rows" in refused(do_predict=True)["do_predict"]


def test_preference_run_needs_the_files_of_its_splits():
    assert refused(train_dataset_path=None) == {
        "train_dataset_path": "do_train needs train_dataset_path, which is not set"
    }
    assert refused(do_eval=True) == {"dev_dataset_path": "do_eval needs dev_dataset_path, which is not set"}
    assert load(loss_type="kto", per_device_train_batch_size=1, zero_padding=True).preference.loss_type == "kto"


EVALUATION = {"do_eval": True, "dev_dataset_path": "dev.jsonl", "evaluation_strategy": "epoch"}


def test_preference_metrics_select_the_best_model(tmp_path):
    train = load(**EVALUATION, metric_for_best_model="eval_rewards/margins").train
    assert train.metric_for_best_model == "rewards/margins"
    found = refused(**EVALUATION, metric_for_best_model="perplexity")
    assert "not measured by pnx dpo" in found["metric_for_best_model"]
    sft = SMALLEST | {"do_eval": True, "evaluation_strategy": "epoch", "metric_for_best_model": "rewards/accuracies"}
    (problem,) = problems(write(tmp_path, sft), methods=METHODS)
    assert "pnx dpo" in problem.message


def test_preference_limits_are_checked():
    found = refused(beta=0, label_smoothing=0.5, loss_type="dpo", simpo_gamma=-1, ref_model_update_steps=-2)
    assert set(found) == {"beta", "label_smoothing", "loss_type", "simpo_gamma", "ref_model_update_steps"}
    assert all(name in found["loss_type"] for name in LOSS_TYPES)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"simpo_gamma": 1.0}, "it applies only to loss_type: simpo"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "it applies only to loss_type: sigmoid, simpo, robust"),
        ({"undesirable_weight": 2.0}, "it applies only to loss_type: kto"),
        ({"loss_type": "orpo", "beta": 0.2}, "beta only scales the logged rewards"),
        ({"loss_type": "simpo", "ref_model_update_steps": 8}, "simpo uses no reference model"),
        ({"reference_free": True, "ref_model_update_steps": 8}, "reference_free is true"),
    ],
)
def test_preference_key_without_effect_gets_a_note(keys, words):
    (note,) = load(**keys).notes
    assert words in note


def test_preference_keys_are_refused_by_fine_tuning(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"beta": 0.2}), methods=METHODS)
    assert found.key == "beta" and "pnx dpo" in found.message
    (found,) = problems(write(tmp_path, SMALLEST | {"max_seq_len": 512}), methods=METHODS)
    assert "for fine-tuning set max_length" in found.message


def test_preference_keys_include_those_of_fine_tuning_without_distillation():
    known, of_distillation = known_keys(METHODS, PREFERENCE_SECTIONS), options_of(DistillationConfig, "distillation")
    fine_tuning = known_keys(METHODS).keys
    assert set(fine_tuning) - set(known.keys) == {name for option in of_distillation for name in option.spellings}
    assert known.options["beta"].section == "preference"


def test_preference_rules_apply_to_a_configuration_made_in_python():
    check_trainer_config(RunConfig(preference=PreferenceConfig(), data=PREFERENCE_SECTIONS["data"]()))
    for key, words in {"autoregressive": "is for plain text", "use_pose_convert": "is for rows with one"}.items():
        data = PREFERENCE_SECTIONS["data"](**{key: True})
        with pytest.raises(ConfigError, match=f"{key} {words}"):
            check_trainer_config(RunConfig(preference=PreferenceConfig(), data=data))


def test_preference_page_matches_the_generated_table():
    maker = load_script(ROOT / "docs" / "make_configuration.py")
    page = maker.PREFERENCE_PAGE.read_text(encoding="utf-8")
    assert maker.renew_preference(page) == page, "run: python docs/make_configuration.py"
    assert all(f"`{name}`" in page for name in (*LOSS_TYPES, "max_seq_len", "dev_dataset_path", "sft_loss_ratio"))


def test_preference_help_names_the_program(capsys):
    with pytest.raises(SystemExit):
        load_run_config(["--help"], METHODS, PREFERENCE_SECTIONS, "run_dpo.py")
    text = capsys.readouterr().out
    assert text.startswith("usage: run_dpo.py CONFIG.json") and "--loss_type" in text and "--max_seq_len" in text
