"""GGUF blocks taken over as they are: every value equals the gguf package's own de-quantisation."""

import numpy as np
import pytest
import torch
from checks import assert_same_bits, same_everywhere

gguf = pytest.importorskip("gguf")
tle = torch.ops.tle


def blocks_of(kind: str, n: int, k: int) -> torch.Tensor:
    """Random blocks of a type: every code and every scale that occurs in practice, also those that no quantiser
    makes."""
    type_ = gguf.GGMLQuantizationType[kind]
    block_k, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(0).integers(0, 256, (n, k // block_k, block_bytes), dtype=np.uint8)
    halves = 2 if kind in ("Q4_1", "Q4_K") else 1
    scales = (np.random.default_rng(1).standard_normal((n, k // block_k, halves)) * 0.02).astype(np.float16)
    raw[..., : 2 * halves] = scales.view(np.uint8).reshape(n, k // block_k, 2 * halves)
    return torch.from_numpy(raw.reshape(n, -1))


@pytest.mark.parametrize("n", [1, 16, 35])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_values_are_the_file_s(kind, n):
    k = 512
    blocks = blocks_of(kind, n, k)
    want = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    packed = tle.pack_gguf_weight(blocks, kind, k)
    got = tle.dequantize_linear_weight(packed, n, k, torch.float32)
    if kind in ("Q4_0", "Q8_0"):
        assert_same_bits(got, want)
    else:  # scale * q + min in one rounding, where the package rounds twice: half a unit of the product
        assert ((got - want).abs() <= 2.0**-23 * (want.abs() + 16 * want.abs().amax())).all()
    x = torch.randn(3, k).bfloat16()
    same_everywhere(lambda: tle.linear(x, packed, n))

    order = torch.randperm(n)
    permuted = tle.pack_gguf_weight(blocks, kind, k, order)
    assert_same_bits(tle.dequantize_linear_weight(permuted, n, k, torch.float32), got[order])
    ids = torch.randint(0, n, (2, 5))
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(same_everywhere(lambda: tle.packed_embedding(ids, packed, n, k, dtype)), got[ids].to(dtype))


def test_embedding_of_every_scheme():
    from tle_torch.ops import _C

    weight = torch.randn(20, 70)
    for scheme in _C.schemes():
        packed = tle.quantize_linear_weight(weight, scheme)
        values = tle.dequantize_linear_weight(packed, 20, 70, torch.float32)
        assert_same_bits(tle.packed_embedding(torch.arange(20), packed, 20, 70, torch.float32), values)


@pytest.mark.parametrize("call, error, words", [
    (lambda: tle.pack_gguf_weight(torch.zeros(2, 18, dtype=torch.uint8), "Q5_0", 32), ValueError,
     "Q5_0 cannot be taken over"),
    (lambda: tle.pack_gguf_weight(torch.zeros(2, 18, dtype=torch.uint8), "Q4_0", 40), ValueError, "do not divide"),
    (lambda: tle.pack_gguf_weight(torch.zeros(2, 17, dtype=torch.uint8), "Q4_0", 32), ValueError,
     "blocks must have size 18"),
    (lambda: tle.pack_gguf_weight(torch.zeros(2, 18), "Q4_0", 32), TypeError, "blocks must be Byte"),
    (lambda: tle.pack_gguf_weight(torch.zeros(2, 18, dtype=torch.uint8), "Q4_0", 32, torch.tensor([0, 2])), IndexError,
     "rows"),
    (lambda: tle.packed_embedding(torch.tensor([4]), tle.quantize_linear_weight(torch.ones(4, 8), "w8a8"), 4, 8,
                                  torch.float32),
     IndexError, "id 4 is not in 0 .. 3"),
    (lambda: tle.packed_embedding(torch.tensor([1]), tle.quantize_linear_weight(torch.ones(4, 8), "w8a8"), 5, 8,
                                  torch.float32),
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
    torch.library.opcheck(tle.packed_embedding.default, (torch.randint(0, 20, (2, 3)), packed, 20, 64, torch.bfloat16))
