"""What sampling leaves out: cut-offs that make logits of which `verify_logits` and `sample_logits` draw. Plain torch."""

from math import inf
from typing import Union

import torch

from ._ops import add_op_namespace_prefix, ops
from .fixed_point import fixed, order, probabilities, scale
from .rule import ONE
from .validation import (
    INTEGERS,
    PROBABILITIES,
    number_of,
    require,
    require_int,
    require_rows,
    require_share,
    validate_temperature,
)

Share = Union[float, torch.Tensor, None]


def mask_logits(
    logits: torch.Tensor,
    *,
    temperature: Share = None,
    top_k: Union[int, torch.Tensor, None] = None,
    top_p: Share = None,
    min_p: Share = None,
) -> torch.Tensor:
    """Logits with -inf in place of what top-k, top-p and min-p cut off, for `verify_logits` and `sample_logits`.

    The output then follows the target's law as it is cut, whatever is cut from the draft, of which its tokens are drawn. Tokens
    rank by their logits, and of equal ones by place. top_k is of all of them, and top_p and min_p are of the probabilities,
    those of rule.probabilities, of what it leaves. The first in rank always stays. rule.mask states it in integers, so every
    device cuts the same; nothing waits for the device. Nothing is sorted for min_p alone.

    Parameters
    ----------
    logits
        Shape ``[.., V]``, float32, float16 or bfloat16, last dimension contiguous. NaN counts as -inf.
    temperature
        As in `verify_logits`: a number, or a float32 tensor of shape ``[..]``, taken into ``[2**-60, 2**60]``. None: 1.
    top_k
        The first k stay (Fan et al. 2018). An int, or an int64 or int32 tensor of shape ``[..]``. All stay if it is 0 or less.
    top_p
        A token stays while the probabilities of those ranked before it sum to less than top_p (Holtzman et al. 2020, nucleus
        sampling). A number in ``(0, 1]``, or a float32 tensor of shape ``[..]``; at 1 what has no probability is cut.
    min_p
        A token stays if it has this share of the first's probability, or more (Nguyen et al. 2024). A number in ``[0, 1]``, or
        a float32 tensor of shape ``[..]``.

    Returns
    -------
    torch.Tensor
        New logits of the same shape and dtype.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, dtype, shape or device, or a number out of its range.

    Examples
    --------
    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    >>> sv.mask_logits(logits, top_k=2)
    tensor([[-inf, 3., 2., -inf]])
    >>> sv.mask_logits(logits, top_p=0.7, temperature=2.0)
    tensor([[-inf, 3., 2., -inf]])
    >>> sv.mask_logits(logits, min_p=torch.tensor([0.1]))
    tensor([[1., 3., 2., -inf]])
    """
    leading, device = require_rows("logits", logits, PROBABILITIES, None, "[.., V]"), logits.device
    temperature, one_temperature = number_of(temperature)
    validate_temperature(temperature, one_temperature, leading, "[..]", device)
    if isinstance(top_k, torch.Tensor):
        require("top_k", top_k, INTEGERS, leading, "[..]", device)
    elif top_k is not None:
        require_int("top_k", top_k)
    require_share("top_p", top_p, leading, "[..]", device, more_than_0=True)
    require_share("min_p", min_p, leading, "[..]", device)

    def tensor(x, dtype=torch.float32):
        if isinstance(x, torch.Tensor):
            return x.detach()
        return x if x is None else torch.full(leading, x, dtype=dtype, device=device)

    temperature = tensor(one_temperature if temperature is None else temperature)
    return ops.mask(logits.detach(), temperature, tensor(top_k, torch.int64), tensor(top_p), tensor(min_p))


@torch.no_grad()
def mask(logits, temperature, top_k, top_p, min_p):
    """rule.mask of each row of [.., V], with an entry of [..] of each number, or None."""
    V, ranking = logits.shape[-1], order(logits)
    if top_k is None and top_p is None:
        first = ranking.argmax(-1, keepdim=True)
    else:
        ranks = torch.sort(~ranking, stable=True).indices
        first = ranks[..., :1]
    left = logits.clone()
    if top_k is not None:
        k = torch.where(top_k > 0, top_k, V)[..., None]
        cut_(left, ranks, torch.arange(V, device=logits.device) >= k)
    if top_p is None and min_p is None:
        return left

    # What is not above 0 counts as the least that is.
    P = probabilities(left, torch.where(temperature > 0, temperature, 0))
    if top_p is not None:
        ranked = P.gather(-1, ranks)
        cut_(left, ranks, ranked.cumsum(-1) - ranked >= fixed(top_p).clamp(min=1)[..., None])
    if min_p is not None:
        share, largest = fixed(min_p)[..., None], P.gather(-1, first)
        least = scale(share << 18, largest << 1)  # share * largest >> 44
        least += (share * largest & ONE - 1) > 0  # rounded up
        left.masked_fill_(P < least, -inf)
    return left


def cut_(logits, ranks, is_cut):
    """Put -inf into the logits of those ranks that are cut."""
    logits.masked_fill_(torch.zeros_like(ranks, dtype=torch.bool).scatter_(-1, ranks, is_cut), -inf)


# An operator, because a compiler that fuses float32 operations may round them otherwise.
_library = torch.library.Library(ops.name, "FRAGMENT")
_library.define("mask(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p) -> Tensor")
for key in ("CPU", "CUDA", "XPU"):  # torch's ROCm builds dispatch under CUDA
    _library.impl("mask", mask, key)
torch.library.register_fake(add_op_namespace_prefix("mask"), lambda logits, *_: torch.empty_like(logits))
