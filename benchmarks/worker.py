"""A contender's process as seen from outside: benchmarks/contender.py says what it can be told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import peers
import torch

HERE = Path(__file__).resolve().parent

# A CPU with AVX2 only: neither TLE nor torch nor MKL uses more, and oneDNN does not take bf16 products there.
AS_AVX2 = {"TLE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
           "ONEDNN_MAX_CPU_ISA": "AVX2", "TLE_BENCHMARK_NO_ONEDNN": "1"}


class Failed(Exception):
    """A contender could not do what it was told; the message is one line."""


class Worker:
    """One contender. Calling it sends a command and waits for the answer; Failed is raised where there is none."""

    def __init__(self, name: str, threads: int, as_avx2: bool = False):
        self.name = name
        peer = peers.CONTENDERS.get(name.partition(":")[0])
        if peer and not peers.installed(peer):
            raise Failed(f"{peer} is not installed here: python benchmarks/peers.py {peer}")
        python = peers.python(peer) if peer else sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
                       "TLE_BENCHMARK_PYTHON": sys.executable, **(AS_AVX2 if as_avx2 else {})}
        self.process = subprocess.Popen([str(python), str(HERE / "contender.py"), name], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)

    def __call__(self, do: str, **arguments) -> dict:
        try:
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(f"its process ended during '{do}', with code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def logits(self, windows: torch.Tensor) -> torch.Tensor:
        """[positions, vocabulary] in fp32 of the loaded model, for windows of tokens [count, length]."""
        with tempfile.TemporaryDirectory() as folder:
            given, made = Path(folder) / "windows.npy", Path(folder) / "logits.npy"
            numpy.save(given, windows.numpy().astype(numpy.int32))
            self("logits", windows=str(given), target=str(made))
            return torch.from_numpy(numpy.load(made))

    def close(self) -> None:
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()
