"""What verification is, beyond parity: properties of the answer that hold for every implementation."""

import math

import pytest
import torch

import spec_verify_xpu as sv
from batches import Batch, random_batch, uniforms, with_bonus


def test_accept_all_returns_k_and_draws_the_bonus(impl, device):
    """The target is certain of each draft, so all stand, and its last row is certain of one token: that is the bonus."""
    batch = random_batch(8, 5, 100)
    certain = torch.zeros_like(batch.target_probs)
    certain[:, :5].scatter_(2, batch.draft_tokens[..., None], 1)
    certain[torch.arange(8), 5, torch.arange(8) * 11] = 1
    accepted, next_token = batch._replace(target_probs=certain).to(device).verify(impl)
    assert accepted.tolist() == [5] * 8
    assert next_token.tolist() == [b * 11 for b in range(8)]


def test_reject_at_zero_draws_from_the_residual(impl, device, sequences):
    """The target gives the draft no mass, so none stands, and what is drawn never lies where p <= q."""
    B = sequences(200)
    batch = random_batch(B, 3, 50)
    batch.target_probs.scatter_(2, batch.draft_tokens[:, :1, None].expand(B, 4, 1), 0)
    accepted, next_token = batch.to(device).verify(impl)
    assert accepted.tolist() == [0] * B
    b = torch.arange(B)
    drawn = next_token.cpu()
    assert (batch.target_probs[b, 0, drawn] > batch.draft_probs[b, 0, drawn]).all()


