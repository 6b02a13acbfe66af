"""patch_model and its way back.

Patching goes in two passes. The first looks: it names every module that can be replaced and every one that cannot,
probes them, and raises what there is to raise, before anything is changed. The second changes one module at a time and
frees each original weight before it takes the next.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from gguf.constants import GGMLQuantizationType
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.gguf.kernels import dequantize_blocks
from transformers.integrations.gguf.utils import GgufEmbedding, GgufLinear

from tle_torch import probes, threads, weights
from tle_torch.attention import NAME as ATTENTION
from tle_torch.cache import check_dtype, supports_config
from tle_torch.decode import PatchedDecoder, Router, self_check
from tle_torch.equalize import Equalised, check_calibration, equalise, mean_squares, readings_of, restore
from tle_torch.families import Family, family_of
from tle_torch.few_operators import SummedProducts, near
from tle_torch.layers import (
    DenseLinear,
    PackedEmbedding,
    PatchedMLP,
    PatchedModule,
    PatchedNorm,
    PatchedPreTrainedModel,
    PatchedRotary,
    QuantizedLinear,
    activation_of,
    patched_class,
)
from tle_torch.ops import _C
from tle_torch.progress import check_progress, progress_of
from tle_torch.report import LeftAlone, Replaced, Report

__all__ = ["disabled", "patch_model", "refuse_disabled", "unpatch_model"]

# Names that gated MLPs of models outside the known families commonly use.
_MLP_NAMES = ("gate_proj", "up_proj", "down_proj", "act_fn")


def patch_model(
    model: nn.Module,
    scheme: str = weights.DEFAULT_SCHEME,
    *,
    quantize_head: bool = False,
    keep_original: bool = False,
    exclude: Sequence[str] = (),
    kv_dtype: torch.dtype | None = None,
    calibration: torch.Tensor | None = None,
    progress: bool | Callable[[int, int, str], None] | None = None,
) -> Report:
    """Makes a model run on TLE's kernels, in place.

    Every Linear is packed to `scheme`, RMSNorms, gated MLPs and rotary embeddings run fused, attention and whole decode
    steps too where the model's family is known (Llama, SmolLM2/3, Mistral, Qwen2/2.5, Qwen3, TinyLlama). What is not
    understood is left as it is and named in the report. `model.generate`, `pipeline`, hooks, `state_dict`, deepcopy and
    pickle keep working; other models of the same class are not touched. Gradients of the model's own parameters are
    turned off, and torch's intra-op threads are set to 1 while a patched model exists; `unpatch_model` undoes both.
    `torch.autocast` does not change what a patched module computes, nor its dtype.

    Args:
        model: any module on the CPU; bf16, fp16 or fp32 weights.
        scheme: of float weights; GGUF blocks that transformers kept packed keep their codes, or get w8a8-g32 where no
            scheme holds them (see from_gguf). "w8a8-a32" (the default: int8 weights per output channel, int8
            activations per 32 values), "w8a8" (activations per token: a little faster in prefill, ten times the error),
            "bf16" (nothing is quantised) and more: `tle_torch.schemes()` lists them.
        quantize_head: also pack the language-model head. A tied head is then packed apart: the embedding stays as it
            is. Otherwise the head stays dense, in place.
        keep_original: keep the original weights too, so that `unpatch_model`, `disabled` and `verify` give back the
            exact model. Otherwise each is freed as soon as it is packed.
        exclude: patterns (as in fnmatch) of module names to leave alone.
        kv_dtype: of the caches that the model makes by itself (see `tle_torch.Cache`): None keeps keys and values as
            they are, torch.int8 in about half the bytes of bf16.
        calibration: token ids, int64 or int32 [B, T], of text like what the model will read, 2,048 or so. The
            unquantised model reads each row from its beginning, which hooks see, and channels of normed hidden states
            that are large there are made smaller before they are quantised, and the weights that read them larger
            (tle_torch/equalize.py). The weights of these norms and Linears are then new parameters, the checkpoint's
            times powers of two, and only together mean the same: do not load the checkpoint's, or adapters made for it,
            into some of them. Where a hook or a forward put on an instance would meet the difference, nothing is
            changed.
        progress: True or False shows a progress bar or none; None shows one for models of 1 GiB and more. A function is
            called with (modules done, modules in all, name).

    Returns:
        what was replaced, what was not, and why.

    Raises:
        TypeError: `model` is no module, or an argument has another type.
        ValueError: unknown scheme or `kv_dtype`; a `kv_dtype` for a model without a decoder of a known family; a weight
            on another device; nothing to patch; the model is inside `with disabled(...)`. `calibration` is empty, of
            another shape, holds an id that the embedding does not have, or makes values that are not finite; the scheme
            quantises nothing, the model is patched already, or has no Linears that calibration could help. Nothing is
            changed then.
    """
    if not isinstance(model, nn.Module):
        what = "a path: load it first, or use tle_torch.from_gguf" if isinstance(model, str) else type(model).__name__
        raise TypeError(f"patch_model takes a torch.nn.Module, got {what}")
    weights.check_scheme(scheme)
    if isinstance(exclude, str):
        raise TypeError("exclude takes a sequence of patterns, got a string")
    check_progress(progress)
    check_dtype(kv_dtype, "kv_dtype")
    if calibration is not None and scheme == weights.UNQUANTIZED:
        raise ValueError(f"calibration: the scheme {scheme!r} quantises nothing")
    refuse_disabled(model)
    _check_devices(model)
    if kv_dtype is not None and not any(family_of(module) is not None for module in model.modules()):
        raise ValueError(f"kv_dtype: this {type(model).__name__} has no decoder of a known family to make a cache")
    scan = _Scan(model, scheme, quantize_head, tuple(exclude))
    if calibration is not None and scan.patched_before:
        raise ValueError("calibration reads the unquantised model: unpatch_model first")
    report = Report(scheme=scheme, isa=_C.isa(), threads=_C.get_num_threads(), left_alone=scan.left_alone)
    report.bytes_before = report.bytes_after = _bytes_of(model)
    if not scan.actions:
        if not scan.patched_before:
            raise ValueError(
                f"nothing to patch in this {type(model).__name__}: it has no Linear, RMSNorm, gated MLP or rotary "
                f"embedding that tle_torch knows"
                + (f" ({scan.left_alone[0].name}: {scan.left_alone[0].reason})" if scan.left_alone else "")
            )
        report.notes.append("The model was patched before; nothing was changed.")
        report.whole_step = {name: decoder.tle_router.refusal(decoder) for name, decoder in _decoders(model)}
        return report
    if scan.patched_before:
        report.notes.append(
            f"{scan.patched_before} modules were patched before and stay as they are: unpatch_model first to change "
            f"them."
        )

    equalised = [] if calibration is None else _equalised(model, scan, calibration, exclude, report)
    record = _patch_record(model)
    record.equalised += equalised
    threads.pin_torch(model)
    _own_configs(model, record)
    with progress_of(progress, report.bytes_before, len(scan.actions)) as advance:
        for action in scan.actions:
            advance(action.name)
            action.apply(report, keep_original)
    _patch_models(model, record, report, kv_dtype)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not _is_adapter_parameter(name, scan.adapters):
            parameter.requires_grad_(False)
            record.requires_grad.append(name)
    if kv_dtype is not None:
        report.notes.append("The caches that the model makes hold keys and values as int8 codes.")
    report.bytes_after = _bytes_of(model)
    record.report = report
    return report


def unpatch_model(model: nn.Module, *, dequantize: bool = False) -> None:
    """Undoes `patch_model`: original classes, attention, configs, gradients, and torch's thread count.

    Weights come back exactly if they were kept (`keep_original=True`) or never quantised. Otherwise they are gone: with
    `dequantize=True` the packed values are written back as floats, which is a different model than before.

    Raises:
        TypeError: `model` is no module.
        ValueError: the model is not patched.
        RuntimeError: weights were quantised and not kept, and `dequantize` is False. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch_model takes a torch.nn.Module, got {type(model).__name__}")
    roots = _patched_roots(model)
    if not dequantize:
        _require_originals(model, "unpatch_model(model, dequantize=True) writes the de-quantised values back")
    for root in roots:
        record: PatchRecord = root.__dict__.pop("tle_patch")
        modules = list(root.modules())
        for module in modules:
            if isinstance(module, PatchedModule):
                module.tle_restore()
        present = set(modules)
        for equalised in record.equalised:
            # The others stay in step with a module that was put in the place of one of them.
            if present.issuperset((equalised.norm, *equalised.linears)):
                restore(equalised)
        parameters = dict(root.named_parameters())
        for name in record.requires_grad:
            if name in parameters:
                parameters[name].requires_grad_(True)
        record.restore_configs(modules)
        threads.unpin_torch(root)


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[nn.Module]:
    """The unpatched model for the length of a `with` block: same object, original code and weights, torch's threads.
    A copy that is made inside is an unpatched model. Blocks may be nested; `patch_model`, `unpatch_model` and `verify`
    refuse the model inside.

    Raises:
        ValueError: the model is not patched.
        RuntimeError: weights were quantised and not kept.
    """
    if any(module in _disabled for module in model.modules()):
        yield model
        return
    roots = _patched_roots(model)
    _require_originals(model, "patch with keep_original=True")
    attention = [entry for root in roots for entry in root.tle_patch.attention]
    attention = [(config, before) for config, before in attention if config._attn_implementation == ATTENTION]
    patched = [m for root in roots for m in root.modules() if isinstance(m, PatchedModule) or m is root]
    saved = [(m, type(m), m.__dict__) for m in dict.fromkeys(patched)]
    for module, _, state in saved:
        # The patch is taken off copies of these; the originals come back below.
        state = state.copy()
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            state[name] = copy.copy(state[name])
        state.pop("tle_patch", None)
        object.__setattr__(module, "__dict__", state)
        if isinstance(module, PatchedModule):
            module.tle_restore()
    for config, before in attention:
        config._attn_implementation = before
    for root in roots:
        threads.unpin_torch(root)
        _disabled.add(root)
    try:
        yield model
    finally:
        for module, cls, state in saved:
            object.__setattr__(module, "__dict__", state)
            module.__class__ = cls
        for config, _ in attention:
            config._attn_implementation = ATTENTION
        for root in roots:
            _disabled.discard(root)
            threads.pin_torch(root)


