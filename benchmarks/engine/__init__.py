"""The torch engine measured: its kernels, adapters, quantized forms, structured outputs and other people's models."""
