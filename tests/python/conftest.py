"""Shared set-up of the Python tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `import tiny`, wherever pytest is started


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
