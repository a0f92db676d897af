"""GGUF, the file format of llama.cpp: a model's weights, configuration and tokenizer in one file."""
