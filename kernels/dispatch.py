"""Which kernel serves a decode step, and why: decided from what is known before any launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .latent_heads import Rotation
from .stored_tokens import DecodePart, KeyNormWeights
from .triton_support import triton_obstacle


# Longer queries expand K and V once instead: from here on the expansion is cheaper than attention in latent space.
MAX_QUERY_TOKENS = 16
MAX_HEAD_DIM = 256
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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
        gradients: whether any are needed.
        obstacle: what else stands against a kernel, in words; None for nothing.
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
    gradients: bool = False
    obstacle: str | None = None


class _Preference:
    kernel = "auto"


_preference = _Preference()
_fast_kernels: dict[str, Callable[[DecodeStep], str | None]] = {}


def register_fast_kernel(name: str, obstacle: Callable[[DecodeStep], str | None]) -> None:
    """Have `choose` prefer a kernel to the general one, after those that were registered before.

    Args:
        name: "position_query" or "tile_reconstruction".
        obstacle: says why the kernel cannot serve a step; None: it can.
    """
    _fast_kernels[name] = obstacle


def position_query_obstacle(step: DecodeStep) -> str | None:
    """Why the position-query form, which never expands a key, cannot serve a step."""
    rows = step.query_heads // step.heads * step.query_tokens
    if rows > 1:
        return f"{rows} query rows share a head"
    if not step.rotated:
        return "keys are not rotated"
    if step.bias or step.norm:
        return "keys have a bias" if step.bias else "keys are normalised"
    return None


def tile_reconstruction_obstacle(step: DecodeStep) -> str | None:
    """Why the kernel that expands each tile of keys once for a group of query heads cannot serve a step."""
    if step.query_heads == step.heads:
        return "every query head has a head of its own"
    if step.bias or step.norm:
        return "keys have a bias" if step.bias else "keys are normalised"
    return None


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
    return "the torch path was asked for" if torch_preferred() else triton_obstacle(device)


def torch_preferred() -> bool:
    """Whether `use("torch")` holds: it concerns all kernels, those that code and read a cache's tokens too."""
    return _preference.kernel == "torch"


def kernels_can_run() -> bool:
    """Whether there is a device for kernels."""
    cuda = torch.cuda.is_available() and triton_obstacle(torch.device("cuda")) is None
    return cuda or triton_obstacle(torch.device("cpu")) is None


def choose_for(step: DecodeStep) -> Choice:
    """The kernel of a step."""
    obstacle = device_obstacle(step.device)
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
    if _preference.kernel == "general":
        return Choice("general", "the general kernel was asked for")
    reasons = []
    for name, unsuited in _fast_kernels.items():
        reason = unsuited(step)
        if reason is None:
            return Choice(name, f"{step.query_heads} query heads over {step.heads} heads, {step.query_tokens} tokens")
        reasons.append(f"{name}: {reason}")
    return Choice("general", "; ".join(reasons) or "it takes any shape")


def choose(
    query: Tensor,
    parts: Sequence[DecodePart] | str,
    rotation: Rotation | None = None,
    *,
    norm: KeyNormWeights | None = None,
    heads: int | None = None,
) -> Choice:
    """The kernel that `fused_attention` of these operands would run, or "torch" where it should not be called.

    Args:
        query: `[B, Hq, N, D]`.
        parts: as `fused_attention` takes them, or why there are none.
        rotation, norm: of the keys.
        heads: of the layer; None: as many as the parts have.
    """
    obstacle = parts if isinstance(parts, str) else None
    parts = () if isinstance(parts, str) else parts
    if heads is None:
        of_parts = {head for part in parts for head in part.heads or range(part.key.payload.shape[1])}
        heads = len(of_parts) or query.shape[1]
    step = DecodeStep(
        device=query.device,
        dtype=query.dtype,
        query_tokens=query.shape[2],
        query_heads=query.shape[1],
        heads=heads,
        head_dim=query.shape[3],
        rotated=rotation is not None,
        bias=any(part.key_bias is not None for part in parts),
        norm=norm is not None,
        gradients=needs_gradients(query, parts),
        obstacle=obstacle,
    )
    return choose_for(step)


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
    `explain(model, cache=None)`: text, one line a group of decoder layers that are alike, for a step of one token on
    the model's devices. Without a cache: for one that the model makes by itself.

    Raises:
        ValueError: neither a query nor a model.
    """
    raise ValueError(f"kernels.explain: got {type(target).__name__}; allowed: a query tensor or a transformers model")


explain.register(Tensor)(choose)
