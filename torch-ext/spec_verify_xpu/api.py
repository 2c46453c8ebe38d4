"""The public functions: what a user calls, checked before anything runs."""

import time
from typing import Optional, Union

import torch
from torch.compiler import is_compiling

from .ops import Call, VerifyResult, implementation, ops, require_implementation
from .repeats import remember, repeat
from .rule import DRAW, MAX_VOCABULARY, SAMPLE
from .validation import (
    LOGITS,
    PROBABILITIES,
    ROWS,
    SCORES,
    number_of,
    require_int,
    require_rows,
    validate_bonus_tokens,
    validate_dense,
    validate_emit,
    validate_mask,
    validate_outputs,
    validate_ragged,
    validate_randomness,
    validate_temperature,
    validate_tokens_out,
)

NEITHER = None, None


def verify(
    draft_tokens: torch.Tensor,
    draft_probs: Optional[torch.Tensor],
    target_probs: torch.Tensor,
    uniform_accept: Optional[torch.Tensor] = None,
    uniform_sample: Optional[torch.Tensor] = None,
    *,
    lengths: Optional[torch.Tensor] = None,
    greedy: Optional[torch.Tensor] = None,
    bonus_tokens: Optional[torch.Tensor] = None,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Union[int, torch.Tensor, None] = None,
    generator: Optional[torch.Generator] = None,
    dtype: torch.dtype = torch.int64,
    out: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
    num_emitted: Optional[torch.Tensor] = None,
    emitted: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> VerifyResult:
    """Verify K speculative drafts for each of B sequences, and draw the token that follows the accepted ones.

    Draft token t is accepted with probability min(1, p(t) / q(t)), where q is the draft's distribution and p the
    target's. The first rejected position draws from the normalised residual max(0, p - q); if all stand, the bonus token
    is drawn from the target's last row. The output follows the target's distribution (Leviathan et al. 2023, algorithm 1;
    Chen et al. 2023, algorithm 2). The arithmetic is on integers, so every implementation and device gives the same
    tokens for the same uniforms; rule.py states it. Inputs are never written, and nothing waits for the device.

    Parameters
    ----------
    draft_tokens
        Drafted token ids. Shape ``[B, K]``, int64 or int32. An id outside ``[0, V_draft)``, such as a -1 that pads, ends
        the draft there: the next token is drawn from the target's row, nothing subtracted. K is at most 2**14.
    draft_probs
        The distributions that the drafts were drawn from. Shape ``[B, K, V_draft]``, float32, float16 or bfloat16, rows
        that sum to 1, last dimension contiguous. None for drafts without probabilities (n-gram, prompt lookup): each
        draft then counts as certain.
    target_probs
        The target's distributions at each draft and after the last. Shape ``[B, K + 1, V]``, likewise. V may differ from
        V_draft; a token outside a vocabulary has probability 0 there. Both are at most 2**19 - 1.
    uniform_accept
        Randomness of the acceptance tests. Shape ``[B, K]``, float32 or float64 in ``[0, 1)``, or int64 random bits, of
        which 63 are used. None: 63 bits each are drawn here. A float32 resolves 2**-24, so pass int64 where that matters.
    uniform_sample
        Randomness of the draws, one for each position where the draft can end. Shape ``[B, K + 1]``, dtype as above.
    lengths
        How many of each sequence's drafts count. Shape ``[B]``, int64 or int32, clamped to ``[0, K]``. None: all K. Whether a
        draft counts must not depend on which token it is, only on what was known before it was drawn, or the output is biased.
    greedy
        Which sequences are verified as `verify_greedy` does, without chance. Shape ``[B]``, bool. Their draft_probs and
        randomness are not looked at. None: none of them.
    bonus_tokens
        The next token of each sequence whose drafts all stand, where it is drawn elsewhere. Shape ``[B]``, int64 or int32, any
        numbers. target_probs then has the drafts' rows alone, ``[B, K, V]``. None: drawn here, from the last row.
    seed, offset
        In place of uniforms: 63 bits a draw from Philox-4x32-10 (Salmon et al. 2011), computed where they are used from the
        sequence's seed and offset and the position alone (docs/SERVING.md has the layout), so the same rows and drafts get the
        same tokens in whatever batch and on whatever device. Ints, or int64 tensors of shape ``[B]``, of any value. Each step
        of a request needs another offset; the length of its text will do. Sequences of equal seed and offset share their
        draws, so give each its own seed. The offset is 0 where only a seed is given.
    generator
        The source of the uniforms that are drawn here. None: the device's default. torch cannot trace a generator: with
        ``torch.compile(fullgraph=True)`` it is an error of torch's.
    dtype
        That of the result, int64 or int32, where no out is given.
    out
        Two tensors of shape ``[B]``, int64 or int32, contiguous, which are written and returned as the result. Like the next
        two they must share no memory with one another or with the inputs.
    num_emitted
        A tensor that is written with how many tokens a sequence gets: accepted + 1. Shape ``[B]``, int64 or int32, contiguous.
    emitted
        A tensor that the verification itself writes with what `emit` returns: the accepted drafts, the next token, and -1 in
        what is left. Shape ``[B, K + 1]``, int64 or int32, last dimension contiguous.
    impl
        "triton", "numba" (CPU), "eager" (vectorised torch) or "reference" (rule.py), which never fall back to another;
        "auto" takes Triton on a GPU and Numba on the CPU where they are installed, and eager elsewhere.

    Returns
    -------
    VerifyResult
        accepted ``[B]`` in ``[0, K]`` and next_token ``[B]`` in ``[0, V)``, or the bonus token as it is. A row without any mass
        gives token 0. Where no out is given they may share an allocation of up to 2 MB with the call's scratch on NVIDIA: copy
        what is kept for long.

    Raises
    ------
    TypeError
        An argument of the wrong type or dtype.
    ValueError
        A wrong shape, device, stride or combination, or an implementation that is unknown or cannot run on these tensors.

    Examples
    --------
    Token 1 stands, since the target likes it more than the draft did. Token 0 does not: the target never says it, so the
    next token comes from what the target has beyond the draft, which is all on token 2.

    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> draft = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    >>> target = torch.tensor([[[0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]])
    >>> sv.verify(torch.tensor([[1, 0]]), draft, target)
    VerifyResult(accepted=tensor([1]), next_token=tensor([2]))
    """
    accepted, next_token = NEITHER if out is None else pair_of(out)
    return run(dense_call, out, generator, (
        draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, seed, offset, lengths, None, greedy,
        bonus_tokens, None, None, None, num_emitted, emitted, accepted, next_token, dtype, impl, None, False, 1.0,
    ))  # fmt: skip


def verify_varlen(
    draft_tokens: torch.Tensor,
    draft_probs: Optional[torch.Tensor],
    target_probs: torch.Tensor,
    cu_drafts: torch.Tensor,
    max_drafts: int,
    uniform_accept: Optional[torch.Tensor] = None,
    uniform_sample: Optional[torch.Tensor] = None,
    *,
    greedy: Optional[torch.Tensor] = None,
    bonus_tokens: Optional[torch.Tensor] = None,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Union[int, torch.Tensor, None] = None,
    generator: Optional[torch.Generator] = None,
    dtype: torch.dtype = torch.int64,
    out: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
    num_emitted: Optional[torch.Tensor] = None,
    emitted: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> VerifyResult:
    """Verify B sequences with drafts of different lengths that stand one behind the other, T drafts in all.

    Sequence b has the drafts from ``cu_drafts[b]`` to ``cu_drafts[b + 1]``, and one row of the target more than drafts, from
    row ``cu_drafts[b] + b`` on. It gets the tokens that `verify` gives it alone. Arguments that are not listed, the result
    and the errors are those of `verify`.

    Parameters
    ----------
    draft_tokens
        Shape ``[T]``, int64 or int32.
    draft_probs
        Shape ``[T, V_draft]``, or None.
    target_probs
        Shape ``[T + B, V]``.
    cu_drafts
        How many drafts stand before each sequence's own, and T last. Shape ``[B + 1]``, int64 or int32. It stays on the
        device. Offsets are clamped to ``[0, T]``, and a sequence that ends before it starts has no drafts. How many a sequence
        has must not depend on which tokens they are: see lengths of `verify`.
    max_drafts
        K, the most drafts that count of a sequence. An int, at most 2**14.
    uniform_accept
        Shape ``[T]``.
    uniform_sample
        Shape ``[T + B]``.
    bonus_tokens
        As in `verify`: target_probs is then ``[T, V]``, and the rows of sequence b start at ``cu_drafts[b]``.
    emitted
        Shape ``[B, max_drafts + 1]``.

    Examples
    --------
    The first sequence has no drafts, the second the two of `verify`'s example.

    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> draft = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    >>> target = torch.tensor([[0.0, 1.0, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    >>> sv.verify_varlen(torch.tensor([1, 0]), draft, target, torch.tensor([0, 0, 2]), max_drafts=2)
    VerifyResult(accepted=tensor([0, 1]), next_token=tensor([1, 2]))
    """
    accepted, next_token = NEITHER if out is None else pair_of(out)
    return run(ragged_call, out, generator, (
        draft_tokens, draft_probs, target_probs, uniform_accept, uniform_sample, seed, offset, None, cu_drafts, greedy,
        bonus_tokens, None, None, None, num_emitted, emitted, accepted, next_token, dtype, impl, max_drafts, False, 1.0,
    ))  # fmt: skip


def verify_logits(
    draft_tokens: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    target_logits: torch.Tensor,
    uniform_accept: Optional[torch.Tensor] = None,
    uniform_sample: Optional[torch.Tensor] = None,
    *,
    temperature: Union[float, torch.Tensor, None] = None,
    draft_temperature: Union[float, torch.Tensor, None] = None,
    draft_slots: Optional[torch.Tensor] = None,
    lengths: Optional[torch.Tensor] = None,
    greedy: Optional[torch.Tensor] = None,
    bonus_tokens: Optional[torch.Tensor] = None,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Union[int, torch.Tensor, None] = None,
    generator: Optional[torch.Generator] = None,
    dtype: torch.dtype = torch.int64,
    out: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
    num_emitted: Optional[torch.Tensor] = None,
    emitted: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> VerifyResult:
    """Verify drafts as `verify` does, from logits: q and p are the softmax of logits / temperature, in integers.

    The softmax is rule.probabilities, in which every implementation and device gets the same 44 bits of each probability, and
    rows whose probabilities sum to the same exactly, so that the output law is that of the target's integers with nothing lost.
    No probabilities are written to memory. Arguments that are not listed, the result and the errors are those of `verify`.

    Parameters
    ----------
    draft_logits
        Shape ``[B, K, V_draft]``, float32, float16 or bfloat16, last dimension contiguous. None for drafts that are certain.
        -inf masks a token, NaN too; +inf shares all probability with its equals. A row of -inf has no probability anywhere.
    target_logits
        Shape ``[B, K + 1, V]``, likewise.
    temperature
        What logits of draft and target are divided by: a number, or a float32 tensor of shape ``[B]``, taken into
        ``[2**-60, 2**60]``. 0 verifies as `verify_greedy` does; of a tensor, so does all that is not above 0. None: 1.
    draft_temperature
        What the draft's logits are divided by in its place, given likewise. Which sequences are greedy it does not say: what is
        not above 0 counts as 2**-60. A number is made a tensor in the call. None: temperature.
    draft_slots
        Where each sequence's rows are in draft_logits that are kept by request: those of sequence b are the first of slot
        ``draft_slots[b]``. Shape ``[B]``, int64 or int32, clamped to ``[0, S - 1]``. draft_logits is then ``[S, D, V_draft]``,
        with S at least 1 and D at least K. None: they are in the order of the batch.

    Examples
    --------
    >>> import math, torch
    >>> import spec_verify_xpu as sv
    >>> draft = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf]]])
    >>> target = torch.tensor([[[0.0, 2.0, -math.inf], [-math.inf, -math.inf, 0.0], [0.0, 0.0, 0.0]]])
    >>> sv.verify_logits(torch.tensor([[1, 0]]), draft, target, temperature=0.7)
    VerifyResult(accepted=tensor([1]), next_token=tensor([2]))
    """
    temperature, one_temperature = number_of(temperature)
    accepted, next_token = NEITHER if out is None else pair_of(out)
    return run(dense_call, out, generator, (
        draft_tokens, draft_logits, target_logits, uniform_accept, uniform_sample, seed, offset, lengths, None, greedy,
        bonus_tokens, temperature, draft_slots, draft_temperature, num_emitted, emitted, accepted, next_token, dtype, impl,
        None, True, one_temperature,
    ))  # fmt: skip


def verify_logits_varlen(
    draft_tokens: torch.Tensor,
    draft_logits: Optional[torch.Tensor],
    target_logits: torch.Tensor,
    cu_drafts: torch.Tensor,
    max_drafts: int,
    uniform_accept: Optional[torch.Tensor] = None,
    uniform_sample: Optional[torch.Tensor] = None,
    *,
    temperature: Union[float, torch.Tensor, None] = None,
    draft_temperature: Union[float, torch.Tensor, None] = None,
    draft_slots: Optional[torch.Tensor] = None,
    greedy: Optional[torch.Tensor] = None,
    bonus_tokens: Optional[torch.Tensor] = None,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Union[int, torch.Tensor, None] = None,
    generator: Optional[torch.Generator] = None,
    dtype: torch.dtype = torch.int64,
    out: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
    num_emitted: Optional[torch.Tensor] = None,
    emitted: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> VerifyResult:
    """As `verify_logits`, for sequences that stand one behind the other: shapes and cu_drafts are those of `verify_varlen`.

    Parameters
    ----------
    draft_logits
        Shape ``[T, V_draft]``, or None. With draft_slots ``[S, D, V_draft]``, with D at least max_drafts and 1, or T.
    target_logits
        Shape ``[T + B, V]``.

    Examples
    --------
    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> target = torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    >>> sv.verify_logits_varlen(torch.tensor([0]), None, target, torch.tensor([0, 0, 1]), max_drafts=1, temperature=0)
    VerifyResult(accepted=tensor([0, 1]), next_token=tensor([1, 1]))
    """
    temperature, one_temperature = number_of(temperature)
    accepted, next_token = NEITHER if out is None else pair_of(out)
    return run(ragged_call, out, generator, (
        draft_tokens, draft_logits, target_logits, uniform_accept, uniform_sample, seed, offset, None, cu_drafts, greedy,
        bonus_tokens, temperature, draft_slots, draft_temperature, num_emitted, emitted, accepted, next_token, dtype, impl,
        max_drafts, True, one_temperature,
    ))  # fmt: skip


def verify_greedy(
    draft_tokens: torch.Tensor,
    target: torch.Tensor,
    *,
    lengths: Optional[torch.Tensor] = None,
    dtype: torch.dtype = torch.int64,
    out: Optional[tuple[torch.Tensor, torch.Tensor]] = None,
    num_emitted: Optional[torch.Tensor] = None,
    emitted: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> VerifyResult:
    """Verify drafts without chance: a draft is accepted while it is the argmax of its row.

    The next token is the argmax of the row where that ends. Of equal entries the first is the largest; NaN is less than any
    number. Arguments that are not listed, the result and the errors are those of `verify`.

    Parameters
    ----------
    draft_tokens
        Shape ``[B, K]``, int64 or int32.
    target
        Probabilities or logits, of which only the order counts. Shape ``[B, K + 1, V]``, float32, float16, bfloat16 or
        float64, last dimension contiguous.

    Examples
    --------
    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> sv.verify_greedy(torch.tensor([[1, 0]]), torch.tensor([[[0.0, 2.0], [0.0, 1.0], [1.0, 1.0]]]))
    VerifyResult(accepted=tensor([1]), next_token=tensor([1]))
    """
    B, K = validate_dense(draft_tokens, None, target, lengths, ("", "target"), SCORES)
    result = result_of(out, num_emitted, emitted, dtype, B, K, target.device)
    require_implementation(impl)
    no_chance = [None] * 4
    options = lengths, None, K, None, None, False, None, 1.0, None, None, num_emitted, emitted
    ops.verify(draft_tokens, None, target, *no_chance, SAMPLE, *options, *result, impl)
    return VerifyResult(*result)


def sample(
    probs: torch.Tensor,
    uniform: Optional[torch.Tensor] = None,
    *,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Union[int, torch.Tensor, None] = None,
    generator: Optional[torch.Generator] = None,
    dtype: torch.dtype = torch.int64,
    out: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Draw a token from each row of probs: the draw of `verify`, on its own.

    A drafter that draws with it draws from exactly the integers that `verify` tests. Arguments that are not listed and the
    errors are those of `verify`.

    Parameters
    ----------
    probs
        Shape ``[.., V]``, float32, float16 or bfloat16, last dimension contiguous. Copied where torch cannot see its leading
        dimensions as one.
    uniform
        Shape ``[..]``, that of probs without its last dimension: float32 or float64 in ``[0, 1)``, or int64 random bits.
    seed, offset
        Ints, or int64 tensors of shape ``[..]``. The draws are independent of what `verify` makes of the same numbers, but
        rows of equal seed and offset share theirs: draft i of a step takes offset + i where the offset is the length of the
        text, and step * K + i where it counts steps.
    out
        Shape ``[..]``, int64 or int32, contiguous: written and returned.

    Returns
    -------
    torch.Tensor
        Token ids, ``[..]`` in ``[0, V)``. A row without any mass gives token 0.

    Examples
    --------
    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> sv.sample(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0.4, 0.4]))
    tensor([0, 1])
    """
    return sample_rows("probs", probs, uniform, False, None, seed, offset, generator, dtype, out, impl)


def sample_logits(
    logits: torch.Tensor,
    uniform: Optional[torch.Tensor] = None,
    *,
    temperature: Union[float, torch.Tensor, None] = None,
    seed: Union[int, torch.Tensor, None] = None,
    offset: Union[int, torch.Tensor, None] = None,
    generator: Optional[torch.Generator] = None,
    dtype: torch.dtype = torch.int64,
    out: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Draw a token from the softmax of each row of logits / temperature: the draw of `verify_logits`, on its own.

    A drafter that draws with it draws from exactly the integers that `verify_logits` tests. Arguments that are not listed, the
    result and the errors are those of `sample`.

    Parameters
    ----------
    logits
        Shape ``[.., V]``, as those of `verify_logits`.
    temperature
        As in `verify_logits`: a number, or a float32 tensor of shape ``[..]``. Where it is 0, the token is the argmax.

    Examples
    --------
    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> sv.sample_logits(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), torch.tensor([0.4, 0.4]))
    tensor([0, 1])
    """
    return sample_rows("logits", logits, uniform, True, temperature, seed, offset, generator, dtype, out, impl)


def sample_rows(name, rows, uniform, logits, temperature, seed, offset, generator, dtype, out, impl):
    """Draw from rows, which the caller knows by this name."""
    leading, device = require_rows(name, rows, PROBABILITIES, None, "[.., V]"), rows.device
    temperature, one_temperature = number_of(temperature)
    validate_temperature(temperature, one_temperature, leading, "[..]", device)
    numbers = randomness_of({"uniform": (uniform, leading, "[..]")}, seed, offset, generator, leading, "[..]", device)
    validate_tokens_out(out, dtype, leading, "[..]", device)
    require_implementation(impl)
    tokens = torch.empty(leading, dtype=dtype, device=device) if out is None else out
    R = tokens.numel()  # each row is a sequence without drafts
    no_drafts, accepted = (torch.empty(shape, dtype=torch.int64, device=device) for shape in ((R, 0), (R,)))
    uniform, seed, offset, temperature = (x if x is None else x.reshape(R) for x in (*numbers, temperature))
    # The acceptance uniforms, of which there are none, are given all the same: without any, sequences would be greedy.
    columns = (None, None) if uniform is None else (uniform.view(R, 1).narrow(1, 0, 0), uniform.view(R, 1))
    inputs = no_drafts, None, rows.reshape(R, 1, rows.shape[-1]), *columns, seed, offset, DRAW, None, None, 0, None, None
    ops.verify(*inputs, logits, temperature, one_temperature, *[None] * 4, accepted, tokens.view(R), impl)
    return tokens


def emit(
    draft_tokens: torch.Tensor,
    accepted: torch.Tensor,
    next_token: torch.Tensor,
    pad: int = -1,
    *,
    out: Optional[torch.Tensor] = None,
    impl: str = "auto",
) -> torch.Tensor:
    """The tokens of a step: each sequence's accepted drafts, its next token, and padding.

    Parameters
    ----------
    draft_tokens
        Shape ``[B, K]``, int64 or int32.
    accepted, next_token
        What `verify` returned. Shape ``[B]``, int64 or int32; accepted is clamped to ``[0, K]``.
    pad
        What stands behind the next token.
    out
        Shape ``[B, K + 1]``, int64 or int32, last dimension contiguous: written and returned. None: a new tensor of
        next_token's dtype.
    impl
        As in `verify`, whose ``emitted`` saves this call.

    Returns
    -------
    torch.Tensor
        Token ids, ``[B, K + 1]``.

    Examples
    --------
    >>> import torch
    >>> import spec_verify_xpu as sv
    >>> sv.emit(torch.tensor([[7, 8, 9], [4, 5, 6]]), torch.tensor([1, 3]), torch.tensor([2, 3]))
    tensor([[ 7,  2, -1, -1],
            [ 4,  5,  6,  3]])
    """
    B, K = validate_emit(draft_tokens, accepted, next_token, pad, out)
    require_implementation(impl)
    tokens = torch.empty(B, K + 1, dtype=next_token.dtype, device=next_token.device) if out is None else out
    ops.emit(draft_tokens, accepted, next_token, pad, tokens, impl)
    return tokens


def warmup(
    device: Union[str, torch.device],
    *,
    draft_tokens: torch.dtype = torch.int64,
    draft_probs: Optional[torch.dtype] = torch.float32,
    target_probs: torch.dtype = torch.float32,
    uniforms: Optional[torch.dtype] = None,
    seed: bool = False,
    lengths: Optional[torch.dtype] = None,
    cu_drafts: Optional[torch.dtype] = None,
    greedy: bool = False,
    bonus_tokens: Optional[torch.dtype] = None,
    num_emitted: Optional[torch.dtype] = None,
    emitted: Optional[torch.dtype] = None,
    logits: bool = False,
    temperature: bool = False,
    draft_temperature: bool = False,
    draft_slots: Optional[torch.dtype] = None,
    dtype: torch.dtype = torch.int64,
    vocabulary: Optional[int] = None,
    impl: str = "auto",
) -> float:
    """Compile ahead of the first request, or load what an earlier process compiled: all that calls of these dtypes need.

    They then compile nothing, whatever the batch, the number of drafts from 1 to 31, and the vocabulary. For NVIDIA 8 kernels
    are compiled at most, 18 from logits. The parameters are named as those of `verify` and `verify_varlen`: the dtype of each
    tensor that calls bring, None or False for what they leave out.

    Parameters
    ----------
    device
        Where calls will run.
    uniforms
        The dtype of both uniforms. None: they are drawn in the call.
    seed
        Whether calls bring seeds in place of uniforms.
    cu_drafts
        Its dtype for calls of `verify_varlen`, None for those of `verify`.
    logits, temperature, draft_temperature
        Whether calls are those of `verify_logits`, whose rows have the dtypes draft_probs and target_probs; and whether they
        bring temperatures, those of all rows as tensors, the draft's own as tensors or numbers. These, and draft_slots, are
        for logits alone.
    vocabulary
        V, where it is known: what other vocabularies need is left out. None: any.

    Returns
    -------
    float
        The seconds that it took.

    Examples
    --------
    >>> import spec_verify_xpu as sv
    >>> sv.warmup("cpu", impl="eager") < 1  # which has nothing to compile
    True
    """
    start = time.perf_counter()
    if vocabulary is not None:
        require_int("vocabulary", vocabulary, 1, MAX_VOCABULARY)
    refused = (
        ("temperature", temperature, not logits, "without logits"),
        ("draft_temperature", draft_temperature, not logits, "without logits"),
        ("draft_slots", draft_slots, not logits, "without logits"),
        ("uniforms", uniforms, seed, "beside a seed"),
        ("lengths", lengths, cu_drafts, "beside cu_drafts"),
    )
    for name, given, is_wrong, where in refused:
        if given and is_wrong:
            raise ValueError(f"{name}: expected nothing {where}, got {given}")

    def tensor(name, dtype, *shape):
        if dtype is None:
            return None
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}: expected a torch.dtype or None, got {dtype!r}")
        return torch.zeros(shape, dtype=dtype, device=device)

    drafts, rows = ((3,), (4,)) if cu_drafts else ((1, 3), (1, 4))  # one sequence, whose rows go in two stages
    numbers = torch.int64 if seed else None
    inputs = (
        tensor("draft_tokens", draft_tokens, *drafts),
        tensor("draft_probs", draft_probs, *((1, 3) if draft_slots else drafts), 16),  # as many entries as are read at once
        tensor("target_probs", target_probs, *(drafts if bonus_tokens else rows), 16),
        tensor("uniforms", uniforms, *drafts),
        tensor("uniforms", uniforms, *rows),
        tensor("seed", numbers, 1),
        tensor("offset", numbers, 1),
        tensor("lengths", lengths, 1),
        tensor("cu_drafts", cu_drafts, 2),
        tensor("greedy", torch.bool if greedy else None, 1),
        tensor("bonus_tokens", bonus_tokens, 1),
        tensor("temperature", torch.float32 if temperature else None, 1),
        tensor("draft_slots", draft_slots, 1),
        tensor("draft_temperature", torch.float32 if draft_temperature else None, 1),
    )
    more = None, dtype, None, tensor("num_emitted", num_emitted, 1), tensor("emitted", emitted, 1, 4), impl
    call = ragged_call(inputs, logits, 1.0, 3, *more) if cu_drafts else dense_call(inputs, logits, 1.0, None, *more)
    module = implementation(call.accepted.device.type, impl)
    if hasattr(module, "warmup"):
        module.warmup(call, vocabulary)
    if call.accepted.device.type != "cpu":
        torch.get_device_module(call.accepted.device).synchronize(call.accepted.device)
    return time.perf_counter() - start


def pair_of(out):
    """Two tensors that were given as out. What cannot be right is given back twice, for the validation to refuse it."""
    is_pair = isinstance(out, (tuple, list)) and len(out) == 2 and out[0] is not None and out[1] is not None
    return tuple(out) if is_pair else (out, out)


def run(call_of_inputs, out, generator, arguments):
    """The result of a call: one of a known layout, or else validated, run, and kept to make the next of its layout cheap.

    Its arguments are as `repeat` has them: each function makes them at once, since that is a part of the host's time.
    """
    if generator is None and (result := repeat(arguments)):
        return result
    *inputs, num_emitted, emitted, _, _, dtype, impl, max_drafts, logits, one_temperature = arguments
    call = call_of_inputs(inputs, logits, one_temperature, max_drafts, generator, dtype, out, num_emitted, emitted, impl)
    ops.verify(*call, impl)
    if not is_compiling():
        remember(arguments, call, impl)
    return VerifyResult(call.accepted, call.next_token)


def dense_call(inputs, logits, one_temperature, _, *options):
    """The call of dense inputs, validated."""
    draft_tokens, draft, target, uniform_accept, uniform_sample, _, _, lengths, _, _, bonus_tokens, _, slots, _ = inputs
    names = LOGITS if logits else ROWS
    B, K = validate_dense(draft_tokens, draft, target, lengths, names, bonus_tokens=bonus_tokens, draft_slots=slots)
    return call_of(inputs, dense_uniforms(uniform_accept, uniform_sample, B, K), B, K, logits, one_temperature, *options)


def ragged_call(inputs, logits, one_temperature, max_drafts, *options):
    """Likewise, of ragged ones."""
    draft_tokens, draft, target, uniform_accept, uniform_sample, _, _, _, cu_drafts, _, bonus_tokens, _, slots, _ = inputs
    names = LOGITS if logits else ROWS
    T, B = validate_ragged(draft_tokens, draft, target, cu_drafts, max_drafts, names, bonus_tokens, slots)
    uniforms = {
        "uniform_accept": (uniform_accept, (T,), "[T]"),
        "uniform_sample": (uniform_sample, (T + B,), "[T + B]"),
    }
    return call_of(inputs, uniforms, B, max_drafts, logits, one_temperature, *options)


def call_of(inputs, uniforms, B, K, logits, one_temperature, generator, dtype, out, num_emitted, emitted, impl):
    """The call of inputs whose rows are validated, with what else they say, and the outputs."""
    draft_tokens, draft, target, _, _, seed, offset, *counts, temperature, draft_slots, draft_temperature = inputs
    lengths, cu_drafts, greedy, bonus_tokens = counts
    randomness = randomness_of(uniforms, seed, offset, generator, (B,), "[B]", target.device)
    validate_mask(greedy, B, target.device)
    validate_bonus_tokens(bonus_tokens, B, target.device)
    validate_temperature(temperature, one_temperature, (B,), "[B]", target.device)
    draft_temperature = draft_temperature_of(draft_temperature, draft, B, target.device)
    accepted, next_token = result_of(out, num_emitted, emitted, dtype, B, K, target.device)
    require_implementation(impl)
    options = lengths, cu_drafts, K, greedy, bonus_tokens, logits, temperature, one_temperature, draft_slots, draft_temperature
    return Call(draft_tokens, draft, target, *randomness, SAMPLE, *options, num_emitted, emitted, accepted, next_token)


def draft_temperature_of(temperature, draft, B, device):
    """A tensor [B] of what is given as the draft's own temperature, or None."""
    if temperature is None:
        return None
    if draft is None:
        raise ValueError(f"draft_temperature: expected None without draft_logits, got {type(temperature).__name__}")
    temperature, number = number_of(temperature)
    validate_temperature(temperature, number, (B,), "[B]", device, "draft_temperature")
    return torch.full((B,), number, dtype=torch.float32, device=device) if temperature is None else temperature


def dense_uniforms(uniform_accept, uniform_sample, B, K):
    """What `verify` and `check` ask of their uniforms, as randomness_of takes it."""
    return {
        "uniform_accept": (uniform_accept, (B, K), "[B, K]"),
        "uniform_sample": (uniform_sample, (B, K + 1), "[B, K + 1]"),
    }


def randomness_of(uniforms, seed, offset, generator, leading, meaning, device):
    """The operator's randomness: each of the uniforms {name: (tensor, shape, meaning)}, then seed and offset [leading].

    Uniforms that are None are drawn, unless there is a seed.
    """
    validate_randomness(uniforms, seed, offset, generator, leading, meaning, device)
    if seed is None:
        drawn = (random_bits(shape, device, generator) if x is None else x for x, shape, _ in uniforms.values())
        return *drawn, None, None
    offset = 0 if offset is None else offset
    numbers = (
        x if isinstance(x, torch.Tensor) else torch.full(leading, x, dtype=torch.int64, device=device) for x in (seed, offset)
    )
    return *(None for _ in uniforms), *numbers


def random_bits(shape, device, generator):
    """63 random bits for each entry of an int64 tensor."""
    bits = torch.empty(shape, dtype=torch.int64, device=device)
    if torch.compiler.is_compiling() and generator is None:  # it knows the functional form only, ten times slower elsewhere
        return torch.ops.aten.random(bits)
    return bits.random_(generator=generator)


def result_of(out, num_emitted, emitted, dtype, B, K, device):
    """accepted and next_token, to be written: the caller's tensors, or new ones."""
    validate_outputs(out, num_emitted, emitted, dtype, B, K, device)
    return [torch.empty(B, dtype=dtype, device=device) for _ in range(2)] if out is None else out


def check(
    draft_tokens: torch.Tensor,
    draft_probs: Optional[torch.Tensor],
    target_probs: torch.Tensor,
    uniform_accept: Optional[torch.Tensor] = None,
    uniform_sample: Optional[torch.Tensor] = None,
    *,
    lengths: Optional[torch.Tensor] = None,
) -> None:
    """Check the contents of `verify`'s arguments, which `verify` itself does not read ahead (that would wait for the device).

    Every probability row that `lengths` lets count must be finite, not negative, and sum to 1 within what rounding to its
    dtype and a float32 softmax can cost: 1e-4 in float32, 2**-7 in bfloat16, 2**-10 + V * 2**-25 in float16. Float
    uniforms must lie in [0, 1). Ids are not checked: one outside the vocabulary is a placeholder.

    Raises
    ------
    TypeError, ValueError
        As `verify`, and ValueError with the index of the first row that is wrong.
    """
    B, K = validate_dense(draft_tokens, draft_probs, target_probs, lengths)
    uniforms = dense_uniforms(uniform_accept, uniform_sample, B, K)
    validate_randomness(uniforms, None, None, None, (B,), "[B]", target_probs.device)
    counted = torch.full((B,), K, device=target_probs.device) if lengths is None else lengths.clamp(0, K)
    for name, probs, rows in (("draft_probs", draft_probs, counted), ("target_probs", target_probs, counted + 1)):
        if probs is not None:
            check_rows(name, probs, torch.arange(probs.shape[1], device=probs.device) < rows[:, None])
    for name, (x, _, _) in uniforms.items():
        if x is not None and x.is_floating_point():
            report_first(name, ~((x >= 0) & (x < 1)), x, "a uniform in [0, 1)")


def check_rows(name, probs, counted):
    """Raise for the first row of probs [B, rows, V], of those that are counted [B, rows], that is no distribution."""
    info = torch.finfo(probs.dtype)
    tolerance = max(1e-4, info.eps) + probs.shape[2] * info.smallest_normal * info.eps / 2
    sums = probs.sum(-1, dtype=torch.float32)
    report_first(name, counted & ~probs.isfinite().all(-1), sums, "finite entries, in a row that sums to 1")
    report_first(name, counted & (probs < 0).any(-1), probs.amin(-1), "no negative entry")
    report_first(name, counted & ((sums - 1).abs() > tolerance), sums, f"a row that sums to 1 within {tolerance:.1e}")


def report_first(name, wrong, values, expected):
    if wrong.any():
        index = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}{index}: expected {expected}, got {values[tuple(index)].item()}")
