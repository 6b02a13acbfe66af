"""Choosing tokens: the bits, the tokens and the random states of transformers' and torch's own code."""

from __future__ import annotations

import math

import pytest
import torch
from checks import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tle_torch import sampling

tle = torch.ops.tle

QWEN = 151_936
SIZES = [1, 2, 15, 16, 17, 18, 63, 100, 1000]


def scores_of(kind: str, size: int, batch: int = 3) -> torch.Tensor:
    """Scores [batch, size] of fp32."""
    x = torch.randn(batch, size, generator=torch.Generator().manual_seed(size)) * 3
    if kind == "bf16":
        return x.bfloat16().float()
    if kind == "few values":
        return x.round()
    if kind == "equal":
        return torch.full_like(x, -1.25)
    if kind == "top-k":
        x = x.bfloat16().float()
        return torch.where(x < x.topk(min(20, size))[0][:, -1:], -math.inf, x)
    if kind == "impossible":
        return torch.full_like(x, -math.inf)
    if kind == "far apart":
        return x * 1e37
    if kind == "tiny":
        return x.round() * 1e-45
    if kind == "signed zeros":
        return torch.where(x > 0, 0.0, -0.0)
    if kind == "rising":
        return (torch.arange(size) // 3).float().expand(batch, size)
    if kind in ("nan", "inf"):
        x[0, size // 2] = x[2, 0] = float(kind)
        x[2, -1] = -math.inf
    return x


KINDS = ["normal", "bf16", "few values", "equal", "top-k", "impossible", "far apart", "tiny", "signed zeros", "rising",
         "nan", "inf"]


def check_top_k(scores, k, **options):
    own = TopKLogitsWarper(k, **options)
    assert_same_bits(tle.top_k_logits(scores, k, own.filter_value), own(None, scores), (scores.shape, k))


def check_top_p(scores, top_p, **options):
    own = TopPLogitsWarper(top_p, **options)
    got = tle.top_p_logits(scores, top_p, own.filter_value, own.min_tokens_to_keep)
    assert_same_bits(got, own(None, scores), (scores.shape, top_p, options))


def check_draws(probabilities, seed=3, before=0, draws=3):
    """The tokens of several draws, and the states after them, from one state to which `before` words lead."""
    theirs, ours = (torch.Generator().manual_seed(seed) for _ in range(2))
    for generator in (theirs, ours):
        if before:
            torch.randint(0, 100, (before,), generator=generator)
    for _ in range(draws):
        got = tle.multinomial(probabilities, generator=ours)
        assert_same_bits(got, torch.multinomial(probabilities, 1, generator=theirs), probabilities.shape)
        assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_top_k(kind, size):
    scores = scores_of(kind, size)
    for k in {1, 2, 20, max(1, size // 2), size, size + 3}:
        check_top_k(scores, k)
    check_top_k(scores, 5, filter_value=-7.5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_top_p(kind, size):
    scores = scores_of(kind, size)
    for top_p in (0.0, 1e-9, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999, 1 - 1e-7, 1.0):
        check_top_p(scores, top_p)
    check_top_p(scores, 0.2, min_tokens_to_keep=4)
    check_top_p(scores, 0.9, min_tokens_to_keep=size + 2, filter_value=3.0)
    check_top_p(scores, 0.7, filter_value=-7.5)


@pytest.mark.parametrize("kind", ["normal", "bf16", "top-k"])
def test_a_real_vocabulary(kind):
    scores = scores_of(kind, QWEN, batch=1)
    for k in (1, 20, 1000, QWEN - 1):
        check_top_k(scores, k)
    for top_p in (0.05, 0.9, 0.999):
        check_top_p(scores, top_p)
    for temperature in (0.3, 1.0, 3.0):
        check_draws(torch.softmax(scores / temperature, -1), before=5, draws=2)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-6, 6) | st.floats(-30, 30, width=32) | st.just(-math.inf), min_size=1, max_size=120),
    st.integers(1, 130),
    st.floats(0, 1),
    st.integers(1, 5),
)
def test_any_scores(values, k, top_p, at_least):
    scores = torch.tensor([values], dtype=torch.float32)
    check_top_k(scores, k)
    check_top_p(scores, top_p, min_tokens_to_keep=at_least)


def test_every_edge():
    """top_p at each of the cumulative sums, and one rounding beside it, where one bit decides."""
    for kind in ("normal", "bf16", "few values"):
        scores = scores_of(kind, 60, batch=1)
        for total in torch.softmax(scores.sort()[0], -1).cumsum(-1)[0].double().tolist():
            for top_p in (1 - total, 1 - total * (1 - 1e-7), 1 - total * (1 + 1e-7)):
                check_top_p(scores, min(max(top_p, 0.0), 1.0))


def probabilities_of(kind: str, size: int) -> torch.Tensor:
    x = torch.rand(3, size, generator=torch.Generator().manual_seed(size))
    if kind == "softmax":
        return torch.softmax(x * 20, -1)
    if kind == "zeros":
        return torch.where(torch.arange(size) % 9 < 2, x, 0.0)
    if kind == "one":
        return torch.nn.functional.one_hot(torch.tensor([0, size // 2, size - 1]), size).float()
    if kind == "subnormal":
        return (x * 50).ceil() * 1e-45
    if kind == "small":
        return 2.0 ** -(x * 149).round()
    if kind == "huge":
        return x.clamp(min=1e-3) * 3.4e38
    if kind == "signed zeros":
        return torch.where(torch.arange(size) == size // 3, 1.0, -0.0).expand(3, size)
    return x


@pytest.mark.parametrize("size", [*SIZES, 312, 1024, 1025, 5000])
@pytest.mark.parametrize(
    "kind", ["uniform", "softmax", "zeros", "one", "subnormal", "small", "huge", "signed zeros"]
)
def test_draws(kind, size):
    check_draws(probabilities_of(kind, size))


@pytest.mark.parametrize("before", [1, 2, 3, 311, 622, 623, 624, 625, 1247, 1248, 2001])
def test_draws_wherever_the_generator_stands(before):
    for size in (1, 2, 311, 312, 313, 700):
        check_draws(probabilities_of("uniform", size), before=before)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0, 1, width=32) | st.just(0.0), min_size=1, max_size=60).filter(lambda p: sum(p) > 0),
    st.integers(0, 2**31),
    st.integers(0, 1300),
)
def test_any_draws(values, seed, before):
    check_draws(torch.tensor([values], dtype=torch.float32), seed, before, draws=2)


def test_the_default_generator():
    p = probabilities_of("uniform", 50)
    torch.manual_seed(5)
    torch.randn(3)  # leaves a normal number for the next one, which a draw does not touch
    state = torch.get_rng_state()
    wanted, after = torch.multinomial(p, 1), torch.get_rng_state()
    normal = torch.randn(3)
    torch.set_rng_state(state)
    assert torch.equal(tle.multinomial(p), wanted)
    assert torch.equal(torch.get_rng_state(), after) and torch.equal(torch.randn(3), normal)


def test_a_state_that_no_draw_leads_to():
    """Words left and words used that do not add up: torch goes on reading where it stands."""
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    state = generators[0].get_state()
    state[8:12] = torch.tensor([300], dtype=torch.int32).view(torch.uint8)
    state[16:24] = torch.tensor([7], dtype=torch.int64).view(torch.uint8)
    p = probabilities_of("uniform", 40)
    for generator in generators:
        generator.set_state(state)
    for _ in range(8):
        got = tle.multinomial(p, generator=generators[0])
        assert torch.equal(got, torch.multinomial(p, 1, generator=generators[1]))
        assert torch.equal(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-45, "nothing"])
def test_what_is_no_probability_is_torchs_error(bad):
    p = torch.full((3, 70), 0.5)
    if bad == "nothing":
        p[1] = 0.0
    else:
        p[2, 64] = bad
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    with pytest.raises(RuntimeError) as theirs:
        torch.multinomial(p, 1)
    with pytest.raises(RuntimeError) as ours:
        tle.multinomial(p, generator=generator)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
    assert torch.equal(generator.get_state(), before)


def test_arguments():
    scores = torch.randn(4, 30)
    for x in (scores.t(), scores[:, ::2], scores[1:2].expand(3, 30)):
        check_top_k(x, 3)
        check_top_p(x, 0.6)
        check_draws(torch.softmax(x, -1).t().contiguous().t())
    empty = torch.empty(0, 5)
    assert tle.top_k_logits(empty, 2, 0.0).shape == tle.top_p_logits(empty, 0.5, 0.0).shape == (0, 5)
    assert tle.multinomial(empty).shape == (0, 1)
    with pytest.raises(ValueError, match="columns"):
        tle.top_k_logits(torch.empty(2, 0), 2, 0.0)
    with pytest.raises(ValueError, match="k must be positive"):
        tle.top_k_logits(scores, 0, 0.0)
    with pytest.raises(ValueError, match="top_p must be in"):
        tle.top_p_logits(scores, 1.5, 0.0)
    with pytest.raises(ValueError, match="min_tokens_to_keep must be positive"):
        tle.top_p_logits(scores, 0.5, 0.0, 0)
    with pytest.raises(RuntimeError, match="overflow"):
        tle.top_k_logits(scores, 2, 1e300)
    for op, arguments in ((tle.top_k_logits, (2, 0.0)), (tle.top_p_logits, (0.5, 0.0)), (tle.multinomial, ())):
        with pytest.raises(TypeError, match="must be Float"):
            op(scores.double(), *arguments)
        with pytest.raises(ValueError, match="dimension"):
            op(scores[0], *arguments)
        with pytest.raises(RuntimeError, match="requires a gradient"):
            op(scores.clone().requires_grad_(), *arguments)


def test_opcheck():
    scores = torch.randn(2, 40)
    torch.library.opcheck(tle.top_k_logits.default, (scores, 3, -math.inf))
    torch.library.opcheck(tle.top_p_logits.default, (scores, 0.4, -math.inf, 2))
    torch.library.opcheck(tle.multinomial.default, (scores.softmax(-1),))


def test_flush_to_zero_set_by_the_user_is_torchs_too():
    tiny = scores_of("tiny", 300)
    assert torch.set_flush_denormal(True)
    try:
        check_top_k(tiny, 20)
        for top_p in (0.1, 0.5, 0.9):
            check_top_p(tiny, top_p)
        check_draws(probabilities_of("small", 400))
        with pytest.raises(RuntimeError, match="sum of probabilities <= 0"):
            tle.multinomial(probabilities_of("subnormal", 40))
    finally:
        torch.set_flush_denormal(False)


# ---- what the loop calls ----

PROCESSORS = [
    TopKLogitsWarper(4),
    TopKLogitsWarper(4, filter_value=-1e4),
    TopPLogitsWarper(0.7),
    TopPLogitsWarper(0.2, min_tokens_to_keep=3),
    MinPLogitsWarper(0.2),
    MinPLogitsWarper(0.0),
    MinPLogitsWarper(1.0, filter_value=-2.0),
    MinPLogitsWarper(0.9, min_tokens_to_keep=3),
]


@pytest.mark.parametrize("kind", KINDS)
def test_processors_have_a_faster_formula(kind):
    for processor in PROCESSORS:
        process = sampling.faster(processor)
        assert process is not None
        for size in (1, 40, 500):
            scores = scores_of(kind, size)
            assert_same_bits(process(None, scores), processor(None, scores), (processor, size))
            assert_same_bits(process(None, scores.double()), processor(None, scores.double()))


def test_settings_are_read_at_each_call():
    scores = scores_of("bf16", 200)
    changes = [("top_k", 3), ("top_k", 500), ("filter_value", 2), ("filter_value", torch.tensor(3.0))]
    for own, attributes in (
        (TopKLogitsWarper(9), changes),
        (TopPLogitsWarper(0.5), [("top_p", 0.1), ("top_p", 1.5), ("top_p", -0.5), ("min_tokens_to_keep", 50)]),
        (MinPLogitsWarper(0.1), [("min_p", 0.5), ("min_p", 1.5), ("min_tokens_to_keep", 7)]),
    ):
        process = sampling.faster(own)
        for name, value in attributes:
            setattr(own, name, value)
            assert_same_bits(process(None, scores), own(None, scores), (name, value))


def test_other_processors_have_none(monkeypatch):
    class Own(TopKLogitsWarper):
        pass

    assert sampling.faster(Own(3)) is None and sampling.faster(TemperatureLogitsWarper(0.5)) is None
    for change in (lambda self, ids, scores: scores * 2, lambda self, ids: ids):
        for processor in (TopKLogitsWarper(3), TopPLogitsWarper(0.5), MinPLogitsWarper(0.5)):
            monkeypatch.setattr(type(processor), "__call__", change)
            assert sampling.faster(processor) is None
    monkeypatch.undo()
    assert sampling.faster(TopKLogitsWarper(3)) is not None


def test_a_torch_that_draws_otherwise_draws(monkeypatch):
    p = probabilities_of("uniform", 30)
    drawn = []

    def multinomial(probabilities, num_samples, generator=None):
        drawn.append(probabilities.shape)
        return torch.zeros(len(probabilities), num_samples, dtype=torch.long)

    torch.manual_seed(1)
    first = sampling.draw(p)
    monkeypatch.setattr(torch, "multinomial", multinomial)
    assert not sampling.draw(p).any() and drawn[-1] == p.shape
    monkeypatch.undo()
    torch.manual_seed(1)
    assert torch.equal(sampling.draw(p), first)
    assert sampling.draw(p.double()).shape == (3, 1)


@pytest.mark.parametrize(
    "context",
    [torch.inference_mode, torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16),
     lambda: torch.device("meta")],
    ids=["inference", "no_grad", "grad", "autocast", "device"],
)
def test_proofs_hold_anywhere_and_draw_nothing(context):
    state = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with context():
            assert sampling._draws_alike.__wrapped__(torch.multinomial)
            for cls in sampling._FORMULAS:
                assert sampling._computes_alike.__wrapped__(cls, cls.__call__)
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(torch.get_rng_state(), state)
