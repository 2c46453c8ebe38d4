"""Bad calls: each raises before anything runs, and names the argument."""

import pytest
import torch

import spec_verify_xpu as sv
from batches import random_batch

B, K, V = 2, 3, 10
NAMES = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")


def good():
    batch = random_batch(B, K, V, uniform=torch.float32)
    return dict(zip(NAMES, batch), lengths=torch.tensor([1, 2]), generator=None, impl="auto")


def cut(x):
    return x[..., :-1]


BAD_CALLS = [
    ("draft_tokens", lambda x: x.tolist(), TypeError),
    ("draft_tokens", lambda x: x.float(), TypeError),
    ("draft_tokens", lambda x: x.to(torch.int16), TypeError),
    ("draft_tokens", lambda x: x.to_sparse(), TypeError),
    ("draft_tokens", lambda x: x[0], ValueError),
    ("draft_tokens", lambda x: x[:, :1].expand(B, 2**14 + 1), ValueError),
    ("draft_tokens", lambda x: x[..., None], ValueError),
    ("draft_tokens", lambda x: x.to("meta"), ValueError),
    ("draft_probs", lambda x: x.tolist(), TypeError),
    ("draft_probs", lambda x: x.double(), TypeError),
    ("draft_probs", lambda x: x.long(), TypeError),
    ("draft_probs", lambda x: x[0], ValueError),
    ("draft_probs", lambda x: x[:1], ValueError),
    ("draft_probs", lambda x: x[:, :2], ValueError),
    ("draft_probs", lambda x: x[..., :0], ValueError),
    ("draft_probs", lambda x: x.mT.contiguous().mT, ValueError),
    ("draft_probs", lambda x: x.new_zeros(1).expand(B, K, 2**19), ValueError),
    ("draft_probs", lambda x: x.to("meta"), ValueError),
    ("target_probs", lambda x: None, TypeError),
    ("target_probs", lambda x: x.double(), TypeError),
    ("target_probs", lambda x: x.to_sparse(), TypeError),
    ("target_probs", lambda x: x[:, :K], ValueError),
    ("target_probs", lambda x: x[:1], ValueError),
    ("target_probs", lambda x: x[0], ValueError),
    ("target_probs", lambda x: x[..., :0], ValueError),
    ("target_probs", lambda x: x[..., ::2], ValueError),
    ("target_probs", lambda x: x.new_zeros(1).expand(B, K + 1, 2**19), ValueError),
    ("uniform_accept", lambda x: 0.5, TypeError),
    ("uniform_accept", lambda x: x.half(), TypeError),
    ("uniform_accept", lambda x: x.int(), TypeError),
    ("uniform_accept", cut, ValueError),
    ("uniform_accept", lambda x: x[0], ValueError),
    ("uniform_accept", lambda x: x.to("meta"), ValueError),
    ("uniform_sample", lambda x: x.bfloat16(), TypeError),
    ("uniform_sample", lambda x: x.double(), TypeError),
    ("uniform_sample", cut, ValueError),
    ("uniform_sample", lambda x: x.to("meta"), ValueError),
    ("lengths", lambda x: [1, 2], TypeError),
    ("lengths", lambda x: x.float(), TypeError),
    ("lengths", lambda x: x[:1], ValueError),
    ("lengths", lambda x: x[:, None], ValueError),
    ("lengths", lambda x: x.to("meta"), ValueError),
    ("generator", lambda x: 0, TypeError),
    ("impl", lambda x: "cuda", ValueError),
    ("impl", lambda x: None, ValueError),
    ("impl", lambda x: ["eager", "triton"], ValueError),
]


@pytest.mark.parametrize("name, spoil, error", BAD_CALLS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BAD_CALLS)])
def test_bad_call(name, spoil, error):
    arguments = good()
    sv.verify(**arguments)
    arguments[name] = spoil(arguments[name])
    with pytest.raises(error, match=rf"^{name}: expected .* got "):
        sv.verify(**arguments)


def test_triton_never_falls_back(monkeypatch):
    """Asked for by name where Triton cannot run, it is an error; auto takes eager."""
    launch = pytest.importorskip("spec_verify_xpu.gpu.launch")
    monkeypatch.setattr(launch, "runs_on", lambda: "cuda")
    sv.ops.implementation.cache_clear()
    try:
        with pytest.raises(ValueError, match=r'^impl: "triton" runs on cuda tensors here, got cpu'):
            sv.verify(**{**good(), "impl": "triton"})
        sv.verify(**good())
    finally:
        sv.ops.implementation.cache_clear()


def test_the_operator_refuses_an_unknown_implementation():
    arguments = good()
    with pytest.raises(ValueError, match=r"^impl: expected one of .* got 'nonsense'"):
        sv.ops.ops.verify(*(arguments[name] for name in NAMES), None, "nonsense")


def test_rows_that_are_not_contiguous_below_the_public_function(impl):
    """torch may hand the operator other strides than those that were validated: a zero tensor comes as one expanded entry."""
    arguments = good()
    arguments["target_probs"] = torch._efficientzerotensor((B, K + 1, V))
    assert sv.verify(**{**arguments, "impl": impl}).next_token.tolist() == [0] * B


def spoiled_row(x, b, i, v, value):
    x = x.clone()
    x[b, i, v] = value
    return x


@pytest.mark.parametrize(
    "name, where, value, message",
    [
        ("target_probs", (1, 2), float("nan"), "finite"),
        ("target_probs", (0, 3), float("inf"), "finite"),
        ("draft_probs", (1, 0), -0.25, "negative"),
        ("draft_probs", (0, 1), 0.9, "sums to 1"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_check_names_the_first_bad_row(name, where, value, message, dtype):
    arguments = {n: x for n, x in good().items() if n in NAMES}
    for n in ("draft_probs", "target_probs"):
        arguments[n] = arguments[n].to(dtype)
    sv.check(**arguments)
    arguments[name] = spoiled_row(arguments[name], *where, 4, value)
    with pytest.raises(ValueError, match=rf"^{name}\[{where[0]}, {where[1]}\]: expected .*{message}"):
        sv.check(**arguments)


def test_check_leaves_out_rows_that_do_not_count():
    arguments = {n: x for n, x in good().items() if n in NAMES}
    arguments["target_probs"] = spoiled_row(arguments["target_probs"], 0, 3, 0, 7.0)
    sv.check(**arguments, lengths=torch.tensor([2, 3]))
    with pytest.raises(ValueError, match=r"^target_probs\[0, 3\]"):
        sv.check(**arguments, lengths=torch.tensor([3, 3]))


def test_check_of_uniforms_and_shapes():
    arguments = {n: x for n, x in good().items() if n in NAMES}
    arguments["uniform_sample"][1, 2] = 1.0
    with pytest.raises(ValueError, match=r"^uniform_sample\[1, 2\]: expected a uniform in \[0, 1\), got 1.0"):
        sv.check(**arguments)
    with pytest.raises(TypeError, match=r"^draft_tokens: expected"):
        sv.check(**{**arguments, "draft_tokens": 3})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_check_passes_real_softmax_rows(dtype):
    """A vocabulary of 151,936 in each dtype, as flat as it gets (where float16 loses most) and as peaked."""
    for scale in (0.0, 0.1, 10.0):
        rows = torch.softmax(scale * torch.randn(1, 2, 151936), -1).to(dtype)
        sv.check(torch.zeros(1, 1, dtype=torch.int64), rows[:, :1], rows)
