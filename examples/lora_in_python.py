"""Train a LoRA adapter in a custom training loop, compare the answers, and merge the adapter.

python examples/lora_in_python.py                # under a minute on two CPU cores
"""

from __future__ import annotations

import argparse

from paddlenlp_ext import configure_runtime

configure_runtime()  # set threads and allocator before Paddle is imported

import paddle

from paddlenlp_ext import AutoModelForCausalLM, AutoTokenizer, LoraConfig, PeftModel, get_peft_model

QUESTION = "What is the code word?"
ANSWER = "The code word is lighthouse."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output", default="checkpoints/example_lora")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompt = tokenizer(f"{QUESTION}\n").input_ids
    answer = [*tokenizer(ANSWER, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    input_ids = paddle.to_tensor([prompt + answer])
    labels = paddle.to_tensor([[-100] * len(prompt) + answer])

    model = AutoModelForCausalLM.from_pretrained(args.model)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    model.print_trainable_parameters()
    model.train()
    optimizer = paddle.optimizer.AdamW(2e-3, parameters=[p for p in model.parameters() if not p.stop_gradient])
    for step in range(1, args.steps + 1):
        loss = model(input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        print(f"step {step}: loss {float(loss):.3f}")
    model.save_pretrained(args.output)

    def reply(chosen: PeftModel) -> str:
        chosen.eval()
        (tokens,) = chosen.generate([prompt], max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        return tokenizer.decode(tokens).strip()

    print("with the adapter:", reply(model))
    with model.disable_adapter():
        print("without it:      ", reply(model))
    print("merged:          ", reply(model.merge_and_unload()))
    print("adapter:         ", args.output)


if __name__ == "__main__":
    main()