# Patched models that are inside `with disabled(...)`.
_disabled: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _patched_roots(model: nn.Module) -> list[nn.Module]:
    """The modules in `model` that patch_model was given.

    Raises:
        ValueError: there is none.
    """
    refuse_disabled(model)
    roots = [module for module in model.modules() if "tle_patch" in module.__dict__]
    if not roots:
        part = any(isinstance(module, PatchedModule) for module in model.modules())
        raise ValueError(
            f"this {type(model).__name__} is not patched"
            + (" by itself: it is a part of a model that is, and goes with it" if part else "")
        )
    return roots


def refuse_disabled(model: nn.Module) -> None:
    """Raises ValueError inside `with disabled(...)`: what changes or judges the patch cannot work there."""
    if any(module in _disabled for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} is inside `with disabled(...)`: leave that block first")


def _require_originals(model: nn.Module, remedy: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, PackedEmbedding) or (isinstance(module, QuantizedLinear) and not module.tle_original):
            raise RuntimeError(
                f"the original weight of {name or 'the model'} was freed when it was packed: load the checkpoint "
                f"again, or {remedy}"
            )


# ---- the first pass: looking ----


@dataclass
class _Action:
    """One module to patch. `apply` does it and adds to the report."""

    name: str
    module: nn.Module

    def apply(self, report: Report, keep_original: bool) -> None:
        raise NotImplementedError

    def _replaced(self, report: Report, kind: str, original: str, before: int, after: int, scheme: str = "") -> None:
        report.replaced.append(Replaced(self.name, kind, original, scheme, before, after))


