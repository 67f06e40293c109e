"""What the Hopper kernels are given: work divided evenly, rows of descriptors, memory that bulk copies can reach."""

from __future__ import annotations

import math

import pytest
import torch

from hf_wsvd.kernels import StoredTokens
from hf_wsvd.kernels.hopper_launch import LARGEST_TILE, balanced_split
from hf_wsvd.kernels.hopper_operands import row_strides, rows_of, scale_strides


@pytest.mark.parametrize("tokens", [1, 100, 1024, 8192, 9000, 32768, 131072])
@pytest.mark.parametrize("programs", [1, 16, 80, 128, 256, 1000])
def test_splits_cover_all_tokens_in_whole_tiles(tokens, programs):
    split = balanced_split(tokens, programs, 132, 512)
    assert split % LARGEST_TILE == 0
    assert split * math.ceil(tokens / split) >= tokens


@pytest.mark.parametrize(
    ("tokens", "programs", "splits"),
    [(32768, 16, 8), (8192, 128, 1), (8192, 256, 1), (8192, 80, 3), (131072, 16, 8)],
)
def test_a_full_gpu_is_the_aim(tokens, programs, splits):
    assert math.ceil(tokens / balanced_split(tokens, programs, 132, 512)) == splits


def test_short_sequences_are_not_cut_to_pieces():
    assert balanced_split(1024, 16, 132, 512) >= 512
    assert balanced_split(1024, 16, 132, 128) < 512


def test_rows_are_counted_over_batch_and_heads():
    buffer = torch.zeros(3, 4, 24, 64)
    tokens = buffer[:, :, :17]
    assert row_strides(tokens) == (4 * 24, 24)
    assert rows_of(tokens) == 2 * 96 + 3 * 24 + 17
    assert row_strides(buffer[:1]) == (0, 24)
    assert row_strides(buffer[:, ::2]) == (96, 48)
    assert row_strides(buffer.transpose(1, 2)) is None
    assert row_strides(buffer[..., :32]) is None


def test_scales_must_start_at_multiples_of_16_bytes():
    def strides(room, numbers):
        scales = torch.zeros(2, 3, room, numbers, dtype=torch.float16)[:, :, :9]
        return scale_strides(StoredTokens(torch.zeros(2, 3, room, 8)[:, :, :9], scales, 8, "symmetric", 8))

    assert strides(16, 1) == (48, 16)
    assert strides(12, 1) is None
    assert strides(12, 2) == (36, 12)


def test_a_growing_cache_compiles_nothing_anew():
    """Whole numbers that change from step to step must not be looked at: 1 and multiples of 16 would be kinds."""
    pytest.importorskip("triton", minversion="3.6")
    from hf_wsvd.kernels.position_query import position_query_kernel
    from hf_wsvd.kernels.tile_reconstruction import tile_reconstruction_kernel

    for kernel in (position_query_kernel, tile_reconstruction_kernel):
        looked_at = {param.name for param in kernel.params if not param.do_not_specialize and not param.is_constexpr}
        assert not looked_at & {"slots", "first", "split_tokens", "splits", "key_head_rows", "rows_batch_rows"}
