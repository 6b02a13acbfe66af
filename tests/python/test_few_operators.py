"""The probes' own comparison and products, against torch's."""

import pytest
import torch

from tle_torch.few_operators import SummedProducts, near


def test_near():
    wanted = torch.tensor([1.0, -2.0, 0.0])
    assert near(wanted.clone(), wanted)
    assert near(wanted + torch.tensor([1e-3, -2e-3, 0.0]), wanted, rtol=1.1e-3)
    assert not near(wanted + torch.tensor([1e-3, -2e-3, 0.0]), wanted, rtol=0.9e-3)
    assert near(wanted + 1e-3, wanted, atol=1.1e-3) and not near(wanted + 1e-3, wanted, atol=0.9e-3)
    assert near(wanted + torch.tensor([0.0, 0.0, 1e-3]), wanted, rtol=1.0, atol=1.1e-3)
    assert not near(wanted + torch.tensor([0.0, 0.0, 1e-3]), wanted, rtol=1.0)
    for bad in (float("nan"), float("inf")):
        other = torch.tensor([1.0, bad, 0.0])
        assert not near(other, wanted, rtol=1.0, atol=100.0) and not near(other, other, rtol=1.0, atol=100.0)
    assert not near(wanted.double(), wanted, atol=1.0) and not near(wanted[:2], wanted, atol=1.0)
    assert not near(wanted.view(1, 3), wanted, atol=1.0)
    assert near(wanted[:0], wanted[:0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(dtype):
    a, b = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3, 8, 4).to(dtype)
    x, weight, bias = torch.randn(2, 5, 8).to(dtype), torch.randn(4, 8).to(dtype), torch.randn(4).to(dtype)
    exact = a.double() @ b.double()
    with SummedProducts():
        for got in (torch.matmul(a, b), a.matmul(b), a @ b):
            assert got.dtype == dtype and near(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(torch.nn.functional.linear(x, weight), x @ weight.mT)
        assert torch.equal(torch.nn.functional.linear(x, weight, None), x @ weight.mT)
        assert torch.equal(torch.nn.functional.linear(x, weight, bias), x @ weight.mT + bias)


def test_what_is_not_a_small_product_is_left_to_torch():
    a, vector, layer = torch.randn(128, 128), torch.randn(128), torch.nn.Linear(128, 256)
    wanted = a @ a, a @ vector, layer(a), layer(vector), torch.softmax(a, -1)
    with SummedProducts():
        got = a @ a, a @ vector, layer(a), layer(vector), torch.softmax(a, -1)
    assert all(torch.equal(g, w) for g, w in zip(got, wanted))


@pytest.mark.parametrize("a, b", [
    (torch.ones(2, 3, 1), torch.ones(2, 8, 4)),
    (torch.ones(3, 8), torch.ones(1, 4)),
    (torch.ones(3, 8), torch.ones(8, 4, dtype=torch.float64)),
    (torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, 4)),
])
def test_what_torch_refuses_is_refused(a, b):
    with SummedProducts():
        for multiply in (torch.matmul, lambda a, b: torch.nn.functional.linear(a, b.mT)):
            with pytest.raises(RuntimeError):
                multiply(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_left_to_torch(dtype):
    a, b = torch.randn(3, 8, dtype=dtype), torch.randn(8, 4, dtype=dtype)
    with SummedProducts():
        got = a @ b
    assert got.dtype == dtype and torch.equal(got, a @ b)
