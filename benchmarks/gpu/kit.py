"""Packs what the check of a GPU needs for a machine without a network: ``python -m benchmarks.gpu.kit --gpu 9.0``.

The machine has torch for CUDA, triton and numpy. The kit adds vLLM, what it imports for Llama and Qwen2 (``kit.txt``),
and what medusa-runtime and its tests need, as one archive of some 60 MB: vLLM's machine code for other GPUs is left
out, and its kernels for other models. There, ``python -m benchmarks.gpu.run --kit FILE`` unpacks it.
"""

from __future__ import annotations

import argparse
import compileall
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PACKAGES = Path(__file__).with_name("kit.txt")
_LOCK = _ROOT / "images/locks/cuda.txt"
_LEFT_OUT = (
    "bin", "**/*.pyi", "**/*.pxd", "PIL/_avif*", "pillow.libs/libavif*",
    "vllm/vllm-rs",  # a server of its own
    "vllm/vllm_flash_attn/_vllm_fa2_C*",  # FlashAttention for GPUs older than 9.0
    # Kernels for other models:
    "vllm/_moe_C*", "vllm/_flashmla*", "vllm/_flashkda*", "vllm/_qutlass*", "vllm/_deepselect*",
    "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100",
)  # fmt: skip


def pack(target: Path, gpus: Sequence[int], python: str, *, packages: Path = _PACKAGES) -> None:
    """Download the packages for this version of Python, and write the archive."""
    with tempfile.TemporaryDirectory(prefix="medusa-kit-") as scratch:
        folder, versions = Path(scratch, "kit"), Path(scratch, "versions.txt")
        versions.write_text("\n".join(re.findall(r"(?m)^[\w.-]+==[^ ;\\]+", _LOCK.read_text())))
        chosen = ["--requirement", str(packages), "--constraint", str(versions), "--target", str(folder)]
        wheels = ["--only-binary", ":all:", "--python-version", python, "--no-deps", "--no-compile", "--quiet"]
        subprocess.run([sys.executable, "-m", "pip", "install", *wheels, *chosen], check=True)
        for glob in _LEFT_OUT:
            for path in sorted(folder.glob(glob)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        libraries = [(str(path.relative_to(folder)), path) for path in sorted(folder.glob("vllm/**/*.so"))]
        runpy.run_path(str(_ROOT / "images/gpu_code.py"))["slim_all"](libraries, gpus)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(target, "w:xz", preset=9) as tar:
            tar.add(folder, ".")


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a kit unless it is there, and compile its Python files on all cores."""
    done = folder / ".done"
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as tar:
        # An argument ``filter`` has existed since Python 3.11.4.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(folder)
    compileall.compile_dir(folder, quiet=2, workers=0)
    done.touch()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse_gpus = runpy.run_path(str(_ROOT / "images/gpu_code.py"))["parse_gpus"]
    parser.add_argument("--gpu", type=parse_gpus, required=True, help="its compute capability, such as 9.0")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, metavar="VERSION", help=f"the machine's Python (default: {here})")
    parser.add_argument(
        "--out", type=Path, default=Path("out/kit.tar.xz"), help="the archive (default: out/kit.tar.xz)"
    )
    options = parser.parse_args(arguments)
    pack(options.out, options.gpu, options.python)
    print(f"{options.out}: {options.out.stat().st_size / (1 << 20):.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
