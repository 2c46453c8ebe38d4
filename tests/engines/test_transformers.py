"""transformers' assisted generation: the target's law, greedy ids as they were, and seeds that reproduce."""

import re
from pathlib import Path

import pytest
import torch
from transformers import set_seed
from transformers.generation import utils
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import laws
import spec_verify_engines.transformers as engine
import spec_verify_xpu as sv

SAMPLE = {"do_sample": True, "top_k": laws.TOP_K, "max_new_tokens": 4}  # the 4th, so that the 3rd can be a draft


@pytest.fixture
def calls(monkeypatch):
    """The draft_probs of each verification."""
    calls, verify = [], sv.verify

    def counted(draft_tokens, draft_probs, target_probs):
        calls.append(draft_probs)
        return verify(draft_tokens, draft_probs, target_probs)

    monkeypatch.setattr(sv, "verify", counted)
    return calls


@pytest.fixture
def drafting(draft):
    """Options of generate() by name. The draft model drafts three tokens whatever it thinks of them."""
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0
    return {
        "assistant": {"assistant_model": draft},
        "early exit": {"assistant_early_exit": 1},
        "lookup": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    }


def prompts(model, n):
    """n prompts of the model's length: its own, and random ones that repeat, so that there is something to look up."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(laws.V, (n - 1, laws.V // 2), generator=generator).repeat(1, 2)
    return torch.cat((torch.tensor([laws.prompt(model)]), texts))[:, None]


@pytest.mark.parametrize("kind", ["assistant", "early exit", "lookup"])
def test_greedy_ids(kind, model, drafting, calls):
    """8 prompts, 32 tokens each: those of plain greedy generation. No verification with chance takes place."""
    options = {"do_sample": False, "max_new_tokens": 32}
    with engine.patched():
        for prompt in prompts(model, 8):
            assert torch.equal(model.generate(prompt, **options, **drafting[kind]), model.generate(prompt, **options))
    assert not calls


def sampled(model, requests, options):
    """The first three tokens after the model's prompt, [requests, 3]."""
    prompt = torch.tensor([laws.prompt(model)])
    with engine.patched():
        texts = [model.generate(prompt, **SAMPLE, **options)[0, laws.V : laws.V + 3] for _ in range(requests)]
    return torch.stack(texts)


@pytest.mark.law
@pytest.mark.parametrize("kind", ["assistant", "lookup"])
def test_law(kind, model, drafting, calls):
    set_seed(1)
    tokens = sampled(model, laws.REQUESTS, drafting[kind])
    assert len(calls) >= laws.REQUESTS and all((probs is None) == (kind == "lookup") for probs in calls)
    assert max(map(abs, laws.z_of_tokens(tokens, model))) < laws.LIMIT


@pytest.mark.law
@pytest.mark.parametrize("kind", ["assistant", "lookup"])
def test_law_catches_a_generous_acceptance(kind, model, drafting, monkeypatch):
    """By a third of the requests."""
    generous = laws.generous(sv.verify)

    def wrong(draft_tokens, draft_probs, target_probs):
        return generous(draft_tokens, draft_probs, target_probs, uniform_accept=torch.empty_like(draft_tokens).random_())

    monkeypatch.setattr(sv, "verify", wrong)
    set_seed(1)
    tokens = sampled(model, laws.REQUESTS // 3, drafting[kind])
    assert max(laws.z_of_tokens(tokens, model)) > laws.LIMIT


@pytest.mark.parametrize("kind", ["assistant", "early exit", "lookup"])
def test_set_seed_reproduces(kind, model, drafting, calls):
    """The same 64 tokens twice after a seed, and others after another."""

    def text(seed):
        set_seed(seed)
        return model.generate(prompts(model, 1)[0], **{**SAMPLE, "max_new_tokens": 64}, **drafting[kind]).tolist()

    with engine.patched():
        assert text(7) == text(7) != text(8)
    assert calls


def test_a_residual_without_mass():
    """The draft gave 2e-35 to a token that the target never says, and p is nowhere above q: 0 / 0 in transformers."""
    ids, q, p = torch.tensor([[3, 1]]), torch.tensor([[[0.0, -80.0]]]), torch.tensor([[[0.0, -200.0], [0.0, 0.0]]])
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        utils._speculative_sampling(ids, q, 1, p)
    with engine.patched():
        tokens, accepted = utils._speculative_sampling(ids, q, 1, p)
    assert tokens.tolist() == [[0]] and accepted == 0


def test_lossy_ensembles_are_left_alone(calls):
    """With a weight of 0 every draft stands, whatever the target says."""
    ids, q, p = torch.tensor([[3, 1]]), torch.zeros(1, 1, 2), torch.tensor([[[0.0, -100.0], [0.0, -100.0]]])
    with engine.patched():
        tokens, accepted = utils._speculative_sampling(ids, q, 1, p, assistant_ensemble_weight=0.0)
    assert tokens.tolist() == [[1, 0]] and accepted == 1 and not calls


def test_document(model, draft, calls):
    """The code of docs/ENGINES.md, with a model, its draft and a prompt."""
    document = Path(__file__).parents[2] / "docs" / "ENGINES.md"
    (block,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    names = {"model": model, "assistant": draft, "prompt": {"input_ids": torch.tensor([laws.prompt(model)])}}
    exec(block, names)
    assert names["ids"].shape == (1, laws.V + 64) and calls


def test_patching_is_undone():
    def state():
        return utils._speculative_sampling, PromptLookupCandidateGenerator.get_candidates

    original = state()
    engine.patch()
    replacement = state()
    assert all(a is not b for a, b in zip(original, replacement))
    engine.patch()
    assert state() == replacement
    with engine.patched():
        assert state() == replacement
    assert state() == replacement  # what was on before the with statement stays on
    engine.unpatch()
    assert state() == original
    with pytest.raises(ZeroDivisionError), engine.patched():
        raise ZeroDivisionError
    assert state() == original
