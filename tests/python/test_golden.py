"""The committed digests: the same bits on every CPU, at every level. See golden_cases.py."""

import os
import subprocess
import sys
from pathlib import Path

import golden_cases as golden
import pytest
import torch

import tle_torch
from tle_torch.ops import _C

ROOT = Path(__file__).resolve().parents[2]
# scripts/arm/run.sh names the emulated CPU here. Emulation takes a quarter of a minute for a prompt: there, every level
# for one scheme only (eight CPUs have all of them as their best one; the operators' digests have every scheme at every
# level of each CPU), and fewer tokens, in one pass.
EMULATED = "TLE_ARM_CPU" in os.environ
NEW_TOKENS = int(os.environ.get("TLE_GOLDEN_TOKENS", 8 if EMULATED else golden.NEW_TOKENS))
CHANGED = "a result is not the committed one, bit for bit. If that was intended: scripts/update_golden.py"


@pytest.fixture(params=_C.isas())
def level(request):
    """Every level that this CPU can run, in force."""
    _C.set_isa(request.param)
    yield request.param
    _C.set_isa("")


@pytest.fixture(scope="module")
def operators():
    return golden.read(golden.OPERATORS)


@pytest.mark.parametrize("cases", golden.CASES, ids=lambda cases: cases.__name__.removesuffix("_cases"))
def test_operators(cases, level, operators):
    got = golden.operator_digests(cases)
    assert not {name for name, digest in got.items() if operators.get(name) != digest}, CHANGED


def test_every_operator_has_digests(operators):
    """And every digest an operator; the file is what the sweep would write, no more and no less."""
    registered = {s.name.removeprefix("tle::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("tle::")}
    memory = {"empty_cache_slots", "advise_huge_pages"}  # compute nothing
    sampling = {"top_k_logits", "top_p_logits", "multinomial"}  # have torch's results, whatever those are on this CPU
    assert {name.partition("/")[0] for name in operators} == registered - memory - sampling
    swept = {name.partition(" ")[0] for cases in golden.CASES for name, _ in cases()}
    assert swept == set(operators)


def fetched(thing: str) -> Path:
    command = [sys.executable, str(ROOT / "scripts" / "fetch.py"), thing]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().splitlines()[-1])


OTHER_SCHEMES = [scheme for scheme in [*tle_torch.schemes(), golden.GGUF] if scheme != "w8a8"]


def check_smollm2(model: torch.nn.Module, scheme: str, levels: list[str], new_tokens: int, one_pass: bool) -> None:
    """Logits of a prompt and what comes after it, greedily: real weights, the way a user runs them."""
    want = dict(golden.read(golden.SMOLLM2)[scheme])
    want["tokens"] = want["tokens"][:new_tokens]
    try:
        for level in levels:
            _C.set_isa(level)
            if one_pass:
                got = golden.smollm2_digests_in_one_pass(model, want["tokens"])
            else:
                got = golden.smollm2_digests(model, new_tokens)
            assert got == want, f"{level}: {CHANGED}"
    finally:
        _C.set_isa("")


@pytest.mark.parametrize("scheme", ["w8a8", *(pytest.param(other, marks=pytest.mark.slow) for other in OTHER_SCHEMES)])
def test_smollm2(scheme):
    model = golden.smollm2_model(scheme, fetched)
    levels = [level for level in _C.isas() if level != "ref"]
    if not EMULATED:
        check_smollm2(model, scheme, levels, NEW_TOKENS, one_pass=False)
    elif scheme == "w8a8":
        check_smollm2(model, scheme, levels, NEW_TOKENS, one_pass=True)
        check_smollm2(model, scheme, levels[-1:], 8, one_pass=False)
    else:
        check_smollm2(model, scheme, levels[-1:], NEW_TOKENS, one_pass=True)


@pytest.mark.slow
def test_smollm2_on_the_scalar_reference():
    check_smollm2(golden.smollm2_model("w8a8", fetched), "w8a8", ["ref"], 2, one_pass=True)


def test_smollm2_has_every_scheme():
    assert set(golden.read(golden.SMOLLM2)) == {"w8a8", *OTHER_SCHEMES}
