"""Benchmarks of the torch engine: adapters, quantized weights, structured outputs, transformers' models."""
