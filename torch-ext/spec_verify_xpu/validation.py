"""Shapes, dtypes and devices of the public functions' arguments. Reads no contents, so nothing waits for a device."""

import torch

from .rule import MAX_VOCABULARY

MAX_DRAFTS = 2**14  # one tile of a Triton kernel tests them all
INTEGERS = (torch.int64, torch.int32)
PROBABILITIES = (torch.float32, torch.float16, torch.bfloat16)
SCORES = (*PROBABILITIES, torch.float64)
ROWS, LOGITS = ("draft_probs", "target_probs"), ("draft_logits", "target_logits")  # the names of rows in errors
UNIFORMS = (torch.float32, torch.float64, torch.int64)


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
        raise ValueError(f"{name}: expected device {device}, got {x.device}")


def require(name, x, dtypes, shape, meaning, device):
    require_tensor(name, x, dtypes)
    require_shape(name, x, shape, meaning)
    require_device(name, x, device)


def require_contiguous_last(name, x):
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got stride {x.stride(-1)}")


def require_writable_rows(name, x):
    require_contiguous_last(name, x)
    if x.shape[0] > 1 and x.stride(0) < x.shape[1]:
        raise ValueError(f"{name}: expected rows that do not overlap, {x.shape[1]} entries apart or more, got {x.stride(0)}")


def require_rows(name, x, dtypes, leading, meaning):
    """x is [*leading, V] with any V that an exact sum allows, contiguous in V. leading None is anything. Returns leading."""
    require_tensor(name, x, dtypes)
    if x.dim() == 0 or (leading is not None and tuple(x.shape[:-1]) != leading):
        sizes = "" if leading is None else f" = [{', '.join(map(str, leading))}, V]"
        raise ValueError(f"{name}: expected shape {meaning}{sizes}, got {list(x.shape)}")
    if not 1 <= x.shape[-1] <= MAX_VOCABULARY:
        raise ValueError(f"{name}: expected a vocabulary of 1 to {MAX_VOCABULARY} entries, got {x.shape[-1]}")
    require_contiguous_last(name, x)
    return tuple(x.shape[:-1])


def require_int(name, x, least=-(2**63), most=2**63 - 1):
    if not isinstance(x, (int, torch.SymInt)) or isinstance(x, bool):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")
    if not least <= x <= most:
        raise ValueError(f"{name}: expected an int in [{least}, {most}], got {x}")


def require_dimensions(name, x, dtypes, meaning):
    """x has as many dimensions as `meaning` names, of any size. Returns the sizes."""
    require_tensor(name, x, dtypes)
    if x.dim() != len(meaning.split(",")):
        raise ValueError(f"{name}: expected shape {meaning}, got {list(x.shape)}")
    return tuple(x.shape)


def require_dense_tokens(draft_tokens):
    """Returns B and K."""
    B, K = require_dimensions("draft_tokens", draft_tokens, INTEGERS, "[B, K]")
    if K > MAX_DRAFTS:
        raise ValueError(f"draft_tokens: expected at most {MAX_DRAFTS} drafts, got {K}")
    return B, K


def validate_dense(draft_tokens, draft, target, lengths, names=ROWS, dtypes=PROBABILITIES, bonus_tokens=None, draft_slots=None):
    """Returns B and K. The rows' arguments have these names, the target's these dtypes."""
    B, K = require_dense_tokens(draft_tokens)
    rows = ((B, K + 1), "[B, K + 1, V]") if bonus_tokens is None else ((B, K), "[B, K, V] beside bonus_tokens")
    require_rows(names[1], target, dtypes, *rows)
    device = target.device
    require_device("draft_tokens", draft_tokens, device)
    validate_draft(names[0], draft, draft_slots, B, (K,), (B, K), "[B, K, V]", device)
    if lengths is not None:
        require("lengths", lengths, INTEGERS, (B,), "[B]", device)
    return B, K


def validate_ragged(draft_tokens, draft, target, cu_drafts, max_drafts, names=ROWS, bonus_tokens=None, draft_slots=None):
    """Returns T and B. The rows' arguments have these names."""
    (T,) = require_dimensions("draft_tokens", draft_tokens, INTEGERS, "[T]")
    (offsets,) = require_dimensions("cu_drafts", cu_drafts, INTEGERS, "[B + 1]")
    if offsets == 0:
        raise ValueError("cu_drafts: expected shape [B + 1], of one entry or more, got [0]")
    require_int("max_drafts", max_drafts, 0, MAX_DRAFTS)
    B = offsets - 1
    rows = ((T + B,), "[T + B, V]") if bonus_tokens is None else ((T,), "[T, V] beside bonus_tokens")
    require_rows(names[1], target, PROBABILITIES, *rows)
    device = target.device
    require_device("draft_tokens", draft_tokens, device)
    require_device("cu_drafts", cu_drafts, device)
    validate_draft(names[0], draft, draft_slots, B, (max(max_drafts, 1), T), (T,), "[T, V]", device)
    return T, B


def validate_draft(name, draft, slots, B, drafts, leading, meaning, device):
    """The draft's rows are [*leading, V] or, in slots, [S, D, V] with D no less than one of `drafts`."""
    if slots is not None:
        if draft is None:
            raise ValueError(f"draft_slots: expected None without {name}, got {type(slots).__name__}")
        require("draft_slots", slots, INTEGERS, (B,), "[B]", device)
    if draft is not None:
        sizes = require_rows(name, draft, PROBABILITIES, leading if slots is None else None, meaning)
        if slots is not None and (len(sizes) != 2 or sizes[0] < 1 or all(sizes[1] < n for n in drafts)):
            raise ValueError(f"{name}: expected shape [S, D, V] with S >= 1 and D >= {min(drafts)}, got {list(draft.shape)}")
        require_device(name, draft, device)


