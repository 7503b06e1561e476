"""File formats of adapters: Hugging Face PEFT's, PaddleNLP's, GGUF, and pickles."""