@dataclass
class _Quantize(_Action):
    scheme: str

    def apply(self, report: Report, keep_original: bool) -> None:
        module, original = self.module, type(self.module).__name__
        parameter = module._parameters["weight"]
        before = _size(parameter)
        if isinstance(module, GgufLinear):
            dtype = torch.float32 if module.bias is None else module.bias.dtype
            weight = _unpacked(module)
        else:
            dtype, weight = parameter.dtype, parameter
        try:
            packed = weights.quantize(weight, self.scheme)
        except (ValueError, RuntimeError) as error:
            report.left_alone.append(LeftAlone(self.name, original, str(error).splitlines()[0]))
            return
        weight = None
        QuantizedLinear.convert(module, packed, dtype, self.scheme, parameter if keep_original else None)
        # Nobody else may be reading what is about to be dropped: this frame and getrefcount's argument hold it.
        if not keep_original and sys.getrefcount(parameter) <= 2:
            weights.release_file_pages(parameter)
        self._replaced(report, "Linear", original, before, _size(packed), self.scheme)


@dataclass
class _TakeBlocks(_Action):
    """GGUF blocks that a module of transformers kept packed: the same codes in the kernels' order. `packed` is what a
    head and the embedding that it is tied to share, by the id of their parameter."""

    kind: str
    groups: torch.Tensor | None
    packed: dict[int, torch.Tensor]

    def apply(self, report: Report, keep_original: bool) -> None:
        module, original = self.module, type(self.module).__name__
        parameter = module._parameters["weight"]
        table = isinstance(module, GgufEmbedding)
        if table and keep_original:
            report.left_alone.append(LeftAlone(self.name, original, "its blocks are the original to keep"))
            return
        scheme, exact = weights.GGUF_TYPES[self.kind]
        shared = self.packed.get(id(parameter))
        packed = shared
        if packed is None:
            columns = module.embedding_dim if table else module.in_features
            packed = torch.ops.tle.pack_gguf_weight(parameter.detach(), self.kind, columns, None, self.groups)
            self.packed[id(parameter)] = packed
        if table:
            PackedEmbedding.convert(module, packed, module.compute_dtype, scheme)
        else:
            dtype = torch.float32 if module.bias is None else module.bias.dtype
            QuantizedLinear.convert(module, packed, dtype, scheme, parameter if keep_original else None)
        what = f"{scheme} ({self.kind} blocks{'' if exact else ', quantised again'})"
        sizes = (_size(parameter), _size(packed)) if shared is None else (0, 0)
        self._replaced(report, "Embedding" if table else "Linear", original, *sizes, what)


