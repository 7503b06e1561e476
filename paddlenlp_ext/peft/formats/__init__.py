"""File formats of adapters: Hugging Face PEFT, PaddleNLP, GGUF, and pickled weights."""
