"""Exit codes and error output of commands."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from paddlenlp_ext.utils import run_command as module
from paddlenlp_ext.utils.run_command import run_command


def test_run_command_with_a_user_error_prints_one_line_and_exits_with_2(capsys):
    def main(argv):
        raise ValueError(f"lora_rank is {argv[0]}; it must be at least 1")

    with pytest.raises(SystemExit) as exit_info:
        run_command(main, ["0"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: lora_rank is 0; it must be at least 1\n"


def test_run_command_with_a_library_error_keeps_the_traceback():
    with pytest.raises(json.JSONDecodeError):
        run_command(lambda argv: json.loads(argv[0]), ["{"])


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
        ValueError(
            "(InvalidArgument) TCP connection reset by peer. (at /paddle/phi/core/distributed/store/tcp_utils.h:111)"
        ),
    ],
)
def test_run_command_that_lost_a_peer_exits_with_1(capsys, monkeypatch, error):
    """Test errors of gloo, and of Paddle when the first process has ended with its key-value store."""
    monkeypatch.setattr(module, "_LAUNCHER_POLL_SECONDS", 0.0)
    monkeypatch.setattr(module, "report_to_launcher", lambda text: pytest.fail(text))

    def main(argv):
        raise error

    with pytest.raises(SystemExit) as exit_info:
        run_command(main, [])
    assert exit_info.value.code == 1
    assert capsys.readouterr().err.startswith("error: another process of the run has ended")


def test_run_command_on_success_returns():
    seen = []
    run_command(seen.extend, ["a", "b"])
    assert seen == ["a", "b"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(13, "Permission denied", "runs/a")])
def test_run_command_with_a_storage_error_of_a_library_prints_one_line(capsys, error):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as exit_info:
        run_command(main, [])
    assert exit_info.value.code == 2
    output = capsys.readouterr().err
    assert output.startswith("error: ") and output.count("\n") == 1 and "; " in output


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        ("| true", 128 + 13, ""),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("> /dev/full", 2, "error: standard output or a file: no space is left on the device"),
    ],
)
def test_run_command_with_unwritable_output_has_no_traceback(redirection, code, message):
    program = (
        "from paddlenlp_ext.utils.run_command import run_command; "
        "run_command(lambda argv: (print('x' * 100000), open('/dev/null').fileno() > 2 or 1 / 0), [])"
    )
    script = f'set -o pipefail; "{sys.executable}" -c "$PROGRAM" {redirection}'
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PROGRAM": program}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert done.stderr.startswith(message) and done.stderr.count("\n") <= 1


def test_run_command_writes_characters_that_the_locale_lacks_as_escapes(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    run_command(lambda argv: print(chr(0xE4), chr(0xDCFF)), [])
    assert written.getvalue() == b"\\xe4 \\udcff\n"
