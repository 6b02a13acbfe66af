"""Models from GGUF files.

For the Llama-shaped architectures the file's weights are taken over as they are: the same codes, scales and minima, packed in
the kernels' order straight out of the mapped file, one tensor at a time. Nothing is de-quantised, not even the
embedding, whose rows are gathered from the packed table that is also the tied head. Everything else goes through
transformers, which de-quantises the file, and through `patch_model`.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tle_torch import weights
from tle_torch.layers import PackedEmbedding, QuantizedLinear
from tle_torch.patcher import patch_model
from tle_torch.report import Replaced

__all__ = ["check_gguf", "from_gguf"]

_MAGIC = b"GGUF"

# GGUF types whose codes a packed scheme holds unchanged (csrc/runtime/gguf_blocks.h).
_TAKEN_OVER = {"Q4_0": "w4a8-g32", "Q4_1": "w4a8-g32-asym", "Q4_K": "w4a8-g32-asym", "Q8_0": "w8a8-g32"}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Other types (Q5_K, Q6_K, ...) are de-quantised one tensor at a time and packed to this scheme; the report says so.
_FALLBACK = "w8a8-g32"


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's converter did to the weights of an architecture.

    Attributes:
        permuted: q and k have their rows in the order of interleaved rotary pairs.
    """

    permuted: bool


_ARCHITECTURES = {"llama": _Architecture(permuted=True), "qwen2": _Architecture(False), "qwen3": _Architecture(False),
                  "smollm3": _Architecture(permuted=True)}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}


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


def from_gguf(path: str | os.PathLike, scheme: str | None = None, *, dtype: torch.dtype = torch.bfloat16, **patch_options):
    """Loads a GGUF file as a patched model.

    Args:
        path: the file.
        scheme: None takes the weights over as the file has them (Q4_0, Q4_1, Q4_K and Q8_0 keep their codes and scales; other
            quantised types are re-quantised to w8a8-g32, and the report names them), for the architectures llama, qwen2,
            qwen3 and smollm3. A scheme's name de-quantises the file and packs the weights to that scheme; so
            does None for any other architecture, with w8a8.
        dtype: of activations and of what stays dense.
        patch_options: further arguments of `patch_model`.

    Returns:
        (model, tokenizer). `model.tle_patch.report` says what became of each weight.

    Raises:
        TypeError, FileNotFoundError, ValueError: `path` is no GGUF file; the scheme or an option is wrong.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if scheme is not None:
        weights.check_scheme(scheme)
    path = check_gguf(path)
    model = None if scheme is not None else _take_over(path, dtype, patch_options)
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
        patch_model(model, scheme or "w8a8", **patch_options)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return model, tokenizer


def _take_over(path: Path, dtype: torch.dtype, patch_options: dict) -> nn.Module | None:
    """The model with the file's own codes, or None if its architecture needs transformers' conversion."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    metadata, names = read_gguf_metadata(str(path))
    architecture = _ARCHITECTURES.get(metadata["general.architecture"])
    targets = {name: _target(name) for name in names}
    if architecture is None or None in targets.values():
        return None
    config = _config(metadata, "output.weight" not in names)
    if config is None:
        return None
    try:
        tensors = GgufHeader.from_file(str(path)).tensors
    except ValueError:  # a type that this reader does not know, and transformers' older one may
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    report_rows: list[Replaced] = []
    requantised: list[str] = []
    with _File(path) as file:
        for info in tensors:
            target, leaf = targets[info.name]
            module = model.get_submodule(target)
            heads = {".self_attn.q_proj": config.num_attention_heads, ".self_attn.k_proj": config.num_key_value_heads}
            count = next((n for suffix, n in heads.items() if target.endswith(suffix)), 0) if architecture.permuted else 0
            rows = _rotate_half_order(info.shape[0], count) if count else None
            kind = file.type_name(info)
            if leaf == "weight" and isinstance(module, (nn.Linear, nn.Embedding)) and kind not in _FLOATS:
                packed, scheme = file.packed(info, rows)
                if kind not in _TAKEN_OVER:
                    requantised.append(f"{target} ({kind})")
                before = info.nbytes
                report_rows += _install(model, target, packed, dtype, scheme, kind, before)
            else:
                values = file.floats(info)
                values = (values if rows is None else values[rows]).to(dtype)
                if module._parameters.get(leaf) is None or module._parameters[leaf].shape != values.shape:
                    raise ValueError(f"{path.name}: {info.name} does not fit {target}.{leaf} of a {type(model).__name__}")
                for owner in (m for m in model.modules() if m._parameters.get(leaf) is module._parameters[leaf]):
                    if owner is not module:  # a tied head
                        owner._parameters[leaf] = nn.Parameter(values, requires_grad=False)
                        module._parameters[leaf] = owner._parameters[leaf]
                if module._parameters[leaf].is_meta:
                    module._parameters[leaf] = nn.Parameter(values, requires_grad=False)
            file.release(info)
    _fill_buffers(model)
    report = patch_model(model, weights.UNQUANTIZED, **patch_options)
    report.scheme = "as the file has them"
    report.replaced[:0] = report_rows
    report.bytes_before = path.stat().st_size
    report.notes = [note for note in report.notes if "patched before" not in note]
    if requantised:
        report.notes.append(f"Re-quantised to {_FALLBACK}, since no packed scheme holds their codes: {', '.join(requantised)}.")
    return model


