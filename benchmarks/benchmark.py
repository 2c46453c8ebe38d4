"""For the hub's own command: `kernels benchmark ./` after `make hub`. The full comparison is bench.py."""

import torch
from kernels.benchmark import Benchmark


class Vocabulary32000(Benchmark):
    """8 sequences, 5 drafts each."""

    seed = 0
    vocabulary = 32_000

    def setup(self):
        B, K, V = 8, 5, self.vocabulary
        logits = torch.randn(B, K + 1, V, device=self.device)
        draft_probs = torch.softmax(logits[:, :K] + 0.5 * torch.randn(B, K, V, device=self.device), -1)
        draft_tokens = torch.multinomial(draft_probs.flatten(0, 1), 1).view(B, K)
        uniforms = torch.randint(2**63 - 1, (2, B, K + 1), device=self.device)
        self.inputs = (draft_tokens, draft_probs, torch.softmax(logits, -1), uniforms[0, :, :K], uniforms[1])
        self.by_rule = self.kernel.verify(*self.inputs, impl="reference")

    def benchmark_verify(self):
        self.accepted, self.out = self.kernel.verify(*self.inputs)

    def verify_verify(self):
        """What eager torch gives. The command compares within a tolerance that lets neighbouring ids pass, so exactly here."""
        eager = self.kernel.verify(*self.inputs, impl="eager")
        for accepted, next_token in (eager, (self.accepted, self.out)):
            assert torch.equal(accepted, self.by_rule.accepted)
            assert torch.equal(next_token, self.by_rule.next_token)
        return eager.next_token


class Vocabulary128256(Vocabulary32000):
    """As above, with the vocabulary of Llama 3."""

    vocabulary = 128_256
