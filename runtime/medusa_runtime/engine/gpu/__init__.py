"""The torch engine on a GPU: memory, attention and CUDA graphs."""