@dataclass
class _Dense(_Action):
    def apply(self, report: Report, keep_original: bool) -> None:
        original, size = type(self.module).__name__, _size(self.module.weight)
        self.module.__class__ = patched_class(DenseLinear, type(self.module))
        torch.ops.tle.advise_huge_pages(self.module.weight.detach())
        dtype = str(self.module.weight.dtype).removeprefix("torch.")
        self._replaced(report, "Linear", original, size, size, f"{dtype}, in place")


@dataclass
class _Norm(_Action):
    kind: str

    def apply(self, report: Report, keep_original: bool) -> None:
        original = type(self.module).__name__
        self.module.tle_kind, self.module.tle_eps = self.kind, probes.epsilon_name(self.module)
        self.module.__class__ = patched_class(PatchedNorm, type(self.module))
        self._replaced(report, f"RMSNorm ({self.kind})", original, 0, 0)


@dataclass
class _MLP(_Action):
    names: tuple[str, str, str, str]

    def apply(self, report: Report, keep_original: bool) -> None:
        original = type(self.module).__name__
        activation = self.names[3]
        self.module.tle_names = self.names[:3]
        self.module.tle_activation = activation, activation_of(self.module, activation)
        self.module.__class__ = patched_class(PatchedMLP, type(self.module))
        self._replaced(report, "fused MLP", original, 0, 0)


@dataclass
class _Rotary(_Action):
    def apply(self, report: Report, keep_original: bool) -> None:
        original = type(self.module).__name__
        PatchedRotary.convert(self.module)
        self._replaced(report, "rotary tables", original, 0, 0)


