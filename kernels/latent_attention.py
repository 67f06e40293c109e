"""Attention of a few query tokens over per-head latents: the oracle and the plain-torch path.

Both compute `softmax(scaling * q k^T + mask) v` with `k = rotate(norm(U_k c_k + b_k))` and `v = U_v c_v + b_v`
(WSVD, section 4), the query being normalised and rotated already.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .latent_heads import KeyNorm, LatentHeads, Rotation, cached_key


def latent_attention_oracle(
    query: Tensor,
    key: LatentHeads,
    value: LatentHeads,
    rotation: Rotation | None = None,
    mask: Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    norm_before: KeyNorm | None = None,
    norm_after: KeyNorm | None = None,
) -> Tensor:
    """The definition, by expanding K and V in double precision. Same arguments and result as `latent_attention`."""
    key, value = (LatentHeads(*(None if t is None else t.double() for t in heads)) for heads in (key, value))
    if rotation is not None:
        rotation = Rotation(rotation.cos.double(), rotation.sin.double(), rotation.interleaved)
    full_key = cached_key(key, rotation, norm_before, norm_after)
    full_value = value.expand()
    group = query.shape[1] // full_key.shape[1]
    full_key, full_value = (t.repeat_interleave(group, dim=1) for t in (full_key, full_value))
    scores = query.double() @ full_key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = apply_mask(scores, mask)
    return (scores.softmax(dim=-1) @ full_value).transpose(1, 2).to(query.dtype)


def latent_attention(
    query: Tensor,
    key: LatentHeads,
    value: LatentHeads,
    rotation: Rotation | None = None,
    mask: Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    norm_before: KeyNorm | None = None,
    norm_after: KeyNorm | None = None,
) -> Tensor:
    """Attention over latents in plain torch; values are never expanded, scores are kept in fp32.

    Args:
        query: `[B, Hq, N, D]`, rotated; Hq a multiple of the KV heads H.
        key, value: latents `[B, H, S, r]` with their expansions.
        rotation: rotary rows of the S cached tokens.
        mask: bool (true = attend) or additive, `[B or 1, Hq or 1, N or 1, S]`; None: every token is seen by every
            query, except that query n of several does not see the last N - 1 - n tokens.
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(scores / softcap)` before the mask.
        norm_before, norm_after: key norm on `[B, H, S, D]`, before or after the rotation.

    Returns:
        `[B, N, Hq, D]` in the query's dtype.
    """
    batch, query_heads, length, _ = query.shape
    heads, tokens = key.latent.shape[1:3]
    group = query_heads // heads
    if group * length == 1 and norm_before is None and norm_after is None:
        scores = position_query_scores(query, key, rotation) * scaling
    else:
        full_key = cached_key(key, rotation, norm_before, norm_after).float()
        grouped = query.float().reshape(batch, heads, group * length, -1)
        scores = (grouped @ full_key.transpose(2, 3)).view(batch, query_heads, length, tokens) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = apply_mask(scores, mask).softmax(dim=-1).to(value.latent.dtype)
    mixed = weights.reshape(batch, heads, group * length, tokens) @ value.latent
    out = LatentHeads(mixed, value.up, value.bias).expand()  # the bias is exact here: the weights sum to one
    # Contiguous, as dense attention functions return it: some models take a view of it.
    return out.view(batch, query_heads, length, -1).transpose(1, 2).contiguous().to(query.dtype)


def position_query_scores(query: Tensor, key: LatentHeads, rotation: Rotation | None) -> Tensor:
    """Unscaled fp32 scores `[B, H, 1, S]` of one query token over its own heads, keys never expanded.

    With rows `T = [cos, sin]` (`[S, d]`, shared by all heads) and
    `W = [q0 U0 + q1 U1 ; q1 U0 - q0 U1]` (`[d, r]`, once a step and head), a token's score is `c . (T W)`: the
    rotation moves from every cached token to the one query, and only r products a token and head remain.
    """
    query = query[:, :, 0]  # [B, H, D]
    if rotation is None:
        projected = query if key.up is None else torch.einsum("bhd,hdr->bhr", query, key.up)
        scores = (key.latent.float() @ projected.float()[..., None]).transpose(2, 3)
        return scores if key.bias is None else scores + torch.einsum("bhd,hd->bh", query, key.bias)[:, :, None, None]
    up = key.up
    if up is None:
        up = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device).expand(query.shape[1], -1, -1)
    rows = torch.cat([rotation.cos, rotation.sin], dim=-1)[:, None]  # [B or 1, 1, S, d]
    columns = up
    if key.bias is not None:
        # The bias as one more latent. It may dwarf the rest of the key, so its products are not rounded to 16 bits.
        columns = torch.cat([up, key.bias[..., None]], dim=-1).float()
        query, rows = query.float(), rows.float()
    query0, query1, query_tail = (part[..., None] for part in rotation.split(query))
    up0, up1, up_tail = (part.transpose(1, 2) for part in rotation.split(columns.transpose(1, 2)))
    by_row = torch.cat([query0 * up0 + query1 * up1, query1 * up0 - query0 * up1], dim=2)  # [B, H, d, r]
    weights = rows @ by_row  # [B, H, S, r]
    if query_tail.shape[2]:
        weights = weights + (query_tail * up_tail).sum(2, keepdim=True)
    if key.bias is not None:
        weights, offset = weights[..., :-1], weights[..., -1].float()
    scores = (key.latent * weights).sum(-1, dtype=torch.float32)
    return (scores if key.bias is None else scores + offset)[:, :, None]


def apply_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    """`scores [B, Hq, N, S]` with hidden tokens at -inf (or the additive mask applied)."""
    length, tokens = scores.shape[-2:]
    if mask is None:
        if length == 1:
            return scores
        hidden = torch.ones(length, tokens, dtype=torch.bool, device=scores.device).triu(tokens - length + 1)
        return scores.masked_fill(hidden, float("-inf"))
    mask = mask[..., -length:, :tokens]
    if mask.dtype == torch.bool:
        # A row with nothing to see (left padding) takes a finite low score: its output is unused, but never NaN.
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask
