"""Command `pnx push`: upload the model or adapter of a run to the Hugging Face hub. Paddle is not imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paddlenlp_ext.checkpoint.hub_upload import check_hub_login, repo_of_run, upload_model
from paddlenlp_ext.cli.run_folder import find_run
from paddlenlp_ext.report.model_card import write_model_card


def run(argv: Sequence[str]) -> None:
    """Upload the model or adapter of a run, and print the URL of the repository.

    Raises:
        ValueError: the folder has no model or adapter, there is no token, or the upload failed.
    """
    parser = argparse.ArgumentParser(
        "pnx push",
        description="Upload a model or adapter with tokenizer, results and a model card to the Hugging Face hub. The "
        "token comes from HF_TOKEN or `hf auth login`.",
    )
    parser.add_argument("run", help="output_dir of a training run, or a folder with a model or adapter")
    parser.add_argument("--repo", help="organisation/name; unset: hub_model_id of the run, or the name of the folder")
    parser.add_argument("--private", action="store_true", default=None, help="create a private repository")
    arguments = parser.parse_args(argv)
    found = find_run(arguments.run)
    repo_id = arguments.repo or repo_of_run(found.path, found.settings.get("hub_model_id"))
    check_hub_login(repo_id, "pnx push")  # before the model card is written
    write_model_card(found.weights, found.path, repo_id)
    private = arguments.private or found.settings.get("hub_private_repo")
    print(f"uploaded to {upload_model(found.weights, repo_id, private, 'pnx push')}")