class _Scan:
    """What can be patched in a model, and what cannot and why. Changes nothing."""

    def __init__(self, model: nn.Module, scheme: str, quantize_head: bool, exclude: tuple[str, ...]):
        self.actions: list[_Action] = []
        self.left_alone: list[LeftAlone] = []
        self.patched_before = 0
        self.adapters: list[str] = []
        self._scheme, self._quantize_head = scheme, quantize_head
        self.tied = _tied_parameters(model)
        self._heads = _heads(model)
        self._families = [family for _, module in model.named_modules() if (family := family_of(module)) is not None]
        self._proven: dict[tuple, object] = {}
        self._packed: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            self._find_adapters(name, module)
        for name, module in model.named_modules():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
                self._leave(name, module, "excluded by the caller")
            elif isinstance(module, PatchedModule):
                self.patched_before += 1
            elif any(name == a or name.startswith(f"{a}.") for a in self.adapters):
                if module._parameters:
                    self._leave(name, module, "part of an adapter")
            else:
                self._look(name, module)

    def _leave(self, name: str, module: nn.Module, reason: str) -> None:
        self.left_alone.append(LeftAlone(name, type(module).__name__, reason))

    def _find_adapters(self, name: str, module: nn.Module) -> None:
        """PEFT: a tuner layer wraps `base_layer`, which is patched like any other; the rest of it is the adapter."""
        prefix = f"{name}." if name else ""
        if hasattr(module, "adapter_layer_names") and "base_layer" in module._modules:
            self.adapters += [f"{prefix}{child}" for child in module._modules if child != "base_layer"]
        # What these hold is trained beside the model: copies of whole modules, and the encoder of a soft prompt.
        for child, mark in (("modules_to_save", "original_module"), ("prompt_encoder", "peft_config")):
            if child in module._modules and hasattr(module, mark):
                self.adapters.append(f"{prefix}{child}")

    def _once(self, probe: Callable[..., object], module: nn.Module, *arguments: object) -> object:
        """A probe's result, which is the same for all modules that differ in nothing but their weights."""
        key = (probe, _likeness(module), *arguments)
        if key not in self._proven:
            self._proven[key] = probe(module, *arguments)
        return self._proven[key]

    def _look(self, name: str, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, GgufLinear)):
            self._look_at_linear(name, module)
            return
        if type(module) is GgufEmbedding and self._takes_blocks(name, module):
            return
        names = self._mlp_names(module)
        if probes.looks_like_norm(module):
            kind = None if "forward" in module.__dict__ else self._once(probes.norm_kind, module)
            if module.weight.dtype not in weights.FLOAT_DTYPES:
                self._leave(name, module, f"its weight is {module.weight.dtype}")
            elif kind is None:
                self._leave(name, module, "its result is not that of a known RMSNorm")
            else:
                self.actions.append(_Norm(name, module, str(kind)))
        elif names is not None:
            *linears, activation = names
            dtypes = {p.dtype for child in linears for p in module._modules[child].parameters()}
            if torch.float64 in dtypes:
                self._leave(name, module, "its weights are float64")
            elif "forward" in module.__dict__ or not self._once(probes.probe_mlp, module, *linears):
                self._leave(name, module, "its result is not down(silu(gate(x)) * up(x)); its Linears are patched")
            else:
                self.actions.append(_MLP(name, module, names))
        elif "inv_freq" in module._buffers:
            if (
                not probes.looks_like_rotary(module)
                or "forward" in module.__dict__
                or not probes.probe_rotary(module)
            ):
                self._leave(name, module, "its rotary tables are of another layout")
            else:
                self.actions.append(_Rotary(name, module))
        elif any(p is not None for p in module._parameters.values()) and not isinstance(module, nn.Embedding):
            self._leave(name, module, "no kernel takes its weights")

    def _mlp_names(self, module: nn.Module) -> tuple[str, str, str, str] | None:
        """The names of gate, up, down and activation if the module is made like a gated MLP."""
        layouts = {(f.gate, f.up, f.down, f.activation) for f in self._families} | {_MLP_NAMES}
        return next((names for names in sorted(layouts) if probes.looks_like_gated_mlp(module, *names)), None)

    def _look_at_linear(self, name: str, module: nn.Module) -> None:
        reason = self._linear_reason(module)
        if reason is not None:
            self._leave(name, module, reason)
            return
        weight = module._parameters["weight"]
        is_head, is_tied = id(module) in self._heads, id(weight) in self.tied
        if isinstance(module, GgufLinear):
            groups = _group_order(module.input_permutation)
            if (groups is not None or module.input_permutation is None) and self._takes_blocks(name, module, groups):
                return
        quantize = self._scheme != weights.UNQUANTIZED and (self._quantize_head if is_head else not is_tied)
        if quantize:
            self.actions.append(_Quantize(name, module, self._scheme))
        elif isinstance(module, GgufLinear):
            self._leave(name, module, "its GGUF blocks need a packed scheme (quantize_head=True packs a head)")
        else:
            self.actions.append(_Dense(name, module))

    def _takes_blocks(self, name: str, module: nn.Module, groups: torch.Tensor | None = None) -> bool:
        """Whether a module's GGUF blocks can be packed; they will be, then."""
        kind = GGMLQuantizationType(module.ggml_type).name
        if kind in weights.GGUF_TYPES:
            self.actions.append(_TakeBlocks(name, module, kind, groups, self._packed))
        return kind in weights.GGUF_TYPES

    @staticmethod
    def _linear_reason(module: nn.Module) -> str | None:
        """Why a Linear cannot be patched, or None."""
        if type(module) not in (nn.Linear, GgufLinear):
            return f"a {type(module).__module__}.{type(module).__qualname__} may do more than a Linear"
        if "forward" in module.__dict__:
            return "its forward was replaced on the instance"
        weight = module._parameters.get("weight")
        if weight is None:
            return "its weight is not a parameter"
        if isinstance(module, GgufLinear):
            return None
        if type(weight.data) is not torch.Tensor or weight.layout != torch.strided:
            return f"its weight is a {type(weight.data).__name__}"
        if weight.dtype not in weights.FLOAT_DTYPES:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
        if weight.numel() == 0:
            return "it is empty"
        return None


