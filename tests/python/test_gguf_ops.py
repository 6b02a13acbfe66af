"""GGUF blocks taken over as they are: every value equals the gguf package's own de-quantisation."""

import numpy as np
import pytest
import torch
from checks import assert_same_bits, same_everywhere

gguf = pytest.importorskip("gguf")
tle = torch.ops.tle


EXACT = ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"]
REQUANTISED = ["Q5_1", "Q5_K", "Q6_K"]


def blocks_of(kind: str, n: int, k: int) -> torch.Tensor:
    """Random blocks of a type: every code and every inner scale that occurs in practice, also those that no quantiser
    makes."""
    type_ = gguf.GGMLQuantizationType[kind]
    block_k, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(0).integers(0, 256, (n, k // block_k, block_bytes), dtype=np.uint8)
    halves = 2 if kind in ("Q4_1", "Q4_K", "Q5_1", "Q5_K") else 1
    first = block_bytes - 2 if kind == "Q6_K" else 0
    scales = (np.random.default_rng(1).standard_normal((n, k // block_k, halves)) * 0.02).astype(np.float16)
    raw[..., first : first + 2 * halves] = scales.view(np.uint8).reshape(n, k // block_k, 2 * halves)
    return torch.from_numpy(raw.reshape(n, -1))


def values_of(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def test_types():
    from tle_torch.weights import GGUF_TYPES

    assert [name for name, type_ in GGUF_TYPES.items() if type_.exact] == sorted(EXACT, key=list(GGUF_TYPES).index)
    assert {name for name, type_ in GGUF_TYPES.items() if not type_.exact} == set(REQUANTISED)


@pytest.mark.parametrize("n", [1, 16, 35])
@pytest.mark.parametrize("kind", EXACT + REQUANTISED)
def test_values_are_the_file_s(kind, n):
    k = 512
    blocks = blocks_of(kind, n, k)
    want = values_of(blocks, kind)
    packed = tle.pack_gguf_weight(blocks, kind, k)
    got = tle.dequantize_linear_weight(packed, n, k, torch.float32)
    if kind in ("Q4_1", "Q4_K"):
        # scale * q + min in one rounding, where the package rounds twice: half a unit of the product
        assert ((got - want).abs() <= 2.0**-23 * (want.abs() + 16 * want.abs().amax())).all()
    elif kind in EXACT:
        assert_same_bits(got, want)
    else:  # half a step of the 254 between -max and max of 32, and the roundings of scale, its inverse and products
        largest = want.view(n, -1, 32).abs().amax(-1, keepdim=True)
        error = (got - want).view(n, -1, 32).abs()
        assert (error <= largest * (0.5 / 127 + 2.0**-21)).all() and error.any()
    x = torch.randn(3, k).bfloat16()
    same_everywhere(lambda: tle.linear(x, packed, n))

    order, groups = torch.randperm(n), torch.randperm(k // 32)
    permuted = tle.pack_gguf_weight(blocks, kind, k, order)
    assert_same_bits(tle.dequantize_linear_weight(permuted, n, k, torch.float32), got[order])
    permuted = tle.pack_gguf_weight(blocks, kind, k, order, groups)
    wanted = got.view(n, -1, 32)[order][:, groups].view(n, k)
    assert_same_bits(tle.dequantize_linear_weight(permuted, n, k, torch.float32), wanted)
    ids = torch.randint(0, n, (2, 5))
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(same_everywhere(lambda: tle.packed_embedding(ids, packed, n, k, dtype)), got[ids].to(dtype))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q6_K"])
def test_an_odd_number_of_groups_and_channels(kind):
    """What lies beside the last group and the last channel is written too."""
    k = 256 if kind == "Q6_K" else 96
    blocks = blocks_of(kind, 17, k)
    got = tle.dequantize_linear_weight(tle.pack_gguf_weight(blocks, kind, k), 17, k, torch.float32)
    assert_same_bits(tle.pack_gguf_weight(blocks, kind, k), tle.pack_gguf_weight(blocks.clone(), kind, k))
    assert (got - values_of(blocks, kind)).abs().max() <= 0.005 * got.abs().max()


def test_embedding_of_every_scheme():
    from tle_torch.ops import _C

    weight = torch.randn(20, 70)
    for scheme in _C.schemes():
        packed = tle.quantize_linear_weight(weight, scheme)
        values = tle.dequantize_linear_weight(packed, 20, 70, torch.float32)
        assert_same_bits(tle.packed_embedding(torch.arange(20), packed, 20, 70, torch.float32), values)


PACKED = tle.quantize_linear_weight(torch.ones(4, 8), "w8a8")


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize("call, error, words", [
    (lambda: tle.pack_gguf_weight(zeros(2, 18), "Q3_K", 32), ValueError, "Q3_K cannot be packed"),
    (lambda: tle.pack_gguf_weight(zeros(2, 18), "Q4_0", 40), ValueError, "do not divide"),
    (lambda: tle.pack_gguf_weight(zeros(2, 17), "Q4_0", 32), ValueError, "blocks must have size 18"),
    (lambda: tle.pack_gguf_weight(torch.zeros(2, 18), "Q4_0", 32), TypeError, "blocks must be Byte"),
    (lambda: tle.pack_gguf_weight(zeros(2, 18), "Q4_0", 32, torch.tensor([0, 2])), IndexError, "rows"),
    (lambda: tle.pack_gguf_weight(zeros(2, 36), "Q4_0", 64, None, torch.tensor([0, 2])), IndexError, "groups"),
    (lambda: tle.pack_gguf_weight(zeros(2, 36), "Q4_0", 64, None, torch.tensor([1, 1])), ValueError,
     "groups must be a permutation"),
    (lambda: tle.pack_gguf_weight(zeros(2, 36), "Q4_0", 64, None, torch.tensor([0])), ValueError, "groups"),
    (lambda: tle.packed_embedding(torch.tensor([4]), PACKED, 4, 8, torch.float32),
     IndexError, "id 4 is not in 0 .. 3"),
    (lambda: tle.packed_embedding(torch.tensor([1]), PACKED, 5, 8, torch.float32),
     ValueError, "expected"),
])
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_opcheck():
    blocks = blocks_of("Q4_1", 20, 64)
    packed = tle.pack_gguf_weight(blocks, "Q4_1", 64)
    torch.library.opcheck(tle.pack_gguf_weight.default, (blocks, "Q4_1", 64))
    torch.library.opcheck(tle.pack_gguf_weight.default, (blocks_of("Q4_K", 20, 256), "Q4_K", 256, torch.arange(20)))
    backwards = torch.arange(16).flip(0)
    torch.library.opcheck(tle.pack_gguf_weight.default, (blocks_of("Q6_K", 20, 512), "Q6_K", 512, None, backwards))
    torch.library.opcheck(tle.packed_embedding.default, (torch.randint(0, 20, (2, 3)), packed, 20, 64, torch.bfloat16))
