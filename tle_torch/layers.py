"""The classes that patched modules become, and how they become them.

A module is patched by giving it a class: `module.__class__ = patched_class(Mixin, type(module))`, a subclass of what it
was, made once per pair. The module stays the same object in the same place, `isinstance` and every attribute keep
working, and giving it its old class back undoes everything that the mixin added.

Such a class can be imported, so that deepcopy and pickle work in any process: its `__qualname__` spells the mixin and
the original class, and this module's `__getattr__` makes the class when pickle asks for it. `__name__` stays the
original's, because transformers writes it into `config.architectures` and dispatches on it.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
import warnings

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from tle_torch import (
    ops,  # noqa: F401  loads the operators that the classes below call
    threads,
    weights,
)
from tle_torch.autocast import alike
from tle_torch.cache import Cache
from tle_torch.frequencies import ExactPowers, exact_frequencies
from tle_torch.generation import SampleLoop
from tle_torch.hooks import has_global_hooks, has_user_hooks
from tle_torch.lazy import LazyTensor

__all__ = [
    "DenseLinear",
    "PackedEmbedding",
    "PatchedMLP",
    "PatchedModule",
    "PatchedNorm",
    "PatchedPreTrainedModel",
    "PatchedRotary",
    "QuantizedLinear",
    "activation_of",
    "is_plain_linear",
    "linear_weight",
    "patched_class",
]


class PatchedModule:
    """Base of every mixin. A patched class has `__tle_base__`, the class that its modules had before."""

    def __new__(cls, *args, **kwargs):
        # `type(module)(...)` is how library code makes another module of the same kind; it means the original class.
        if args or kwargs:
            return cls.__tle_base__(*args, **kwargs)
        return super().__new__(cls)

    def tle_restore(self) -> None:
        """Gives the module its original class back. Subclasses first take back what they keep on the module."""
        self.__class__ = type(self).__tle_base__


# ---- making classes ----

_classes: dict[tuple[type, type], type] = {}
_classes_lock = threading.RLock()


def patched_class(mixin: type, base: type) -> type:
    """The subclass of `base` with `mixin` in front; the same object at each call.

    Raises:
        TypeError: `base` is a patched class already.
    """
    if issubclass(base, PatchedModule):
        raise TypeError(f"{base.__qualname__} is a patched class already")
    with _classes_lock:
        cls = _classes.get((mixin, base))
        if cls is None:
            namespace = {
                "__module__": __name__,
                "__qualname__": _mangle(mixin, base),
                "__doc__": base.__doc__,
                "__tle_base__": base,
            }
            forward = getattr(mixin, "forward", None)
            if forward is not None and issubclass(base, PreTrainedModel):
                # generate() reads the parameters of forward. A copy, because update_wrapper writes on the function.
                copy = types.FunctionType(
                    forward.__code__, forward.__globals__, closure=forward.__closure__, argdefs=forward.__defaults__
                )
                copy.__kwdefaults__ = forward.__kwdefaults__
                namespace["forward"] = functools.update_wrapper(copy, base.forward)
            cls = type(base)(base.__name__, (mixin, base), namespace)
            if issubclass(base, PreTrainedModel):
                # transformers looks up what can be recorded by str(class), which it registers in __init__.
                dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), base._can_record_outputs)
            _classes[mixin, base] = cls
    return cls


def _mangle(mixin: type, base: type) -> str:
    # pickle takes a dot in a qualified name for nesting.
    return f"{mixin.__module__}.{mixin.__name__}:{base.__module__}:{base.__qualname__}".replace(".", "/")


def __getattr__(name: str):
    """Makes the patched class that a mangled name spells (PEP 562): how pickle finds it in a fresh process."""
    parts = name.replace("/", ".").split(":")
    if len(parts) == 3 and parts[0].startswith(f"{__package__}."):
        module, _, mixin_name = parts[0].rpartition(".")
        mixin = getattr(importlib.import_module(module), mixin_name)
        base = importlib.import_module(parts[1])
        for part in parts[2].split("."):
            base = getattr(base, part)
        if isinstance(mixin, type) and issubclass(mixin, PatchedModule) and isinstance(base, type):
            return patched_class(mixin, base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---- linear layers ----


class DenseLinear(PatchedModule):
    """A Linear whose weight stays as it is, row-major in its parameter, and runs on TLE's kernels: a tied or
    unquantised head, and every layer under the scheme that quantises nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = self._parameters
        weight = parameters.get("weight")
        if weight is None:
            # Pruning and parametrisations make it an attribute that they compute.
            weight = self.weight
        if x.dtype != weight.dtype and torch.is_autocast_enabled("cpu"):
            x = x.to(weight.dtype)
        return _linear(x, weight, weight.shape[0], self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tle=dense"


class QuantizedLinear(PatchedModule):
    """A Linear whose weight is packed.

    The packed bytes are the buffer `packed`, so that they go through state_dict, safetensors and `.to()`; `bias` stays
    the parameter that it was. `weight` remains readable: a `LazyTensor` [N, K] of the layer's float dtype with the
    values in use (what the packed codes stand for, not what was packed). It cannot be written in place; assigning a
    float tensor to it, or loading a state_dict that has one, packs that.

    Attributes:
        tle_scheme: the scheme's name.
        tle_original: None, or a 1-tuple with the parameter that was packed (keep_original).
    """

    @staticmethod
    def convert(module: nn.Module, packed: torch.Tensor, dtype: torch.dtype, scheme: str, original) -> None:
        """Makes `module` a QuantizedLinear. Its `weight` parameter is dropped; `original` is kept if not None."""
        del module._parameters["weight"]
        module.__class__ = patched_class(QuantizedLinear, type(module))
        module.register_buffer("packed", packed)
        # Follows .to(dtype), .half(), ... like the weight would, and holds nothing.
        module.register_buffer("weight_like", torch.empty(0, dtype=dtype), persistent=False)
        module.tle_scheme = scheme
        module.__dict__["tle_original"] = None if original is None else (original,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _linear(x, self._buffers["packed"], self.out_features, self.bias)

    @property
    def weight(self) -> LazyTensor:
        return LazyTensor(
            (self.out_features, self.in_features),
            self._buffers["weight_like"].dtype,
            self.dequantized,
            "the weight of a packed Linear is a read-only view of its de-quantised values: assign a new weight, or "
            "call tle_torch.unpatch_model first (merging an adapter needs that too)",
        )

    def dequantized(self) -> torch.Tensor:
        """The values in use as a new tensor [N, K] of the layer's float dtype."""
        dtype = self._buffers["weight_like"].dtype
        return weights.dequantize(self._buffers["packed"], self.out_features, self.in_features, dtype)

    def float_weight(self) -> torch.Tensor:
        """The original weight if it was kept and is no GGUF blocks, else the de-quantised values."""
        original = self.tle_original[0].detach() if self.tle_original else None
        return self.dequantized() if original is None or original.dtype == torch.uint8 else original

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            self._pack(value)
        else:
            super().__setattr__(name, value)

    def _pack(self, weight: torch.Tensor) -> None:
        """Packs a new float weight of the layer's size."""
        if isinstance(weight, LazyTensor):
            weight = weight.materialize()
        wanted = (self.out_features, self.in_features)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or tuple(weight.shape) != wanted:
            got = f"{list(weight.shape)} {weight.dtype}" if isinstance(weight, torch.Tensor) else type(weight).__name__
            raise ValueError(f"weight must be a float tensor {list(wanted)}, got {got}")
        self._buffers["packed"] = weights.quantize(weight, self.tle_scheme)
        if self.tle_original:
            kept = weight.detach().to(self._buffers["weight_like"].dtype, copy=True)
            self.__dict__["tle_original"] = (nn.Parameter(kept, requires_grad=False),)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        weight, packed = own.pop(f"{prefix}weight", None), own.get(f"{prefix}packed")
        try:
            if weight is not None:
                self._pack(weight)
                # Already in place; the base class finds nothing left to do.
                own[f"{prefix}packed"] = self._buffers["packed"]
            elif packed is not None:
                info = weights.check_packed(packed, self.out_features, self.in_features)
                if packed.shape != self._buffers["packed"].shape:
                    self._buffers["packed"] = packed.clone()
                self.tle_scheme = info["scheme"]
                # Originals of other values would be a lie.
                self.__dict__["tle_original"] = None
        except (ValueError, RuntimeError) as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")
            return
        super()._load_from_state_dict(
            own, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def tle_restore(self) -> None:
        original = self.tle_original
        weight = original[0] if original else nn.Parameter(self.dequantized(), requires_grad=False)
        del self._buffers["packed"], self._buffers["weight_like"], self.tle_scheme, self.__dict__["tle_original"]
        self._non_persistent_buffers_set.discard("weight_like")
        super().tle_restore()
        if not original and not isinstance(self, nn.Linear):
            # What held GGUF blocks cannot hold floats: it becomes the Linear that the blocks stood for.
            self.__class__ = nn.Linear
            self._parameters.setdefault("bias", self.__dict__.pop("bias", None))
        # The weight comes first again.
        others = dict(self._parameters)
        self._parameters.clear()
        self._parameters.update(weight=weight, **others)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tle={self.tle_scheme}"


class PackedEmbedding(PatchedModule):
    """An embedding that gathers its rows from a packed weight [num_embeddings, embedding_dim]: the table of a model
    whose checkpoint is packed, shared with the tied head. `weight` is what it is for a QuantizedLinear, but cannot be
    assigned."""

    @staticmethod
    def convert(module: nn.Embedding, packed: torch.Tensor, dtype: torch.dtype, scheme: str) -> None:
        """Makes `module` a PackedEmbedding; its `weight` parameter is dropped."""
        del module._parameters["weight"]
        module.__class__ = patched_class(PackedEmbedding, type(module))
        module.register_buffer("packed", packed)
        module.register_buffer("weight_like", torch.empty(0, dtype=dtype), persistent=False)
        module.tle_scheme = scheme

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        buffers = self._buffers
        dtype = buffers["weight_like"].dtype
        return _packed_embedding(ids.long(), buffers["packed"], self.num_embeddings, self.embedding_dim, dtype)

    @property
    def weight(self) -> LazyTensor:
        return LazyTensor(
            (self.num_embeddings, self.embedding_dim),
            self._buffers["weight_like"].dtype,
            self.float_weight,
            "the weight of a packed embedding is a read-only view of its de-quantised values: call "
            "tle_torch.unpatch_model first",
        )

    def float_weight(self) -> torch.Tensor:
        """The values in use as a new tensor [num_embeddings, embedding_dim]."""
        dtype = self._buffers["weight_like"].dtype
        return weights.dequantize(self._buffers["packed"], self.num_embeddings, self.embedding_dim, dtype)

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            raise RuntimeError(self.weight._read_only)
        super().__setattr__(name, value)

    def tle_restore(self) -> None:
        weight = nn.Parameter(self.float_weight(), requires_grad=False)
        del self._buffers["packed"], self._buffers["weight_like"], self.tle_scheme
        self._non_persistent_buffers_set.discard("weight_like")
        super().tle_restore()
        if not isinstance(self, nn.Embedding):
            # What held GGUF blocks cannot hold floats: it becomes the Embedding that the blocks stood for.
            self.__class__ = nn.Embedding
            self.padding_idx = self.max_norm = None
            self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self._parameters["weight"] = weight

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, tle={self.tle_scheme}"


def linear_weight(module: nn.Module) -> torch.Tensor:
    """The weight of a patched Linear as the operators take it: packed, or dense [N, K]."""
    if isinstance(module, QuantizedLinear):
        return module._buffers["packed"]
    return module._parameters["weight"]


def is_plain_linear(module: nn.Module) -> bool:
    """Whether calling `module` is the tle linear of its weight and nothing else, so that a fused operator may take
    its weight instead of calling it."""
    if isinstance(module, DenseLinear):
        return module._parameters.get("weight") is not None and not has_user_hooks(module)
    return isinstance(module, QuantizedLinear) and not has_user_hooks(module)


def activation_of(mlp: nn.Module, name: str) -> object:
    """The class of an MLP's activation module, or its activation function, or None."""
    activation = mlp._modules.get(name, mlp.__dict__.get(name))
    return type(activation) if isinstance(activation, nn.Module) else activation


# ---- norms, MLP, rotary tables ----


class PatchedNorm(PatchedModule):
    """An RMSNorm. `tle_kind` says where it rounds (see ops.rms_norm), `tle_eps` names its epsilon attribute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        if x.dtype != weight.dtype or x.dtype not in weights.FLOAT_DTYPES:
            # torch's type promotion decides the result's dtype here, and the original's arithmetic with it.
            return super().forward(x)
        return _rms_norm(x, weight, getattr(self, self.tle_eps), self.tle_kind)

    def tle_restore(self) -> None:
        del self.tle_kind, self.tle_eps
        super().tle_restore()


class PatchedMLP(PatchedModule):
    """A gated MLP, down(silu(gate(x)) * up(x)).

    One operator where all three Linears are plain; with a hook or an adapter on one of them, each is called, and the
    result has the same bits. With a hook on the activation itself the original's code runs, which rounds once more.

    Attributes:
        tle_names: the names of gate, up and down.
        tle_activation: the activation's name and what `activation_of` said of it when the MLP was proven.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in weights.FLOAT_DTYPES or not self.tle_knows_activation():
            return super().forward(x)
        gate, up, down = (self._modules[name] for name in self.tle_names)
        if is_plain_linear(gate) and is_plain_linear(up) and is_plain_linear(down) and not has_global_hooks():
            return _fused_mlp(
                x,
                linear_weight(gate),
                linear_weight(up),
                linear_weight(down),
                gate.out_features,
                gate.bias,
                up.bias,
                down.bias,
            )
        return down(_swiglu(*alike(gate(x), up(x))))

    def tle_knows_activation(self) -> bool:
        """Whether the activation is the one that was proven, and nobody wants to see its calls."""
        name, proven = self.tle_activation
        module = self._modules.get(name)
        return activation_of(self, name) is proven and (module is None or not has_user_hooks(module))

    def tle_restore(self) -> None:
        del self.tle_names, self.tle_activation
        super().tle_restore()


class PatchedRotary(PatchedModule):
    """A rotary embedding module: cos and sin [B, Q, R] of the positions, from its `inv_freq`. The frequencies are those
    of the module's formula with exact powers (frequencies.py), so that they are the same on every machine.

    Attributes:
        tle_before: buffers and attributes of the module that the patch changed, by name, as they were.
    """

    @staticmethod
    def convert(module: nn.Module) -> None:
        """Makes `module` a PatchedRotary."""
        exact = exact_frequencies(module)
        buffers = module._buffers
        own, start = buffers["inv_freq"], buffers.get("original_inv_freq")
        names = ("max_seq_len_cached", "attention_scaling", "long_inv_freq")
        attributes = {name: vars(module)[name] for name in names if name in vars(module)}
        module.tle_before = ({"inv_freq": own, "original_inv_freq": start}, attributes)
        # Longrope's second set: the module computes it when it is first wanted.
        vars(module).pop("long_inv_freq", None)
        if exact is not None:
            # Frequencies that a dynamic type grew stay until it computes others.
            if start is None or torch.equal(own, start):
                buffers["inv_freq"] = exact.to(own.dtype, copy=True)
            if start is not None:
                buffers["original_inv_freq"] = exact.to(start.dtype, copy=True)
        module.__class__ = patched_class(PatchedRotary, type(module))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype not in weights.FLOAT_DTYPES or position_ids.is_floating_point():
            return super().forward(x, position_ids)
        return self._tables(x, position_ids)

    @torch.no_grad()
    def _tables(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rope_type != "default":
            with ExactPowers():
                _update_frequencies(self, x, position_ids)
        return _rotary_tables(position_ids.long(), self.inv_freq.float(), self.attention_scaling, x.dtype)

    def tle_restore(self) -> None:
        before, attributes = self.__dict__.pop("tle_before")
        for name, buffer in before.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(self._buffers[name].dtype)
        self.__dict__.pop("long_inv_freq", None)
        self.__dict__.update(attributes)
        super().tle_restore()


# What transformers does before a forward: types that depend on the length get their frequencies for it.
_update_frequencies = dynamic_rope_update(lambda self, x, position_ids: None)


# ---- whole models ----


class PatchedPreTrainedModel(PatchedModule):
    """A transformers model with patched modules in it. Its forward is its own; what changes is what it hands out.

    Attributes:
        tle_kv_dtype: the `dtype` of the caches that it makes (see `Cache`).
    """

    tle_kv_dtype: torch.dtype | None = None

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        # A copy, or one out of a pickle, is one more patched model.
        if "tle_patch" in self.__dict__:
            threads.pin_torch(self)

    def tle_restore(self) -> None:
        self.__dict__.pop("tle_owns_cache", None)
        self.__dict__.pop("tle_kv_dtype", None)
        super().tle_restore()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Loads an unpatched model: `type(model).from_pretrained` means the original class."""
        return cls.__tle_base__.from_pretrained(*args, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        return cls.__tle_base__.is_custom_code()

    def save_pretrained(self, save_directory, is_main_process: bool = True, state_dict=None, **kwargs) -> None:
        """Writes an ordinary checkpoint of the original class: float weights, the original ones where they were kept
        and the de-quantised ones otherwise. Arguments as in transformers."""
        if state_dict is None:
            state_dict = float_state_dict(self)
            packed = [m for m in self.modules() if isinstance(m, QuantizedLinear)]
            if any(not m.tle_original for m in packed):
                warnings.warn(
                    "save_pretrained writes the de-quantised weights of this patched model (patch with "
                    "keep_original=True to save the original ones)",
                    stacklevel=2,
                )
        with _without_gguf_quantizer(self):
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)

    def resize_token_embeddings(self, *args, **kwargs):
        """As in transformers. A packed head is dropped: the new one is dense, or tied, and runs on TLE's kernels.

        Raises:
            RuntimeError: the embedding itself is packed (`from_gguf`).
        """
        if isinstance(self.get_input_embeddings(), PackedEmbedding):
            raise RuntimeError(self.get_input_embeddings().weight._read_only)
        head = self.get_output_embeddings()
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        new_head = self.get_output_embeddings()
        if isinstance(head, (QuantizedLinear, DenseLinear)) and type(new_head) is nn.Linear:
            new_head.__class__ = patched_class(DenseLinear, nn.Linear)
        return embeddings

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        # Only where transformers would make a DynamicCache because nobody asked for anything.
        if (
            model_kwargs.get("past_key_values") is None
            and generation_config.use_cache is not False
            and generation_config.cache_implementation is None
            and self.__dict__.get("tle_owns_cache", False)
        ):
            model_kwargs["past_key_values"] = Cache(
                self.config, max_cache_len=max_cache_length, dtype=self.tle_kv_dtype
            )
            return None
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus: bool = False,
        streamer=None,
        **model_kwargs,
    ):
        # generate() looks this up on the class. What the lean loop does not understand takes transformers' own.
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        loop = SampleLoop.of(self, *arguments, synced_gpus, streamer, model_kwargs)
        if loop is not None:
            return loop.run()
        return super()._sample(*arguments, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)


def float_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict that the unpatched model would have, with original or de-quantised weights. A head that was
    packed apart from the embedding it is tied to is that embedding again."""
    state = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, PackedEmbedding):
            del state[f"{prefix}packed"]
            state[f"{prefix}weight"] = module.float_weight()
        elif isinstance(module, QuantizedLinear):
            del state[f"{prefix}packed"]
            source = tied.get(f"{prefix}weight")
            state[f"{prefix}weight"] = state[source] if source in state else module.float_weight()
    return state


class _without_gguf_quantizer:
    """Takes the marks of a GGUF file off a model for as long as it is saved: its weights are dense, but transformers
    refuses to save a model that has them."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.taken: list[tuple[object, str, object]] = []

    def __enter__(self) -> None:
        method = getattr(getattr(self.model, "hf_quantizer", None), "quantization_config", None)
        if str(getattr(getattr(method, "quant_method", None), "value", "")) != "gguf":
            return
        for owner, name in ((self.model, "hf_quantizer"), (self.model.config, "quantization_config")):
            if name in vars(owner):
                self.taken.append((owner, name, vars(owner).pop(name)))

    def __exit__(self, *exception) -> None:
        for owner, name, value in self.taken:
            vars(owner)[name] = value


# Overloads, resolved once: the call then skips overload resolution, about 1 us of a call from Python.
_linear = torch.ops.tle.linear.default
_packed_embedding = torch.ops.tle.packed_embedding.default
_rms_norm = torch.ops.tle.rms_norm.default
_fused_mlp = torch.ops.tle.fused_mlp.default
_swiglu = torch.ops.tle.swiglu.default
_rotary_tables = torch.ops.tle.rotary_tables.default
