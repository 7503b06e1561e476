"""Write images/run.svg, the recording of three commands in README.

python docs/make_run_picture.py FOLDER    # contains my.jsonl; the commands write run.json and checkpoints/run there

The script needs asciinema 2 (`pip install "asciinema<3"`) and svg-term (`npm install svg-term-cli`) on PATH. The
commands take about 80 seconds on two idle cores. In the picture, training is shown at SPEED times its real speed.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = (
    "head -n 2 my.jsonl",
    "pnx init -m smollm2-135m-instruct -d my.jsonl --yes",
    "pnx sft run.json --max_steps 24 --eval_steps 12 --save_steps 12 --logging_steps 2",
    'echo "What is the past tense of the verb \\"carry\\"? Answer with one word." | pnx chat checkpoints/run',
)
WIDTH, HEIGHT = 100, 28
SPEED = 4
LONGEST_PAUSE, FRAME = 1.5, 0.25
"""Longest time without output, and time between two frames, in seconds."""
_PICTURE = Path(__file__).parent / "images" / "run.svg"
_TYPE = r"""
for command in "$@"; do
  printf '\033[1;32m$\033[0m '
  for ((i = 0; i < ${#command}; i++)); do printf '%s' "${command:i:1}"; sleep 0.03; done
  echo; sleep 0.5; eval "$command"; sleep 2
done
sleep 3
"""

Event = tuple[float, str]
"""Time in seconds, and output of the terminal."""


def record(folder: Path, cast: Path) -> tuple[dict[str, object], list[Event]]:
    """Record the commands in the folder; return the header of the recording, and its events."""
    script = cast.with_suffix(".sh")
    script.write_text(f"set -- {shlex.join(COMMANDS)}\n{_TYPE}", encoding="utf-8")
    size = ["--cols", str(WIDTH), "--rows", str(HEIGHT), "--idle-time-limit", str(LONGEST_PAUSE)]
    subprocess.run(["asciinema", "rec", *size, "--command", f"bash {script}", str(cast)], cwd=folder, check=True)
    header, *lines = map(json.loads, cast.read_text(encoding="utf-8").splitlines())
    return {name: header[name] for name in ("version", "width", "height")}, [(line[0], line[2]) for line in lines]


def shorten(events: list[Event], start: float, stop: float) -> list[Event]:
    """Play the events between two times at SPEED, and join events that are closer than FRAME."""
    home, now, before = str(Path.home()), 0.0, 0.0
    shown: list[Event] = []
    for time, text in events:
        pause = min(time - before, LONGEST_PAUSE)
        now, before = now + pause / (SPEED if start < time < stop else 1), time
        text = text.replace(home, "~")
        if shown and now - shown[-1][0] < FRAME:
            shown[-1] = (shown[-1][0], shown[-1][1] + text)
        else:
            shown.append((now, text))
    return [*shown, (now + 3, "")]


def main(folder: Path) -> None:
    """Record the commands in the folder, and write the picture."""
    with tempfile.TemporaryDirectory() as work:
        cast = Path(work) / "run.cast"
        header, events = record(folder, cast)
        prompts = [time for time, text in events if "$" in text and "\x1b[1;32m" in text]
        events = shorten(events, *prompts[-2:])
        lines = [header, *([round(time, 3), "o", text] for time, text in events)]
        cast.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        size = ["--width", str(WIDTH), "--height", str(HEIGHT), "--no-cursor", "--window"]
        subprocess.run(["svg-term", "--in", cast, "--out", _PICTURE, *size], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
