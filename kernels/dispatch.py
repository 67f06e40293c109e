"""Which kernel serves a decode step, and why: decided from what is known before any launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .decode_call import DecodeCall, sequence_tokens
from .latent_heads import Rotation
from .stored_tokens import DecodePart, KeyNormWeights
from .triton_support import triton_obstacle


# Longer queries expand K and V once instead: from here on the expansion is cheaper than attention in latent space.
MAX_QUERY_TOKENS = 16
MAX_HEAD_DIM = 256
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TORCH_PREFERRED = "the torch path was asked for"
PREFERENCES = ("auto", "general", "torch")


class Choice(NamedTuple):
    """What runs a decode step.

    Attributes:
        kernel: "position_query", "tile_reconstruction", "general" or "torch" (no kernel).
        reason: why, in words.
    """

    kernel: str
    reason: str


class DecodeStep(NamedTuple):
    """What a choice depends on.

    Attributes:
        device, dtype: of the query.
        query_tokens, query_heads, heads, head_dim: N, Hq, the layer's KV heads, D.
        rotated, bias, norm: whether keys are rotated, have a bias, are normalised after they are expanded.
        interleaved, softcap: whether pairs of neighbours are rotated, and scores are capped; of a model's step alone.
        gradients: whether any are needed.
        obstacle: what else stands against a kernel, in words; None for nothing.
        capability: of a GPU to choose for in place of the device, such as (9, 0), or None.
        forms: width, code, bits and groups of what is stored, see `StoredTokens`; one each for keys and values that
            lie in one run each, none where they lie in several or where the operands are asked.
    """

    device: torch.device
    dtype: torch.dtype
    query_tokens: int
    query_heads: int
    heads: int
    head_dim: int
    rotated: bool = False
    bias: bool = False
    norm: bool = False
    interleaved: bool = False
    softcap: bool = False
    gradients: bool = False
    obstacle: str | None = None
    capability: tuple[int, int] | None = None
    forms: tuple[tuple[int, str, int, int], ...] = ()


class _Preference:
    kernel = "auto"


_preference = _Preference()


@contextmanager
def use(kernel: str) -> Iterator[None]:
    """Have all threads choose otherwise inside.

    Args:
        kernel: "auto" (the best there is), "general" (no specialised kernel) or "torch" (no kernel).

    Raises:
        ValueError: another name.
    """
    if kernel not in PREFERENCES:
        raise ValueError(f"kernels.use: kernel={kernel!r} is not allowed; allowed: one of {PREFERENCES}")
    before, _preference.kernel = _preference.kernel, kernel
    try:
        yield
    finally:
        _preference.kernel = before


def device_obstacle(device: torch.device) -> str | None:
    """Why no kernel runs on a device now; None where kernels run."""
    return TORCH_PREFERRED if torch_preferred() else triton_obstacle(device)


def torch_preferred() -> bool:
    """Whether `use("torch")` holds: it concerns all kernels, those that code and read a cache's tokens too."""
    return _preference.kernel == "torch"


def kernels_can_run() -> bool:
    """Whether there is a device for kernels."""
    cuda = torch.cuda.is_available() and triton_obstacle(torch.device("cuda")) is None
    return cuda or triton_obstacle(torch.device("cpu")) is None


def choose_for(step: DecodeStep) -> Choice:
    """The kernel of a step."""
    if step.capability is None:
        obstacle = device_obstacle(step.device)
    else:
        obstacle = TORCH_PREFERRED if torch_preferred() else None
    if obstacle is None and step.gradients:
        obstacle = "gradients are needed"
    if obstacle is None and step.query_tokens > MAX_QUERY_TOKENS:
        obstacle = f"query of {step.query_tokens} tokens: kernels take up to {MAX_QUERY_TOKENS}"
    if obstacle is None and step.dtype not in QUERY_DTYPES:
        obstacle = f"query of {str(step.dtype).removeprefix('torch.')}"
    if obstacle is None and step.head_dim > MAX_HEAD_DIM:
        obstacle = f"head_dim={step.head_dim}: kernels take up to {MAX_HEAD_DIM}"
    obstacle = obstacle or step.obstacle
    if obstacle is not None:
        return Choice("torch", obstacle)
    if not step.forms:
        return Choice("general", "it takes any shape")
    return kernel_of_step(step)


def kernel_of_step(step: DecodeStep) -> Choice:
    """The kernel for one run of keys and of values, as far as a step tells without its operands."""
    from .hopper_operands import capability_obstacle, fast_kernel, form_obstacle, hopper_obstacle

    group = step.query_heads // step.heads
    name = fast_kernel(group)
    obstacle = "the general kernel was asked for" if _preference.kernel == "general" else None
    if obstacle is None and step.capability is not None:
        obstacle = capability_obstacle(step.capability)
    elif obstacle is None:
        obstacle = hopper_obstacle(step.device)
    if obstacle is None and not step.rotated:
        obstacle = "keys are not rotated"
    if obstacle is None and (step.interleaved or step.softcap):
        obstacle = "rotation of pairs of neighbours" if step.interleaved else "there is a softcap"
    if obstacle is None:
        obstacle = form_obstacle(step.head_dim, step.dtype, group, step.forms, step.bias, step.norm)
    if obstacle is not None:
        return Choice("general", f"{name}: {obstacle}")
    return Choice(name, f"{step.query_heads} query heads over {step.heads} heads")


