"""Shapes, dtypes and devices of the public functions' arguments. Reads no contents, so nothing waits for a device."""

import torch

from .rule import MAX_VOCABULARY

MAX_DRAFTS = 2**14  # one tile of a Triton kernel tests them all
TOKEN_DTYPES = (torch.int64, torch.int32)
PROBABILITY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNIFORM_DTYPES = (torch.float32, torch.float64, torch.int64)


def require_tensor(name, x, dtypes):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense tensor (torch.strided), got {x.layout}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")


def require_shape(name, x, shape, meaning):
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {meaning} = {list(shape)}, got {list(x.shape)}")


def require_device(name, x, device):
    if x.device != device:
        raise ValueError(f"{name}: expected device {device}, that of target_probs, got {x.device}")


def require_probabilities(name, x, rows, meaning):
    """x is [B, rows, V] with any V that an exact sum allows, contiguous in V."""
    if x.dim() != 3 or tuple(x.shape[:2]) != rows:
        raise ValueError(f"{name}: expected shape {meaning} = [{rows[0]}, {rows[1]}, V], got {list(x.shape)}")
    if not 1 <= x.shape[2] <= MAX_VOCABULARY:
        raise ValueError(f"{name}: expected a vocabulary of 1 to {MAX_VOCABULARY} entries, got {x.shape[2]}")
    if x.stride(2) != 1 and x.shape[2] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got stride {x.stride(2)}")


def validate_verify(draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, lengths, generator):
    require_tensor("draft_tokens", draft_tokens, TOKEN_DTYPES)
    if draft_tokens.dim() != 2:
        raise ValueError(f"draft_tokens: expected shape [B, K], got {list(draft_tokens.shape)}")
    B, K = draft_tokens.shape
    if K > MAX_DRAFTS:
        raise ValueError(f"draft_tokens: expected at most {MAX_DRAFTS} drafts, got {K}")
    require_tensor("target_probs", target_probs, PROBABILITY_DTYPES)
    require_probabilities("target_probs", target_probs, (B, K + 1), "[B, K + 1, V]")
    device = target_probs.device
    require_device("draft_tokens", draft_tokens, device)
    if draft_probs is not None:
        require_tensor("draft_probs", draft_probs, PROBABILITY_DTYPES)
        require_probabilities("draft_probs", draft_probs, (B, K), "[B, K, V]")
        require_device("draft_probs", draft_probs, device)
    if uniform_accept is not None:
        require_tensor("uniform_accept", uniform_accept, UNIFORM_DTYPES)
        require_shape("uniform_accept", uniform_accept, (B, K), "[B, K]")
        require_device("uniform_accept", uniform_accept, device)
    if uniform_sample is not None:
        require_tensor("uniform_sample", uniform_sample, UNIFORM_DTYPES)
        require_shape("uniform_sample", uniform_sample, (B, K + 1), "[B, K + 1]")
        require_device("uniform_sample", uniform_sample, device)
        if uniform_accept is not None and uniform_accept.dtype != uniform_sample.dtype:
            raise TypeError(
                f"uniform_sample: expected the dtype of uniform_accept, {uniform_accept.dtype}, got {uniform_sample.dtype}"
            )
    if lengths is not None:
        require_tensor("lengths", lengths, TOKEN_DTYPES)
        require_shape("lengths", lengths, (B,), "[B]")
        require_device("lengths", lengths, device)
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
        if generator.device.type != device.type:
            raise ValueError(f"generator: expected a generator on {device.type}, got one on {generator.device}")
