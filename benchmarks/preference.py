"""Tokens per second of DPO on random pairs, with prompts computed once or twice per pair.

    python -m benchmarks.preference [--pairs 8 --prompt 384 --answer 64 --steps 3] [--key value ...]

Further keys are keys of llm/run_dpo.py, such as `--lora true --lora_rank 8`, `--bf16 true`, `--share_prompt false`. A
step has all pairs, in packs of 2,048 positions. Speed counts every pair as two sequences, each with its prompt. The
first step is not timed. The forward pass of the reference model before training is timed separately.
benchmarks/peers/preference.py measures the step in TRL.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import numpy as np

from benchmarks.measure import num_pair_tokens, random_pairs, report, tokens_per_second
from benchmarks.ours import run_config
from benchmarks.train_rows import StepTimes
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import RunData
from paddlenlp_ext.trainer.objectives import dpo_objective
from paddlenlp_ext.utils.run_command import run_command

KEYS = {
    "zero_padding": "true",
    "max_seq_len": "2048",
    "per_device_train_batch_size": "8",
    "per_device_eval_batch_size": "4",
    "overwrite_output_dir": "true",
    "disable_tqdm": "true",
}


class Pairs:
    """Pairs in memory, with the interface of a PairDataset."""

    def __init__(self, pairs: list[dict[str, list[int]]], share_prompt: bool, cache_folder: Path) -> None:
        self.cache_folder = cache_folder
        self._rows = []
        for index, pair in enumerate(pairs):
            prompt, chosen, rejected = (np.array(ids, np.int32) for ids in pair.values())
            tokens, starts = np.concatenate([prompt, chosen, rejected]), (len(prompt), len(prompt) + len(chosen))
            loss_mask = np.arange(len(tokens)) >= len(prompt)
            self._rows.append(TokenizedPair(tokens, loss_mask, index, starts, (True, False), share_prompt))
        self.lengths = np.array([row.length for row in self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TokenizedPair:
        return self._rows[index]

    def source(self, index: int) -> tuple[str, int]:
        return "random", index + 1


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="number of pairs of an optimizer step")
    parser.add_argument("--prompt", type=int, default=384, help="mean number of tokens of a prompt")
    parser.add_argument("--answer", type=int, default=64, help="mean number of tokens of an answer")
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps, after an untimed step")
    args, keys = parser.parse_known_args(argv)
    shared = [word for key, value in {**KEYS, "max_steps": str(args.steps + 1)}.items() for word in (f"--{key}", value)]
    config = run_config([*shared, *keys], PREFERENCE_SECTIONS)
    assert config.preference is not None, "the configuration must be of a preference run"
    source, pairs = ModelSource.from_config(config.model), random_pairs(args.pairs, args.prompt, args.answer)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    times, reference_seconds = StepTimes(), [0.0]
    with tempfile.TemporaryDirectory() as folder:
        rows = Pairs(pairs, config.preference.share_prompt, Path(folder))
        data = RunData(source, tokenizer, SimpleNamespace(stop_token_ids=()), rows, None)
        trainer = build_trainer(config, data, [times])
        compute = dpo_objective.reference_logps

        def timed(*arguments: object) -> np.ndarray:
            start = time.perf_counter()
            found = compute(*arguments)
            reference_seconds[0] += time.perf_counter() - start
            return found

        dpo_objective.reference_logps = timed
        trainer.train()
    timed_steps = times.reports[1:]
    tokens = sum(map(num_pair_tokens, pairs))
    figures = tokens_per_second([tokens] * len(timed_steps), [step.seconds for step in timed_steps])
    positions = {"computed_tokens": timed_steps[0].num_tokens, "reference_seconds": round(reference_seconds[0], 2)}
    report("preference", {**vars(args), "keys": keys, **positions, **figures}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
