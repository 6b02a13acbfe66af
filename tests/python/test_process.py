"""What belongs to the whole process: one OpenMP runtime, as many threads as asked for, fork, floating-point mode."""

import os
import subprocess
import sys
from pathlib import Path

import process_programs
import pytest

import tle_torch

PACKAGE_PARENT = Path(tle_torch.__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(process_programs.PROGRAMS))
def test_in_a_fresh_process(name):
    environment = {key: value for key, value in os.environ.items() if key not in ("TLE_NUM_THREADS", "OMP_NUM_THREADS")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, process_programs.__file__, name], env=environment, timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
