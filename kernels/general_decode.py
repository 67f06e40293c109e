"""The decode kernel that takes everything: any code, rank, head size, rotation, mask and number of queries up to 16.

Split-K over the slots of a part, one program for all query rows of a KV head, so that a key is rebuilt once for its
whole group. Values stay latent: the merge of the splits expands them (WSVD, section 4). `decode_part_oracle` is its
twin in plain torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_loads import expand_keys, load_numbers, load_query, load_row, load_up, pair_channels


# These change from step to step or as buffers grow, which must not compile the kernel anew.
CHANGING = [
    *("scaling", "softcap", "norm_epsilon", "hidden", "slots", "first", "places_end", "window"),
    *("splits", "split_tokens", "group", "queries", "rows_batch_stride", "places_batch_stride"),
    *("mask_batch_stride", "mask_head_stride", "mask_query_stride"),
    *("key_scales_batch_stride", "key_scales_head_stride", "value_scales_batch_stride", "value_scales_head_stride"),
]


@triton.jit(do_not_specialize=CHANGING)
def general_decode_kernel(
    query,
    cos,
    sin,
    norm_weight,
    mask,
    lengths,
    starts,
    places,
    heads,
    key,
    key_scales,
    key_levels,
    key_head_scales,
    key_up,
    key_bias,
    value,
    value_scales,
    value_levels,
    value_head_scales,
    partial,
    lse,
    scaling,
    softcap,
    norm_epsilon,
    hidden,
    slots,
    first,
    places_end,
    window,
    splits,
    split_tokens,
    group,
    queries,
    query_batch_stride,
    query_head_stride,
    query_token_stride,
    rows_batch_stride,
    rows_token_stride,
    mask_batch_stride,
    mask_head_stride,
    mask_query_stride,
    mask_token_stride,
    places_batch_stride,
    key_batch_stride,
    key_head_stride,
    key_token_stride,
    key_scales_batch_stride,
    key_scales_head_stride,
    key_scales_token_stride,
    key_up_head_stride,
    key_up_channel_stride,
    key_bias_head_stride,
    value_batch_stride,
    value_head_stride,
    value_token_stride,
    value_scales_batch_stride,
    value_scales_head_stride,
    value_scales_token_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM_BEFORE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    KEY_CODE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Partial attention of one split, KV head and sequence. Grid `(splits * row tiles, heads of the part, B)`.

    Arguments as `general_launch.launch_arguments` gives them. Writes `partial [B, Hq, N, splits, VALUE_WIDTH]`, which
    is normalised, and `lse [B, Hq, N, splits]` of base 2; both contiguous fp32, Hq the query heads of the part.
    """
    split = tl.program_id(0) % splits
    row_tile = tl.program_id(0) // splits
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    layer_head = head
    if heads is not None:
        layer_head = tl.load(heads + head).to(tl.int64)
    compute_dtype = query.dtype.element_ty
    LOG2_E: tl.constexpr = 1.4426950408889634

    row = row_tile * ROWS + tl.arange(0, ROWS)  # of the group's query heads times queries
    row_inside = row < group * queries
    layer_query_head = layer_head * group + row // queries
    number = row % queries
    query_rows = query + batch * query_batch_stride + layer_query_head * query_head_stride
    query_rows += number * query_token_stride

    key += batch * key_batch_stride + head * key_head_stride
    value += batch * value_batch_stride + head * value_head_stride
    if key_scales is not None:
        key_scales += batch * key_scales_batch_stride + head * key_scales_head_stride
    if value_scales is not None:
        value_scales += batch * value_scales_batch_stride + head * value_scales_head_stride
    if key_head_scales is not None:
        key_head_scales = tl.load(key_head_scales + head)
    if value_head_scales is not None:
        value_head_scales = tl.load(value_head_scales + head)
    if key_up is not None:
        key_up += head * key_up_head_stride
    if key_bias is not None:
        key_bias += head * key_bias_head_stride

    # Channels are loaded pairs first, then the tail that does not turn: interleaved pairs are two halves from here on.
    if HALF > 0:
        pair = tl.arange(0, HALF_BLOCK)
        channels_0 = pair_channels(pair, 0, HALF, HALF_BLOCK, INTERLEAVED, HEAD_DIM)
        channels_1 = pair_channels(pair, 1, HALF, HALF_BLOCK, INTERLEAVED, HEAD_DIM)
        query_0 = load_query(query_rows, channels_0, row_inside, HEAD_DIM)
        query_1 = load_query(query_rows, channels_1, row_inside, HEAD_DIM)
        up_0 = load_up(key_up, channels_0, key_up_channel_stride, HEAD_DIM, KEY_WIDTH, KEY_BLOCK, compute_dtype)
        up_1 = load_up(key_up, channels_1, key_up_channel_stride, HEAD_DIM, KEY_WIDTH, KEY_BLOCK, compute_dtype)
        bias_0, bias_1 = load_row(key_bias, channels_0, HEAD_DIM), load_row(key_bias, channels_1, HEAD_DIM)
        weight_0, weight_1 = load_row(norm_weight, channels_0, HEAD_DIM), load_row(norm_weight, channels_1, HEAD_DIM)
    if TAIL_BLOCK > 0:
        channels_2 = 2 * HALF + tl.arange(0, TAIL_BLOCK)
        query_2 = load_query(query_rows, channels_2, row_inside, HEAD_DIM)
        up_2 = load_up(key_up, channels_2, key_up_channel_stride, HEAD_DIM, KEY_WIDTH, KEY_BLOCK, compute_dtype)
        bias_2, weight_2 = load_row(key_bias, channels_2, HEAD_DIM), load_row(norm_weight, channels_2, HEAD_DIM)

    length = places_end
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + batch), places_end)
    lowest = 0  # no query sees a place before
    if starts is not None:
        lowest = tl.maximum(tl.load(starts + batch), 0)
    if window is not None:
        lowest = tl.maximum(lowest, length - queries - window + 1)
    own_place = length - queries + number
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, slots)
    if places is None:
        begin = tl.maximum(begin, lowest - first)
        end = tl.minimum(end, length - first)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    token = tl.arange(0, TOKENS)
    for at in range(begin, end, TOKENS):
        slot = at + token
        if places is None:
            place = first + slot
        else:
            place = tl.load(places + batch * places_batch_stride + slot, mask=slot < end, other=-1)
        # Nothing else is read: what lies in other slots, NaN included, is nobody's token.
        readable = (slot < end) & (place >= lowest) & (place < length)

        offset = tl.cast(at, tl.int64)
        key_rows = key + offset * key_token_stride
        key_scale_rows = key_scales
        if key_scales is not None:
            key_scale_rows += offset * key_scales_token_stride
        latents = None
        if key_up is not None:
            latents = load_numbers(
                key_rows, key_scale_rows, key_levels, key_head_scales, token, readable, tl.arange(0, KEY_BLOCK),
                key_token_stride, key_scales_token_stride, KEY_WIDTH, KEY_GROUPS, KEY_CODE, KEY_BITS,
            ).to(compute_dtype)  # fmt: skip
        if HALF > 0:
            keys_0 = expand_keys(
                latents, up_0, bias_0,
                key_rows, key_scale_rows, key_levels, key_head_scales, token, readable, channels_0,
                key_token_stride, key_scales_token_stride, KEY_WIDTH, KEY_GROUPS, KEY_CODE, KEY_BITS,
            )  # fmt: skip
            keys_1 = expand_keys(
                latents, up_1, bias_1,
                key_rows, key_scale_rows, key_levels, key_head_scales, token, readable, channels_1,
                key_token_stride, key_scales_token_stride, KEY_WIDTH, KEY_GROUPS, KEY_CODE, KEY_BITS,
            )  # fmt: skip
        if TAIL_BLOCK > 0:
            keys_2 = expand_keys(
                latents, up_2, bias_2,
                key_rows, key_scale_rows, key_levels, key_head_scales, token, readable, channels_2,
                key_token_stride, key_scales_token_stride, KEY_WIDTH, KEY_GROUPS, KEY_CODE, KEY_BITS,
            )  # fmt: skip

        for step in tl.static_range(2):  # the norm comes before the rotation or after it
            if norm_weight is not None and (step == 0) == NORM_BEFORE:
                squares = tl.zeros([TOKENS], tl.float32)
                if HALF > 0:
                    squares += tl.sum(keys_0 * keys_0, 1) + tl.sum(keys_1 * keys_1, 1)
                if TAIL_BLOCK > 0:
                    squares += tl.sum(keys_2 * keys_2, 1)
                factor = tl.rsqrt(squares / HEAD_DIM + norm_epsilon)[:, None]
                if HALF > 0:
                    keys_0 *= factor * weight_0[None, :]
                    keys_1 *= factor * weight_1[None, :]
                if TAIL_BLOCK > 0:
                    keys_2 *= factor * weight_2[None, :]
            if HALF > 0 and step == 0:
                row_offsets = batch * rows_batch_stride + place.to(tl.int64) * rows_token_stride
                row_offsets = row_offsets[:, None] + pair[None, :]
                rows_inside = readable[:, None] & (pair < HALF)[None, :]
                cosines = tl.load(cos + row_offsets, mask=rows_inside, other=0.0).to(tl.float32)
                sines = tl.load(sin + row_offsets, mask=rows_inside, other=0.0).to(tl.float32)
                turned = keys_0 * cosines - keys_1 * sines
                keys_1 = keys_1 * cosines + keys_0 * sines
                keys_0 = turned

        scores = tl.zeros([ROWS, TOKENS], tl.float32)
        if HALF > 0:
            scores = tl.dot(query_0, tl.trans(keys_0.to(compute_dtype)), scores, input_precision="ieee")
            scores = tl.dot(query_1, tl.trans(keys_1.to(compute_dtype)), scores, input_precision="ieee")
        if TAIL_BLOCK > 0:
            scores = tl.dot(query_2, tl.trans(keys_2.to(compute_dtype)), scores, input_precision="ieee")

        # The factor goes to the scores: in the query it would be rounded to 16 bits, which peaked softmaxes show.
        scores *= scaling
        if softcap is not None:
            scores = softcap * (1 - 2 / (1 + tl.exp2(scores / softcap * (2 * LOG2_E))))  # tanh
        visible = readable[None, :]
        if window is not None:
            visible = visible & (place[None, :] > own_place[:, None] - window)
        if mask is None:
            visible = visible & (place[None, :] <= own_place[:, None])
        else:
            mask_rows = batch * mask_batch_stride + layer_query_head * mask_head_stride + number * mask_query_stride
            shown = tl.load(
                mask + mask_rows[:, None] + place[None, :] * mask_token_stride,
                mask=row_inside[:, None] & readable[None, :],
                other=0,
            )
            if mask.dtype.element_ty == tl.uint8:
                visible = visible & (shown != 0)
            else:
                shown = shown.to(tl.float32)
                visible = visible & (shown > hidden)
                scores += shown
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))

        now_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(now_highest == float("-inf"), 0.0, now_highest)  # nothing seen yet
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        highest = now_highest
        total = total * decay + tl.sum(weights, 1)

        value_rows = value + offset * value_token_stride
        value_scale_rows = value_scales
        if value_scales is not None:
            value_scale_rows += offset * value_scales_token_stride
        values = load_numbers(
            value_rows, value_scale_rows, value_levels, value_head_scales, token, readable, tl.arange(0, VALUE_BLOCK),
            value_token_stride, value_scales_token_stride, VALUE_WIDTH, VALUE_GROUPS, VALUE_CODE, VALUE_BITS,
        ).to(compute_dtype)  # fmt: skip
        mixed = tl.dot(weights.to(compute_dtype), values, mixed * decay[:, None], input_precision="ieee")

    query_heads = tl.num_programs(1) * group
    target = (batch * query_heads + head * group + row // queries) * queries + number
    target = target * splits + split
    total = tl.where(total == 0, 1.0, total)  # of a row that saw nothing
    tl.store(lse + target, highest + tl.log2(total), mask=row_inside)
    channels = tl.arange(0, VALUE_BLOCK)
    mixed /= total[:, None]
    inside = row_inside[:, None] & (channels < VALUE_WIDTH)[None, :]
    tl.store(partial + target[:, None] * VALUE_WIDTH + channels[None, :], mixed, mask=inside)
