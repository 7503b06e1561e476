"""Write OUT/: reward models and adapters of reward models made here, each with the scores computed here.

`check_reward_in_peers.py` reads them.

    python -m tests.golden.peer_checks.export_rewards_for_peers OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from paddlenlp_ext.data.preference.collate_reward_pairs import collate_reward_pairs
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.trainer.forward_backward import hidden_states
from paddlenlp_ext.trainer.objectives.reward_objective import answer_scores
from tests.golden.cases.model_cases import CASES
from tests.golden.cases.preference_training_cases import make_pairs
from tests.golden.cases.reward_cases import FAMILIES, PAD_TOKEN_ID


def main() -> None:
    for case in FAMILIES:
        folder = Path(sys.argv[1], case).resolve()
        AutoModelForCausalLM.from_config(CASES[case]).save_pretrained(folder / "base")
        source = ModelSource.resolve(folder / "base").as_classifier(1, PAD_TOKEN_ID)
        model = AutoModelForSequenceClassification.from_pretrained(source, seed=1)
        move(model)
        model.save_pretrained(folder / "reward")
        write_scores(folder / "reward", model)
        base = AutoModelForSequenceClassification.from_pretrained(source, seed=1)
        adapted = get_peft_model(base, LoRAConfig(rank=4, target_modules=["o_proj"]))
        move(adapted)
        adapted.save_pretrained(folder / "reward_lora")
        write_scores(folder / "reward_lora", adapted)
        print(f"{case}: written")


def move(model: Any) -> None:
    """Change all trained parameters."""
    paddle.seed(0)
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(parameter + 0.1 * paddle.randn(parameter.shape))
    model.eval()


def write_scores(folder: Path, model: Any) -> None:
    """Write rows of token ids, padded on the right, and their scores."""
    texts = [np.concatenate([prompt, answer]) for prompt, *answers in make_pairs() for answer in answers]
    rows = [
        TokenizedPair(text.astype(np.int32), np.arange(len(text)) >= 1, index, (1,), (True,), scores_last_tokens=True)
        for index, text in enumerate(texts)
    ]
    batch = collate_reward_pairs([rows], unscored_token_id=PAD_TOKEN_ID)
    with paddle.no_grad():
        scores = answer_scores(model, hidden_states(model, batch), batch).numpy()
    input_ids = np.full((len(texts), max(map(len, texts))), PAD_TOKEN_ID)
    for row, text in zip(input_ids, texts, strict=True):
        row[: len(text)] = text
    np.savez(folder / "scores.npz", input_ids=input_ids, lengths=[len(text) for text in texts], scores=scores)


if __name__ == "__main__":
    main()
