"""Equalisation: a decoder's normed hidden states get channels of less unequal size before anything is quantised.

A few of these channels are many times larger than the others. A large one coarsens the steps of all activations that
share its scale. The steps of an int8 weight row follow the row's largest weight wherever it stands, but its errors
count as much as the channels that they meet. So a channel is divided by s > 1 where it is large, in the norm's weight,
and the weights of the Linears that read it (q, k and v, or gate and up) are multiplied by s:

    x = w * rms_normed(h),  y = A x      ->      x' = (w / s) * rms_normed(h),  y = (A s) x'

With s a power of two every product and sum keeps its bits: the float model computes what it did before (in fp16, but
for channels that 1 / s takes below its smallest normal number). How large s is is SmoothQuant's question (Xiao et al.,
2022, arXiv:2211.10438, equation 4 with alpha = 1/2), answered with the root mean square over calibration tokens where
the paper has the largest |x_k|:

    s_k = sqrt(rms(x_k) / max_n |A_nk|), over the same of the medians of both, rounded to a power of two
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tle_torch import weights
from tle_torch.families import family_of
from tle_torch.hooks import has_user_hooks

__all__ = ["Equalised", "Reading", "check_calibration", "equalise", "mean_squares", "readings_of", "restore"]

# Tokens that one pass over the model reads.
_PASS = 2048
# Values that share a scale of activations, in all schemes but w8a8.
_GROUP = 32


@dataclass
class Reading:
    """A norm of a decoder and the Linears that read its result: all of them."""

    decoder: nn.Module
    norm: nn.Module
    linears: list[nn.Module]


@dataclass
class Equalised:
    """What `equalise` did: it divided the norm's weight by `scales` and multiplied the columns of the Linears'."""

    norm: nn.Module
    linears: list[nn.Module]
    scales: torch.Tensor  # fp32 [K], powers of two


def check_calibration(ids: torch.Tensor, decoders: list[nn.Module]) -> None:
    """Whether `ids` are token ids that all of the decoders can read.

    Raises:
        TypeError: no tensor of integers.
        ValueError: another shape than [B, T], empty, on another device, or an id that an embedding does not have.
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"calibration takes a tensor of token ids [B, T], got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"calibration takes token ids of int64 or int32, got {ids.dtype}")
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(f"calibration takes token ids [B, T], B and T at least 1, got {list(ids.shape)}")
    if ids.device.type != "cpu":
        raise ValueError(f"calibration is on {ids.device}: tle_torch runs on the CPU")
    low, high = int(ids.min()), int(ids.max())
    size = min(decoder.get_input_embeddings().weight.shape[0] for decoder in decoders)
    if low < 0 or high >= size:
        raise ValueError(f"calibration holds the ids {low} .. {high}, the embedding has 0 .. {size - 1}")


def readings_of(model: nn.Module, norms: set[int], linears: set[int]) -> Iterator[Reading]:
    """The norms in decoders of known families that can be equalised: where no hook and no forward put on an instance
    sees, or changes, what the norm hands to the Linears.

    Args:
        norms: ids of norms that multiply by their weight (not by 1 + w), which no other module has.
        linears: ids of the Linears that will be quantised.
    """
    for decoder in model.modules():
        family = family_of(decoder)
        if family is None:
            continue
        for layer in getattr(decoder, family.layers):
            if "forward" in vars(layer) or not family.is_made_of(layer, "layer"):
                continue
            attention, mlp = getattr(layer, family.self_attention), getattr(layer, family.feed_forward)
            for norm_name, part, module, names in (
                (family.input_norm, "attention", attention, (family.q, family.k, family.v)),
                (family.post_norm, "mlp", mlp, (family.gate, family.up)),
            ):
                if family.is_made_of(module, part):
                    norm, readers = getattr(layer, norm_name), [getattr(module, name) for name in names]
                    known = id(norm) in norms and all(id(linear) in linears for linear in readers)
                    if known and not any(map(has_user_hooks, (norm, module, *readers))):
                        yield Reading(decoder, norm, readers)


