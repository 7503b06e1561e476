"""Dry run of several processes: number of steps, and layouts that do not fit the model."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from paddlenlp_ext.cli.dry_run import describe_run
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.trainer.memory import run_estimate
from tests.common.adapters import tiny_model
from tests.common.models import TINY_DELTA, TINY_LLAMA, write_tiny_model
from tests.generation.tiny_models import SIZES


@pytest.fixture
def plan(run_folders, monkeypatch):
    """Return a function that prints the dry run for a number of processes: 12 rows, one epoch, batches of two rows."""

    def describe(processes, **keys):
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(processes))
        paths = {"model_name_or_path": "model", "dataset_name_or_path": "data", "data_cache_dir": "cache"}
        values = {name: run_folders / path for name, path in {**paths, "output_dir": "out"}.items()}
        values |= {"device": "cpu", "do_train": True, "num_train_epochs": 1, "per_device_train_batch_size": 2, **keys}
        config = load_run_config([word for key, v in values.items() for word in (f"--{key}", str(v))], peft_methods())
        printed = io.StringIO()
        describe_run(config, load_data(config), Console(file=printed, width=120))
        return printed.getvalue()

    return describe


@pytest.mark.parametrize(
    ("processes", "keys", "steps"),
    [
        (1, {}, 6),
        (2, {}, 3),
        (2, {"sharding": "stage2"}, 3),
        (2, {"tensor_parallel_degree": 2}, 6),
        (4, {"pipeline_parallel_degree": 2}, 3),
    ],
)
def test_describe_run_steps_are_those_of_the_replicas(plan, processes, keys, steps):
    assert re.search(rf"optimizer steps +.?  *{steps} \(1.00 epochs\)", plan(processes, **keys))


def test_describe_run_counts_the_teacher_unless_its_log_probabilities_are_stored(plan, run_folders):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 20000}
    teacher = AutoModelForCausalLM.from_config({**TINY_LLAMA, **sizes})
    teacher.save_pretrained(run_folders / "teacher")
    num_bytes = 4 * sum(parameter.size for parameter in teacher.parameters())

    def weights(**keys):
        printed = plan(1, **keys)
        return float(re.search(r"weights +.? *([\d.]+) GB", printed)[1]), printed

    alone, _ = weights()
    distilled, printed = weights(teacher_model_name_or_path=run_folders / "teacher")
    assert distilled - alone == pytest.approx(num_bytes / 1e9, abs=0.011)
    assert "divergence from the teacher" in printed
    assert weights(teacher_logps_path=run_folders / "logps")[0] == alone


def test_describe_run_does_not_count_a_teacher_that_is_the_base_of_the_adapter(plan, run_folders):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 20000}
    model = AutoModelForCausalLM.from_config({**TINY_LLAMA, **sizes})
    model.save_pretrained(run_folders / "model")
    num_bytes = 4 * sum(parameter.size for parameter in model.parameters())

    def weights(**keys):
        return float(re.search(r"weights +.? *([\d.]+) GB", plan(1, **keys))[1])

    teacher = {"teacher_model_name_or_path": run_folders / "model"}
    assert weights(lora=True, **teacher) == weights(lora=True)
    assert weights(**teacher) - weights() == pytest.approx(num_bytes / 1e9, abs=0.011)


def test_describe_run_warns_of_rows_beyond_the_context_of_the_teacher(plan, run_folders):
    write_tiny_model(run_folders / "teacher")
    file = run_folders / "teacher" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 4}))
    printed = " ".join(plan(1, teacher_model_name_or_path=run_folders / "teacher").replace("│", " ").split())
    assert "12 of 12 training rows are longer than the teacher's context of 4 positions" in printed


def test_describe_run_counts_the_answers_that_a_student_samples(plan, run_folders):
    def printed(**keys):
        text = plan(1, teacher_model_name_or_path=run_folders / "model", **keys)
        return text, float(re.search(r"activations +.? *([\d.]+) GB", text)[1])

    stored, alone = printed()
    assert "while sampling" not in stored
    sampled, short = printed(lmbda=0.5, max_new_tokens=16)
    assert "samples the answers of 50%" in " ".join(sampled.replace("│", " ").split())
    assert "while sampling" in sampled
    _, long = printed(lmbda=0.5, max_new_tokens=20_000)
    assert long > short + 0.05 and short >= alone


def test_describe_run_degree_that_does_not_divide_the_model_is_an_error(plan):
    with pytest.raises(ValueError, match=r"tensor_parallel_degree 4 does not divide num_key_value_heads 2"):
        plan(4, tensor_parallel_degree=4)
    with pytest.raises(ValueError, match="gives 4 chunks, but the model has only 2 layers"):
        plan(4, pipeline_parallel_degree=4)
    with pytest.raises(ValueError, match="expert_parallel_degree 2: the model has no experts"):
        plan(4, expert_parallel_degree=2)


def test_describe_run_of_layers_that_peft_takes_for_experts_names_targets_that_it_reads(plan, run_folders):
    tiny_model("experts").save_pretrained(run_folders / "model")
    printed = " ".join(plan(1, lora=True).replace("│", " ").split())
    assert "drops the adapters of 6 other layers" in printed
    assert "lora_target_modules: k_proj, o_proj, q_proj, v_proj" in printed
    read = plan(1, lora=True, lora_target_modules="o_proj", target_parameters="shared_experts.up_proj.weight")
    assert "drops the adapters" not in read


def test_describe_run_names_shared_prefixes_and_recommends_them_if_they_save_much(plan, run_folders):
    shots = "What is the plural of this word? " * 12
    rows = [{"src": f"{shots}{number}", "tgt": f"{number} words"} for number in range(24)]
    (run_folders / "data" / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"max_length": 1024, "src_length": 900}

    def printed(**more):
        return " ".join(plan(1, **keys, **more).replace("│", " ").split())

    saving = r"24 of 24 rows share a prefix of (\d+) tokens; {} would compute (\d\d)% fewer positions in an epoch"
    both = re.search(saving.format("zero_padding: true and share_prefix: true"), printed())
    assert both is not None
    packed = printed(zero_padding=True)
    assert re.search(saving.format("share_prefix: true"), packed)[1] == both[1]
    shared = printed(zero_padding=True, share_prefix=True)
    found = re.search(r"shared prefixes 24 of 24 rows share .* tokens; .* are computed \((\d\d)\.\d% saved\)", shared)
    assert found is not None and abs(int(found[1]) - int(both[2])) <= 1 and "would compute" not in shared
    (gigabytes,) = re.findall(r"activations (\d+\.\d+) GB", shared)
    assert float(gigabytes) < float(re.findall(r"activations (\d+\.\d+) GB", packed)[0])
    assert "would compute" not in printed(reft=True)


def test_describe_run_of_rows_that_share_little_recommends_nothing(plan):
    assert "share_prefix" not in plan(1)


def test_describe_run_shows_the_states_of_recurrent_layers_that_a_batch_saves(plan, run_folders):
    assert "state" not in plan(1)
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 96}
    config = {**SIZES, **TINY_DELTA, **sizes, "vocab_size": 49152}
    AutoModelForCausalLM.from_config(config).save_pretrained(run_folders / "model")
    rows = [{"src": "What is the plural of this word? " * 12, "tgt": f"{number} words"} for number in range(24)]
    (run_folders / "data" / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"max_length": 1024, "src_length": 900, "zero_padding": True}
    separate, shared = (
        " ".join(plan(1, **keys, share_prefix=flag).replace("│", " ").split()) for flag in (False, True)
    )
    matrices, window = 4 * 64 * 96, 3 * (2 * 2 * 64 + 4 * 96)
    assert f"state of a row while decoding {4 * (matrices + window) / 1e6:.3f} MB" in separate
    assert " states " not in separate and f" states {25 * 4 * matrices / 1e9:.2f} GB" in shared


@pytest.mark.parametrize(
    ("release", "capability", "expected"), [("3.8.0", (9, 0), True), ("3.7.1", (9, 0), False), ("3.8.0", (7, 5), False)]
)
def test_dry_run_for_a_gpu_counts_triton_kernels_where_the_ops_take_them(monkeypatch, release, capability, expected):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: release)
    monkeypatch.setattr(run_estimate, "place_of", lambda device: AbsentGpu(capability))
    assert run_estimate._numerics(PrecisionConfig(device="gpu", bf16=True)).triton == expected