def test_identical_distributions_reject_nothing(impl, device, sequences):
    """Whatever the uniforms, the largest among them."""
    B = sequences(100)
    batch = random_batch(B, 4, 64)
    batch.target_probs[:, :4] = batch.draft_probs
    batch.uniform_accept[: B // 2] = -1  # 63 ones
    assert batch.to(device).verify(impl).accepted.tolist() == [4] * B


def test_a_token_without_mass_is_never_drawn(impl, device, sequences):
    batch = random_batch(sequences(300), 2, 40)
    batch.target_probs[..., ::2] = 0
    _, next_token = batch.to(device).verify(impl)
    assert (next_token % 2 == 1).all()


@pytest.fixture
def batch_of_many():
    """600 entries are two chunks; 12 sequences accept from 0 to 4."""
    batch = random_batch(12, 4, 600)._replace(lengths=torch.tensor([4, 4, 3, 4, 2, 4, 4, 1, 4, 4, 0, 4]))
    assert len(set(batch.by_rule()[0].tolist())) >= 4
    return batch


def pick(batch, rows):
    return Batch(*(x if x is None else x[rows] for x in batch))


def test_a_sequence_does_not_depend_on_its_batch(batch_of_many, impl, device):
    """Alone, in slices, and permuted: the same answer."""
    batch = batch_of_many.to(device)
    whole = torch.stack(batch.verify(impl))
    rows = torch.arange(12, device=device)
    alone = [torch.stack(pick(batch, rows[b : b + 1]).verify(impl)) for b in range(12)]
    assert torch.equal(torch.cat(alone, 1), whole)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(torch.stack(pick(batch, order).verify(impl)), whole[:, order])
    assert torch.equal(torch.stack(pick(batch, rows[5:9]).verify(impl)), whole[:, 5:9])


@pytest.mark.parametrize(
    "chunk, chunks, lanes, limbs",
    [(64, 4, 64, False), (256, 2, 32, False), (1024, 2, 256, False), (512, 4, 16, True), (128, 8, 16, True)],
)
@pytest.mark.parametrize("aligned", [True, False])
def test_tiles_change_nothing(chunk, chunks, lanes, limbs, aligned, device, monkeypatch):
    """Re-tiled: narrow, wide and many chunks a program, warps that read a chunk piece by piece, limbs and native sums."""
    config = pytest.importorskip("spec_verify_xpu.gpu.config")
    batch = random_batch(4, 3, 608 if aligned else 601).to(device)  # a part of a chunk at the end of each
    tiles = config.Config(chunk, chunks, lanes, limbs, sum_warps=4, locate_warps=2, positions=16, sums=(128, 1024))
    monkeypatch.setitem(config.CONFIGURATIONS, device.type, lambda *_: tiles)
    monkeypatch.setattr(sv.repeats, "known", {})  # which were planned for other tiles
    for x in (batch, with_bonus(batch).to(device)):
        assert torch.equal(torch.stack(x.verify("triton")), torch.stack(x.verify("eager")))


@pytest.mark.parametrize("B", [1, 6, 8])
def test_mixed_sequences(B, device, monkeypatch):
    """Chunks that take the sequences in orders of their own: of 8 all change places, of 6 pairs, and one has no other."""
    config = pytest.importorskip("spec_verify_xpu.gpu.config")
    batch = random_batch(B, 3, 608).to(device)  # 5 programs a sequence
    tiles = config.Config(64, 2, 64, False, sum_warps=4, locate_warps=4, positions=16, sums=(128,), mixed=True)
    monkeypatch.setitem(config.CONFIGURATIONS, device.type, lambda *_: tiles)
    monkeypatch.setattr(sv.repeats, "known", {})  # which were planned for other tiles
    assert torch.equal(torch.stack(batch.verify("triton")), torch.stack(batch.verify("eager")))


def test_programs_sum_pairs_of_chunks():
    """The second kernel reads sums in pairs, so one past the last of an odd number must have been written."""
    config = pytest.importorskip("spec_verify_xpu.gpu.config")
    assert all(x.chunks % 2 == 0 for x in vars(config).values() if isinstance(x, config.Config))


def test_padding_the_vocabulary_changes_nothing(batch_of_many, impl, device):
    """Entries without mass behind the last one, into another chunk and off its alignment."""
    batch = batch_of_many.to(device)
    whole = torch.stack(batch.verify(impl))
    for extra in (1, 8, 500):
        padded = [torch.nn.functional.pad(x, (0, extra)) for x in batch[1:3]]
        assert torch.equal(torch.stack(batch._replace(draft_probs=padded[0], target_probs=padded[1]).verify(impl)), whole)


def test_inputs_are_not_written(batch_of_many, impl, device):
    batch = batch_of_many.to(device)
    given = [x for x in batch if x is not None]
    before = [x.clone() for x in given]
    batch.verify(impl)
    assert all(map(torch.equal, given, before))


def test_generator_makes_a_run_reproducible(impl, device, sequences):
    batch = random_batch(sequences(100), 4, 64).to(device)

    def run(seed):
        generator = torch.Generator(device).manual_seed(seed)
        return torch.stack(sv.verify(*batch[:3], generator=generator, impl=impl))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_drawn_uniforms_have_63_bits():
    """Of 20,000 draws every one of the 63 bits is set about half of the time, and none is negative."""
    bits = sv.api.random_bits((20000,), torch.device("cpu"), torch.Generator().manual_seed(0))
    assert (bits >= 0).all()
    share = (bits[:, None] >> torch.arange(63) & 1).double().mean(0)
    assert (share - 0.5).abs().max() < 5 * 0.5 / 20000**0.5  # one false alarm in 27,000


@pytest.mark.parametrize("V, draws", [(32000, 2000), (151936, 400)])
def test_next_token_follows_the_target_at_full_width(V, draws, device):
    """Chi-square over 16 groups of tokens with int64 bits: drafts from q, verified against p, emit p.

    The bound is the 1 - 1e-6 quantile of chi-square with 15 degrees (Wilson and Hilferty): one false alarm in a million runs.
    """
    g = torch.Generator().manual_seed(V)
    q = torch.softmax(3 * torch.randn(V, generator=g), -1).to(device)
    p = torch.softmax(3 * torch.randn(V, generator=g), -1).to(device)
    bonus = torch.zeros(V, device=device)
    bonus[0] = 1
    rows = torch.stack([p, bonus])
    groups = torch.randint(16, (V,), generator=g)
    expected = torch.zeros(16, dtype=torch.float64).index_add_(0, groups, p.cpu().double()) * draws
    counts = torch.zeros(16, dtype=torch.float64)
    for _ in range(0, draws, 50):
        drafts = torch.multinomial(q.cpu(), 50, replacement=True, generator=g)[:, None].to(device)
        ua, us = (uniforms((50, k), torch.int64, g).to(device) for k in (1, 2))
        accepted, next_token = sv.verify(drafts, q.expand(50, 1, V), rows.expand(50, 2, V), ua, us)
        emitted = torch.where(accepted > 0, drafts[:, 0], next_token).cpu()
        counts += torch.bincount(groups[emitted], minlength=16)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    quantile = 15 * (1 - 2 / 135 + 4.753 * math.sqrt(2 / 135)) ** 3
    assert chi_square < quantile


def test_chi_square_catches_a_wrong_rule():
    """The test above can fail: emitting the target's token only when the draft is refused is caught at the same size."""
    g = torch.Generator().manual_seed(0)
    V, draws = 32000, 2000
    q, p = (torch.softmax(3 * torch.randn(V, generator=g), -1) for _ in range(2))
    groups = torch.randint(16, (V,), generator=g)
    expected = torch.zeros(16, dtype=torch.float64).index_add_(0, groups, p.double()) * draws
    counts = torch.bincount(groups[torch.multinomial(q, draws, replacement=True, generator=g)], minlength=16)
    assert float(((counts - expected) ** 2 / expected).sum()) > 60


@pytest.mark.parametrize(
    "B, V, threads, name",
    [
        (1, 32000, 768, "XPU_FEW_ROWS"),  # Iris Xe, batch 1: 63 long chunks would leave most of its threads idle
        (8, 32000, 768, "XPU_FEW_ROWS"),  # 504 of them still
        (16, 32000, 768, "XPU"),  # 1,008 fill it
        (1, 151936, 768, "XPU"),  # 1,187 short chunks are more sums than one search should hold
        (8, 32000, 8192, "XPU_FEW_ROWS"),  # a large GPU
        (1, 128256, 2112, "CUDA"),  # an H200: 501 sums of 256
        (64, 151936, 2112, "CUDA_WIDE"),  # 297 sums of 512, where 256 would make 594
        (64, 128257, 2112, "CUDA_WIDE"),  # rows that are not aligned have one configuration
    ],
)
def test_configuration(B, V, threads, name):
    config = pytest.importorskip("spec_verify_xpu.gpu.config")
    configuration = config.CONFIGURATIONS[name.split("_")[0].lower()]
    assert configuration(B, V, V % 16 == 0, threads) is getattr(config, name)


def test_few_kernels_serve_every_shape():
    """On NVIDIA 8 for one set of dtypes, which warmup compiles; test_gpu counts them. K comes in from 32 drafts on."""
    config = pytest.importorskip("spec_verify_xpu.gpu.config")
    warm = config.variants("cuda", threads=2112)
    assert len(warm) + len({(x, aligned) for x, aligned, _ in warm}) == 8  # locate's and sum_chunks'
    g = torch.Generator().manual_seed(0)
    vocabularies = torch.randint(1, 2**19, (200,), generator=g)
    vocabularies[::2] -= vocabularies[::2] % 16
    for V in filter(None, vocabularies.tolist()):
        for aligned in {V % 16 == 0, False}:
            x = config.for_cuda(1, V, aligned, 2112)
            taken = x, aligned, x.capacity(V)
            assert taken in warm and taken in config.variants("cuda", 2112, V)
