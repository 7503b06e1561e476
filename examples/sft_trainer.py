"""Fine-tune with TRL's interface, and print the answer to a question during training.

python examples/sft_trainer.py                   # under a minute on two CPU cores
"""

from __future__ import annotations

import argparse
from typing import Any

from paddlenlp_ext import configure_runtime

configure_runtime()  # set threads and allocator before Paddle is imported

from paddlenlp_ext import LoraConfig, SFTConfig, SFTTrainer, TrainerCallback, load_dataset

VERBS = {
    "carry": "carried", "stop": "stopped", "teach": "taught", "bring": "brought", "think": "thought", "fly": "flew",
    "buy": "bought", "try": "tried", "speak": "spoke", "plan": "planned", "write": "wrote", "seek": "sought",
}  # fmt: skip


class Answers(TrainerCallback):
    """Print the model's answer to one question at every log entry."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **_: Any):
        model.eval()
        (tokens,) = model.generate([self.prompt], max_new_tokens=8, do_sample=False)
        model.train()
        print(f"step {state.global_step}: {processing_class.decode(tokens, skip_special_tokens=True)!r}")


def question(verb: str) -> str:
    return f'What is the past tense of the verb "{verb}"? Answer with one word.'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output", default="checkpoints/example_sft")
    args = parser.parse_args()

    rows = [
        {"messages": [{"role": "user", "content": question(verb)}, {"role": "assistant", "content": past}]}
        for verb, past in VERBS.items()
    ]
    trainer = SFTTrainer(
        model=args.model,
        args=SFTConfig(
            args.output,
            max_steps=args.steps,
            learning_rate=4e-4,
            logging_steps=5,
            save_strategy="no",
            packing=True,
            max_length=512,
            per_device_train_batch_size=1,
            overwrite_output_dir=True,
        ),
        train_dataset=rows,
        peft_config=LoraConfig(r=16),
    )
    held_out = load_dataset(
        [{"messages": [{"role": "user", "content": question("catch")}, {"role": "assistant", "content": "caught"}]}],
        "dev",
        trainer.processing_class,
    )
    prompt, _, _ = next(held_out.prompts())
    trainer.add_callback(Answers(prompt))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
