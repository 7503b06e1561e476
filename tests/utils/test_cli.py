from __future__ import annotations

import json

import pytest

from paddlenlp_ext.utils.cli import run_command


def test_a_users_mistake_is_one_line_and_exit_code_2(capsys):
    def main(argv):
        raise ValueError(f"lora_rank is {argv[0]}; it must be at least 1")

    with pytest.raises(SystemExit) as exit_info:
        run_command(main, ["0"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: lora_rank is 0; it must be at least 1\n"


def test_an_error_out_of_a_library_keeps_its_traceback():
    with pytest.raises(json.JSONDecodeError):
        run_command(lambda argv: json.loads(argv[0]), ["{"])


def test_success_returns():
    seen = []
    run_command(seen.extend, ["a", "b"])
    assert seen == ["a", "b"]
