"""What belongs to the whole process: one OpenMP runtime, as many threads as asked for, fork, floating-point mode."""

import os
import subprocess
import sys
from pathlib import Path

import process_programs
import pytest

import tle_torch

PACKAGE_PARENT = Path(tle_torch.__file__).parent.parent
NAMES = sorted(process_programs.PROGRAMS)


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess:
    """All of the programs, each in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key not in ("TLE_NUM_THREADS", "OMP_NUM_THREADS")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
    environment["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's would start threads when it is imported
    command = [sys.executable, process_programs.__file__, *NAMES]
    return subprocess.run(command, env=environment, timeout=1800, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_in_a_fresh_process(name, done):
    assert f"{name} 0" in done.stdout.splitlines(), f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
