"""Models from GGUF files.

For the Llama-shaped architectures the file's weights are taken over as they are: the same codes, scales and minima,
packed in the kernels' order straight out of the mapped file, one tensor at a time. Nothing that a packed scheme holds
is de-quantised, not even the embedding, whose rows are gathered from the packed table that is also the tied head.
Everything else goes through transformers, which de-quantises the file, and through `patch_model`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from tle_torch import weights
from tle_torch.gguf_file import FLOAT_TYPES, GgufFile, Strings, Tensor
from tle_torch.gguf_tokenizer import tokenizer_of
from tle_torch.layers import PackedEmbedding, QuantizedLinear
from tle_torch.patcher import patch_model
from tle_torch.report import Replaced

__all__ = ["from_gguf"]

# What types that pack_gguf_weight does not know (Q2_K, Q3_K, ...) are packed to, de-quantised one tensor at a time.
_FALLBACK = "w8a8-g32"


@dataclass(frozen=True)
class _Architecture:
    """What llama.cpp's converter did to the weights of an architecture.

    Attributes:
        permuted: q and k have their rows in the order of interleaved rotary pairs.
    """

    permuted: bool


_ARCHITECTURES = {
    "llama": _Architecture(permuted=True),
    "qwen2": _Architecture(permuted=False),
    "qwen3": _Architecture(permuted=False),
    "smollm3": _Architecture(permuted=True),
}

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

# Metadata (after the architecture's name and a dot) that the config must have, and that it may have.
_NEEDED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
_ROPE_DIVISORS = "rope_freqs.weight"
_ROPE_THETA = 10000.0  # llama.cpp's, where a file names none


def from_gguf(
    path: str | os.PathLike, scheme: str | None = None, *, dtype: torch.dtype = torch.bfloat16, **patch_options
):
    """Loads a GGUF file as a patched model.

    Args:
        path: the file.
        scheme: None takes the weights over as the file has them (Q4_0, Q4_1, Q4_K, Q5_0, Q8_0, IQ4_NL and IQ4_XS keep
            their codes and scales; other quantised types are re-quantised to w8a8-g32, and the report names them), for
            the architectures llama, qwen2, qwen3 and smollm3. A scheme's name de-quantises the file and packs the
            weights to that scheme; so does None for any other architecture, with the default scheme.
        dtype: of activations and of what stays dense.
        patch_options: further arguments of `patch_model`.

    Returns:
        (model, tokenizer). `model.tle_patch.report` says what became of each weight.

    Raises:
        TypeError, FileNotFoundError: `path` is no path, or of no file.
        ValueError: it is no GGUF file, is cut off or damaged, holds something else than a model that can be loaded, or
            tensors that do not fit it; the scheme or an option is wrong.
    """
    if scheme is not None:
        weights.check_scheme(scheme)
    with GgufFile(path) as file:
        _check_layers(file)
        config = None if scheme is not None else _config(file)
        if config is None:
            model = _converted(file, scheme, dtype, patch_options)
            return model, tokenizer_of(file, model.config)
        # The tokenizer first: what making it leaves behind is then free for the model.
        tokenizer = tokenizer_of(file, config)
        file.metadata.clear()
        weights.trim_heap()
        model = _taken_over(file, config, dtype, patch_options)
    weights.trim_heap()  # of what the proofs of the kernels used
    return model, tokenizer


def _check_layers(file: GgufFile) -> None:
    """A number of layers that the tensors cannot make up is an error before anybody builds that many."""
    layers = file.metadata.get(f"{file.architecture}.block_count")
    if isinstance(layers, (int, float)) and layers > len(file.tensors):
        raise ValueError(
            f"{file.path.name}: the metadata say {layers} layers, and the file has {len(file.tensors)} tensors"
        )


def _converted(file: GgufFile, scheme: str | None, dtype: torch.dtype, patch_options: dict) -> PreTrainedModel:
    """The model as transformers reads it, with floats for weights, packed to a scheme."""
    folder, name = file.path.parent, file.path.name
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=dtype, output_loading_info=True
        )
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name}: transformers cannot load its architecture {file.architecture!r}: {reason}"
        ) from error
    _refuse_missing(file, sorted(found["missing_keys"]))  # transformers made up random ones
    report = patch_model(model.eval(), scheme or weights.DEFAULT_SCHEME, **patch_options)
    if scheme is None:
        report.notes.append(
            f"The file's codes were not kept: transformers reads what is special to its {file.architecture!r}."
        )
    return model


def _taken_over(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype, patch_options: dict) -> PreTrainedModel:
    """The model with the file's own codes."""
    with _Unallocated(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        model.tie_weights()  # is part of what was left out
    report_rows: list[Replaced] = []
    requantised: list[str] = []
    # For a moment a tensor is there twice, in the file and packed: the largest (the embedding) while nothing else is.
    largest = max(file.tensors.values(), key=lambda tensor: tensor.nbytes)
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor is not largest):
        if tensor.name == _ROPE_DIVISORS:
            continue  # is part of the config
        target, leaf = _target(tensor.name)
        module = _owner(file, tensor, model, target, leaf)
        rows = _order(config, target, tensor.shape[0]) if _ARCHITECTURES[file.architecture].permuted else None
        if leaf == "weight" and isinstance(module, (nn.Linear, nn.Embedding)) and tensor.type not in FLOAT_TYPES:
            packed, scheme = _packed(file, tensor, rows)
            if not _is_exact(tensor):
                requantised.append(f"{target} ({tensor.type})")
            report_rows += _install(model, target, packed, dtype, scheme, tensor)
        else:
            values = _values(file, tensor)
            parameter = nn.Parameter((values if rows is None else values[rows]).to(dtype), requires_grad=False)
            for sharer in _sharers(model, module, leaf):
                sharer._parameters[leaf] = parameter
        file.release()
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    _refuse_missing(file, left)
    report = patch_model(model, weights.UNQUANTIZED, **patch_options)
    report.scheme = "as the file has them"
    report.replaced[:0] = report_rows
    report.bytes_before = file.path.stat().st_size
    report.notes = [note for note in report.notes if "patched before" not in note]
    if requantised:
        report.notes.append(
            f"Re-quantised to {_FALLBACK}, since no packed scheme holds their codes: {', '.join(requantised)}."
        )
    return model


