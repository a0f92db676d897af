"""Flags of other model servers, and what is said instead to those who bring them."""

from __future__ import annotations

_TOKENS = "--max-model-len, which counts prompt and answer together"
_SIZE = "--kv-cache-mb, in MB; without it the size follows from free memory"
_QUANTIZED = "no flag: config.json says how the weights are quantized"

# Those of vLLM, SGLang, TGI, Triton and KServe's servers that have another name here, or none.
MEANT: dict[str, str] = {
    "--allowed-origins": "--cors-origins",
    "--api-key": "--api-key-file, or the variable MEDUSA_TOKEN",
    "--context-length": "--max-model-len",
    "--cors-allow-origin": "--cors-origins",
    "--cuda-memory-fraction": _SIZE,
    "--disable-radix-cache": "--prefix-cache-mb 0",
    "--download-dir": "no flag: weights are read into memory, and not kept on disk",
    "--enable-prefix-caching": "no flag: it is enabled; --prefix-cache-mb says how much is kept",
    "--gpu-memory-utilization": _SIZE,
    "--hostname": "--host",
    "--http-port": "--port",
    "--http_port": "--port",
    "--huggingface-hub-cache": "no flag: weights are read into memory, and not kept on disk",
    "--kv-cache-memory-bytes": _SIZE,
    "--max-batch-prefill-tokens": "--max-batched-tokens",
    "--max-batch-size": "--max-concurrency",
    "--max-concurrent-requests": "--max-waiting for those that wait, --max-concurrency for those that are computed",
    "--max-input-length": _TOKENS,
    "--max-input-tokens": _TOKENS,
    "--max-num-batched-tokens": "--max-batched-tokens",
    "--max-num-seqs": "--max-concurrency",
    "--max-running-requests": "--max-concurrency",
    "--max-total-tokens": _TOKENS,
    "--max_model_len": "--max-model-len",
    "--mem-fraction-static": _SIZE,
    "--model-id": "--model; a model of the Hugging Face Hub is hf://org/name",
    "--model-path": "--model; a model of the Hugging Face Hub is hf://org/name",
    "--model-repository": "--model, which names the folder of one model",
    "--model_dir": "--model",
    "--model_id": "--model; a model of the Hugging Face Hub is hf://org/name",
    "--model_name": "--served-model-name",
    "--no-enable-prefix-caching": "--prefix-cache-mb 0",
    "--num-shard": "--tensor-parallel",
    "--quantization": _QUANTIZED,
    "--quantize": _QUANTIZED,
    "--revision": "--model hf://org/name@REVISION",
    "--tensor-parallel-size": "--tensor-parallel",
    "--tensor_parallel_size": "--tensor-parallel",
    "--tokenizer": "no flag: the tokenizer is the one beside the weights",
    "--tokenizer-path": "no flag: the tokenizer is the one beside the weights",
    "--tp": "--tensor-parallel",
    "--tp-size": "--tensor-parallel",
    "--trust-remote-code": "no flag: code that a checkpoint brings is not run",
}
