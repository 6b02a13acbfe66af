"""What tests compare with: bits, levels, thread counts, units in the last place."""

import torch

import tle_torch
from tle_torch.ops import _C


def assert_same_bits(got, want, what=""):
    if isinstance(want, (tuple, list)):
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w, what)
        return
    assert got.dtype == want.dtype and got.shape == want.shape, what
    # Through bytes: a NaN equals itself here, and -0 differs from 0.
    same = torch.equal(got.contiguous().flatten().view(torch.uint8), want.contiguous().flatten().view(torch.uint8))
    assert same, f"bits differ: {what}"


def same_everywhere(function):
    """Asserts that `function()` gives the same bits on every level that the CPU has and with 1, 2 and 3 threads.

    Returns:
        Its result on the reference level.
    """
    threads = tle_torch.get_num_threads()
    try:
        _C.set_isa("ref")
        want = function()
        for level in _C.isas():
            _C.set_isa(level)
            assert_same_bits(function(), want, level)
        _C.set_isa("")
        for count in (1, 2, 3):
            tle_torch.set_num_threads(count)
            assert_same_bits(function(), want, f"{count} threads")
    finally:
        _C.set_isa("")
        tle_torch.set_num_threads(threads)
    return want


def int8_slots(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [.., D] as an int8 cache holds them, [.., D + 4], and what those stand for, in float64."""
    codes, scales = torch.ops.tle.quantize_rows(x)
    scales = scales.unsqueeze(-1)
    return torch.cat([codes, scales.view(torch.int8)], -1), codes.double() * scales.double()


def ulp(x: torch.Tensor) -> torch.Tensor:
    """The distance from |x| to the next larger value of its dtype, in float64."""
    return (torch.nextafter(x.abs(), torch.full_like(x, torch.inf)).double() - x.abs().double()).abs()
