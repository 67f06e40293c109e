"""Attention of many query tokens over keys and values of a few heads, by a dense kernel or block by block."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float) -> Tensor:
    """`scaled_dot_product_attention` of queries that stand at the end of a text.

    Args:
        query: `[B, Hq, N, D]`; Hq a multiple of the KV heads H.
        key, value: `[B, H, S, D]`.
        mask: as `latent_attention` takes it. None lets flash kernels run.

    Returns:
        `[B, Hq, N, D]`.
    """
    length, tokens = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    key, value = (repeated(heads, group) for heads in (key, value))
    causal = mask is None and length == tokens > 1
    if mask is None and not causal and length > 1:
        mask = causal_lower_right(length, tokens) if query.is_cuda else seen_at_the_end(length, tokens, query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scaling)


def seen_at_the_end(length: int, tokens: int, device: torch.device) -> Tensor:
    """Which of `tokens` each of the last `length` sees: bool `[length, tokens]`, all but those that come later."""
    last_seen = torch.arange(tokens - length, tokens, device=device)
    return torch.arange(tokens, device=device) <= last_seen[:, None]


def repeated(heads: Tensor, group: int) -> Tensor:
    """Every head of `[B, H, S, D]` `group` times in a row; of a single head a view."""
    batch, count, tokens, width = heads.shape
    return heads[:, :, None].expand(batch, count, group, tokens, width).reshape(batch, count * group, tokens, width)


def attention_by_blocks(
    query: Tensor,
    read: Callable[[int, int], tuple[Tensor, Tensor]],
    tokens: int,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    block: int,
) -> Tensor:
    """The same over keys and values that exist `block` tokens at a time.

    The softmax is rescaled as the maximum grows (Milakov and Gimelshein, arXiv 1805.02867).

    Args:
        read: `read(start, stop)` gives the keys and values of these tokens, `[B, H, stop - start, D]` each.
        tokens: of a sequence, at least N.
        mask, softcap: as `latent_attention` takes them.

    Returns:
        `[B, Hq, N, D]`, computed in fp32 or, for queries in fp64, in that.
    """
    batch, query_heads, length, width = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    top = query.new_full((batch, query_heads, length, 1), torch.finfo(dtype).min, dtype=dtype)
    total = torch.zeros_like(top)
    mixed = 0.0
    for start in range(0, tokens, block):
        key, value = (heads.to(dtype) for heads in read(start, min(start + block, tokens)))
        heads, count = key.shape[1:3]
        grouped = query.to(dtype).reshape(batch, heads, -1, width)
        scores = (grouped @ key.transpose(2, 3)).view(batch, query_heads, length, count) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = masked(scores, mask, start, tokens)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - higher)
        kept = torch.exp(top - higher)
        total = total * kept + weights.sum(-1, keepdim=True)
        added = (weights.reshape(batch, heads, -1, count) @ value).view(batch, query_heads, length, -1)
        mixed = mixed * kept + added
        top = higher
    return (mixed / total).to(query.dtype)


def masked(scores: Tensor, mask: Tensor | None, start: int, tokens: int) -> Tensor:
    """`scores [B, Hq, N, n]` of the tokens from `start` on, those that a query must not see as low as can be.

    Args:
        tokens: of the whole sequence.
    """
    length, count = scores.shape[-2:]
    lowest = torch.finfo(scores.dtype).min
    if mask is None:
        last_seen = torch.arange(tokens - length, tokens, device=scores.device)
        position = torch.arange(start, start + count, device=scores.device)
        return scores.masked_fill(position > last_seen[:, None], lowest)
    mask = mask[..., -length:, start : start + count]
    return scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask


def causal_tokens(mask: Tensor) -> int | None:
    """How many first tokens a mask `[B or 1, Hq or 1, N, S]` shows, if it is that of N queries at their end.

    None for padding, windows and whatever else hides one of them. The answer is kept with the mask, which all layers
    share, until somebody writes to it: looking costs a wait for the device.
    """
    version = None if mask.is_inference() else mask._version  # writes to tensors of inference mode are not counted
    known = getattr(mask, "_wsvd_causal_tokens", None)
    if known is None or known[0] != version:
        known = mask._wsvd_causal_tokens = (version, _causal_tokens(mask))
    return known[1]


def _causal_tokens(mask: Tensor) -> int | None:
    if mask.dtype != torch.bool or mask.ndim != 4 or not mask.numel():
        return None
    length, columns = mask.shape[-2:]
    tokens = int(mask[0, 0, -1].sum())
    if tokens < length:
        return None
    last_seen = torch.arange(tokens - length, tokens, device=mask.device)
    wanted = torch.arange(columns, device=mask.device) <= last_seen[:, None]
    return tokens if bool((mask == wanted).all()) else None
