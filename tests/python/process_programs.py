"""Programs that test_process.py runs, each in a fresh interpreter: `python process_programs.py NAME`.

What they check belongs to a whole process (its libraries, threads and floating-point mode), so it cannot share one with
other tests. A program that returns has passed; what went wrong is its exception.
"""

import ctypes
import os
import platform
import re
import sys
import threading
import time

import torch

PROGRAMS = {}
# scripts/arm/run.sh names the emulated CPU here. qemu-user 7.2 aborts when the forked child of a program with threads
# starts a thread itself, so there a child computes alone, and the parent of a child that has to start one does.
EMULATED = "TLE_ARM_CPU" in os.environ


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def settled_thread_count(wanted: int) -> int:
    """The number of threads, once it is `wanted` or ten seconds are over: a call may end before its team started."""
    deadline = time.monotonic() + 10
    while thread_count() != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return thread_count()


def mapped_files() -> list[tuple[range, str]]:
    """The files that are mapped into this process, each with a range of addresses."""
    with open("/proc/self/maps") as maps:
        rows = [fields for line in maps if len(fields := line.split(maxsplit=5)) == 6]
    return [(range(*(int(end, 16) for end in fields[0].split("-"))), fields[5].strip()) for fields in rows]


def openmp_runtimes() -> set[str]:
    """The files of OpenMP runtimes that are mapped into this process, but for sentencepiece's, which transformers
    imports where it is installed: its wheel brings one for itself."""
    found = {path for _, path in mapped_files() if re.search(r"lib(gomp|omp|iomp5)[-.]", path)}
    return {path for path in found if "/sentencepiece.libs/" not in path}


def openmp_runtime_of(library: str) -> str:
    """The file of the OpenMP runtime whose parallel regions a library opens."""
    entry = ctypes.cast(ctypes.CDLL(library).GOMP_parallel, ctypes.c_void_p).value
    (path,) = (path for addresses, path in mapped_files() if entry in addresses)
    return path


def packed_linear(out_features: int = 4096, in_features: int = 256, seed: int = 0):
    """A w8a8 linear of a size that is worth a team of threads, as a function of x [..., in_features]."""
    import tle_torch  # noqa: F401  registers the operators

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator)
    packed = torch.ops.tle.quantize_linear_weight(weight, "w8a8")
    return lambda x: torch.ops.tle.linear(x, packed, out_features)


@program
def one_openmp_runtime():
    before = openmp_runtimes()
    assert len(before) == 1, f"torch itself brings {before}"
    import tle_torch

    tle_torch.set_num_threads(2)
    linear = packed_linear()
    x = torch.randn(4, 256)
    want = linear(x)
    assert tle_torch._C.parallel_regions() > 0, "the team was never used: this would show nothing"
    assert openmp_runtimes() == before == {openmp_runtime_of(tle_torch._C.__file__)}
    # Inductor compiles and loads a library of its own. It needs a compiler on the machine that runs, which an emulated
    # one has not, and a torch whose folder has no space in its name (Inductor's link line does not quote it); elsewhere
    # the graph runs without code generation.
    usable = platform.machine() == "x86_64" and " " not in torch.__path__[0]
    backend = "inductor" if usable else "aot_eager"
    got = torch.compile(lambda x: torch.relu(linear(x)) + 1, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, torch.relu(want) + 1, rtol=0, atol=0)
    assert openmp_runtimes() == before


@program
def subnormals_survive():
    def keeps_subnormals():
        tiny = float("1e-310")
        big = torch.full((1 << 20,), 1e-40)
        return tiny * 1.0 != 0.0 and bool((torch.tensor(1e-40) * 1 != 0).item()) and bool((big * 1 != 0).all())

    def in_new_thread():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(keeps_subnormals()))
        thread.start()
        thread.join()
        return seen == [True]

    torch.set_num_threads(2)  # so that the large tensor goes through torch's pool as well
    assert keeps_subnormals() and in_new_thread(), "before the import"
    import tle_torch

    assert keeps_subnormals() and in_new_thread(), "after the import"
    tle_torch.set_num_threads(2)
    packed_linear()(torch.randn(4, 256))
    assert keeps_subnormals() and in_new_thread(), "after the first operator"


