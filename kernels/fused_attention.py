"""Attention of a few query tokens over packed, per-head latent caches, by fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .decode_call import DecodeCall, layer_heads, sequence_tokens
from .decode_checks import check_call, check_parts, check_query
from .latent_heads import Rotation
from .ops import flatten, fused_attention_op
from .stored_tokens import DecodePart, KeyNormWeights


def fused_attention(
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
    """`softmax(scaling * q k^T + mask) v` with `k = rotate(norm(U_k c_k + b_k))` and `v = U_v c_v + b_v`.

    WSVD (arXiv 2604.02570), section 4; neither keys nor values are ever in memory. The operator behind it is
    `torch.ops.hf_wsvd.fused_attention`: one node of a compiled graph, with no look at a value on the host, so that
    CUDA graphs can hold it (after one call outside a graph, which compiles kernels and copies head numbers). It has
    no derivative.

    A token has a *place* in the sequence, by which it is rotated, masked and counted. With L places in use, query n
    of N stands at place `L - N + n`.

    Args:
        query: `[B, Hq, N, D]` float16, bfloat16 or float32, normalised and rotated; N from 1 to 16, D up to 256. On a
            CUDA device, or on a CPU where Triton interprets (`TRITON_INTERPRET=1` when it is imported).
        parts: all tokens of all KV heads; several for heads kept apart (`heads`) and for tokens kept apart (`first`,
            `places`). No token may be in two parts.
        rotation: rotary rows by place, `[B or 1, at least all places, d/2]`, or None.
        mask: bool (true = attend) or additive, `[B or 1, Hq or 1, N or 1, places]`, by place; wider or taller ones
            count from the first place and the last query. An additive mask hides what it gives the lowest number of
            its dtype or -inf. None: a query sees no place behind its own.
        scaling: factor of the scores.
        softcap: scores become `softcap * tanh(scores / softcap)` before the mask.
        window: a query sees the last `window` places only, its own included.
        lengths: int32 `[B]` on the device, places in use of each sequence; no memory of tokens behind is read. None:
            all that the parts have.
        starts: int32 `[B]` on the device, first place of each sequence that may be seen (left padding).
        norm: RMS norm of the expanded keys.

    Returns:
        `[B, N, Hq, D]` in the query's dtype. A query with nothing to see gets zeros.

    Raises:
        ValueError: an argument that does not fit, by its name.
    """
    check_query(query)
    parts = list(parts)
    check_parts(parts, query)
    tokens = sequence_tokens(parts, rotation, mask, lengths)
    if rotation is not None and rotation.cos.stride() != rotation.sin.stride():
        rotation = rotation._replace(cos=rotation.cos.contiguous(), sin=rotation.sin.contiguous())
    call = DecodeCall(
        query, layer_heads(parts), tokens, scaling, rotation, mask, softcap, window, lengths, starts, norm
    )
    check_call(call)
    if mask is not None:
        mask = mask[..., -query.shape[2] :, :tokens]
    tensors, numbers = flatten(parts)
    cos, sin, interleaved = (None, None, False) if rotation is None else rotation
    weight, epsilon, before = (None, 0.0, True) if norm is None else norm
    return fused_attention_op(
        *(query, tensors, numbers, cos, sin, bool(interleaved), mask),
        *(float(scaling), softcap, window, lengths, starts, weight, float(epsilon), bool(before)),
    )
