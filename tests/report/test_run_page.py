"""The page of a run: well-formed, escaped, without scripts, and complete."""

from __future__ import annotations

from paddlenlp_ext.report.run_folder import read_run
from paddlenlp_ext.report.run_page import commands, render_run
from tests.report.conftest import ATTACK, Page, history, write_run


def test_render_run_writes_one_closed_page_without_scripts_or_network(run_folder):
    text = render_run(read_run(run_folder))
    page = Page(text)
    assert "script" not in page.tags and page.links == ["data_audit.html"]
    assert ATTACK in page.text and ATTACK not in text
    assert "default-src 'none'" in text and "prefers-color-scheme: dark" in text
    assert page.tags.count("svg") == 5


def test_render_run_shows_verdict_findings_answers_keys_rows_and_commands(run_folder):
    page = Page(render_run(read_run(run_folder)))
    for words in (
        "Completed: 60 steps", "Best dev loss 1.25 at step 20", "30.0 s in optimizer steps, 9,000 tokens",
        "6 dev rows are also in train", "step 20", "after training", "mouses", "mice", "learning_rate", "0.004",
        "5e-05", "3.3.1", "900 (10.0%)", "--hub_token '(hidden)'", "run_config.json --output_dir", "and 2 more",
        "dashed: max_grad_norm 1", "(best)",
    ):  # fmt: skip
        assert words in page.text, words


def test_render_run_shows_sampled_answers_escaped_and_collapsed(tmp_path):
    answers = [
        {"prompt": ATTACK, "answer": f"41 {ATTACK}", "reward": 0.25, "scores": {"correct": 0.0, ATTACK: 0.5}},
        {"prompt": "6 * 7?", "answer": "42", "reward": None, "scores": {"correct": None}},
    ]
    event = {"event": "sampled_answers", "step": 30, "time": 1030.5, "answers": answers}
    lines = history()
    run = read_run(write_run(tmp_path / "grpo", [*lines[:-1], event, lines[-1]]))
    text = render_run(run)
    page = Page(text)
    assert "script" not in page.tags and ATTACK not in text and f"41 {ATTACK}" in page.text
    section = text[text.index("<h2>Sampled answers</h2>") :]
    assert section.split("\n")[1].startswith("<details><summary><b>step 30</b>")
    cells = [line for line in section.split("\n") if line.startswith("<tr><td>")][:2]
    assert cells[0].endswith("<td>0.25</td><td>0</td><td>0.5</td></tr>")
    assert cells[1] == "<tr><td>6 * 7?</td><td>42</td><td>none</td><td>none</td><td>none</td></tr>"
    assert run.end is not None, "the run has ended"


def test_render_run_before_the_first_step_says_that_the_run_goes_on(tmp_path):
    run = read_run(write_run(tmp_path / "lora", history()[:1]))
    run.is_active = True
    page = Page(render_run(run))
    assert "Running: step 0 of 60" in page.text and "svg" not in page.tags


def test_render_run_that_was_killed_offers_to_continue(tmp_path):
    page = Page(render_run(read_run(write_run(tmp_path / "lora", history()[:-1]))))
    assert "Killed at step 60 of 60" in page.text


def test_render_run_after_a_failure_gives_the_error_and_how_to_continue(tmp_path):
    end = {"step": 60, "time": 1061.0, "event": "end", "outcome": "failed", "reason": "loss is nan"}
    page = Page(render_run(read_run(write_run(tmp_path / "lora", [*history()[:-1], end]))))
    assert "Failed at step 60 of 60: loss is nan" in page.text
    assert "--resume_from_checkpoint true" in page.text


def test_commands_repeat_a_resumed_run_from_its_start(run_folder):
    run = read_run(run_folder)
    assert "--resume" not in dict(commands(run))["Repeat the run in a new folder"]
    run.config["resume_from_checkpoint"] = True
    assert dict(commands(run))["Repeat the run in a new folder"].endswith("lora-2 --resume_from_checkpoint false")