def _likeness(module: nn.Module) -> tuple:
    """A key that two modules share only if they compute the same from the same weights: class, settings, the shapes of
    weights, and the likeness of children that are no Linear."""
    simple = (bool, int, float, str, type(None))
    settings = [(k, v if isinstance(v, simple) else id(v)) for k, v in vars(module).items() if not k.startswith("_")]
    shapes = [(k, None if p is None else p.shape) for k, p in module._parameters.items()]
    children = [(k, type(m) if isinstance(m, nn.Linear) else _likeness(m)) for k, m in module._modules.items()]
    return type(module), *settings, *shapes, *children


def _check_devices(model: nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type == "meta":
            raise ValueError(f"{name} has no data (it is on the meta device): load the model's weights first")
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}: tle_torch runs on the CPU, move the model with .to('cpu')")


def _tied_parameters(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module holds."""
    seen: set[int] = set()
    tied: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _heads(model: nn.Module) -> set[int]:
    """ids of the Linears that turn hidden states into a model's result: language-model and classification heads."""
    heads: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            with contextlib.suppress(AttributeError, NotImplementedError):  # how some models say that they have none
                heads.add(id(module.get_output_embeddings()))
            if module.base_model is not module:
                heads.update(id(child) for child in module.children() if isinstance(child, nn.Linear))
    return heads


def _unpacked(module: GgufLinear) -> torch.Tensor:
    """The float weight [N, K] of a module that holds GGUF blocks, its columns in the order of the inputs."""
    weight = dequantize_blocks(
        module.weight, module.ggml_type, module.out_features, module.in_features, torch.float32
    )
    if module.input_permutation is None:
        return weight
    # forward computes x[:, permutation] W^T, so that column j of W belongs to input permutation[j].
    natural = torch.empty_like(weight)
    natural[:, module.input_permutation] = weight
    return natural


def _group_order(permutation: torch.Tensor | None) -> torch.Tensor | None:
    """For each group of 32 natural columns the group of the blocks' columns, int64 [K / 32]; None if a permutation does
    not move whole groups (that of Qwen3.5's value heads does), or there is none.

    Args:
        permutation: column j of the blocks belongs to input permutation[j] (see `_unpacked`).
    """
    if permutation is None or permutation.numel() % weights.GGUF_GROUP:
        return None
    groups = permutation.view(-1, weights.GGUF_GROUP)
    first = groups[:, :1]
    if (first % weights.GGUF_GROUP).any() or not torch.equal(groups, first + torch.arange(weights.GGUF_GROUP)):
        return None
    return torch.argsort(first.flatten() // weights.GGUF_GROUP)


def _is_adapter_parameter(name: str, adapters: list[str]) -> bool:
    return any(name.startswith(f"{adapter}.") or name == adapter for adapter in adapters)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(model: nn.Module) -> int:
    kept = [m.tle_original[0] for m in model.modules() if isinstance(m, QuantizedLinear) and m.tle_original]
    return sum(map(_size, itertools.chain(model.parameters(), model.buffers(), kept)))


def _equalised(
    model: nn.Module, scan: _Scan, ids: torch.Tensor, exclude: Sequence[str], report: Report
) -> list[Equalised]:
    """Equalises the channels of a model that is about to be quantised, by what it computes of `ids`.

    Raises:
        TypeError, ValueError: as patch_model. Nothing is changed then.
    """
    norms = {
        id(action.module)
        for action in scan.actions
        if isinstance(action, _Norm) and action.kind != "gemma" and id(action.module.weight) not in scan.tied
    }
    linears = {id(a.module) for a in scan.actions if isinstance(a, _Quantize) and type(a.module) is nn.Linear}
    readings = list(readings_of(model, norms, linears))
    if not readings:
        raise ValueError(
            f"calibration cannot help this {type(model).__name__}: it takes a decoder of a known family whose Linears "
            f"get quantised from floats"
        )
    check_calibration(ids, [reading.decoder for reading in readings])
    # On TLE's kernels, so that the scales are the same on every machine. What is packed all the same, GGUF blocks, has
    # to come back.
    patch_model(model, weights.UNQUANTIZED, keep_original=True, exclude=exclude, progress=False)
    try:
        squares = mean_squares(readings, ids)
    finally:
        unpatch_model(model)
    done: list[Equalised] = []
    try:
        for pair in zip(readings, squares):
            if (found := equalise(*pair)) is not None:
                done.append(found)
    except BaseException:  # no memory for a weight, or the user's patience
        for found in done:
            restore(found)
        raise
    report.calibration_tokens = ids.numel()
    report.notes.append(
        f"Equalised by {ids.numel()} calibration tokens: {len(done)} of {len(readings)} norms and the Linears that "
        f"read them; the others would not gain, or would lose bits, as small fp16 weights do. Norms, Linears and "
        f"adapters of the checkpoint do not fit one by one."
    )
    return done


# ---- the second pass: what concerns the model as a whole ----


@dataclass
class PatchRecord:
    """What unpatch_model needs to know; lives on the patched model as `tle_patch`.

    Attributes:
        configs: (the copy that the model now has, the object that it had).
        attention: (config, its attention implementation before).
        requires_grad: names of parameters that wanted gradients.
        report: what patch_model returned last.
        equalised: what calibration did to the weights.
    """

    configs: list[tuple[PreTrainedConfig, PreTrainedConfig]] = field(default_factory=list)
    attention: list[tuple[PreTrainedConfig, str | None]] = field(default_factory=list)
    requires_grad: list[str] = field(default_factory=list)
    report: Report | None = None
    equalised: list[Equalised] = field(default_factory=list)

    def restore_configs(self, modules: Iterable[nn.Module]) -> None:
        """Gives attention back, and each config object to its modules unless the copy was changed meanwhile."""
        for config, before in self.attention:
            # Another one than ours was chosen since, and stays.
            if config._attn_implementation == ATTENTION:
                config._attn_implementation = before
        originals = {
            id(copied): shared
            for copied, shared in self.configs
            if copied.to_dict() == shared.to_dict() and copied._attn_implementation == shared._attn_implementation
        }
        for module in modules:
            shared = originals.get(id(module.__dict__.get("config")))
            if shared is not None:
                module.config = shared


def _patch_record(model: nn.Module) -> PatchRecord:
    if "tle_patch" not in model.__dict__:
        model.tle_patch = PatchRecord()
    return model.tle_patch


def _own_configs(model: nn.Module, record: PatchRecord) -> None:
    """Gives a model's modules copies of their configs: models built from one config object share it, and only this
    one's attention is to change."""
    if not any(family_of(module) is not None for module in model.modules()):
        return
    memo: dict = {}
    known = {id(copied) for copied, _ in record.configs}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig) and id(config) not in known:
            if id(config) not in memo:
                # One memo for all: a config that is part of another stays part of its copy.
                record.configs.append((copy.deepcopy(config, memo), config))
            module.config = memo[id(config)]


def _decoders(model: nn.Module) -> Iterator[tuple[str, PatchedDecoder]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, PatchedDecoder))


