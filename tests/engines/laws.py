"""Tiny models, and the exact law of what they say."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

V, TOP_K = 16, 8  # three tokens have 8 * 8 * 8 texts, whose law is counted in a moment
MODEL, NOISE = 49, 0.05  # a model and a draft for which a wrong acceptance shows best, of 60 that were looked at
REQUESTS, LIMIT = 10_000, 4


def tiny(seed):
    """A random Llama: two layers, with weights large enough that its rows are far from flat."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def noisy(model):
    """A draft for a model: its weights with noise."""
    draft = tiny(0)
    draft.load_state_dict(model.state_dict())
    torch.manual_seed(100 + MODEL)
    with torch.no_grad():
        for weights in draft.model.layers.parameters():
            weights.add_(NOISE * torch.randn_like(weights))
    return draft


@torch.no_grad()
def prompt(model):
    """What the model likes best to say without saying anything twice: prompt lookup finds a likely draft after any token."""
    text = [0]
    while len(text) < V:
        logits = model(torch.tensor([text])).logits[0, -1]
        text.append(logits.index_fill(0, torch.tensor(text), -torch.inf).argmax().item())
    return text


@torch.no_grad()
def marginals(model):
    """The law of the first three tokens after its prompt by top-k at temperature 1: three rows [V] in float64."""
    rows, weights, texts = [], torch.ones(1, dtype=torch.float64), torch.tensor([prompt(model)])
    for _ in range(3):
        logits = model(texts).logits[:, -1].double()
        kept = logits.topk(TOP_K)
        probs = torch.zeros(len(texts), V, dtype=torch.float64).scatter_(1, kept.indices, kept.values.softmax(-1))
        rows.append(weights @ probs)
        weights = (weights[:, None] * probs.gather(1, kept.indices)).flatten()
        texts = torch.cat((texts.repeat_interleave(TOP_K, 0), kept.indices.reshape(-1, 1)), 1)
    return rows


def z(tokens, law):
    """How far the counts of tokens [N] are from a law [V], in deviations of a chi-square. Rare tokens are counted as one."""
    expected, counts = len(tokens) * law, torch.bincount(tokens, minlength=V)
    assert (counts[law == 0] == 0).all(), "a token without probability came"
    rare = expected < 5
    expected, counts = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (expected, counts))
    expected, counts = expected[expected > 0], counts[expected > 0]
    freedom = len(expected) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / (2 * freedom) ** 0.5


def z_of_tokens(tokens, model):
    """z of each of the first three tokens of texts [N, 3 or more], printed too: `pytest -rP` shows it."""
    values = [z(column, law) for column, law in zip(tokens.T, marginals(model))]
    print("z of tokens 1 to 3:", *(f"{value:+.2f}" for value in values))
    return values


def generous(verify, factor=1.2):
    """A wrong verify: a draft stands with a probability 1.2 times too large."""

    def verify_generously(*arguments, uniform_accept, **options):
        return verify(*arguments, uniform_accept=(uniform_accept / factor).long(), **options)

    return verify_generously
