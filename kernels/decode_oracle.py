"""Attention over packed tokens by its definition, in double precision: what every decode kernel is judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .decode_call import DecodeCall, hidden_below, layer_heads, part_heads, sequence_tokens
from .dequantize import read_tokens
from .latent_heads import LatentHeads, Rotation, cached_key
from .stored_tokens import DecodePart, KeyNormWeights, StoredTokens


def fused_attention_oracle(
    query: Tensor,
    parts: Sequence[DecodePart],
    rotation: Rotation | None,
    mask: Tensor | None = None,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    norm: KeyNormWeights | None = None,
) -> Tensor:
    """The definition of `fused_attention`, same arguments; result `[B, N, Hq, D]` fp64, nothing checked.

    One softmax over the tokens of all parts of a head; no splits. Memory: fp64 keys and values of one head at a time.
    """
    tokens = sequence_tokens(parts, rotation, mask, lengths)
    call = DecodeCall(
        query, layer_heads(parts), tokens, scaling, rotation, mask, softcap, window, lengths, starts, norm
    )
    out = []
    for head in range(call.kv_heads):
        scores, values = [], []
        for part in parts:
            for index, layer_head in enumerate(part_heads(part)):
                if layer_head == head:
                    scores.append(head_scores(call, part, index))
                    latents = readable_values(call, part, index)
                    values.append(LatentHeads(latents, _head(part.value_up, index), _head(part.value_bias, index)))
        scores = torch.cat(scores, dim=-1)
        values = torch.cat([heads.expand() for heads in values], dim=2)
        out.append(softmax(scores) @ values)
    return torch.cat(out, dim=1).transpose(1, 2)


def decode_part_oracle(call: DecodeCall, part: DecodePart, split_tokens: int) -> tuple[Tensor, Tensor]:
    """What a kernel writes for one part, in fp64: `partial [B, Hp G, N, splits, width]` and `lse [..., splits]`.

    Split i has the slots from `i * split_tokens`. A `lse` is of base 2, -inf where a split saw nothing; there, its
    `partial` is 0 here and unspecified in a kernel.
    """
    partial, lse = [], []
    for index in range(part.key.payload.shape[1]):
        splits = head_scores(call, part, index).split(split_tokens, dim=-1)
        latents = readable_values(call, part, index).split(split_tokens, dim=2)
        partial.append(torch.stack([softmax(s) @ v for s, v in zip(splits, latents)], dim=3))
        lse.append(torch.stack([s.logsumexp(-1) for s in splits], dim=3) * math.log2(math.e))
    return torch.cat(partial, dim=1), torch.cat(lse, dim=1)


def head_scores(call: DecodeCall, part: DecodePart, index: int) -> Tensor:
    """Scores `[B, G, N, S]` of one KV head of a part after softcap and mask, -inf where nothing is to be seen."""
    batch, _, queries, _ = call.query.shape
    head = part_heads(part)[index]
    group = slice(head * call.group, (head + 1) * call.group)
    place, readable = token_places(call, part)
    latents = LatentHeads(
        read_tokens(_one_head(part.key, index)), _head(part.key_up, index), _head(part.key_bias, index)
    )
    norm = None if call.norm is None else lambda keys: rms_norm(keys, call.norm)
    before = call.norm is not None and call.norm.before
    rows = None if call.rotation is None else rows_at(call.rotation, place)
    keys = cached_key(latents, rows, norm if before else None, None if before else norm)
    scores = call.query[:, group].double() @ keys.transpose(2, 3) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)

    visible = readable[:, None, None].expand(scores.shape)
    own_place = sequence_lengths(call)[:, None] - queries + torch.arange(queries, device=place.device)  # [B, N]
    if call.window is not None:
        visible = visible & (place[:, None] > own_place[:, :, None] - call.window)[:, None]
    if call.mask is None:
        visible = visible & (place[:, None] <= own_place[:, :, None])[:, None]
    else:
        mask = call.mask[..., -queries:, :].expand(batch, call.query.shape[1], queries, -1)[:, group]
        mask = mask.gather(3, place[:, None, None].expand(scores.shape))
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            visible = visible & (mask > hidden_below(mask))
            scores = scores + mask
    return scores.masked_fill(~visible, -math.inf)


def token_places(call: DecodeCall, part: DecodePart) -> tuple[Tensor, Tensor]:
    """Places `[B, S]` of a part's slots (0 for those without one), and which of them hold tokens that may be read."""
    device, slots = call.query.device, part.key.payload.shape[2]
    places = part.first + torch.arange(slots, device=device)[None] if part.places is None else part.places.long()
    places = places.expand(call.query.shape[0], -1)
    readable = (places >= 0) & (places < sequence_lengths(call)[:, None])
    if call.starts is not None:
        readable = readable & (places >= call.starts[:, None])
    return torch.where(readable, places, 0), readable


def sequence_lengths(call: DecodeCall) -> Tensor:
    """Places in use, `[B]` int64."""
    if call.lengths is None:
        return torch.full((call.query.shape[0],), call.tokens, device=call.query.device)
    return call.lengths.long().clamp(max=call.tokens)


def rows_at(rotation: Rotation, place: Tensor) -> Rotation:
    """Rotary rows of the tokens at `place [B, S]`, fp64."""
    index = place[..., None].expand(-1, -1, rotation.cos.shape[-1])
    cos, sin = (r.double().expand(place.shape[0], -1, -1).gather(1, index) for r in (rotation.cos, rotation.sin))
    return Rotation(cos, sin, rotation.interleaved)


def readable_values(call: DecodeCall, part: DecodePart, index: int) -> Tensor:
    """Value latents `[B, 1, S, width]` of one head of a part, 0 for slots that may hold anything."""
    readable = token_places(call, part)[1]
    return read_tokens(_one_head(part.value, index)).masked_fill(~readable[:, None, :, None], 0)


def rms_norm(keys: Tensor, norm: KeyNormWeights) -> Tensor:
    """`keys [..., D]` over their root mean square, times the weight."""
    return keys * (keys.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * norm.weight.to(keys.dtype)


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis; zeros for a row of -inf alone."""
    return scores.softmax(dim=-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)


def _one_head(stored: StoredTokens, index: int) -> StoredTokens:
    head = slice(index, index + 1)
    return stored._replace(
        payload=stored.payload[:, head],
        scales=None if stored.scales is None else stored.scales[:, head],
        head_scales=None if stored.head_scales is None else stored.head_scales[head],
    )


def _head(weight: Tensor | None, index: int) -> Tensor | None:
    return None if weight is None else weight[index : index + 1].double()
