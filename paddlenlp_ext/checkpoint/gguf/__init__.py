"""Read and write the GGUF files of llama.cpp, with Hugging Face names for tensors."""
