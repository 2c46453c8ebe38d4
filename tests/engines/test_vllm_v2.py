"""The sampler of vLLM's V2 model runner as a function, on tensors of its layout. That runner does not start without a GPU."""

import math
from inspect import signature

import pytest
import torch

from spec_verify_engines import vllm as plugin
from spec_verify_engines import vllm_v2
from spec_verify_xpu import rule

STEPS = 5  # num_speculative_steps
RAGGED = [3, 0, 1, 5, 0, 2, 4]  # a request without drafts inside, one of one draft, and the longest in the middle


def step(counts, vocabularies=(11, 11), temperature=(0.7, 1.0), has_logits=True, dtype=torch.float32, seed=0):
    """The arguments, by name, of a step of requests with counts drafts, whose states are some of more, in no order."""
    generator = torch.Generator().manual_seed(seed)
    R, S, (V, V_draft) = len(counts), 2 * len(counts), vocabularies
    rows = [n + 1 for n in counts]
    idx_mapping = torch.randperm(S, generator=generator)[:R].int()
    temperatures = torch.tensor(temperature).repeat(S)[:S]
    target_logits = 2 * torch.randn(sum(rows), V, generator=generator)
    target_logits[:, ::3] = -torch.inf  # as top-k and top-p leave them
    draft_logits = 2 * torch.randn(S, STEPS, V_draft, generator=generator)
    best, drawn = target_logits.argmax(-1), torch.randint(min(vocabularies), (sum(rows),), generator=generator)
    ids = torch.where(torch.rand(sum(rows), generator=generator) < 0.5, best, drawn)  # of each row; so greedy requests accept
    return {
        "target_logits": target_logits.to(dtype),
        "draft_logits": draft_logits.to(dtype) if has_logits else None,
        "draft_sampled": ids.roll(1).int(),
        "cu_num_logits": torch.tensor([0, *rows]).cumsum(0).int(),
        "pos": torch.cat([torch.arange(n) + 100 * r for r, n in enumerate(rows)]),
        "idx_mapping": idx_mapping,
        "expanded_idx_mapping": idx_mapping.repeat_interleave(torch.tensor(rows)),
        "expanded_local_pos": torch.cat([torch.arange(n) for n in rows]).int(),
        "temperature": temperatures,
        "seed": torch.randint(-(2**62), 2**62, (S,), generator=generator),
        "num_speculative_steps": STEPS,
    }


def on(device, x):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in x.items()}


def by_rule(x):
    """The same, request after request, by rule.py: lists of rows and of their lengths."""
    sampled, num_sampled = [], []
    V = min(logits.shape[-1] for logits in (x["target_logits"], x["draft_logits"]) if logits is not None)
    for r, state in enumerate(x["idx_mapping"].tolist()):
        rows = slice(*x["cu_num_logits"][r : r + 2].tolist())
        drafts, target = x["draft_sampled"][rows][1:], x["target_logits"][rows, :V]
        T, n = x["temperature"][state], len(drafts)
        draft = None if x["draft_logits"] is None else x["draft_logits"][state, :n, :V][None]
        options = {"seed": x["seed"][state].item(), "offset": x["pos"][rows][0].item(), "greedy": [T == 0]}
        options.update(temperature=1.0, draft_temperature=[T])
        (accepted,), (token,) = rule.verify(drafts[None], draft, target[None], **options)
        row = rule.emit_sequence(drafts.tolist(), accepted, token)
        sampled.append(row + [-1] * (STEPS - n))
        num_sampled.append(accepted + 1)
    return sampled, num_sampled


