"""Fine-tune a model: python llm/run_finetune.py CONFIG.json [MORE.json ...] [--key value ...]

`--help` lists every key, `--dry_run` says what would run, `--preview_data N` prints N rows as the model sees them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext._runtime import configure_runtime, require_paddle
from paddlenlp_ext.utils.distributed_env import is_main_rank
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.process import run_command


def main(argv: Sequence[str]) -> None:
    """Read the configuration, then show, plan, train or evaluate, as it says."""
    require_paddle()
    from paddlenlp_ext.config import load_run_config
    from paddlenlp_ext.peft.registry import peft_methods
    from paddlenlp_ext.trainer.build import load_data
    from paddlenlp_ext.trainer.finetune import run_training
    from paddlenlp_ext.trainer.output_dir import check_output_dir

    config = load_run_config(argv, peft_methods())
    for note in config.notes:
        get_logger().info("%s", note)
    if config.command.preview_data:
        from paddlenlp_ext.data.preview import preview_rows

        data = load_data(config)
        if is_main_rank():
            rows = data.train_rows or data.eval_rows
            assert rows is not None, "validation requires do_train or do_eval"
            preview_rows(rows, data.tokenizer, config.command.preview_data)
        return
    if config.command.dry_run:
        from paddlenlp_ext.cli.dry_run import describe_run

        if is_main_rank():
            check_output_dir(config)
        data = load_data(config)
        if is_main_rank():
            describe_run(config, data)
        return
    run_training(config)


if __name__ == "__main__":
    configure_runtime()
    run_command(main)
