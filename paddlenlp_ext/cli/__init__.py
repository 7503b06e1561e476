"""Programs of the scripts in `llm/`: parse the command line, call the library, print the result.

The modules cannot be run: `python -m paddlenlp_ext.cli.NAME` prints the script to run instead, and exits with code 2.
"""

from __future__ import annotations

import sys

_PREDICT = ("export_model", "reft_predictor", "reward_predictor")
_SCRIPTS = {name: f"predict/{name}.py" for name in _PREDICT} | {
    "chat": "predict/predictor.py",
    **dict.fromkeys(("dry_run", "plan_warnings", "time_steps"), "run_finetune.py CONFIG.json --dry_run"),
    "next_steps": "run_finetune.py",
    **dict.fromkeys(("eval_rows", "run_folder"), "predict/predictor.py"),
    "export_model_arguments": "predict/export_model.py",
    **dict.fromkeys(("predict", "predict_arguments", "predict_file", "predict_resume"), "predict/predictor.py"),
    "progress": "predict/predictor.py",
    **dict.fromkeys(("sampled_rows", "sampling_arguments"), "run_sampling.py"),
}
"""Module of this package -> script that runs it, if the script is not llm/<module>.py."""


def _refuse(module: str) -> None:
    name = module.removeprefix(f"{__name__}.")
    print(f"error: {module} is not a program; run: python llm/{_SCRIPTS.get(name, f'{name}.py')}", file=sys.stderr)
    sys.exit(2)


if sys.argv[:1] == ["-m"]:  # true while `python -m` imports the package of the module to run
    for argument in sys.orig_argv:
        if argument.startswith(f"{__name__}."):
            _refuse(argument)