@pytest.mark.parametrize("has_logits", [True, False])
@pytest.mark.parametrize("temperature", [(0.7, 1.0), (0.0, 0.7, 1.3)], ids=["random", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 where no request has its logits processed
@pytest.mark.parametrize("V", [11, 1100])  # below and above one block of the softmax
def test_function_equals_the_rule(has_logits, temperature, dtype, V, device):
    """Ragged, with placeholders at the end of the longest draft, and where all requests have all drafts."""
    for counts in (RAGGED, [STEPS] * 2):
        x = step(counts, (V, V), temperature, has_logits, dtype)
        if counts is RAGGED:
            x["draft_sampled"][11:13] = -1  # of the rows 7 to 12
        sampled, num_sampled = vllm_v2.verify(**on(device, x))
        assert sampled.dtype == torch.int64 and num_sampled.dtype == torch.int32
        assert (sampled.tolist(), num_sampled.tolist()) == by_rule(x)


@pytest.mark.parametrize("counts", [RAGGED, [STEPS] * 2, [1]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_launch_arranges_what_torch_does(counts, dtype, device):
    kernel = pytest.importorskip("spec_verify_engines.vllm_v2_kernel")
    x = step(counts, temperature=(0.0, 0.7, 1.3))
    x.update({name: x[name].to(dtype) for name in kernel.INPUTS if not x[name].is_floating_point() and name != "seed"})
    x["draft_sampled"][-1] = -1
    inputs = [x[name].to(device) for name in kernel.INPUTS]
    apart = [torch.stack([x, -x], 1)[:, 0] for x in inputs]  # not contiguous
    by_torch = [x.tolist() for x in vllm_v2.by_torch(*inputs, STEPS)]
    for given in (inputs, apart):
        by_launch = kernel.by_triton(*given, STEPS)
        assert [x.tolist() for x in by_launch] == by_torch and all(x.is_contiguous() for x in by_launch)


@pytest.mark.parametrize("vocabularies", [(11, 8), (8, 11)])
def test_vocabularies_of_different_size(vocabularies, device):
    """vLLM leaves out what only one of them has: the rows that pad it."""
    x = step(RAGGED, vocabularies)
    sampled, num_sampled = vllm_v2.verify(**on(device, x))
    assert (sampled.tolist(), num_sampled.tolist()) == by_rule(x)
    assert sampled.max() < min(vocabularies)


def test_only_the_draft_is_divided_by_temperature():
    """(0, ln 2) at a temperature of 1/2 is (1/5, 4/5), as (0, ln 4) is: every draft stands. At any other, some do not."""
    x = step([STEPS] * 20, (2, 2))
    x["target_logits"][:] = torch.tensor([0.0, math.log(4)])
    x["draft_logits"][:] = torch.tensor([0.0, math.log(2)])
    for temperature, all_stand in ((0.5, True), (1.0, False), (0.25, False)):
        x["temperature"][:] = temperature
        _, num_sampled = vllm_v2.verify(**x)
        assert (num_sampled == STEPS + 1).all() == all_stand


def vllm_draws(target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
               expanded_local_pos, temperature, seed, num_speculative_steps, synthetic_conditional_rates=None, use_fp64=False,
               use_block_verification=False, contexts=None, fly_window_size=0, fly_entropy_threshold=0.3,
               of_a_later_version=3):  # fmt: skip
    """In place of vLLM's function, with its options: a token that follows from a request's first row, seed and position."""
    first = cu_num_logits[:-1]
    sampled = pos.new_full((len(idx_mapping), num_speculative_steps + 1), -7)  # as memory that nobody has written
    sampled[:, 0] = (target_logits[first].argmax(-1) + seed[idx_mapping] + pos[first]) % 1000
    return sampled, torch.ones_like(first)


def only(x, requests):
    """The arguments of a step of some of its requests, in this order."""
    rows = [torch.arange(*x["cu_num_logits"][r : r + 2].tolist()) for r in requests]
    of_rows = {name: x[name][torch.cat(rows)] for name in vllm_v2.OF_ROWS}
    cu_num_logits = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    return {**x, **of_rows, "cu_num_logits": cu_num_logits, "idx_mapping": x["idx_mapping"][requests]}


@pytest.mark.parametrize("has_logits", [True, False])
def test_a_request_keeps_its_tokens(has_logits):
    """A request gets the same tokens alone and among others, in another order; with or without drafts."""
    rejection_sample = vllm_v2.in_place_of(vllm_draws)
    x = step(RAGGED, temperature=(0.0, 0.7, 1.3), has_logits=has_logits)
    sampled, num_sampled = rejection_sample(*x.values())
    for requests in ([6, 5, 4, 3, 2, 1, 0], [3, 1, 6], *([r] for r in range(7))):
        again, lengths = rejection_sample(*only(x, requests).values())
        assert torch.equal(lengths, num_sampled[requests])
        for r, n, row, other in zip(requests, lengths, again, sampled[requests]):
            assert torch.equal(row[:n], other[:n]), r
    other_seeds, _ = rejection_sample(*{**x, "seed": x["seed"] + 1}.values())
    assert not torch.equal(other_seeds, sampled)


def test_requests_without_drafts_get_vllms_token():
    """And arguments may come by name."""
    x = step(RAGGED)
    sampled, num_sampled = vllm_v2.in_place_of(vllm_draws)(**x)
    drawn, by_us = vllm_draws(**x)[0], vllm_v2.verify(**x)[0]
    by_us[[1, 4], 0] = drawn[[1, 4], 0]
    assert torch.equal(sampled, by_us) and num_sampled[[1, 4]].tolist() == [1, 1]


@pytest.mark.parametrize(
    "counts, options, ours",
    [
        ([2, 2], {}, True),
        ([2, 2], {"synthetic_conditional_rates": None, "use_fp64": True, "use_block_verification": False}, True),
        ([2, 2], {"fly_window_size": 0, "fly_entropy_threshold": 1.0, "of_a_later_version": 3}, True),
        ([2, 2], {"synthetic_conditional_rates": torch.ones(2)}, False),
        ([2, 2], {"use_block_verification": True}, False),
        ([2, 2], {"fly_window_size": 2}, False),
        ([2, 2], {"contexts": torch.ones(6, 4)}, False),  # watermarks
        ([2, 2], {"of_a_later_version": 4}, False),
        ([2, 2], {"of_no_version": 1}, False),
        ([0, 0], {}, False),
    ],
)
def test_what_goes_to_vllm(counts, options, ours):
    """Every other rule, those too that we do not know, and steps without drafts; all of it as it came."""
    x, seen = {**step(counts), "num_speculative_steps": 2}, []

    def original(*arguments, **given):
        seen.append((arguments, given))
        return vllm_draws(*arguments)

    original.__signature__ = signature(vllm_draws)
    sampled, _ = vllm_v2.in_place_of(original)(*x.values(), **options)
    assert seen == ([] if ours else [(tuple(x.values()), options)])
    assert torch.equal(sampled, (vllm_v2.verify if ours else vllm_draws)(**x)[0])


def test_options_by_position():
    """As vLLM passes the rates of its synthetic rule."""
    x, rates = step([STEPS] * 2), torch.ones(STEPS)
    for options, ours in (([None], True), ([rates], False)):
        sampled, _ = vllm_v2.in_place_of(vllm_draws)(*x.values(), *options)
        assert torch.equal(sampled, (vllm_v2.verify if ours else vllm_draws)(**x)[0])


@pytest.mark.parametrize("has_logits", [True, False])
def test_nothing_waits_for_the_device(has_logits):
    """With tensors on the meta device, which have no contents: to read one on the host is an error."""
    x = on("meta", step(RAGGED, has_logits=has_logits))
    sampled, num_sampled = vllm_v2.in_place_of(vllm_draws)(*x.values())
    assert sampled.shape == (7, STEPS + 1) and num_sampled.shape == (7,)


@pytest.fixture
def sampler(monkeypatch):
    """vLLM's module, put back as it was."""
    module = pytest.importorskip("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    monkeypatch.setattr(module, "rejection_sample", module.rejection_sample)
    return module


def test_vllms_function_is_replaced(sampler):
    """That of the version which is installed; once."""
    plugin.register()
    ours = sampler.rejection_sample
    assert ours.__module__ == vllm_v2.__name__
    plugin.register()
    assert sampler.rejection_sample is ours


def test_other_layouts_are_left_alone(sampler, monkeypatch):
    """Arguments that vLLM had before, and draft logits that it had divided by temperature, which it kept elsewhere."""

    def older(target_sampled, draft_sampled, cu_num_logits, num_speculative_steps): ...

    original = sampler.rejection_sample
    monkeypatch.setattr(sampler, "rejection_sample", older)
    plugin.register()
    assert sampler.rejection_sample is older
    sampler.rejection_sample = original
    gumbel = pytest.importorskip("vllm.v1.worker.gpu.sample.gumbel")
    monkeypatch.setattr(gumbel, "gumbel_sample", lambda logits, output_processed_logits=None: None)
    plugin.register()
    assert sampler.rejection_sample is original
