"""Model class for lm-evaluation-harness, registered under the name paddlenlp_ext.

    python llm/run_lm_eval.py run --model paddlenlp_ext --model_args pretrained=MODEL,lora_path=ADAPTER --tasks piqa

The harness is the package lm-eval (extra `lm-eval`). This class tokenizes texts in the same way as the harness's class
for Hugging Face models (`hf`), so that both classes score the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddlenlp_ext.evaluation.compare_models import context_of, progress
from paddlenlp_ext.evaluation.generation_task import cut_at
from paddlenlp_ext.evaluation.log_likelihood import Continuation, Likelihood, log_likelihoods
from paddlenlp_ext.evaluation.perplexity_task import rolling_windows
from paddlenlp_ext.evaluation.prompt_encoder import split_pair
from paddlenlp_ext.inference.arguments import ModelArguments
from paddlenlp_ext.inference.load_model import find_model_and_adapter, load_model, load_tokenizer
from paddlenlp_ext.utils.optional_packages import import_extra

NAME = "paddlenlp_ext"
_MAX_NEW_TOKENS = 256
_LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")


def register_lm_eval_model() -> type:
    """Register `LMEvalModel` with lm-eval and return the registered subclass.

    Raises:
        ValueError: lm-eval is not installed.
    """
    base = import_extra("lm_eval.api.model", "lm-eval", "run_lm_eval.py").LM
    registry = import_extra("lm_eval.api.registry", "lm-eval", "run_lm_eval.py")
    model_class = type("PaddleLM", (LMEvalModel, base), {})
    registry.register_model(NAME)(model_class)
    return model_class


class LMEvalModel:
    """Implementation of the interface `lm_eval.api.model.LM`; `register_lm_eval_model` derives a class from both.

    Args:
        pretrained: name or folder of a model, like `model_name_or_path` of the predictor.
        lora_path: folder of an adapter, trained with any adapter method.
        batch_size: prompts per batch; "auto" is 8.
        max_length: maximum number of tokens of a prompt plus its continuation; None: the model's context length.
        device: cpu, gpu, ...; None: a GPU if available, else the CPU. The harness passes its default cuda:0, which
            selects GPU 0 if available, else the CPU.
        dtype: dtype of the weights; None: float32 on the CPU, bfloat16 on devices that compute in it.
        max_batch_size: ignored.
    """

    def __init__(
        self,
        pretrained: str,
        lora_path: str | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        device = None if device is None else device.replace("cuda", "gpu")  # cuda: PyTorch's name for GPUs
        arguments = ModelArguments(model_name_or_path=pretrained, lora_path=lora_path, device=device, dtype=dtype)
        base, adapter = find_model_and_adapter(arguments)
        self.tokenizer: Any = load_tokenizer(base, adapter)
        self.max_length = context_of(base, adapter, max_length)
        self.batch_size = 8 if str(batch_size).startswith("auto") else int(batch_size)
        self.model: Any = load_model(arguments, base, adapter)

    # -- texts --------------------------------------------------------------------------------------------------------
    @property
    def prefix_token_id(self) -> int:
        """Id of the token that replaces an empty context: BOS, or EOS if the tokenizer has no BOS."""
        first = self.tokenizer.bos_token_id
        return int(self.tokenizer.eos_token_id if first is None else first)

    def _encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with special tokens unless the text already begins with the prefix token."""
        has_prefix = text.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return list(self.tokenizer.encode(text, add_special_tokens=not has_prefix))

    def _continuation(self, context: str, continuation: str) -> Continuation:
        prompt, tokens = split_pair(self._encode, context, continuation)
        if not prompt:
            tokens = list(self.tokenizer.encode(context + continuation, add_special_tokens=False))
            if tokens[:1] == [self.prefix_token_id]:
                return Continuation(tokens[:1], tokens[1:])
            prompt = [self.prefix_token_id]
        return Continuation(prompt, tokens)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the request cache of lm-eval."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the tokenizer's chat template; "" without a template, or if `chat_template` is False.

        Raises:
            ValueError: `chat_template` is the name of a template.
        """
        if isinstance(chat_template, str):
            raise ValueError(
                f"chat_template {chat_template}: a template cannot be selected by name; pass True to use the template "
                "of the tokenizer"
            )
        return (self.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the messages as text, rendered with the tokenizer's chat template."""
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

    # -- requests -----------------------------------------------------------------------------------------------------
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would generate the continuation.

        Args:
            requests: requests with `args` (context, continuation).
            disable_tqdm: ignored.
        """
        continuations = [self._continuation(*request.args) for request in requests]
        found = self._likelihoods("loglikelihood", continuations, with_greedy=True)
        return [(each.logprob, bool(each.is_greedy)) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. `rolling_windows` splits texts longer than `max_length`.

        Args:
            requests: requests with `args` (text,).
            disable_tqdm: ignored.
        """
        windows, text_of = [], []
        for number, request in enumerate(requests):
            own = list(rolling_windows(self._encode(request.args[0]), self.prefix_token_id, self.max_length))
            windows += own
            text_of += [number] * len(own)
        sums = [0.0] * len(requests)
        for number, each in zip(text_of, self._likelihoods("loglikelihood_rolling", windows), strict=True):
            sums[number] += each.logprob
        return sums

    def _likelihoods(self, title: str, continuations: Sequence[Continuation], **options: Any) -> list[Likelihood]:
        with progress(title, len(continuations)) as advance:
            sizes = {"batch_size": self.batch_size, "max_length": self.max_length}
            return log_likelihoods(self.model, continuations, advance=advance, **sizes, **options)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates after each context, up to the first stop string.

        Contexts that are too long are truncated from the left.

        Args:
            requests: requests with `args` (context, generation options).
            disable_tqdm: ignored.

        Raises:
            ValueError: an option is unknown, or the new tokens leave no room for a context in `max_length`.
        """
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        answers = [""] * len(requests)
        with progress("generate_until", len(requests)) as advance:
            for numbers in by_options.values():
                stops, options = generation_options(requests[numbers[0]].args[1])
                longest_prompt = self.max_length - options["max_new_tokens"]
                if longest_prompt < 1:
                    raise ValueError(
                        f"{options['max_new_tokens']} new tokens leave no room for a context in {self.max_length} "
                        "tokens; lower max_gen_toks"
                    )
                prompts = [
                    (self._encode(requests[number].args[0]) or [self.prefix_token_id])[-longest_prompt:]
                    for number in numbers
                ]
                generated = self.model.generate(
                    prompts, batch_size=self.batch_size, on_row=lambda _, __: advance(1), **options
                )
                for number, ids in zip(numbers, generated, strict=True):
                    answers[number] = cut_at(self.tokenizer.decode(ids, skip_special_tokens=True), stops)
        return answers


def generation_options(given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the stop strings and the arguments of `generate` for generation options of lm-eval.

    Raises:
        ValueError: an option is unknown.
    """
    rest = dict(given)
    stops = rest.pop("until", None) or []
    lengths = [rest.pop(key) for key in _LENGTH_KEYS if rest.get(key) is not None]
    samples = rest.pop("do_sample", float(rest.get("temperature") or 0) > 0)
    options: dict[str, Any] = {"max_new_tokens": int(lengths[0]) if lengths else _MAX_NEW_TOKENS}
    sampling = {key: value for key in _SAMPLING_KEYS if (value := rest.pop(key, None)) is not None}
    if samples:
        options |= {"decode_strategy": "sampling", **sampling}
    unknown = [key for key, value in rest.items() if value is not None]
    if unknown:
        known = ", ".join(("until", "do_sample", *_LENGTH_KEYS, *_SAMPLING_KEYS))
        raise ValueError(f"unknown generation option {unknown[0]!r}; known: {known}")
    return [stops] if isinstance(stops, str) else [stop for stop in stops if stop], options
