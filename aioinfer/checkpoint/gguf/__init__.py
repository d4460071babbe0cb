"""GGUF: files of llama.cpp as checkpoints: config, names of tensors, weights, tokenizer."""