class _Unallocated(TorchFunctionMode):
    """While it is active, what modules make to be loaded has no memory: `torch.empty`, `ones` and `zeros` give tensors
    on the meta device, and indexing or filling those (an embedding sets the row of padding to zero) does nothing. What
    modules compute, rotary frequencies, is real. `torch.device("meta")` would leave them without values, after much
    Python code for the shapes."""

    _makers = (torch.empty, torch.ones, torch.zeros)
    _setters = (torch.Tensor.__getitem__, torch.Tensor.fill_)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self._makers and kwargs.get("device") is None:
            return torch.empty(*args, **{**kwargs, "device": "meta"})
        if func in self._setters and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs)


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


def _config(file: GgufFile) -> PreTrainedConfig | None:
    """The file's metadata as a transformers config; None if the file has something that only transformers' conversion
    knows: another architecture, tensors of other names, scaled rotary embeddings."""
    metadata, architecture, name = file.metadata, file.architecture, file.path.name
    if architecture not in _ARCHITECTURES or any(
        _target(tensor) is None for tensor in file.tensors if tensor != _ROPE_DIVISORS
    ):
        return None
    if metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        return None
    missing = [key for key in _NEEDED if f"{architecture}.{key}" not in metadata]
    if missing:
        raise ValueError(f"{name}: the metadata lack {', '.join(f'{architecture}.{key}' for key in missing)}")
    values = {
        ours: metadata[f"{architecture}.{key}"]
        for key, ours in {**_NEEDED, **_OPTIONAL}.items()
        if f"{architecture}.{key}" in metadata
    }
    wrong = [ours for ours, value in values.items() if not isinstance(value, (int, float)) or value <= 0]
    if wrong:
        raise ValueError(
            f"{name}: the metadata's {wrong[0]} is {values[wrong[0]]!r}, which a {architecture} model cannot have"
        )
    heads = values["num_attention_heads"]
    shared = values.setdefault("num_key_value_heads", heads)
    if heads % shared:
        raise ValueError(
            f"{name}: the metadata's {heads} attention heads are no multiple of the {shared} of keys and values"
        )
    if "head_dim" not in values and values["hidden_size"] % heads:
        raise ValueError(
            f"{name}: {heads} attention heads, and the embeddings' {values['hidden_size']} are no multiple"
        )
    values.setdefault("head_dim", values["hidden_size"] // heads)
    if metadata.get(f"{architecture}.rope.dimension_count", values["head_dim"]) != values["head_dim"]:
        return None
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{name}: the file has no token_embd.weight")
    values["vocab_size"] = embedding.shape[0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Strings) and len(tokens) != embedding.shape[0]:
        raise ValueError(
            f"{name}: the vocabulary has {len(tokens)} tokens, and token_embd.weight {embedding.shape[0]} rows"
        )
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for ours, theirs in _TOKEN_IDS.items():
        if f"tokenizer.ggml.{theirs}_token_id" in metadata:
            values[ours] = metadata[f"tokenizer.ggml.{theirs}_token_id"]
    theta = metadata.get(f"{architecture}.rope.freq_base", _ROPE_THETA)
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **_rope_divisors(file, values)}
    # llama.cpp has one architecture for both.
    mistral = architecture == "llama" and "mistral" in str(metadata.get("general.name", ""))
    return AutoConfig.for_model("mistral" if mistral else architecture, **values)


