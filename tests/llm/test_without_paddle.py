"""Scripts of llm/ where Paddle or this package is not installed: each says what to do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.common.scripts import LLM, load_script

MERGE = ("--model_name_or_path", "m", "--output_path", "merged")
PREDICT = ("--model_name_or_path", "m", "--data_file", "rows.json")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("finetune_generation.py", "run_dpo.py", "run_finetune.py", "run_quantization.py"), ()),
    "run_grpo.py": (),
    **dict.fromkeys(("run_lm_eval.py", "run_reward.py", "predict/reward_predictor.py"), ()),
    **{f"merge_{name}_params.py": (f"--{name}_path", "a", *MERGE) for name in ("lokr", "lora", "peft", "vera")},
    "export_gguf.py": ("--model_name_or_path", "m", "--output_file", "m.gguf"),
    "merge_tp_and_pp_params.py": ("--model_name_or_path", "m", "--tp", "2", "--pp", "1", "--allow_pickle"),
    "predict/export_model.py": MERGE,
    "predict/predictor.py": PREDICT,
    "predict/reft_predictor.py": (*PREDICT, "--reft_path", "r"),
    "run_sampling.py": (*PREDICT, "--reward_funcs", "exact_answer"),
    "run_evaluation.py": (*PREDICT, "--task", "perplexity"),
}


def test_scripts_are_all_listed():
    assert {str(path.relative_to(LLM)) for path in LLM.rglob("*.py") if path.name != "__init__.py"} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_script_without_paddle_says_what_to_install(name, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    script = load_script(LLM / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text('{"src": "a", "tgt": "b"}\n')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "paddle" else find_spec(name))
    with pytest.raises(ModuleNotFoundError, match="PaddlePaddle is not installed"):
        script.main(ARGUMENTS[name])


def test_script_in_a_python_without_the_package_names_the_python_of_the_checkout(tmp_path):
    for name in ARGUMENTS:
        command = [sys.executable, "-E", "-S", str(LLM / name)]  # without PYTHONPATH and installed packages
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert result.returncode == 1 and result.stderr.startswith(
            "error: paddlenlp_ext is not installed for this Python"
        )
        assert ".venv/bin/python" in result.stderr and "Traceback" not in result.stderr, name
