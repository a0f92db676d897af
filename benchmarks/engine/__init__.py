"""Benchmarks of the torch engine: kernels, adapters, quantized weights, structured outputs, transformers' models."""
