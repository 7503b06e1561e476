"""A tiny model, rows in memory and configurations for tests that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config.run_config import GRPO_SECTIONS, PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS, RunConfig
from paddlenlp_ext.data.find_prefixes import find_prefixes
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.trainer.callbacks.callback import Callback
from tests.common.models import TINY_LLAMA

VOCABULARY = TINY_LLAMA["vocab_size"]


class Rows:
    """Rows in memory with the interface of a TokenizedDataset."""

    def __init__(self, num_rows: int, seed: int = 0, longest: int = 20) -> None:
        generator = np.random.default_rng(seed)
        self.rows = []
        for index in range(num_rows):
            num_tokens = int(generator.integers(4, longest))
            tokens = generator.integers(1, VOCABULARY, num_tokens).astype(np.int32)
            loss_mask = np.arange(num_tokens) >= generator.integers(1, num_tokens - 1)
            self.rows.append(EncodedRow(tokens, loss_mask, index))
        self.lengths = np.array([row.length for row in self.rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> EncodedRow:
        return self.rows[index]

    def source(self, index: int) -> tuple[str, int]:
        return "train.json", index + 1

    def prompts(self) -> Iterator[tuple[list[int], str, str]]:
        for row in self.rows:
            answer = row.tokens[row.loss_mask].tolist()
            yield row.tokens[: len(row.tokens) - len(answer)].tolist(), _text(answer), f"question {row.row_index}"


class PrefixedRows(Rows):
    """Rows in memory that share prefixes, with the interface of a TokenizedDataset.

    Args:
        prefixes: number of tokens of each prefix; row i has prefix i modulo their number.
        capacity: number of positions of a pack.
    """

    def __init__(self, num_rows: int, prefixes: Sequence[int], capacity: int = 512, seed: int = 0) -> None:
        super().__init__(num_rows, seed)
        generator = np.random.default_rng(seed)
        starts = [generator.integers(1, VOCABULARY, length).astype(np.int32) for length in prefixes]
        for index, row in enumerate(self.rows):
            # The first remainders have different first tokens, so that the prefixes have exactly the given lengths.
            prefix, own = starts[index % len(starts)], row.tokens.copy()
            own[0] = 1 + index // len(starts) % 40
            loss_mask = np.concatenate([np.zeros(len(prefix) + 1, bool), row.loss_mask[1:]])
            self.rows[index] = EncodedRow(np.concatenate([prefix, own]), loss_mask, index)
        self.lengths = np.array([row.length for row in self.rows], dtype=np.int64)
        self.prefixes = find_prefixes([arrays_of(self.rows)], capacity)


def arrays_of(rows: Sequence[EncodedRow]) -> TokenArrays:
    """Return the tokens of some rows as the arrays of a dataset."""
    return TokenArrays(
        np.concatenate([row.tokens for row in rows]),
        np.concatenate([row.loss_mask for row in rows]),
        np.cumsum([0, *(len(row.tokens) for row in rows)]),
        np.zeros((len(rows), 3), np.int64),
        np.zeros((len(rows), 2), np.int64),
    )


class PreferenceRows(Rows):
    """Pairs of answers in memory, or rated answers, with the interface of a PairDataset."""

    def __init__(
        self, num_rows: int, cache_folder: Path, seed: int = 0, share_prompt: bool = True, in_pairs: bool = True
    ) -> None:
        generator = np.random.default_rng(seed)
        self.cache_folder, self.rows = cache_folder, []
        cache_folder.mkdir(exist_ok=True, parents=True)
        for index in range(num_rows):
            prompt, first, second = generator.integers([1, 1, 1], [12, 8, 8])
            tokens = generator.integers(1, VOCABULARY, prompt + first + second).astype(np.int32)
            starts, is_desirable = (int(prompt), int(prompt + first)), (True, False)
            if not in_pairs:
                tokens, starts, is_desirable = tokens[: prompt + first], starts[:1], (index % 2 == 0,)
            loss_mask = np.arange(len(tokens)) >= prompt
            self.rows.append(TokenizedPair(tokens, loss_mask, index, starts, is_desirable, share_prompt))
        self.lengths = np.array([row.length for row in self.rows], dtype=np.int64)


class RewardRows(PreferenceRows):
    """Pairs of answers in memory with margins, with the interface of a PairDataset."""

    def __init__(self, num_rows: int, cache_folder: Path, seed: int = 0, share_prompt: bool = True) -> None:
        super().__init__(num_rows, cache_folder, seed, share_prompt)
        self.rows = [
            dataclasses.replace(row, margin=0.25 * (index % 3), scores_last_tokens=True)
            for index, row in enumerate(self.rows)
        ]
        self.lengths = np.array([row.length for row in self.rows], dtype=np.int64)


class Tokenizer:
    """Tokenizer that writes token 5 as `w5`."""

    pad_token_id = 0
    eos_token_id = 7

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return _text(tokens)

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


class KilledError(Exception):
    """Error that stands in for a crash of a run."""


class KillAfter(Callback):
    """Callback that raises after a step's update, as a crash would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: Any, report: Any) -> None:
        if state.step == self.step:
            raise KilledError


def _text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def make_model(lora: bool = False, *, seed: int = 1, **lora_fields: Any) -> Any:
    """Build the tiny Llama with all weights trained, or with LoRA, whose B starts at zero."""
    model = AutoModelForCausalLM.from_config(TINY_LLAMA, seed=seed)
    return get_peft_model(model, LoRAConfig(**{"rank": 4, **lora_fields})) if lora else model


def make_config(output_dir: Path, **keys: Any) -> RunConfig:
    """Build a RunConfig from flat keys and small defaults; `loss_type` selects a preference run.

    `center_rewards_coefficient` selects the run of a reward model, and `num_generations` a run of GRPO.
    """
    defaults = {
        "output_dir": str(output_dir),
        "do_train": True,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "num_train_epochs": 1.0,
        "max_length": 32,
        "src_length": 16,
        "disable_tqdm": True,
    }
    classes = PREFERENCE_SECTIONS if "loss_type" in keys else SECTIONS
    classes = REWARD_SECTIONS if "center_rewards_coefficient" in keys else classes
    classes = GRPO_SECTIONS if "num_generations" in keys else classes
    sections: dict[str, dict[str, Any]] = {name: {} for name in classes}
    for key, value in {**defaults, **keys}.items():
        owners = [name for name, cls in classes.items() if key in {f.name for f in dataclasses.fields(cls)}]
        assert len(owners) == 1, f"{key} belongs to {owners}"
        sections[owners[0]][key] = value
    return RunConfig(**{name: cls(**sections[name]) for name, cls in classes.items()})


def make_folder_config(run_folders: Path, output: str, **keys: Any) -> RunConfig:
    """Build the RunConfig of four steps on the model and the data in `run_folders`."""
    settings = {
        "model_name_or_path": str(run_folders / "model"),
        "dataset_name_or_path": str(run_folders / "data"),
        "data_cache_dir": str(run_folders / "cache"),
        "chat_template": "none",
        "device": "cpu",
        "max_steps": 4,
        "per_device_train_batch_size": 2,
    }
    return make_config(run_folders / output, **settings | keys)


def weights(model: Any) -> dict[str, np.ndarray]:
    """Return all parameters as arrays."""
    return {name: parameter.numpy().copy() for name, parameter in model.named_parameters()}


def assert_same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert np.array_equal(got[name], value), f"{name} differs by {np.abs(got[name] - value).max()}"