@program
def flush_to_zero_of_the_user():
    import tle_torch

    torch.set_num_threads(2)
    tle_torch.set_num_threads(2)
    linear = packed_linear()
    x = torch.randn(512, 256)
    small = x * 3e-37  # the scales of the rows' codes are subnormal
    tiny = x * 1e-39  # the elements are
    weight, ones = torch.randn(256), torch.ones_like(x)

    def results():
        return [linear(small), torch.ops.tle.rms_norm(tiny, weight, 1e-6), torch.ops.tle.swiglu(tiny, ones)]

    want = results()
    assert all(bool((out != 0).any(-1).all()) for out in want), "flushing must be able to make a difference"
    assert torch.set_flush_denormal(True), "torch cannot switch to flush-to-zero on this CPU"
    assert (torch.tensor(1e-40) * 1).item() == 0
    flushed = results()
    # Threads that are born now inherit the flushing mode of their maker.
    tle_torch.set_num_threads(3)
    reborn = results()
    in_thread = []
    thread = threading.Thread(target=lambda: in_thread.extend(results()))
    thread.start()
    thread.join()
    assert (torch.tensor(1e-40) * 1).item() == 0, "the user's mode was not given back"
    torch.set_flush_denormal(False)
    for got in (flushed, reborn, in_thread):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@program
def threads_as_asked():
    import tle_torch

    torch.set_num_threads(1)
    tle_torch.set_num_threads(1)
    linear = packed_linear()
    x = torch.randn(4, 256)
    want = linear(x)
    alone = thread_count()
    for count in (2, 3, 2):
        tle_torch.set_num_threads(count)
        assert tle_torch.get_num_threads() == count
        assert torch.equal(linear(x), want)
        found = settled_thread_count(alone + count - 1) - alone + 1
        assert found == count, f"{count} threads asked for, {found} found"
    tle_torch.set_num_threads(1)
    regions = tle_torch._C.parallel_regions()
    assert torch.equal(linear(x), want)
    assert tle_torch._C.parallel_regions() == regions, "one thread asked for, but the team was used"
    assert torch.get_num_threads() == 1


@program
def fork_after_use():
    import tle_torch

    tle_torch.set_num_threads(4)
    linear = packed_linear()
    x = torch.randn(4, 256)
    want = linear(x)
    assert tle_torch._C.parallel_regions() > 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            alone, threads = thread_count(), 1 if EMULATED else 4
            tle_torch.set_num_threads(threads)
            same = torch.equal(linear(x), want)
            code = 0 if same and settled_thread_count(alone + threads - 1) == alone + threads - 1 else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 300
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            raise AssertionError("the forked child hangs")
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    assert torch.equal(linear(x), want), "the parent goes on as before"


class _Rows(torch.utils.data.Dataset):
    def __init__(self, linear, x):
        self.linear, self.x = linear, x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.linear(self.x[i : i + 1])[0]


@program
def dataloader_workers():
    import tle_torch

    torch.set_num_threads(1)
    tle_torch.set_num_threads(1 if EMULATED else 2)
    linear = packed_linear()
    x = torch.randn(16, 256)
    want = linear(x)
    loader = torch.utils.data.DataLoader(_Rows(linear, x), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), want)


@program
def many_python_threads():
    import tle_torch

    torch.set_num_threads(1)
    tle_torch.set_num_threads(2)
    linear = packed_linear()
    callers, calls = 8, 200
    x = torch.randn(callers, calls, 1, 256)
    want = torch.stack([torch.stack([linear(row) for row in rows]) for rows in x])
    before = thread_count()
    start, most = threading.Barrier(callers + 1), 0
    got = [None] * callers

    def caller(i):
        start.wait()
        got[i] = torch.stack([linear(row) for row in x[i]])

    workers = [threading.Thread(target=caller, args=(i,)) for i in range(callers)]
    for worker in workers:
        worker.start()
    start.wait()
    while any(worker.is_alive() for worker in workers):
        most = max(most, thread_count())
        time.sleep(0.001)
    for worker in workers:
        worker.join()
    assert torch.equal(torch.stack(got), want)
    assert most <= before + callers, f"{most} threads where {before} and {callers} callers were expected"
    assert thread_count() <= before


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
