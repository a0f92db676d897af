"""Convert a checkpoint of `benchmarks.make_checkpoint` for llama.cpp: ``python -m benchmarks.make_gguf --help``.

The work is done by llama.cpp's own `convert_hf_to_gguf.py`, which comes with its source. That script recognizes a
tokenizer by a hash of what it makes of one text, and refuses those that it does not know, such as ours. Ours splits
text as GPT-2's does, so this command says so in its place. A checkpoint with a known tokenizer needs only the script.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", required=True, type=Path, metavar="DIR", help="the folder of llama.cpp's source")
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="the checkpoint, of a Llama shape")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the .gguf file to write")
    parser.add_argument("--dtype", choices=("bf16", "f16", "f32", "q8_0"), default="bf16", help="of the matrices")
    options = parser.parse_args(arguments)
    script = options.llama_cpp / "convert_hf_to_gguf.py"
    if not script.is_file():
        parser.error(f"--llama-cpp: expected a folder with convert_hf_to_gguf.py, found none in {options.llama_cpp}")
    sys.path[:0] = [str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    text_model = importlib.import_module("conversion.base").TextModel
    text_model.get_vocab_base_pre = lambda *_: "gpt-2"
    importlib.import_module("conversion.llama").LlamaModel.set_vocab = text_model._set_vocab_gpt2
    sys.argv = [str(script), str(options.model), "--outfile", str(options.out), "--outtype", options.dtype]
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
