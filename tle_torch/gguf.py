"""Models from GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tle_torch.patcher import patch_model

__all__ = ["check_gguf", "from_gguf"]

_MAGIC = b"GGUF"


def check_gguf(path: str | os.PathLike) -> Path:
    """`path` as a Path if it is a GGUF file.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: there is no such file.
        ValueError: the file is something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise ValueError(f"{path} is no GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
    return path


def from_gguf(path: str | os.PathLike, scheme: str = "w8a8", *, dtype: torch.dtype = torch.bfloat16, **patch_options):
    """Loads a GGUF file and patches the model.

    transformers de-quantises most architectures while it loads them, so that loading needs the memory of the dense
    model; the weights are then packed to `scheme`.

    Args:
        path: the file.
        dtype: of activations and of what stays dense.
        patch_options: further arguments of `patch_model`.

    Returns:
        (model, tokenizer). `model.tle_patch.report` says what was patched.

    Raises:
        TypeError, FileNotFoundError, ValueError: `path` is no GGUF file; the scheme or an option is wrong.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tle_torch.weights import check_scheme

    check_scheme(scheme)
    path = check_gguf(path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    patch_model(model, scheme, **patch_options)
    return model, tokenizer
