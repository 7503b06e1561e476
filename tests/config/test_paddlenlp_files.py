"""PaddleNLP's own files: all fine-tuning files of the supported families load; others name what is not available."""

from __future__ import annotations

import pytest

from paddlenlp_ext.config.run_config import switches_of
from paddlenlp_ext.peft.registry import peft_methods
from tests.config.config_cases import load, problems, write
from tests.config.paddlenlp_files import COMMON, FINE_TUNING, OTHER

BUILT = peft_methods()
WITHOUT_EFFECT = {"unified_checkpoint", "eval_accumulation_steps", "sharding", "ignore_save_lr_and_optim"}


@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_file_loads_with_notes_only(tmp_path, name):
    written = {key: value for key, value in (COMMON | FINE_TUNING[name]).items() if value is not None}
    config = load(write(tmp_path, COMMON | FINE_TUNING[name]), methods=BUILT)
    noted = {note.split(" ")[0] for note in config.notes}
    assert {key for key in WITHOUT_EFFECT & set(written) if written[key]} <= noted
    on = {switch for switch in BUILT if written.get(switch) is True}
    assert on == (set() if config.peft is None else set(switches_of(config.peft_switch, type(config.peft))))


@pytest.mark.parametrize("name", OTHER)
def test_file_of_another_program_names_what_is_not_available(tmp_path, name):
    difference, refused = OTHER[name]
    found = problems(write(tmp_path, COMMON | difference), methods=BUILT)
    assert {problem.key for problem in found} == refused, [str(problem) for problem in found]
    words = (
        "is not available yet",
        "is not used here",
        "needs model_name_or_path",
        "needs dataset_name_or_path",
        "are names of the same key",
    )
    assert all(any(word in problem.message for word in words) for problem in found)


def test_fine_tuning_file_values_are_adjusted_as_in_paddlenlp(tmp_path):
    def loaded(name):
        return load(write(tmp_path, COMMON | FINE_TUNING[name]), methods=BUILT)

    abbreviated = loaded("2.7 sft with abbreviated keys").train
    assert (abbreviated.eval_steps, abbreviated.save_steps) == (80000, 80000)
    assert loaded("2.7 sft with intokens").data.zero_padding
    assert loaded("3.0 llama/lora with do_eval false").train.do_eval
    flashmask = loaded("3.0 llama/flashmask/sft")
    assert flashmask.parallel.tensor_parallel_degree == 1 and not flashmask.train.load_best_model_at_end
    assert loaded("2.8 llama/vera").peft.rank == 8
