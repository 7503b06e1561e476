"""Train with DPO through TRL's interface, and compare the rewards of the first and last step.

python examples/preferences.py                   # under a minute on two CPU cores
"""

from __future__ import annotations

import argparse

from paddlenlp_ext import configure_runtime

configure_runtime()  # set threads and allocator before Paddle is imported

from paddlenlp_ext import DPOConfig, DPOTrainer, LoraConfig

PLURALS = {
    "foot": ("feet", "foots"),
    "mouse": ("mice", "mouses"),
    "goose": ("geese", "gooses"),
    "ox": ("oxen", "oxes"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", default="checkpoints/example_dpo")
    args = parser.parse_args()

    rows = [
        {"prompt": f"What is the plural of {noun}?", "chosen": right, "rejected": wrong}
        for noun, (right, wrong) in PLURALS.items()
    ]
    trainer = DPOTrainer(
        model=args.model,
        args=DPOConfig(
            args.output,
            max_steps=args.steps,
            learning_rate=2e-4,
            logging_steps=1,
            save_strategy="no",
            overwrite_output_dir=True,
        ),
        train_dataset=rows,
        peft_config=LoraConfig(r=8),
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    for title, entry in (("first step", logged[0]), ("last step", logged[-1])):
        print(f"{title}: margin {entry['rewards/margins']:.3f}, accuracy {entry['rewards/accuracies']:.0%}")
    trainer.save_model()


if __name__ == "__main__":
    main()
