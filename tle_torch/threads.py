"""Thread counts: TLE's own team, and torch's intra-op threads that make room for it.

TLE's kernels run on a team of their own size (`set_num_threads`). While any patched model exists, torch's intra-op
count is 1: two teams on the same cores cost more than either brings. The first patched model saves torch's count and
the last one to be unpatched, or to be garbage-collected, puts it back.
"""

from __future__ import annotations

import gc
import threading
import weakref

import torch

from tle_torch.ops import _C

__all__ = ["cpu_info", "get_num_threads", "pin_torch", "pinned_models", "set_num_threads", "unpin_torch"]


def set_num_threads(count: int) -> None:
    """Sets how many threads TLE's kernels use, from the next call on.

    Args:
        count: 1 or more. Results do not depend on it.

    Raises:
        TypeError: `count` is not an int.
        ValueError: `count` is below 1, or above what the library can run.
    """
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"set_num_threads: count must be an int, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"set_num_threads: count must be at least 1, got {count}")
    _C.set_num_threads(count)


def get_num_threads() -> int:
    """The number of threads that TLE's kernels use. Its default is the number of usable performance cores (affinity
    mask, CPU quota, `cpu_capacity` of big.LITTLE), or `TLE_NUM_THREADS`."""
    return _C.get_num_threads()


def cpu_info() -> dict:
    """What TLE sees of this CPU and makes of it: features, cores, the instruction-set level in force and the thread
    count. All values are plain Python values, so that a bug report can print them."""
    info = dict(_C.cpu_info())
    info.update(isa=_C.isa(), isas=list(_C.isas()), num_threads=_C.get_num_threads())
    return info


# Re-entrant: the garbage collector may call _release while this thread already holds it.
_lock = threading.RLock()
_owners: dict[int, weakref.finalize] = {}
_saved_count = 0


def pin_torch(owner: object) -> None:
    """Counts `owner` (a patched model) in; the first one sets torch's intra-op threads to 1. Counting twice is once."""
    global _saved_count
    with _lock:
        if id(owner) in _owners:
            return
        if not _owners:
            _saved_count = torch.get_num_threads()
            torch.set_num_threads(1)
        _owners[id(owner)] = weakref.finalize(owner, _release, id(owner))
        _owners[id(owner)].atexit = False


def unpin_torch(owner: object) -> None:
    """Counts `owner` out; the last one restores torch's intra-op threads. An owner that was not counted is ignored."""
    finalizer = _owners.get(id(owner))
    if finalizer is not None and finalizer.detach() is not None:
        _release(id(owner))


def pinned_models() -> int:
    """How many patched models are counted in."""
    return len(_owners)


def _release(key: int) -> None:
    with _lock:
        if _owners.pop(key, None) is None or _owners:
            return
        # torch.compile takes a count that changes while it traces for an error, and the garbage collector may run at
        # any time.
        if torch._guards.CompileContext.try_get() is None:
            _restore()
        elif _restore_later not in gc.callbacks:
            gc.callbacks.append(_restore_later)


def _restore() -> None:
    # A count that the user set meanwhile is the user's: it stays.
    if not _owners and torch.get_num_threads() == 1:
        torch.set_num_threads(_saved_count)


def _restore_later(phase: str, info: dict) -> None:
    """After a collection: the first one behind the compilation restores."""
    if phase == "stop" and torch._guards.CompileContext.try_get() is None:
        with _lock:
            gc.callbacks.remove(_restore_later)
            _restore()