def validate_mask(greedy, B, device):
    if greedy is not None:
        require("greedy", greedy, (torch.bool,), (B,), "[B]", device)


def validate_bonus_tokens(bonus_tokens, B, device):
    if bonus_tokens is not None:
        require("bonus_tokens", bonus_tokens, INTEGERS, (B,), "[B]", device)


def validate_temperature(temperature, number, leading, meaning, device, name="temperature"):
    """A tensor, or None and a number."""
    if isinstance(temperature, torch.Tensor):
        require(name, temperature, (torch.float32,), leading, meaning, device)
    elif temperature is not None:
        raise TypeError(f"{name}: expected a number or a float32 tensor {meaning}, got {type(temperature).__name__}")
    elif not number >= 0:
        raise ValueError(f"{name}: expected 0 or more, got {number}")


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def number_of(temperature):
    """(tensor, number): of a temperature that is a number, or None, the number, so that no tensor is made of it.

    A number above 0 is taken into the range that temperatures have, so that float32 makes it neither 0 nor inf.
    """
    if temperature is None:
        return None, 1.0
    if not is_number(temperature):
        return temperature, 1.0
    return None, float(min(max(temperature, 2.0**-60), 2.0**60)) if temperature > 0 else temperature


def require_share(name, x, leading, meaning, device, more_than_0=False):
    """x is a number in [0, 1] or, if so, in (0, 1], a float32 tensor, or None."""
    if isinstance(x, torch.Tensor):
        require(name, x, (torch.float32,), leading, meaning, device)
    elif x is not None:
        if not is_number(x):
            raise TypeError(f"{name}: expected a number or a float32 tensor {meaning}, got {type(x).__name__}")
        if not 0 <= x <= 1 or (more_than_0 and x == 0):
            raise ValueError(f"{name}: expected a number in {'(' if more_than_0 else '['}0, 1], got {x}")


def validate_randomness(uniforms, seed, offset, generator, leading, meaning, device):
    """uniforms is {name: (tensor or None, shape, meaning)}. Given are uniforms, or a seed, or a generator, or nothing."""
    dtype = None
    for name, (x, shape, shape_means) in uniforms.items():
        if x is not None:
            require(name, x, UNIFORMS, shape, shape_means, device)
            if seed is not None:
                raise ValueError(f"{name}: expected None beside a seed, got a tensor")
            if dtype is not None and x.dtype != dtype:
                raise TypeError(f"{name}: expected the dtype of uniform_accept, {dtype}, got {x.dtype}")
            dtype = x.dtype
    if seed is None and offset is not None:
        raise ValueError(f"offset: expected None without a seed, got {type(offset).__name__}")
    for name, x in (("seed", seed), ("offset", offset)):
        if isinstance(x, torch.Tensor):
            require(name, x, (torch.int64,), leading, meaning, device)
        elif x is not None:
            if not isinstance(x, (int, torch.SymInt)):
                raise TypeError(f"{name}: expected an int or an int64 tensor {meaning}, got {type(x).__name__}")
            require_int(name, x)
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
        if generator.device.type != device.type:
            raise ValueError(f"generator: expected a generator on {device.type}, got one on {generator.device}")
        if seed is not None:
            raise ValueError("generator: expected None beside a seed, got a torch.Generator")


def validate_outputs(out, num_emitted, emitted, dtype, B, K, device):
    """out is two tensors [B], or None."""
    require_integer_dtype(dtype)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(f"out: expected two tensors, got {type(out).__name__}")
        for i, x in enumerate(out):
            require(f"out[{i}]", x, INTEGERS, (B,), "[B]", device)
            require_contiguous_last(f"out[{i}]", x)
        if out[0] is out[1]:
            raise ValueError("out: expected two tensors, got one twice")
    if num_emitted is not None:
        require("num_emitted", num_emitted, INTEGERS, (B,), "[B]", device)
        require_contiguous_last("num_emitted", num_emitted)
    if emitted is not None:
        require("emitted", emitted, INTEGERS, (B, K + 1), "[B, K + 1]", device)
        require_writable_rows("emitted", emitted)


def validate_tokens_out(out, dtype, leading, meaning, device):
    """out is one tensor [*leading], or None."""
    require_integer_dtype(dtype)
    if out is not None:
        require("out", out, INTEGERS, leading, meaning, device)
        if not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous tensor, got strides {list(out.stride())}")


def validate_emit(draft_tokens, accepted, next_token, pad, out):
    """Returns B and K."""
    B, K = require_dense_tokens(draft_tokens)
    for name, x in (("accepted", accepted), ("next_token", next_token)):
        require(name, x, INTEGERS, (B,), "[B]", draft_tokens.device)
    if out is not None:
        require("out", out, INTEGERS, (B, K + 1), "[B, K + 1]", draft_tokens.device)
        require_writable_rows("out", out)
    limits = torch.iinfo((next_token if out is None else out).dtype)
    require_int("pad", pad, limits.min, limits.max)
    return B, K


def require_integer_dtype(dtype):
    if dtype not in INTEGERS:
        raise TypeError(f"dtype: expected {' or '.join(map(str, INTEGERS))}, got {dtype}")
