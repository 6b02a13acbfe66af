"""A key-value cache that is written in place.

transformers' `DynamicCache` concatenates: every token copies the whole past of every layer. Here each layer owns slots
[B, Hkv, S, D] that are allocated once (or grown in large steps), new keys go to the next free slots, and attention
reads a view of the used ones. It is a drop-in `transformers.Cache`: generate, beam search, assisted decoding (`crop`),
batch repeat and select, deepcopy and pickle work as with `DynamicCache`.

With `dtype=torch.int8` a slot holds codes and a scale instead of floats, in a little more than half of bf16's bytes.
"""

from __future__ import annotations

import operator

import torch
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin
from transformers.cache_utils import get_layer_types_and_kwargs

from tle_torch.lazy import LazyTensor

__all__ = ["Cache", "CacheLayer", "Int8CacheLayer", "Int8States", "check_dtype", "supports_config"]

_length_of = operator.attrgetter("length")
_keys_of = operator.attrgetter("key_slots")
_values_of = operator.attrgetter("value_slots")
# What prepare_step remembers of the step before: slots of every layer, what they fit, and their smallest capacity.
_NO_STEP: tuple = ([], [], None, -1)

# Slots come in multiples of this: a layer of a small model then starts with 64 KiB, and page-sized rounding is lost.
_SLOT_STEP = 256
# A promised length beyond this many slots is not allocated in advance: generation_config.max_length is often the
# model's whole context of 131,072 tokens, which few prompts use. Growing from here by doubling copies each slot once
# on average.
_RESERVE_LIMIT = 8192
# Of the fp32 scale that stands behind the codes of an int8 slot (schemas.cc, attention).
_SCALE_BYTES = 4

# Layer types (config.layer_types) that are keys and values per token. A sliding layer keeps all its tokens here: the
# window is applied by attention, so that cropping back over its edge stays possible.
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})


def supports_config(config) -> bool:
    """Whether every layer of this (text) config caches plain keys and values, which is what `Cache` can hold."""
    if getattr(config, "is_encoder_decoder", False):
        return False
    layer_types, _ = get_layer_types_and_kwargs(config)
    return _ATTENTION_TYPES.issuperset(layer_types)


def check_dtype(dtype: torch.dtype | None, what: str) -> None:
    """Raises ValueError unless a `Cache` can hold this dtype."""
    if dtype is not None and dtype is not torch.int8:
        raise ValueError(f"{what} must be None (keys and values as they come) or torch.int8, got {dtype}")


