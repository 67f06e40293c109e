"""Long queries over a filled cache: keys and values are expanded for a few heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .kernels import LatentHeads, Rotation, cached_key
from .kernels.dispatch import MAX_QUERY_TOKENS
from .kernels.long_query import attention_by_blocks, causal_tokens, dense_attention


if TYPE_CHECKING:
    from .call import DenseCall, LatentCall

# Expanded keys and values, and what is needed to make them, stay below this; more of it changes little in speed.
WORKSPACE_BYTES = 256 * 2**20
# Copies of an expanded head that exist at once: keys before and after rotation and norm, and parts of both; values.
COPIES_OF_A_HEAD = 5


class Portion(NamedTuple):
    """What is worked on at a time.

    Attributes:
        heads: KV heads.
        rows: of the batch.
        tokens: that are expanded at once; None for all.
    """

    heads: int
    rows: int
    tokens: int | None = None


def needs_portions(call: LatentCall | DenseCall, tokens: Tensor) -> bool:
    """Whether all expanded keys and values that new tokens `[B, H, N, width]` see are too much to hold at once.

    The cache layer has the new tokens already. Queries that are read in latent space, and those whose gradient is
    wanted, are none of these.
    """
    length = tokens.shape[-2]
    if length <= MAX_QUERY_TOKENS or (torch.is_grad_enabled() and tokens.requires_grad):
        return False
    visible = length if call.layer_was_empty else call.layer.visible_tokens(length)
    return call.batch * call.heads * visible * bytes_of_token(call, 1) > WORKSPACE_BYTES


def bytes_of_token(call: LatentCall | DenseCall, group: int) -> int:
    """Workspace for one token of one KV head, with `group` query heads."""
    copies = COPIES_OF_A_HEAD + (2 * group if group > 1 else 0)
    return copies * call.head_dim * call.element_size


def portion(call: LatentCall | DenseCall, query: Tensor, tokens: int, blocks: bool) -> Portion:
    """As many heads as fit into the workspace; where a head does not fit, as many rows; else a part of the tokens.

    Args:
        blocks: whether the tokens have to be read in blocks, whose scores need room as well.
    """
    batch, query_heads, length, _ = query.shape
    group = query_heads // call.heads
    of_token = bytes_of_token(call, group)
    # A norm that knows which head it is given needs all heads.
    heads = call.heads if call.norm_needs_all_heads() else 1
    if not blocks and heads == 1:
        fitting = WORKSPACE_BYTES // (batch * tokens * of_token)
        if fitting:
            return Portion(min(fitting, call.heads), batch)
        fitting = WORKSPACE_BYTES // (tokens * of_token)
        if fitting:
            return Portion(1, min(fitting, batch))
    scores = 4 * group * length * torch.float32.itemsize
    block = WORKSPACE_BYTES // (heads * (2 * of_token + scores))
    return Portion(heads, 1, min(max(block, 1), tokens))


def attend_in_portions(
    call: LatentCall | DenseCall, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention of an open call, `[B, N, Hq, D]`, in which keys and values of all heads never exist together.

    Args:
        query: `[B, Hq, N, D]`.
        mask: as `latent_attention` takes it, but that None for the first tokens of a cache means no later token.
    """
    batch, query_heads, length, _ = query.shape
    tokens = length if call.layer_was_empty else call.layer.visible_tokens(length)
    mask, tokens = settled_mask(mask, length, tokens)
    part = portion(call, query, tokens, softcap is not None)
    rotation, norms = call.rotation(), call.key_norms()
    group = query_heads // call.heads
    out = query.new_empty(batch, length, query_heads, call.value_dim)
    for heads in slices(call.heads, part.heads):
        of_queries = slice(heads.start * group, heads.stop * group)
        key, value = call.read_heads(heads, length)
        for rows in slices(batch, part.rows):

            def read(start: int, stop: int, key=key, value=value, rows=rows) -> tuple[Tensor, Tensor]:
                chosen = (part_of(side, rows, slice(start, stop)) for side in (key, value))
                turned = None if rotation is None else rows_of(rotation, rows, slice(start, stop))
                keys, values = chosen
                return cached_key(keys, turned, **norms), values.expand()

            asking, hidden = query[rows, of_queries], part_of_mask(mask, rows, of_queries)
            if part.tokens is None:
                found = dense_attention(asking, *read(0, tokens), hidden, scaling=scaling)
            else:
                options = {"scaling": scaling, "softcap": softcap, "block": part.tokens}
                found = attention_by_blocks(asking, read, tokens, hidden, **options)
            out[rows, :, of_queries] = found.transpose(1, 2)
    return out


def settled_mask(mask: Tensor | None, length: int, tokens: int) -> tuple[Tensor | None, int]:
    """The mask over the tokens that anybody sees, and their number; no mask where a flash kernel needs none.

    A cache of fixed size has a column for every token that may still come.
    """
    if mask is None:
        return None, tokens
    seen = None if torch.compiler.is_compiling() else causal_tokens(mask)
    if seen is not None and seen <= tokens:
        return None, seen
    return mask[..., -length:, :tokens], tokens


def slices(count: int, size: int) -> Iterator[slice]:
    """`range(count)` in slices of at most `size`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def part_of(heads: LatentHeads, rows: slice, tokens: slice) -> LatentHeads:
    """Some tokens of some rows."""
    return heads._replace(latent=heads.latent[rows, :, tokens])


def rows_of(rotation: Rotation, rows: slice, tokens: slice) -> Rotation:
    """The rotary rows of some tokens of some rows of the batch."""
    cos, sin = (side[rows if side.shape[0] > 1 else slice(None), tokens] for side in rotation[:2])
    return rotation._replace(cos=cos, sin=sin)


def part_of_mask(mask: Tensor | None, rows: slice, heads: slice) -> Tensor | None:
    """What a mask `[B or 1, Hq or 1, N, S]` says of some rows and query heads."""
    if mask is None:
        return None
    everything = slice(None)
    return mask[rows if mask.shape[0] > 1 else everything, heads if mask.shape[1] > 1 else everything]
