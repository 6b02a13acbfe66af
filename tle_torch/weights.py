"""Weights of linear layers: schemes, packing, and giving memory back.

A packed weight is a plain uint8 tensor that describes itself (see csrc/runtime/packed_weight.h); this file decides
which float weights become one and what is read back from it.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from typing import NamedTuple

import torch

from tle_torch.ops import _C

__all__ = [
    "DEFAULT_SCHEME",
    "FLOAT_DTYPES",
    "GGUF_TYPES",
    "UNQUANTIZED",
    "check_packed",
    "check_scheme",
    "dequantize",
    "quantize",
    "release_file_pages",
    "schemes",
    "trim_heap",
]

# The scheme that quantises nothing: dense weights stay where they are and run on TLE's kernels.
UNQUANTIZED = "bf16"
# One scale per 32 activations costs a tenth of the accuracy that one per token costs, for the same weight bytes
# (EXPECTED_COST).
DEFAULT_SCHEME = "w8a8-a32"
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADER_BYTES = 64
GGUF_GROUP = 32  # k per scale of what becomes of GGUF blocks


class GgufType(NamedTuple):
    """What becomes of the blocks of a GGUF type: a scheme, and whether it holds the same codes, scales and minima."""

    scheme: str
    exact: bool


# The types that `pack_gguf_weight` packs, by name (csrc/runtime/gguf_blocks.h).
GGUF_TYPES = {name: GgufType(*what) for name, what in _C.gguf_types().items()}


def schemes() -> list[str]:
    """The names that `patch_model(scheme=...)` takes."""
    return [*(name for name in _C.schemes() if name != UNQUANTIZED), UNQUANTIZED]


def check_scheme(scheme: str) -> str:
    """`scheme` if it is known.

    Raises:
        TypeError: it is no string.
        ValueError: no such scheme.
    """
    if not isinstance(scheme, str):
        raise TypeError(f"scheme must be a string, got {type(scheme).__name__}")
    if scheme not in schemes():
        raise ValueError(f"unknown scheme {scheme!r}: this build knows {', '.join(schemes())}")
    return scheme


def quantize(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """Packs a float weight [N, K] (formulas: `quantize_channel` in csrc/runtime/packed_weight.h).

    Raises:
        ValueError: a value is not finite: its row would be NaN for every input.
        RuntimeError: sizes that the scheme cannot hold.
    """
    weight = weight.detach()
    # min and max propagate NaN, read the weight once and, unlike isfinite(), write nothing.
    low, high = torch.aminmax(weight)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise ValueError("the weight holds values that are not finite")
    return torch.ops.tle.quantize_linear_weight(weight, scheme)


def dequantize(packed: torch.Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """The values that a packed weight stands for, [N, K] of `dtype`."""
    return torch.ops.tle.dequantize_linear_weight(packed, out_features, in_features, dtype)


def check_packed(packed: torch.Tensor, out_features: int, in_features: int) -> dict:
    """Reads the header of a packed weight and compares it with a layer's sizes.

    Returns:
        what the header says: scheme, version, out_features, in_features, code_bits, group_size.

    Raises:
        ValueError: no packed weight, of a version that this build does not know, or of another size.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(f"a packed weight is a 1-D uint8 tensor, got {list(packed.shape)} {packed.dtype}")
    header = packed[:HEADER_BYTES].contiguous().numpy().tobytes()
    info = _C.packed_info(header, packed.numel())
    if (info["out_features"], info["in_features"]) != (out_features, in_features):
        raise ValueError(
            f"the packed weight is {info['out_features']} x {info['in_features']} (out x in features), the layer is "
            f"{out_features} x {in_features}"
        )
    return info


def release_file_pages(tensor: torch.Tensor) -> None:
    """Gives back the memory of a weight that nobody needs any more and that is a private mapping of a file.

    safetensors maps a checkpoint as a whole, so dropping one tensor frees nothing until the last one is dropped: while
    a model is packed, file pages and packed weights would add up. Pages that nobody wrote to are the file's and would
    be read again; others would be lost, so nothing is done if another tensor shares the memory. Anything that is not
    such a mapping, or not Linux, is left to the allocator.
    """
    # Two owners: this tensor, and the Python object that asks. It has to be held: some versions of torch (2.13) keep
    # one by themselves that was made once, others (2.9) do not.
    storage = tensor.untyped_storage()
    if torch._C._storage_Use_Count(storage._cdata) != 2:
        return
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    # Only whole pages: the outer ones belong to the neighbours too.
    begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and hasattr(mmap, "MADV_DONTNEED") and _is_private_file_mapping(begin, end):
        ctypes.CDLL(None, use_errno=True).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED)
        )


def trim_heap() -> None:
    """Gives memory that was freed back to the system, where Python and the C library (glibc) keep it until asked."""
    # Python keeps some thousand freed tuples for the next ones, wherever they lie, and with each a megabyte. A full
    # collection lets go of them; of frozen objects it looks at none, which would take a quarter of a second. Objects
    # that the user has frozen stay so.
    if gc.get_freeze_count() == 0:
        gc.freeze()
        try:
            gc.collect()
        finally:
            gc.unfreeze()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


def _is_private_file_mapping(begin: int, end: int) -> bool:
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                addresses, permissions, *rest = line.split(maxsplit=5)
                low, high = (int(part, 16) for part in addresses.split("-"))
                if low <= begin < high:
                    return end <= high and permissions.endswith("p") and len(rest) == 4 and rest[3].startswith("/")
    except OSError:
        pass
    return False