class CacheLayer(CacheLayerMixin):
    """The slots of one layer: `key_slots` and `value_slots` [B, Hkv, S, D], of which the first `length` are in use.

    The memory of unused slots is never initialised and never read.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, reserve: int = 0):
        super().__init__()
        self.reserve = reserve
        self.length = 0
        self.key_slots: torch.Tensor | None = None
        self.value_slots: torch.Tensor | None = None
        # The other half of a ping-pong pair: beam search reorders the batch at every token, and a new allocation of
        # the whole capacity each time would cost more page faults than the copy itself.
        self._spare: tuple[torch.Tensor, torch.Tensor] | None = None

    # `keys` and `values` are what transformers reads. Assigning them (the base class does, with None) replaces the
    # contents: the tensor becomes the slots, all of them in use.
    @property
    def keys(self) -> torch.Tensor | None:
        """The used keys, a view [B, Hkv, length, D]; None before the first update."""
        return None if self.key_slots is None else self._read(self.key_slots)

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self.key_slots, self.length = self._taken_over(tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """The used values, a view [B, Hkv, length, D]; None before the first update."""
        return None if self.value_slots is None else self._read(self.value_slots)

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self.value_slots, self.length = self._taken_over(tensor)

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first update."""
        return -1 if self.key_slots is None else self.key_slots.shape[0]

    @property
    def capacity(self) -> int:
        """Allocated slots."""
        return 0 if self.key_slots is None else self.key_slots.shape[2]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, capacity={self.capacity})"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates slots that fit these states' batch, heads, head sizes and dtype."""
        if key_states.device.type != "cpu":
            raise ValueError(f"tle_torch.Cache lives on the CPU, the keys came on {key_states.device}")
        self.dtype, self.device = key_states.dtype, key_states.device
        slots = self._slot_of(key_states), self._slot_of(value_states)
        self._allocate(key_states.shape[:2], *slots, key_states.shape[2])
        self.is_initialized = True

    def ensure(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes room for the tokens of these states, keeping what is stored.

        Raises:
            ValueError: their batch, heads, head sizes or dtype are not the cache's. Nothing is changed then.
        """
        if not self.is_initialized or (self.length == 0 and not self._fits(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        elif not self._fits(key_states, value_states):
            raise ValueError(
                f"tle_torch.Cache holds keys {_shape(self.keys)} and values {_shape(self.values)}; the new keys "
                f"{_shape(key_states)} and values {_shape(value_states)} do not continue them"
            )
        self.reserve_slots(self.length + key_states.shape[2])

    def reserve_slots(self, needed: int) -> None:
        """Grows an initialised layer so that `needed` slots exist. At least doubles, so that growing costs each slot
        one copy on average."""
        if needed <= self.capacity:
            return
        keys, values = self._used(self.key_slots), self._used(self.value_slots)
        sizes = (keys.shape[3], keys.dtype), (values.shape[3], values.dtype)
        self._allocate(keys.shape[:2], *sizes, max(needed, 2 * self.capacity))
        self._used(self.key_slots).copy_(keys)
        self._used(self.value_slots).copy_(values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the new tokens and returns all of them.

        Args:
            key_states: [B, Hkv, Q, D], any strides.
            value_states: [B, Hkv, Q, Dv], any strides.

        Returns:
            keys [B, Hkv, length, D] and values [B, Hkv, length, Dv]: views of the slots, valid until the next growth.

        Raises:
            ValueError: the states do not continue what is stored.
        """
        self.ensure(key_states, value_states)
        tokens = key_states.shape[2]
        self.key_slots.narrow(2, self.length, tokens).copy_(self._encoded(key_states))
        self.value_slots.narrow(2, self.length, tokens).copy_(self._encoded(value_states))
        self.length += tokens
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forgets the tokens and keeps the memory."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens.

        Args:
            tokens_to_remove: 0 or negative, minus the number of tokens, as transformers passes it.

        Raises:
            ValueError: it is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove (transformers' convention), got {tokens_to_remove}"
            )
        self.length = max(self.length + tokens_to_remove, 0)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.length > 0:
            self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.length > 0:
            self._select_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.length > 0:
            rows = indices.nonzero().view(-1) if indices.dtype == torch.bool else indices
            self._select_rows(rows)

    def offload(self) -> None:
        raise NotImplementedError("tle_torch.Cache does not offload: it is in the CPU's memory already")

    def prefetch(self) -> None:
        raise NotImplementedError("tle_torch.Cache does not offload, so there is nothing to fetch back")

    def __getstate__(self) -> dict:
        # A copy is exact in what is stored; the spare holds nothing, and a pickle should not carry unused slots.
        state = self.__dict__.copy()
        state["_spare"] = None
        if self.key_slots is not None:
            state["key_slots"] = self._used(self.key_slots).clone()
            state["value_slots"] = self._used(self.value_slots).clone()
        return state

    # What is stored in a slot, and how.

    def _slot_of(self, states: torch.Tensor) -> tuple[int, torch.dtype]:
        """Elements of a slot, and their dtype, for keys or values like these."""
        return states.shape[3], states.dtype

    def _encoded(self, states: torch.Tensor) -> torch.Tensor:
        """Keys or values as slots hold them."""
        return states

    def _decoded(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots as keys or values."""
        return slots

    def _used(self, slots: torch.Tensor) -> torch.Tensor:
        return slots.narrow(2, 0, self.length)

    def _read(self, slots: torch.Tensor) -> torch.Tensor:
        return self._decoded(self._used(slots))

    def _taken_over(self, states: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
        if states is None:
            return None, 0
        self.dtype = states.dtype
        return self._encoded(states), states.shape[2]

    def _allocate(
        self, rows: torch.Size, key: tuple[int, torch.dtype], value: tuple[int, torch.dtype], needed: int
    ) -> None:
        slots = max(needed, min(self.reserve, _RESERVE_LIMIT))
        slots = -(-slots // _SLOT_STEP) * _SLOT_STEP
        # Huge pages are read faster, but of one that is used at all every slot is resident: where half will be used.
        huge = 2 * needed >= slots
        self.key_slots, self.value_slots = (_empty((*rows, slots, size), dtype, huge) for size, dtype in (key, value))
        self._spare = None

    def _fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        slots, value_slots = self.key_slots, self.value_slots
        return (
            keys.shape[:2] == slots.shape[:2]
            and self._slot_of(keys) == (slots.shape[3], slots.dtype)
            and values.shape[:2] == value_slots.shape[:2]
            and self._slot_of(values) == (value_slots.shape[3], value_slots.dtype)
            and keys.shape[2] == values.shape[2]
        )

    def _select_rows(self, rows: torch.Tensor) -> None:
        rows = rows.to("cpu")
        old = self.key_slots, self.value_slots
        used = self._used(old[0]), self._used(old[1])
        if self._spare is not None and self._spare[0].shape[0] == len(rows):
            self.key_slots, self.value_slots = self._spare
        else:
            self.key_slots = _empty((len(rows), *old[0].shape[1:]), old[0].dtype)
            self.value_slots = _empty((len(rows), *old[1].shape[1:]), old[1].dtype)
        self._used(self.key_slots).copy_(used[0].index_select(0, rows))
        self._used(self.value_slots).copy_(used[1].index_select(0, rows))
        self._spare = old if old[0].shape[0] == len(rows) else None


class Int8States(LazyTensor):
    """Keys or values [B, Hkv, S, D] of a layer of int8 slots. Attention "tle" reads the slots; for anybody else they
    are the codes times their scales, rounded to the dtype of the states that were stored.

    Attributes:
        slots: int8 [B, Hkv, S, D + 4], a view of the layer's.
    """

    @staticmethod
    def __new__(cls, slots: torch.Tensor, dtype: torch.dtype):
        size = slots.shape[3] - _SCALE_BYTES

        def build() -> torch.Tensor:
            scales = slots[..., size:].contiguous().view(torch.float32)
            return (slots[..., :size] * scales).to(dtype)

        shape = (*slots.shape[:3], size)
        self = LazyTensor.__new__(cls, shape, dtype, build, "keys and values of an int8 cache may be read, not written")
        self.slots = slots
        return self


class Int8CacheLayer(CacheLayer):
    """A layer whose slots are int8 [B, Hkv, S, D + 4]: for each token and key head D codes and behind them the bytes of
    their fp32 scale, as `torch.ops.tle.quantize_rows` makes them and `torch.ops.tle.attention` reads them."""

    def _slot_of(self, states: torch.Tensor) -> tuple[int, torch.dtype]:
        return states.shape[3] + _SCALE_BYTES, torch.int8

    def _encoded(self, states: torch.Tensor) -> torch.Tensor:
        codes, scales = torch.ops.tle.quantize_rows(states)
        return torch.cat([codes, scales.unsqueeze(-1).view(torch.int8)], dim=-1)

    @torch.compiler.disable  # dynamo cannot trace the making of a LazyTensor
    def _decoded(self, slots: torch.Tensor) -> torch.Tensor:
        return Int8States(slots, self.dtype)

    def _fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        return self.dtype == keys.dtype == values.dtype and super()._fits(keys, values)


class Cache(HFCache):
    """A preallocated key-value cache; the default of a patched model.

    Args:
        config: the model's config. Gives the number of layers, and is checked: every layer must be full or sliding
            attention. None: layers appear as they are first used.
        max_cache_len: how many tokens are expected. A hint, not a limit: the slots grow beyond it, and no more than
            8,192 are allocated in advance.
        dtype: None keeps keys and values as the model makes them. torch.int8 keeps codes with one scale for each token
            and key head: D + 4 bytes for a head of D instead of bf16's 2 D. README.md says what that costs.
        offloading: refused unless False.

    Raises:
        ValueError: the config has layers that do not cache keys and values per token, `dtype` is another one, or
            `offloading` is True.
        TypeError: `max_cache_len` is no int.

    Example:
        >>> cache = tle_torch.Cache(config=model.config, max_cache_len=4096)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    """

    def __init__(
        self,
        config=None,
        max_cache_len: int | None = None,
        offloading: bool = False,
        dtype: torch.dtype | None = None,
        **kwargs,
    ):
        if kwargs:
            raise TypeError(f"tle_torch.Cache takes config, max_cache_len, offloading and dtype, not {sorted(kwargs)}")
        if offloading:
            raise ValueError("tle_torch.Cache does not offload: it is in the CPU's memory already")
        if max_cache_len is not None and not isinstance(max_cache_len, int):
            raise TypeError(f"tle_torch.Cache: max_cache_len must be an int, got {type(max_cache_len).__name__}")
        check_dtype(dtype, "tle_torch.Cache: dtype")
        self._reserve = max_cache_len or 0
        self._layer_class = CacheLayer if dtype is None else Int8CacheLayer
        layers = []
        if config is not None:
            text_config = config.get_text_config(decoder=True)
            if not supports_config(text_config):
                raise ValueError(
                    f"tle_torch.Cache holds keys and values of full and sliding attention; "
                    f"{text_config.model_type} has other layers: use transformers' DynamicCache"
                )
            layers = [self._layer_class(self._reserve) for _ in range(text_config.num_hidden_layers)]
        super().__init__(layers=layers)
        self._step = _NO_STEP

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_step": _NO_STEP}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.add_layers(layer_idx + 1)
        return self.layers[layer_idx].update(key_states, value_states)

    def add_layers(self, count: int) -> None:
        """Makes sure that at least `count` layers exist."""
        while len(self.layers) < count:
            self.layers.append(self._layer_class(self._reserve))

    def prepare_step(
        self, layers: int, batch: int, heads: int, tokens: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        """Makes room for `tokens` new tokens in each of `layers` layers, without storing anything yet.

        Returns:
            the key slots and the value slots of every layer, [B, Hkv, S, D] or int8 [B, Hkv, S, D + 4], and the common
            number of used slots.

        Raises:
            ValueError: the stored tokens have other sizes or another dtype, or the layers differ in length.
        """
        self.add_layers(layers)
        stack = self.layers[:layers]
        used = stack[0].length
        if any(map(used.__ne__, map(_length_of, stack))):
            lengths = sorted({layer.length for layer in stack})
            raise ValueError(f"tle_torch.Cache: its layers hold {lengths} tokens; they must agree")
        key_slots, value_slots, shape, capacity = self._step
        if (
            capacity < used + tokens
            or shape != (layers, batch, heads, head_dim, dtype)
            or not all(map(operator.is_, key_slots, map(_keys_of, stack)))
            or not all(map(operator.is_, value_slots, map(_values_of, stack)))
        ):
            # What a layer grows out of is freed before the next one grows: nothing here may hold it.
            self._step = _NO_STEP
            del key_slots, value_slots
            new = torch.empty((), dtype=dtype).expand(batch, heads, tokens, head_dim)
            for layer in stack:
                layer.ensure(new, new)
            key_slots, value_slots = list(map(_keys_of, stack)), list(map(_values_of, stack))
            self._step = (
                key_slots,
                value_slots,
                (layers, batch, heads, head_dim, dtype),
                min(layer.capacity for layer in stack),
            )
        return key_slots, value_slots, used

    def commit_step(self, layers: int, tokens: int) -> None:
        """Declares the `tokens` slots after the used ones as stored."""
        for layer in self.layers[:layers]:
            layer.length += tokens

    def lengths(self) -> list[int]:
        """Used slots of every layer; `restore_lengths` brings them back."""
        return [layer.length for layer in self.layers]

    def restore_lengths(self, lengths: list[int]) -> None:
        """Forgets what was stored since `lengths()`: a step that failed half-way leaves the cache as it was."""
        for index, layer in enumerate(self.layers):
            layer.length = lengths[index] if index < len(lengths) else 0

    def __iter__(self):
        """Yields (keys, values, None) per layer, as `DynamicCache` does; None stands for its sliding window."""
        for layer in self.layers:
            yield layer.keys, layer.values, None

    def __repr__(self) -> str:
        return f"tle_torch.Cache(layers={len(self.layers)}, length={self.get_seq_length()})"


def _empty(sizes: tuple[int, ...], dtype: torch.dtype, huge: bool = False) -> torch.Tensor:
    # A tensor made in inference mode could never be written outside of it; a cache may live longer than the mode.
    with torch.inference_mode(False):
        return torch.ops.tle.empty_cache_slots(sizes, dtype) if huge else torch.empty(sizes, dtype=dtype, device="cpu")


def _shape(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
