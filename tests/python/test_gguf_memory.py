"""What loading a GGUF file costs: time, and resident memory against the size of the file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_gguf_models import write_gguf

ROOT = Path(__file__).resolve().parents[2]

# Loads FIRST, so that the code of torch that every model runs through is in memory, and then measures FILE. Loading
# must not make float weights: neither transformers' conversion nor an operator that de-quantises may run.
PROGRAM = """
import json, resource, sys, time
import torch, transformers, tle_torch
from tle_torch import gguf, layers, weights

def forbidden(*arguments, **options):
    raise AssertionError("something was de-quantised")

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

first, file = sys.argv[1:]
gguf._converted = gguf.quants.dequantize = weights.dequantize = weights.quantize = forbidden
tle_torch.from_gguf(first)
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")  # the peak starts again
before = resident()
begin = time.perf_counter()
model, tokenizer = tle_torch.from_gguf(file)
seconds = time.perf_counter() - begin
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
ids = tokenizer("The capital of France is", return_tensors="pt")
out = tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
dense = [name for name, p in model.named_parameters() if p.dim() > 1]
print(json.dumps({
    "seconds": seconds, "growth": resident() - before, "peak": int(status["VmHWM"].split()[0]) * 1024 - before, "out":
    out, "dense": dense, "shared": model.get_input_embeddings().packed is model.get_output_embeddings().packed,
}))
"""


# Measures the first call of a process as benchmarks/load.py does: the code that is touched for the first time counts.
FRESH = """
import resource, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import tle_torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

before = resident()
loaded = tle_torch.from_gguf(sys.argv[1])
print(resident() - before)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc"),
]


def smollm2() -> Path:
    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), "smollm2"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


def last_line(program: str, *arguments: Path):
    """What a program prints last, as JSON, in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def test_smollm2_in_a_fresh_process():
    file = smollm2()
    growth = last_line(FRESH, file)
    assert growth <= 1.3 * file.stat().st_size, growth


def test_smollm2(tmp_path):
    file = smollm2()
    got = last_line(PROGRAM, write_gguf(tmp_path / "first.gguf"), file)
    size = file.stat().st_size
    assert "Paris" in got["out"] and got["dense"] == [] and got["shared"]
    assert got["growth"] <= 1.3 * size, got
    # While it loads: the largest tensor, which is the embedding, is there twice for a moment, in the file and packed.
    assert got["peak"] <= 1.3 * size, got
    # Six tenths of a second on an idle machine; a busy one takes several times as long.
    assert got["seconds"] < 10, got
