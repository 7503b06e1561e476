"""Run lm-evaluation-harness on a model of this project: python llm/run_lm_eval.py run --model paddlenlp_ext ...

    --model_args pretrained=MODEL[,lora_path=ADAPTER][,max_length=N][,dtype=DTYPE]
    --device cpu, cuda or cuda:N; unset: the first GPU, or the CPU without a GPU

Other arguments are passed to lm-eval (pip install 'paddlenlp-ext[lm-eval]'); docs/evaluation.md has an example.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("paddlenlp_ext") is None:
    sys.exit("error: paddlenlp_ext is not installed for this Python; run the script with .venv/bin/python (README.md)")

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.utils.optional_packages import import_extra
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    """Register the model class with lm-eval, and run the command line of lm-eval."""
    sys.argv[1:] = argv
    if {"-h", "--help"}.intersection(argv):
        print(__doc__)
        if find_spec("lm_eval") is None:
            raise SystemExit(0)
    else:
        require_paddle()
        from paddlenlp_ext.evaluation.lm_eval_harness import register_lm_eval_model

        register_lm_eval_model()
    import_extra("lm_eval.__main__", "lm-eval", "run_lm_eval.py").cli_evaluate()


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