def kernel_of(part: DecodePart, call: DecodeCall) -> Choice:
    """The kernel for one part of checked operands; never "torch"."""
    from .hopper_launch import plan_of
    from .hopper_operands import fast_kernel

    if _preference.kernel == "general":
        return Choice("general", f"{fast_kernel(call.group)}: the general kernel was asked for")
    plan = plan_of(part, call)
    if plan.obstacle is not None:
        return Choice("general", f"{plan.kernel}: {plan.obstacle}")
    return Choice(plan.kernel, f"{call.query.shape[1]} query heads over {call.kv_heads} heads")


def choose(
    query: Tensor,
    parts: Sequence[DecodePart] | str,
    rotation: Rotation | None = None,
    *,
    norm: KeyNormWeights | None = None,
    mask: Tensor | None = None,
    heads: int | None = None,
) -> Choice:
    """The kernel that `fused_attention` of these operands would run, or "torch" where it should not be called.

    Args:
        query: `[B, Hq, N, D]`.
        parts: as `fused_attention` takes them, or why there are none.
        rotation, norm, mask: as `fused_attention` takes them.
        heads: of the layer; None: as many as the parts have.

    Returns:
        Kernels of several parts are named with " + " between.
    """
    choice = choose_for(step_of(query, parts, rotation, norm, heads))
    if choice.kernel == "torch" or not parts:
        return choice
    heads = heads or heads_of(parts)
    places = sequence_tokens(parts, rotation, mask, None) if all(part.places is None for part in parts) else 0
    call = DecodeCall(query, heads, places, 1.0, rotation, mask, norm=norm)
    choices = list(dict.fromkeys(kernel_of(part, call) for part in parts))
    return Choice(*(" + ".join(dict.fromkeys(texts)) for texts in zip(*choices)))


def needs_torch(
    query: Tensor, parts: Sequence[DecodePart] | str, rotation: Rotation | None, norm: KeyNormWeights | None
) -> bool:
    """Whether `choose` says "torch", found without a look at memory or devices: a compiled step may ask."""
    return choose_for(step_of(query, parts, rotation, norm, None)).kernel == "torch"


def step_of(
    query: Tensor,
    parts: Sequence[DecodePart] | str,
    rotation: Rotation | None,
    norm: KeyNormWeights | None,
    heads: int | None,
) -> DecodeStep:
    """What a choice depends on of operands; arguments as those of `choose`."""
    obstacle = parts if isinstance(parts, str) else None
    parts = () if isinstance(parts, str) else parts
    return DecodeStep(
        device=query.device,
        dtype=query.dtype,
        query_tokens=query.shape[2],
        query_heads=query.shape[1],
        heads=heads or heads_of(parts) or query.shape[1],
        head_dim=query.shape[3],
        rotated=rotation is not None,
        bias=any(part.key_bias is not None for part in parts),
        norm=norm is not None,
        gradients=needs_gradients(query, parts),
        obstacle=obstacle,
    )


def heads_of(parts: Sequence[DecodePart]) -> int:
    """KV heads that the parts have together."""
    return len({head for part in parts for head in part.heads or range(part.key.payload.shape[1])})


def needs_gradients(query: Tensor, parts: Sequence[DecodePart]) -> bool:
    """Whether a gradient would flow to an operand."""
    if not torch.is_grad_enabled():
        return False
    expansions = (tensor for part in parts for tensor in part[2:6] if tensor is not None)
    tokens = (side.payload for part in parts for side in part[:2])
    return query.requires_grad or any(tensor.requires_grad for tensor in (*expansions, *tokens))


@singledispatch
def explain(target: Any, *args: Any, **kwargs: Any) -> Choice | str:
    """Which kernel serves a decode step, and why.

    `explain(query, parts, rotation, norm=...)`: the `Choice` for operands of `fused_attention`.
    `explain(model, cache=None, capability=None)`: text, one line a group of decoder layers that are alike, for a step
    of one token. Without a cache: for one that the model makes by itself. `capability`: as on a CUDA device of that
    compute capability, such as (9, 0) for an H100, with Triton installed; None: on the model's devices.

    Raises:
        ValueError: neither a query nor a model.
    """
    raise ValueError(f"kernels.explain: got {type(target).__name__}; allowed: a query tensor or a transformers model")


explain.register(Tensor)(choose)