@torch.no_grad()
def mean_squares(readings: list[Reading], ids: torch.Tensor) -> list[torch.Tensor]:
    """The mean square of each channel over all tokens: fp32 [K] for each reading, zeros where the decoder leaves the
    layer out.

    Args:
        readings: of a model that is patched but not quantised, so that it computes the same on every machine.
        ids: int [B, T]; each row is read from its beginning.

    Raises:
        ValueError: a value is not finite.
    """
    first = [reading.linears[0] for reading in readings]
    sums = {linear: torch.zeros(linear.weight.shape[1], dtype=torch.float32) for linear in first}

    def add(linear: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        sums[linear] += _column_sums(arguments[0].flatten(0, -2).float().square())

    decoders = {id(reading.decoder): reading.decoder for reading in readings}.values()
    training = [(module, module.training) for decoder in decoders for module in decoder.modules()]
    hooks = [linear.register_forward_pre_hook(add) for linear in first]
    try:
        for decoder in decoders:
            decoder.eval()
            for rows in ids.long().split(max(1, _PASS // ids.shape[1])):
                decoder(input_ids=rows, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training:
            module.training = mode
    found = [sums[linear] / ids.numel() for linear in first]
    if not all(torch.isfinite(squares).all() for squares in found):
        raise ValueError("calibration: the model computes values that are not finite, or too large to be squared")
    return found


@torch.no_grad()
def equalise(reading: Reading, squares: torch.Tensor) -> Equalised | None:
    """Equalises the channels between a norm and its Linears, whose weights become new parameters.

    Args:
        squares: fp32 [K], the mean square of each channel.

    Returns:
        what was done, or None if nothing was: the expected error would not fall, or a product would not be exact.
    """
    scales = _scales(squares, torch.stack([linear.weight.abs().amax(0).float() for linear in reading.linears]).amax(0))
    if not _expected_error(reading.linears, squares, scales) < _expected_error(
        reading.linears, squares, torch.ones_like(scales)
    ):
        return None
    parts = [(reading.norm, 1 / scales), *((linear, scales) for linear in reading.linears)]
    products = [_exact_product(module.weight, factors) for module, factors in parts]
    if any(product is None for product in products):
        return None
    for (module, _), product in zip(parts, products):
        _replace(module, product)
    return Equalised(reading.norm, reading.linears, scales)


@torch.no_grad()
def restore(equalised: Equalised) -> None:
    """Undoes `equalise`, on whatever weights the modules have by now."""
    parts = [(equalised.norm, equalised.scales), *((linear, 1 / equalised.scales) for linear in equalised.linears)]
    for module, factors in parts:
        _replace(module, module.weight * factors.to(module.weight.dtype))


def _scales(squares: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """fp32 [K], powers of two near sqrt(rms(x_k) / max |A_k|) over the same of medians, from mean squares and largest
    weights [K]; 1 for a channel that is always 0 or that nobody reads. Whole numbers and single products, because a
    logarithm's last bit is not the same on every machine."""
    scales = torch.ones_like(squares)
    alive = (squares > 0) & (sizes > 0)
    if not alive.any():
        return scales
    squares, sizes = squares[alive].double(), sizes[alive].double()
    fourth = (squares / squares.median()) * (sizes.median() / sizes).square()
    # In [2^(e - 1), 2^e): the whole number nearest to log2(fourth) / 4 is floor((e + 1) / 4).
    exponent = torch.div(torch.frexp(fourth).exponent + 1, 4, rounding_mode="floor")
    scales[alive] = torch.ldexp(scales[alive], exponent)
    return scales


def _expected_error(linears: list[nn.Module], squares: torch.Tensor, scales: torch.Tensor) -> float:
    """What quantisation is expected to add to the squares of the results, over all Linears and in units of a squared
    half step's: sum_n max_k |A_nk|^2 sum_k E[x_k^2] for weights with a scale for each row, and for activations with a
    scale for each group g, whose maximum is taken for its largest channel's root mean square,
    sum_g max_(k in g) E[x_k^2] sum_(k in g) sum_n A_nk^2."""
    squares = squares / scales.square()
    # Sums that fsum rounds once are the same on every machine.
    rows, columns = 0.0, torch.zeros_like(squares)
    for linear in linears:
        magnitude = linear.weight.abs().float() * scales
        rows += math.fsum(magnitude.amax(1).double().square().tolist())
        columns += _column_sums(magnitude.square_())
    largest = torch.stack([group.amax() for group in squares.split(_GROUP)]).repeat_interleave(_GROUP)
    activations = (largest[: len(columns)].double() * columns.double()).tolist()
    return rows * math.fsum(squares.tolist()) + math.fsum(activations)


def _column_sums(values: torch.Tensor) -> torch.Tensor:
    """[K], of fp32 [N, K], on an operator whose order of additions is the same on every machine."""
    return torch.ops.tle.linear(values.new_ones(1, len(values)), values.T.contiguous(), values.shape[1])[0]


def _exact_product(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor | None:
    """A weight times powers of two, one for each element of its last dimension; None if that cannot be undone: it is
    not finite, or a bit falls below the smallest number."""
    factors = factors.to(weight.dtype)
    product = weight * factors
    return product if torch.isfinite(product).all() and torch.equal(product / factors, weight) else None


def _replace(module: nn.Module, product: torch.Tensor) -> None:
    """Gives a module a new weight."""
    weight = module._parameters["weight"]
    module._parameters["weight"] = nn.Parameter(product, requires_grad=weight.requires_grad)
    # Nobody else may be reading what was dropped: this frame and getrefcount's argument hold it.
    if sys.getrefcount(weight) <= 2:
        weights.release_file_pages(weight)