def _patch_models(model: nn.Module, record: PatchRecord, report: Report, kv_dtype: torch.dtype | None) -> None:
    """Patches the models in a model: routing and attention of the decoders that are known, caches, saving."""
    models = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and not isinstance(module, PatchedModule)
    ]
    for name, module in models:
        family = family_of(module)
        if family is None:
            if any(isinstance(child, PatchedModule) for child in module.modules()):
                module.__class__ = patched_class(PatchedPreTrainedModel, type(module))
            continue
        module.__class__ = patched_class(PatchedDecoder, type(module))
        module.tle_kv_dtype = kv_dtype
        module.tle_router = Router()
        before = module.config._attn_implementation
        module.config._attn_implementation = ATTENTION
        record.attention.append((module.config, before))
        reason = _attention_problem(module, family)
        if reason is None:
            report.replaced += [
                Replaced(child_name, "attention", type(child).__name__, "", 0, 0)
                for child_name, child in module.named_modules(prefix=name)
                if family.is_made_of(child, "attention")
            ]
        else:
            module.config._attn_implementation = before
            report.left_alone.append(LeftAlone(name, type(module).__name__, f"attention stays {before}: {reason}"))
        module.tle_router.disabled = reason or self_check(module)
        report.whole_step[name] = module.tle_router.refusal(module)
    for _, module in models:
        # The text model itself must be a decoder that is known: another may use its cache in a way of its own.
        text = module.config.get_text_config(decoder=True)
        if module.can_generate() and supports_config(text) and any(d.config is text for _, d in _decoders(module)):
            module.tle_owns_cache = True
            module.tle_kv_dtype = kv_dtype
    unknown = [type(m).__name__ for _, m in models if family_of(m) is None and not any(True for _ in _decoders(m))]
    if unknown and not report.whole_step:
        report.notes.append(
            f"{unknown[-1]} is of no known family: its attention and its forward stay transformers' own, on one torch "
            f"thread."
        )