def _rope_divisors(file: GgufFile, values: dict) -> dict:
    """Rotary parameters of a file that divides each frequency by a number of its own. Llama 3.1 and later do: the file
    has the numbers, not the formula that they are from, and transformers' longrope takes numbers."""
    tensor = file.tensors.get(_ROPE_DIVISORS)
    if tensor is None:
        return {}
    pairs = values["head_dim"] // 2
    if tensor.shape != (pairs,):
        raise ValueError(
            f"{file.path.name}: {tensor.name} has the shape {list(tensor.shape)}, and a head {pairs} pairs"
        )
    divisors = _values(file, tensor).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": values.get("max_position_embeddings", 2048),
    }


def _owner(file: GgufFile, tensor: Tensor, model: PreTrainedModel, target: str, leaf: str) -> nn.Module:
    """The module that a tensor belongs to; ValueError if it has no such parameter, or of another shape."""
    name = file.path.name
    try:
        module = model.get_submodule(target)
    except AttributeError:
        raise ValueError(
            f"{name}: {tensor.name} belongs to {target}, which a model of these metadata does not have"
        ) from None
    parameter = module._parameters.get(leaf)
    if parameter is None:
        raise ValueError(
            f"{name}: {tensor.name} belongs to {target}.{leaf}, which a {type(model).__name__} does not have"
        )
    if tuple(parameter.shape) != tensor.shape:
        raise ValueError(
            f"{name}: {tensor.name} has the shape {list(tensor.shape)}, and the metadata say {list(parameter.shape)}"
        )
    return module


def _sharers(model: PreTrainedModel, module: nn.Module, leaf: str) -> list[nn.Module]:
    """The modules that hold the same parameter: `module`, and the head that is tied to the embedding."""
    parameter, head = module._parameters[leaf], model.get_output_embeddings()
    return [module, head] if head is not module and head._parameters.get(leaf) is parameter else [module]


def _order(config: PreTrainedConfig, target: str, rows: int) -> torch.Tensor | None:
    """For each row of a query or key projection the file's row, None for other tensors: llama.cpp stores the pairs of a
    rotation side by side, Hugging Face the first of all pairs and then the second ones."""
    if target.endswith(".self_attn.q_proj"):
        heads = config.num_attention_heads
    elif target.endswith(".self_attn.k_proj"):
        heads = config.num_key_value_heads
    else:
        return None
    # numpy, of which less code comes into memory than of torch (see few_operators.py).
    return torch.from_numpy(np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).flatten())


def _packed(file: GgufFile, tensor: Tensor, rows: torch.Tensor | None) -> tuple[torch.Tensor, str]:
    """(packed weight, scheme) of a quantised tensor [N, K]; `rows`: the file's row of each row, or None."""
    n, k = tensor.shape
    if tensor.type in weights.GGUF_TYPES:
        blocks = file.bytes_of(tensor).view(n, -1)
        return torch.ops.tle.pack_gguf_weight(blocks, tensor.type, k, rows), weights.GGUF_TYPES[tensor.type].scheme
    values = _values(file, tensor)
    return weights.quantize(values if rows is None else values[rows], _FALLBACK), _FALLBACK


def _is_exact(tensor: Tensor) -> bool:
    """Whether a packed weight has the very codes of a quantised tensor."""
    return tensor.type in weights.GGUF_TYPES and weights.GGUF_TYPES[tensor.type].exact


def _values(file: GgufFile, tensor: Tensor) -> torch.Tensor:
    """A copy of a tensor's values: as stored if they are floats, else de-quantised to fp32."""
    data = file.bytes_of(tensor)
    if tensor.type in FLOAT_TYPES:
        return data.clone().view(FLOAT_TYPES[tensor.type]).view(tensor.shape)
    try:
        values = quants.dequantize(data.view(*tensor.shape[:-1], -1).numpy(), GGMLQuantizationType[tensor.type])
    except (NotImplementedError, KeyError):
        raise ValueError(
            f"{file.path.name}: {tensor.name} is of the type {tensor.type}, which cannot be read"
        ) from None
    return torch.from_numpy(values).view(tensor.shape)


def _install(
    model: PreTrainedModel, target: str, packed: torch.Tensor, dtype: torch.dtype, scheme: str, tensor: Tensor
) -> list[Replaced]:
    """Puts a packed weight into its module, and the embedding's also into the head that is tied to it."""
    module = model.get_submodule(target)
    was = type(module).__name__
    name = f"{scheme} ({tensor.type} of the file)" if _is_exact(tensor) else scheme
    rows = [Replaced(target, was, was, name, tensor.nbytes, packed.numel())]
    if isinstance(module, nn.Embedding):
        for head in _sharers(model, module, "weight")[1:]:
            rows.append(Replaced("lm_head", "Linear", type(head).__name__, f"{name}, shared with the embedding", 0, 0))
            QuantizedLinear.convert(head, packed, dtype, scheme, None)
        PackedEmbedding.convert(module, packed, dtype, scheme)
    else:
        QuantizedLinear.convert(module, packed, dtype, scheme, None)
    return rows


def _refuse_missing(file: GgufFile, names: list[str]) -> None:
    if names:
        raise ValueError(
            f"{file.path.name}: the file has no values for {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        )