def _target(name: str) -> tuple[str, str] | None:
    """(module, parameter) of a GGUF tensor's name, or None if it is none of a Llama-shaped decoder."""
    stem, _, leaf = name.rpartition(".")
    parts = stem.split(".")
    if leaf in ("weight", "bias"):
        if len(parts) == 1 and stem in _MODEL_NAMES:
            return _MODEL_NAMES[stem], leaf
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}", leaf
    return None


def _config(metadata: dict, tied: bool):
    """The file's metadata as a transformers config, by transformers' own table of names; None if a key says what the table does not
    (scaled rotary embeddings)."""
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_MAPPING

    architecture = metadata["general.architecture"]
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none" or architecture not in GGUF_CONFIG_MAPPING:
        return None
    model_type = "mistral" if architecture == "llama" and "mistral" in str(metadata.get("general.name", "")) else architecture
    values = {"tie_word_embeddings": tied}
    for key, name in GGUF_CONFIG_MAPPING[model_type].items():
        if name is not None and name != -1 and f"{architecture}.{key}" in metadata:
            values[name] = metadata[f"{architecture}.{key}"]
    tokens = metadata.get("tokenizer.ggml.tokens")
    values.setdefault("vocab_size", tokens if isinstance(tokens, int) else len(tokens))
    for token in ("bos", "eos", "unknown", "padding"):
        if f"tokenizer.ggml.{token}_token_id" in metadata:
            short = {"unknown": "unk", "padding": "pad"}.get(token, token)
            values[f"{short}_token_id"] = metadata[f"tokenizer.ggml.{token}_token_id"]
    theta = values.pop("rope_theta", None)
    if theta is not None:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    return AutoConfig.for_model(model_type, **values)


def _rotate_half_order(rows: int, heads: int) -> torch.Tensor:
    """For each row of a projection the file's row: llama.cpp stores the pairs of a rotation side by side, Hugging Face the first of all pairs
    and then the second ones."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _install(model, target: str, packed: torch.Tensor, dtype: torch.dtype, scheme: str, kind: str, before: int) -> list[Replaced]:
    """Puts a packed weight into its module, and the embedding's also into the head that is tied to it."""
    module = model.get_submodule(target)
    was = type(module).__name__
    name = f"{scheme} ({kind} of the file)" if kind in _TAKEN_OVER else scheme
    rows = [Replaced(target, type(module).__name__, was, name, before, packed.numel())]
    if isinstance(module, nn.Embedding):
        head = model.get_output_embeddings()
        if head._parameters.get("weight") is module._parameters["weight"]:
            rows.append(Replaced("lm_head", "Linear", type(head).__name__, f"{name}, shared with the embedding", 0, 0))
            QuantizedLinear.convert(head, packed, dtype, scheme, None)
        PackedEmbedding.convert(module, packed, dtype, scheme)
    else:
        QuantizedLinear.convert(module, packed, dtype, scheme, None)
    return rows


def _fill_buffers(model: nn.Module) -> None:
    """Buffers that are computed and not loaded (rotary frequencies) are on the meta device: makes their modules anew."""
    for name, module in list(model.named_modules()):
        if any(b.is_meta for b in module._buffers.values() if b is not None):
            model.set_submodule(name, type(module)(config=module.config))
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise ValueError(f"the GGUF file has no values for {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}")


class _File:
    """The mapped file. A tensor's pages are given back once it was packed."""

    def __init__(self, path: Path):
        from transformers.integrations.gguf.reader import GgufHeader

        self._start = GgufHeader.from_file(str(path)).data_start
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_) -> None:
        self._map.close()

    @staticmethod
    def type_name(info) -> str:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(info.ggml_type).name

    def _bytes(self, info) -> torch.Tensor:
        raw = np.frombuffer(self._map, np.uint8, info.nbytes, self._start + info.offset)
        return torch.from_numpy(raw)

    def packed(self, info, rows: torch.Tensor | None) -> tuple[torch.Tensor, str]:
        """(packed weight, scheme) of a quantised tensor [N, K]."""
        from transformers.integrations.gguf.dequant import dequantize

        n, k = info.shape
        kind = self.type_name(info)
        blocks = self._bytes(info).view(n, -1)
        if kind in _TAKEN_OVER:
            return torch.ops.tle.pack_gguf_weight(blocks, kind, k, rows), _TAKEN_OVER[kind]
        values = dequantize(blocks.clone(), info.ggml_type).view(n, k)
        return weights.quantize(values if rows is None else values[rows], _FALLBACK), _FALLBACK

    def floats(self, info) -> torch.Tensor:
        """A copy of a tensor's values: as stored if they are floats, else de-quantised."""
        from transformers.integrations.gguf.dequant import dequantize

        raw, kind = self._bytes(info).clone(), self.type_name(info)
        if kind in _FLOATS:
            return raw.view(_FLOATS[kind]).view(info.shape)
        return dequantize(raw.view(*info.shape[:-1], -1), info.ggml_type).view(info.shape)

    def release(self, info) -> None:
        begin = (self._start + info.offset) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, begin, self._start + info.offset + info.nbytes - begin)
