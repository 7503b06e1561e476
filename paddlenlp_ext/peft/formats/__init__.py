"""Read and write adapter files: Hugging Face PEFT, PaddleNLP, GGUF, and pickled weights."""