def _attention_problem(decoder: PatchedDecoder, family: Family) -> str | None:
    """Compares "tle" attention with "eager" on the decoder's first attention module; None if they agree."""
    attention = getattr(getattr(decoder, family.layers)[0], family.self_attention)
    dtype = getattr(decoder, family.final_norm).weight.dtype
    generator = torch.Generator().manual_seed(20240229)
    x = torch.randn(1, 6, decoder.config.hidden_size, generator=generator, dtype=torch.float32).to(dtype)
    causal = torch.full((6, 6), torch.finfo(dtype).min, dtype=dtype).triu(1).view(1, 1, 6, 6)
    outputs = {}
    training, attention.training = attention.training, False
    try:
        with torch.no_grad():  # the module may keep frequencies that it computes here
            tables = getattr(decoder, family.rotary)(x, torch.arange(6).unsqueeze(0))
        with torch.inference_mode(), SummedProducts():
            for implementation, mask in (("eager", causal), (ATTENTION, None)):
                attention.config._attn_implementation = implementation
                outputs[implementation] = attention(x, position_embeddings=tables, attention_mask=mask)[0].float()
    except Exception as error:
        return f"its probe failed: {str(error).splitlines()[0]}"
    finally:
        attention.training = training
        attention.config._attn_implementation = ATTENTION
    # The products round differently, and then an activation of the output projection may get the next int8 code:
    # compare with the size of the result.
    coarse = dtype != torch.float32 or any(isinstance(m, QuantizedLinear) for m in attention.modules())
    wanted, got = outputs["eager"], outputs[ATTENTION]
    if not near(got, wanted, atol=(5e-2 if coarse else 1e-3) * wanted.abs().max().item() + 1e-6):
        return "its result differs from eager attention's"
    return None
