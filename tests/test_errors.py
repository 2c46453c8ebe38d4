"""Bad calls: each raises before anything runs, and names the argument."""

import re
from math import inf as INF
from math import nan as NAN

import pytest
import torch

import spec_verify_xpu as sv
from batches import as_ragged, random_batch
from spec_verify_xpu.rule import SAMPLE

B, K, V = 2, 3, 10
T = B * K
NAMES = ("draft_tokens", "draft_probs", "target_probs", "uniform_accept", "uniform_sample")


def good():
    batch = random_batch(B, K, V, uniform=torch.float32)
    return dict(zip(NAMES, batch), lengths=torch.tensor([1, 2]), generator=None, impl="auto")


def cut(x):
    return x[..., :-1]


BAD_INPUTS = [  # of verify
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


@pytest.mark.parametrize("name, spoil, error", BAD_INPUTS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BAD_INPUTS)])
def test_bad_input(name, spoil, error):
    arguments = good()
    sv.verify(**arguments)
    arguments[name] = spoil(arguments[name])
    with pytest.raises(error, match=rf"^{name}: expected .* got "):
        sv.verify(**arguments)


def good_calls():
    batch = random_batch(B, K, V)
    ragged = as_ragged(batch)
    ids, results = torch.int64, (torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.int64))
    outputs = {"out": results, "num_emitted": results[0].clone(), "emitted": torch.empty(B, K + 1, dtype=ids), "dtype": ids}
    chance = {"seed": torch.zeros(B, dtype=ids), "offset": 3, "greedy": torch.tensor([True, False])}
    logits = {"draft_tokens": batch.draft_tokens, "draft_logits": batch.draft_probs, "target_logits": batch.target_probs}
    one_behind_the_other = dict(zip(("draft_tokens", "draft_logits", "target_logits", "cu_drafts", "max_drafts"), ragged))
    temperature = {"temperature": torch.ones(B)}
    return {
        "verify_logits": {**logits, **outputs, **chance, **temperature},
        "verify_logits_varlen": {**one_behind_the_other, **outputs, **chance, **temperature},
        "sample_logits": {"logits": batch.target_probs, "seed": 5, "temperature": torch.ones(B, K + 1), "out": None},
        "verify": {**dict(zip(NAMES[:3], batch)), **outputs, **chance},
        "verify_varlen": {**dict(zip(ragged._fields[:5], ragged)), **outputs, **chance},
        "verify_greedy": {"draft_tokens": batch.draft_tokens, "target": batch.target_probs, **outputs},
        "sample": {"probs": batch.target_probs, "seed": 5, "offset": None, "out": torch.empty(B, K + 1, dtype=ids)},
        "emit": {"draft_tokens": batch.draft_tokens, **dict(zip(("accepted", "next_token"), results)), "pad": 0, "out": None},
        "warmup": {"device": "cpu", "impl": "eager"},
    }


