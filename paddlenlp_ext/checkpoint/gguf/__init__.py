"""GGUF files of llama.cpp: read them under Hugging Face names, and write them."""
