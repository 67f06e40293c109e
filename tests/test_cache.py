"""The latent cache as an object: memory, growth, and every operation of a transformers cache."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import CLOSED_FORM, FAMILIES, prompt
from transformers import DynamicCache, StaticCache

from hf_wsvd import WSVDCache, cache_nbytes
from hf_wsvd.cache_layers import GrowingLayer, GrowingSlidingWindowLayer
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.latent_layers import LatentMixin
from hf_wsvd.storage.token_buffer import TokenBuffer, slack


KINDS = ["llama", "qwen3", "mistral", "qwen2_vl"]


@torch.no_grad()
def forward(model, ids, cache, **kwargs):
    """Logits of the last token after appending `ids` to `cache`."""
    return model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs).logits[:, -1]


def tokens(batch=2, length=20, seed=3):
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_half_rank_takes_at_most_52_percent_of_the_dense_bytes(dense, compressed):
    """Payload, slack and rotary rows together, in bf16, as torch holds them; 48 heads as in the embedded model."""
    import transformers
    from tiny_models import TEXT

    from hf_wsvd import WSVDConfig, compress

    shape = {**TEXT, "num_key_value_heads": 8, "num_attention_heads": 8, "num_hidden_layers": 6, "head_dim": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, "max_position_embeddings": 4096}))
    model = model.to(torch.bfloat16).eval()
    held = {}
    for name in ("dense", "latent"):
        if name == "latent":
            compress(model, WSVDConfig(rank_ratio=0.5, **CLOSED_FORM), calibration=[prompt("llama", tokens=24)])
        cache = DynamicCache()
        forward(model, tokens(1, 2040), cache)
        for step in range(8):
            forward(model, tokens(1, 1, seed=step), cache)
        held[name] = cache_nbytes(cache)
        assert cache.get_seq_length() == 2048
    assert held["dense"] == 2048 * 6 * 8 * 64 * 2 * 2
    assert held["latent"] <= 0.52 * held["dense"]


def test_nbytes_counts_every_tensor_once(compressed):
    cache = WSVDCache(compressed("llama", 0.5), max_cache_len=32)
    forward(compressed("llama", 0.5), tokens(), cache, attention_mask=torch.ones(2, 20))
    latents = 3 * 2 * (2 * 2 * 32 * 8) * 4  # layers, K and V, [B, H, S, r], fp32
    rows = 2 * (2 * 32 * 8) * 4  # cos and sin, [B, S, d/2], once for all layers
    lengths = (3 + 1) * 8
    assert cache_nbytes(cache) == latents + rows + lengths


@pytest.mark.parametrize("family", KINDS)
def test_a_step_does_not_copy_the_cache(family, compressed):
    """Storage moves only when the spare tokens are used up."""
    model, cache = compressed(family, 0.5), DynamicCache()
    forward(model, tokens(1, 30), cache)
    moves, addresses = 0, None
    for step in range(40):
        forward(model, tokens(1, 1, seed=step), cache)
        now = [b.data.data_ptr() for layer in cache.layers for store in layer.stores() for b in store.buffers.values()]
        moves += addresses is not None and now != addresses
        addresses = now
    assert moves <= 6


def test_sliding_layers_hold_no_more_than_their_window(compressed):
    model, cache = compressed("mistral", 0.5), DynamicCache(config=compressed("mistral", 0.5).config)
    forward(model, tokens(1, 30), cache)
    for step in range(30):
        forward(model, tokens(1, 1, seed=step), cache)
    for layer in (*cache.layers, cache.layers[0].rows):
        assert layer.keys.shape[-2] == 7
        assert layer.key_store.buffers["tokens"].data.shape[-2] <= 7 + 1 + slack(8)
    assert cache.get_seq_length() == 60


@pytest.mark.parametrize("family", KINDS)
def test_crop_forgets_tokens(family, compressed):
    model, ids = compressed(family, 0.5), tokens(1, 6)
    cache, expected = WSVDCache(model), WSVDCache(model)
    reference = forward(model, ids, expected)
    forward(model, ids[:, :4], cache)
    forward(model, tokens(1, 3, seed=8), cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 4
    torch.testing.assert_close(forward(model, ids[:, 4:], cache), reference)


def test_crop_past_the_window_needs_recording(compressed):
    model, ids = compressed("mistral", 0.5), tokens(1, 24)
    cache, expected = WSVDCache(model), WSVDCache(model)
    reference = forward(model, ids, expected)
    forward(model, ids[:, :20], cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-2)
    cache.activate_past_recording()
    forward(model, tokens(1, 3, seed=8), cache)
    cache.crop(-3)
    torch.testing.assert_close(forward(model, ids[:, 20:], cache), reference)


def test_crop_refuses_positive_numbers(compressed):
    cache = WSVDCache(compressed("llama", 0.5))
    forward(compressed("llama", 0.5), tokens(), cache)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(4)


@pytest.mark.parametrize("positions", [False, True], ids=["shared-rows", "rows-per-sequence"])
@pytest.mark.parametrize("family", KINDS)
def test_batch_operations_move_latents_and_rows_alike(family, positions, compressed):
    """Reordering, selecting and repeating rows of the batch, before the next tokens of each row."""
    model, ids, more = compressed(family, 0.5), tokens(2, 12), tokens(4, 2, seed=9)

    def at(length, batch):  # different positions in each row, so that rotary rows differ
        if not positions or family == "qwen2_vl":
            return {}
        rows = torch.arange(length)[None] + torch.tensor([0, 5]).repeat_interleave(batch // 2)[:, None]
        return {"position_ids": rows}

    operations = {
        "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    }
    for operation, order in operations.values():
        cache, expected = WSVDCache(model), WSVDCache(model)
        place = at(12, 2)
        forward(model, ids, cache, **place)
        operation(cache)
        forward(model, ids[order], expected, **{k: v[order] for k, v in place.items()})
        step = {k: torch.arange(12, 14)[None] + v[order, :1] for k, v in place.items()}
        ours, reference = (forward(model, more[: len(order)], c, **step) for c in (cache, expected))
        torch.testing.assert_close(ours, reference)


def test_batch_one_positions_then_one_a_row(compressed):
    """Rotary rows arrive with batch 1 (default positions) and later with one a sequence, and the other way round."""
    model, ids = compressed("llama", 0.5), tokens(2, 10)
    per_row = torch.arange(10).expand(2, -1)
    reference = forward(model, ids, WSVDCache(model))
    for first, second in (({}, {"position_ids": per_row[:, 8:]}), ({"position_ids": per_row[:, :8]}, {})):
        cache = WSVDCache(model)
        forward(model, ids[:, :8], cache, **first)
        torch.testing.assert_close(forward(model, ids[:, 8:], cache, **second), reference)


@pytest.mark.parametrize("family", KINDS)
def test_deepcopy_is_independent(family, compressed):
    model, ids = compressed(family, 0.5), tokens(2, 12)
    cache = WSVDCache(model)
    forward(model, ids, cache)
    copied = copy.deepcopy(cache)
    assert copied.layers[1].rows is copied.layers[0].rows is not cache.layers[0].rows
    reference = forward(model, tokens(2, 2, seed=4), copy.deepcopy(cache))
    forward(model, tokens(2, 3, seed=5), cache)
    torch.testing.assert_close(forward(model, tokens(2, 2, seed=4), copied), reference)


def test_layers_can_be_offloaded_and_prefetched(compressed):
    model, ids = compressed("llama", 0.5), tokens(2, 12)
    cache, expected = WSVDCache(model), WSVDCache(model)
    for each in (cache, expected):
        forward(model, ids, each)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    more = tokens(2, 2, seed=4)
    torch.testing.assert_close(forward(model, more, cache), forward(model, more, expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_stock_cache_is_upgraded_in_place(family, compressed):
    model = compressed(family, 0.5)
    config = model.config.get_text_config(decoder=True)
    for cache in (DynamicCache(), DynamicCache(config=config), StaticCache(config, 32)):
        kind = type(cache)
        forward(model, tokens(), cache)
        assert type(cache) is kind
        assert all(isinstance(layer, LatentMixin) for layer in cache.layers)


def test_a_cache_with_dense_keys_in_it_stays_dense(dense, compressed, merged):
    """A prompt cached before compression (or by another model) is not reinterpreted."""
    cache = DynamicCache()
    forward(merged("llama", 0.5), tokens(), cache)
    reference = forward(merged("llama", 0.5), tokens(2, 2), copy.deepcopy(cache))
    torch.testing.assert_close(forward(compressed("llama", 0.5), tokens(2, 2), cache), reference)
    assert not any(isinstance(layer, LatentMixin) for layer in cache.layers)


def test_latents_of_another_model_are_refused(dense, compressed):
    cache = DynamicCache()
    forward(compressed("llama", 0.5), tokens(), cache)
    with pytest.raises(RuntimeError, match="holds latents"):
        forward(dense("llama"), tokens(2, 1), cache)


@pytest.mark.parametrize("max_cache_len", [0, -1, True, 2.5, "8"])
def test_wsvd_cache_refuses_wrong_sizes(max_cache_len, compressed):
    with pytest.raises(ValueError, match="max_cache_len"):
        WSVDCache(compressed("llama", 0.5), max_cache_len=max_cache_len)


def test_prefill_in_inference_mode_and_decode_outside_of_it(compressed):
    model, ids = compressed("llama", 0.5), tokens(2, 12)
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=ids[:, :9], use_cache=True, **{CACHE_ARGUMENT: cache})
    ours = torch.cat([forward(model, ids[:, i : i + 1], cache) for i in range(9, 12)])
    fresh = WSVDCache(model)
    forward(model, ids[:, :9], fresh)
    reference = torch.cat([forward(model, ids[:, i : i + 1], fresh) for i in range(9, 12)])
    torch.testing.assert_close(ours, reference)


def test_gradients_flow_through_several_steps(compressed):
    model, ids = copy.deepcopy(compressed("llama", 0.5)), tokens(2, 12)
    cache = DynamicCache()
    out = [model(input_ids=ids[:, :9], use_cache=True, **{CACHE_ARGUMENT: cache}).logits[:, -1]]
    out += [
        model(input_ids=ids[:, i : i + 1], use_cache=True, **{CACHE_ARGUMENT: cache}).logits[:, -1] for i in (9, 10)
    ]
    torch.stack(out).square().sum().backward()
    attention = model.model.layers[0].self_attn
    for projection in (attention.k_proj, attention.v_proj):
        assert projection.weight.grad.abs().sum() > 0
        assert projection.up.grad.abs().sum() > 0


@pytest.mark.parametrize("chunks", [[5, 1, 1, 1], [1] * 40, [100, 1, 70, 1], [3, 0, 2]])
def test_token_buffer_equals_concatenation(chunks):
    buffer, whole = TokenBuffer(), torch.empty(2, 3, 0, 4)
    for count in chunks:
        new = torch.randn(2, 3, count, 4)
        whole = torch.cat([whole, new], dim=-2)
        assert torch.equal(buffer.append(new), whole)
        assert len(buffer) == whole.shape[-2]


def test_token_buffer_operations():
    whole = torch.randn(3, 2, 20, 4)
    buffer = TokenBuffer()
    buffer.append(whole)
    buffer.append(whole[..., :1, :])
    buffer.crop(4)
    assert torch.equal(buffer.view, whole[..., :17, :])
    buffer.keep_last(5)
    assert torch.equal(buffer.view, whole[..., 12:17, :])
    buffer.select_batch(torch.tensor([2, 0]))
    assert torch.equal(buffer.view, whole[[2, 0], :, 12:17])
    buffer.repeat_batch(2)
    assert torch.equal(buffer.append(whole[[2, 2, 0, 0], :, 17:]), whole[[2, 2, 0, 0], :, 12:])
    buffer.crop(100)
    assert len(buffer) == 0


def test_slack_is_a_small_share():
    assert all(slack(n) <= max(8, n / 64 + 8) and slack(n) % 8 == 0 for n in range(1, 5000, 7))


@pytest.mark.parametrize(
    "layer", [GrowingLayer(), GrowingSlidingWindowLayer(sliding_window=6)], ids=["full", "window"]
)
def test_growing_layers_equal_the_stock_layers(layer):
    stock = type(layer).__mro__[2](**({"sliding_window": 6} if layer.is_sliding else {}))
    for count in (4, 1, 1, 1, 5, 1):
        keys, values = torch.randn(2, 3, count, 4), torch.randn(2, 3, count, 4)
        sizes = layer.get_mask_sizes(count), stock.get_mask_sizes(count)
        assert sizes[0] == sizes[1]
        for ours, theirs in zip(layer.update(keys, values), stock.update(keys, values)):
            assert torch.equal(ours, theirs)
        assert layer.get_seq_length() == stock.get_seq_length()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_assisted_decoding_on_a_kept_cache(family, compressed, merged):
    """transformers asks every layer to record its past; only sliding layers drop any."""
    inputs = {"input_ids": tokens(1, 10).repeat(1, 2)}
    options = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 4}
    cache = {CACHE_ARGUMENT: WSVDCache(compressed(family, 0.5))}
    ours = compressed(family, 0.5).generate(**inputs, **options, **cache)
    assert torch.equal(ours, merged(family, 0.5).generate(**inputs, **options))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cache_cropped_to_nothing_is_empty(family, compressed):
    model = compressed(family, 0.5)
    reference = forward(model, tokens(1, 5), WSVDCache(model))
    caches = [WSVDCache(model)]
    if family == "llama" and hasattr(StaticCache(model.config, 24).layers[0], "crop"):  # since transformers 5.24
        caches.append(WSVDCache(model, max_cache_len=24))
    for cache in caches:
        forward(model, tokens(1, 6, seed=9), cache)
        cache.crop(-6)
        torch.testing.assert_close(forward(model, tokens(1, 5), cache), reference)


def test_dense_shapes_given_ahead_are_not_taken(compressed):
    model = compressed("llama", 0.5)
    cache = WSVDCache(model, max_cache_len=24)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(forward(model, tokens(), cache), forward(model, tokens(), WSVDCache(model)))


def test_batch_rows_may_be_a_list_or_a_slice(compressed):
    model = compressed("llama", 0.5)
    for index in ([1], slice(1, 2)):
        cache = WSVDCache(model)
        forward(model, tokens(), cache)
        cache.batch_select_indices(index)
        assert cache.layers[0].keys.shape[0] == 1
