"""The window that counts on the device holds, gives and masks what the stock window of transformers does."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import StaticSlidingWindowLayer

from hf_wsvd.storage.static_window import StaticWindowLayer


WINDOW = 6
STEPS = {
    "token by token": [1] * 15,
    "a prompt within the window": [4] + [1] * 8,
    "a prompt as long as it": [6] + [1] * 4,
    "a longer prompt": [9] + [1] * 4,
    "chunks": [3, 2, 4, 1, 7, 2, 1, 1],
}


def tokens_of(count, start):
    tokens = torch.arange(start, start + count, dtype=torch.float32)[None, None, :, None]
    return tokens.expand(2, 3, -1, 4).contiguous(), -tokens.expand(2, 3, -1, 5).contiguous()


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_it_is_the_stock_window(steps):
    ours, stock, start = StaticWindowLayer(32, WINDOW), StaticSlidingWindowLayer(32, WINDOW), 0
    for _ in range(2):
        for count in steps:
            assert tuple(int(size) for size in ours.get_mask_sizes(count)) == stock.get_mask_sizes(count)
            new = tokens_of(count, start)
            for found, wanted in zip(ours.update(*new), stock.update(*new)):
                assert torch.equal(found, wanted)
            assert torch.equal(ours.keys, stock.keys)
            assert torch.equal(ours.values, stock.values)
            start += count
            assert int(ours.get_seq_length()) == stock.get_seq_length()
        ours.reset()
        stock.reset()
        start = 0


def test_addresses_stay():
    layer = StaticWindowLayer(32, WINDOW)
    layer.update(*tokens_of(9, 0))
    before = [tensor.data_ptr() for tensor in (layer.keys, layer.values, layer.cumulative_length)]
    layer.update(*tokens_of(1, 9))
    layer.reset()
    layer.update(*tokens_of(2, 0))
    assert before == [tensor.data_ptr() for tensor in (layer.keys, layer.values, layer.cumulative_length)]


def test_crop_within_the_window_alone():
    layer = StaticWindowLayer(32, WINDOW)
    layer.update(*tokens_of(5, 0))
    layer.crop(-2)
    layer.update(*tokens_of(1, 3))
    assert int(layer.get_seq_length()) == 4
    assert layer.keys[0, 0, :4, 0].tolist() == [0, 1, 2, 3]
    layer.update(*tokens_of(4, 4))
    with pytest.raises(RuntimeError, match="cannot be cropped"):
        layer.crop(-1)
    with pytest.raises(ValueError, match="pass a negative number"):
        layer.crop(1)