def ints(*shape, dtype=torch.int64, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


def floats(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


META = torch.device("meta")
OF_LOGITS = "verify_logits verify_logits_varlen"
RANDOM = f"verify verify_varlen {OF_LOGITS}"
VERIFIERS = f"{RANDOM} verify_greedy"
BAD_CALLS = [  # functions, the argument that the error names, what is given, error
    *((RANDOM, name, {name: x}, TypeError) for name in ("seed", "offset") for x in (1.5, True, "1", [1, 2], floats(B))),
    *((RANDOM, name, {name: ints(B, dtype=torch.int32)}, TypeError) for name in ("seed", "offset")),
    *((RANDOM, name, {name: x}, ValueError) for name in ("seed", "offset") for x in (2**63, -(2**63) - 1)),
    *((RANDOM, name, {name: ints(*n)}, ValueError) for name in ("seed", "offset") for n in ((B + 1,), (B, 1), (), (1,))),
    *((RANDOM, name, {name: ints(B, device=META)}, ValueError) for name in ("seed", "offset")),
    (RANDOM, "offset", {"seed": None}, ValueError),
    (RANDOM, "generator", {"generator": torch.Generator()}, ValueError),
    ("verify", "uniform_accept", {"uniform_accept": ints(B, K)}, ValueError),
    ("verify", "uniform_sample", {"uniform_sample": floats(B, K + 1)}, ValueError),
    (RANDOM, "greedy", {"greedy": True}, TypeError),
    (RANDOM, "greedy", {"greedy": ints(B)}, TypeError),
    (RANDOM, "greedy", {"greedy": ints(B + 1).bool()}, ValueError),
    (RANDOM, "greedy", {"greedy": ints(B, K).bool()}, ValueError),
    (RANDOM, "greedy", {"greedy": ints(B, device=META).bool()}, ValueError),
    (RANDOM, "bonus_tokens", {"bonus_tokens": 3}, TypeError),
    *((RANDOM, "bonus_tokens", {"bonus_tokens": x}, TypeError) for x in (floats(B), ints(B, dtype=torch.int16))),
    *((RANDOM, "bonus_tokens", {"bonus_tokens": ints(*n)}, ValueError) for n in ((B + 1,), (B, 1), ())),
    (RANDOM, "bonus_tokens", {"bonus_tokens": ints(B, device=META)}, ValueError),
    *(
        (f"{VERIFIERS} sample sample_logits", "dtype", {"dtype": x}, TypeError)
        for x in (torch.int16, torch.float32, "int64", None)
    ),
    (VERIFIERS, "out", {"out": ints(2, B)}, TypeError),
    (VERIFIERS, "out", {"out": (ints(B),)}, TypeError),
    (VERIFIERS, "out[0]", {"out": (None, ints(B))}, TypeError),
    (VERIFIERS, "out[0]", {"out": (floats(B), ints(B))}, TypeError),
    (VERIFIERS, "out[1]", {"out": (ints(B), ints(B, dtype=torch.int16))}, TypeError),
    (VERIFIERS, "out[1]", {"out": (ints(B), ints(B + 1))}, ValueError),
    (VERIFIERS, "out[1]", {"out": [ints(B), ints(2 * B)[::2]]}, ValueError),
    (VERIFIERS, "out[0]", {"out": (ints(1).expand(B), ints(B))}, ValueError),
    (VERIFIERS, "out[1]", {"out": (ints(B), ints(B, device=META))}, ValueError),
    (VERIFIERS, "out", {"out": [ints(B)] * 2}, ValueError),
    *((VERIFIERS, "num_emitted", {"num_emitted": x}, TypeError) for x in (3, floats(B))),
    *(
        (VERIFIERS, "num_emitted", {"num_emitted": x}, ValueError)
        for x in (ints(B + 1), ints(2 * B)[::2], ints(B, device=META))
    ),
    (VERIFIERS, "emitted", {"emitted": [[0] * (K + 1)] * B}, TypeError),
    (VERIFIERS, "emitted", {"emitted": floats(B, K + 1)}, TypeError),
    (VERIFIERS, "emitted", {"emitted": ints(B, K)}, ValueError),
    (VERIFIERS, "emitted", {"emitted": ints(K + 1)}, ValueError),
    (VERIFIERS, "emitted", {"emitted": ints(K + 1, B).t()}, ValueError),
    (VERIFIERS, "emitted", {"emitted": ints(B, K + 1, device=META)}, ValueError),
    (VERIFIERS, "emitted", {"emitted": ints(K + 1).expand(B, K + 1)}, ValueError),
    (VERIFIERS, "emitted", {"emitted": ints(2 * K + 1).unfold(0, K + 1, K)}, ValueError),  # the rows share an entry
    ("emit", "out", {"out": ints(K + 1).expand(B, K + 1)}, ValueError),
    ("verify_varlen", "draft_tokens", {"draft_tokens": ints(B, K)}, ValueError),
    ("verify_varlen", "draft_tokens", {"draft_tokens": floats(T)}, TypeError),
    ("verify_varlen", "draft_tokens", {"draft_tokens": ints(T, device=META)}, ValueError),
    ("verify_varlen", "draft_probs", {"draft_probs": floats(T + B, V)}, ValueError),
    ("verify_varlen", "draft_probs", {"draft_probs": floats(T, V, dtype=torch.float64)}, TypeError),
    ("verify_varlen", "draft_probs", {"draft_probs": floats(T, V, device=META)}, ValueError),
    ("verify_varlen", "target_probs", {"target_probs": floats(T, V)}, ValueError),
    ("verify_varlen", "target_probs", {"target_probs": floats(B, K + 1, V)}, ValueError),
    ("verify_varlen", "target_probs", {"target_probs": floats(T + B, 0)}, ValueError),
    ("verify_varlen", "target_probs", {"target_probs": floats(V, T + B).t()}, ValueError),
    ("verify_varlen", "cu_drafts", {"cu_drafts": [0, K, T]}, TypeError),
    ("verify_varlen", "cu_drafts", {"cu_drafts": floats(B + 1)}, TypeError),
    ("verify_varlen", "cu_drafts", {"cu_drafts": ints(0)}, ValueError),
    ("verify_varlen", "cu_drafts", {"cu_drafts": ints(B + 1, 1)}, ValueError),
    ("verify_varlen", "cu_drafts", {"cu_drafts": ints(B + 1, device=META)}, ValueError),
    ("verify_varlen", "target_probs", {"cu_drafts": ints(B)}, ValueError),  # so B is one less, and its rows too many
    *(("verify_varlen", "max_drafts", {"max_drafts": x}, TypeError) for x in (2.0, True, None, ints())),
    *(("verify_varlen", "max_drafts", {"max_drafts": x}, ValueError) for x in (-1, 2**14 + 1, 2**63)),
    ("verify_varlen", "uniform_accept", {"seed": None, "offset": None, "uniform_accept": floats(T + B)}, ValueError),
    ("verify_varlen", "uniform_sample", {"seed": None, "offset": None, "uniform_sample": floats(T)}, ValueError),
    ("verify_varlen", "uniform_accept", {"uniform_accept": ints(T)}, ValueError),
    ("verify_varlen", "generator", {"seed": None, "offset": None, "generator": 1}, TypeError),
    ("verify_greedy", "draft_tokens", {"draft_tokens": ints(T)}, ValueError),
    ("verify_greedy", "draft_tokens", {"draft_tokens": ints(1, 1).expand(1, 2**14 + 1)}, ValueError),
    ("verify_greedy", "draft_tokens", {"draft_tokens": ints(B, K, device=META)}, ValueError),
    ("verify_greedy", "target", {"target": ints(B, K + 1, V)}, TypeError),
    ("verify_greedy", "target", {"target": floats(B, K, V)}, ValueError),
    ("verify_greedy", "target", {"target": floats(B, V, K + 1).mT}, ValueError),
    ("verify_greedy", "lengths", {"lengths": ints(B + 1)}, ValueError),
    ("verify_greedy", "lengths", {"lengths": floats(B)}, TypeError),
    *(
        (f"{OF_LOGITS} sample_logits", "temperature", {"temperature": x}, TypeError)
        for x in ("1", True, [1.0, 1.0], 1j, torch.ones(B, dtype=torch.float64), torch.ones(B).half(), ints(B))
    ),
    *((f"{OF_LOGITS} sample_logits", "temperature", {"temperature": x}, ValueError) for x in (-1, -1e-30, NAN, -INF)),
    *(
        (f"{OF_LOGITS} sample_logits", "temperature", {"temperature": x}, ValueError)
        for x in (floats(), floats(1), floats(B + 1), floats(B, 1), floats(B, K, device=META))
    ),
    (OF_LOGITS, "temperature", {"temperature": floats(B, device=META)}, ValueError),
    *(
        (OF_LOGITS, "draft_temperature", {"draft_temperature": x}, TypeError)
        for x in ("1", True, [1.0, 1.0], torch.ones(B, dtype=torch.float64), ints(B))
    ),
    *(
        (OF_LOGITS, "draft_temperature", {"draft_temperature": x}, ValueError)
        for x in (-1, NAN, floats(), floats(B + 1), floats(B, device=META))
    ),
    *((OF_LOGITS, "draft_temperature", {"draft_temperature": x, "draft_logits": None}, ValueError) for x in (1, floats(B))),
    *((OF_LOGITS, "draft_slots", {"draft_slots": x}, TypeError) for x in (0, [0] * B, floats(B), ints(B, dtype=torch.int16))),
    *((OF_LOGITS, "draft_slots", {"draft_slots": x}, ValueError) for x in (ints(), ints(B + 1), ints(B, device=META))),
    (OF_LOGITS, "draft_slots", {"draft_slots": ints(B), "draft_logits": None}, ValueError),
    *(
        (OF_LOGITS, "draft_logits", {"draft_slots": ints(B), "draft_logits": floats(*n, V)}, ValueError)
        for n in ((0, K), (5, K - 1), (T,), (1, 5, K))
    ),
    (
        "verify_logits_varlen",
        "draft_logits",
        {"draft_slots": ints(B), "draft_logits": floats(5, 0, V), "max_drafts": 0, "emitted": None},
        ValueError,
    ),
    (OF_LOGITS, "draft_logits", {"draft_slots": ints(B), "draft_logits": floats(5, V, K).mT}, ValueError),
    (OF_LOGITS, "draft_logits", {"draft_slots": ints(B), "draft_logits": floats(5, K, V, device=META)}, ValueError),
    (OF_LOGITS, "draft_logits", {"draft_slots": ints(B), "draft_logits": floats(5, K, V, dtype=torch.float64)}, TypeError),
    ("sample_logits", "temperature", {"temperature": floats(B, K + 1, device=META)}, ValueError),
    ("verify_logits", "draft_logits", {"draft_logits": floats(B, K + 1, V)}, ValueError),
    ("verify_logits", "draft_logits", {"draft_logits": floats(B, V, K).mT}, ValueError),
    ("verify_logits", "draft_logits", {"draft_logits": floats(B, K, V, dtype=torch.float64)}, TypeError),
    ("verify_logits", "draft_logits", {"draft_logits": floats(B, K, V, device=META)}, ValueError),
    ("verify_logits", "target_logits", {"target_logits": floats(B, K, V)}, ValueError),
    ("verify_logits", "target_logits", {"target_logits": floats(B, K + 1, 0)}, ValueError),
    ("verify_logits_varlen", "draft_logits", {"draft_logits": floats(T + B, V)}, ValueError),
    ("verify_logits_varlen", "draft_logits", {"draft_logits": floats(T, 0)}, ValueError),
    ("verify_logits_varlen", "target_logits", {"target_logits": floats(T, V)}, ValueError),
    (OF_LOGITS, "draft_logits", {"draft_logits": [[0.5] * V]}, TypeError),
    (OF_LOGITS, "target_logits", {"target_logits": None}, TypeError),
    (OF_LOGITS, "target_logits", {"target_logits": ints(T + B, V)}, TypeError),
    ("sample_logits", "logits", {"logits": [0.5, 0.5]}, TypeError),
    ("sample_logits", "logits", {"logits": floats(V, dtype=torch.float64)}, TypeError),
    ("sample_logits", "logits", {"logits": floats()}, ValueError),
    ("sample_logits", "logits", {"logits": floats(V, B).t()}, ValueError),
    ("sample_logits", "uniform", {"uniform": floats(B, K + 1)}, ValueError),  # beside a seed
    ("sample_logits", "out", {"out": ints(B)}, ValueError),
    ("sample", "probs", {"probs": [0.5, 0.5]}, TypeError),
    ("sample", "probs", {"probs": floats(V, dtype=torch.float64)}, TypeError),
    ("sample", "probs", {"probs": floats()}, ValueError),
    ("sample", "probs", {"probs": floats(B, 0)}, ValueError),
    ("sample", "probs", {"probs": floats(1).expand(2**19)}, ValueError),
    ("sample", "probs", {"probs": floats(V, B).t()}, ValueError),
    ("sample", "uniform", {"uniform": floats(B, K + 1)}, ValueError),  # beside a seed
    ("sample", "uniform", {"seed": None, "uniform": 0.5}, TypeError),
    ("sample", "uniform", {"seed": None, "uniform": floats(B, K + 1, dtype=torch.float16)}, TypeError),
    ("sample", "uniform", {"seed": None, "uniform": floats(B)}, ValueError),
    ("sample", "uniform", {"seed": None, "uniform": floats(B, K + 1, device=META)}, ValueError),
    ("sample", "generator", {"generator": torch.Generator()}, ValueError),
    ("sample", "generator", {"seed": None, "generator": 1}, TypeError),
    ("sample", "offset", {"seed": None, "offset": 1}, ValueError),
    ("sample", "seed", {"seed": ints(B)}, ValueError),
    ("sample", "offset", {"offset": ints(B, K + 1, dtype=torch.int32)}, TypeError),
    ("sample", "out", {"out": floats(B, K + 1)}, TypeError),
    ("sample", "out", {"out": (ints(B, K + 1),)}, TypeError),
    ("sample", "out", {"out": ints(B)}, ValueError),
    ("sample", "out", {"out": ints(K + 1, B).t()}, ValueError),
    ("sample", "out", {"out": ints(B, K + 1, device=META)}, ValueError),
    ("emit", "draft_tokens", {"draft_tokens": ints(T)}, ValueError),
    ("emit", "draft_tokens", {"draft_tokens": floats(B, K)}, TypeError),
    *(("emit", name, {name: floats(B)}, TypeError) for name in ("accepted", "next_token")),
    *(("emit", name, {name: ints(B, 1)}, ValueError) for name in ("accepted", "next_token")),
    *(("emit", name, {name: ints(B, device=META)}, ValueError) for name in ("accepted", "next_token")),
    *(("emit", "pad", {"pad": x}, TypeError) for x in (1.5, None, False)),
    ("emit", "pad", {"pad": 2**63}, ValueError),
    ("emit", "out", {"out": floats(B, K + 1)}, TypeError),
    ("emit", "out", {"out": ints(B, K)}, ValueError),
    ("emit", "out", {"out": ints(K + 1, B).t()}, ValueError),
    ("emit", "out", {"out": ints(B, K + 1, device=META)}, ValueError),
    (f"{VERIFIERS} sample sample_logits emit warmup", "impl", {"impl": "cuda"}, ValueError),
    ("warmup", "vocabulary", {"vocabulary": 0}, ValueError),
    ("warmup", "vocabulary", {"vocabulary": 2**19}, ValueError),
    *(("warmup", name, {name: True}, ValueError) for name in ("temperature", "draft_temperature")),
    ("warmup", "draft_slots", {"draft_slots": torch.int64}, ValueError),
    ("warmup", "uniforms", {"uniforms": torch.float32, "seed": True}, ValueError),
    ("warmup", "lengths", {"lengths": torch.int64, "cu_drafts": torch.int64}, ValueError),
    *(("warmup", name, {name: "int64"}, TypeError) for name in ("draft_tokens", "target_probs", "uniforms", "cu_drafts")),
]
BAD_CALLS = [(function, *rest) for functions, *rest in BAD_CALLS for function in functions.split()]


def rows_of_drafts(function):
    """The good call's target without the rows that bonus tokens stand for, by its name."""
    name, call = "target_logits" if "logits" in function else "target_probs", good_calls()[function]
    return {name: call[name][:T] if "varlen" in function else call[name][:, :K]}


@pytest.mark.parametrize("function, name, given, error", BAD_CALLS, ids=[f"{x[0]}-{x[1]}-{i}" for i, x in enumerate(BAD_CALLS)])
def test_bad_call(function, name, given, error):
    rows = rows_of_drafts(function) if "bonus_tokens" in given else {}
    with pytest.raises(error, match=rf"^{re.escape(name)}: expected .* got "):
        getattr(sv, function)(**{**good_calls()[function], **rows, **given})


@pytest.mark.parametrize("function", RANDOM.split())
def test_rows_beside_bonus_tokens(function):
    """They are those of drafts alone, and without bonus tokens one more."""
    bonus, rows = {"bonus_tokens": ints(B)}, rows_of_drafts(function)
    getattr(sv, function)(**{**good_calls()[function], **bonus, **rows})
    for wrong, why in ((bonus, " beside bonus_tokens"), (rows, "")):
        with pytest.raises(ValueError, match=rf"^{next(iter(rows))}: expected shape \[.*\]{why} = \[.*, got "):
            getattr(sv, function)(**{**good_calls()[function], **wrong})


@pytest.mark.parametrize("function", sorted({function for function, *_ in BAD_CALLS}))
def test_the_call_that_the_bad_ones_spoil_is_good(function):
    getattr(sv, function)(**good_calls()[function])


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
    inputs, results = [good()[name] for name in NAMES], [torch.empty(B, dtype=torch.int64) for _ in range(2)]
    options = None, None, SAMPLE, None, None, K, None, None, False, None, 1.0, *[None] * 4
    with pytest.raises(ValueError, match=r"^impl: expected one of .* got 'nonsense'"):
        sv.ops.ops.verify(*inputs, *options, *results, "nonsense")


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
