"""GGUF: llama.cpp's files, in which weights, architecture and tokenizer lie together."""
