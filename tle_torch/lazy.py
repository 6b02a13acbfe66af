"""Tensors whose values are computed only when somebody looks at them.

A patched module owes Hugging Face code attributes that are large and that nearly nobody reads for their values: the
float `weight` of a packed Linear (read for its dtype, by more than a hundred model files) and the [B, 1, Q, S] mask of
a left-padded prefill (read by attention, which needs only the padding's width). `LazyTensor` has the shape, dtype and
device of such a tensor and no memory; an operation on it first builds the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_map

__all__ = ["LazyTensor"]

_writes = (torch.Tensor.data.__set__, torch.Tensor.__setitem__)
# What needs real memory and never reaches __torch_dispatch__.
_needs_memory = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__deepcopy__,
                 torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.share_memory_)


class LazyTensor(torch.Tensor):
    """A read-only CPU tensor that is built by `build()` at every operation on it.

    Args:
        shape: its sizes.
        dtype: its dtype.
        build: returns the values, a dense tensor of that shape and dtype. Called once per operation: nothing is kept,
            because keeping would undo what packing saved.
        read_only: the sentence that an in-place operation raises (RuntimeError). Results of operations, views
            included, are ordinary tensors with memory of their own.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, build: Callable[[], torch.Tensor], read_only: str):
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device="cpu")
        self._build = build
        self._read_only = read_only
        return self

    def materialize(self) -> torch.Tensor:
        """The values as an ordinary tensor; a new one at each call."""
        return self._build()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _writes:
            if isinstance(args[0], LazyTensor):
                raise RuntimeError(args[0]._read_only)
        elif func in _needs_memory:
            args = tree_map(_materialized, args)
        # The default would make the results LazyTensors too.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        for value, argument in zip(args, func._schema.arguments):
            if isinstance(value, LazyTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                raise RuntimeError(value._read_only)
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.alias.default:
            source = args[0]
            return LazyTensor(source.shape, source.dtype, source._build, source._read_only)
        return func(*tree_map(_materialized, args), **tree_map(_materialized, kwargs or {}))


def _materialized(value):
    return value.materialize() if isinstance(value, LazyTensor) else value
