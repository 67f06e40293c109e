"""Every way to generate gives the tokens of the equivalent dense model, and does so from latents.

The equivalent dense model is the untouched one at full rank and the merged one (weights `U D`) at half rank.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny_models import CLOSED_FORM, FAMILIES, TEXT_FAMILIES, build, prompt
from transformers import DynamicCache

from hf_wsvd import WSVDCache, WSVDConfig, compress
from hf_wsvd.compat import CACHE_ARGUMENT, cache_of_output
from hf_wsvd.latent_layers import LatentMixin


NEW_TOKENS = 14
IMAGE_INPUTS = ("pixel_values", "image_grid_thw")


def greedy(model, inputs, **kwargs):
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs)


def beam(model, inputs):
    return greedy(model, inputs, num_beams=3, num_return_sequences=2)


def sampling(model, inputs):
    torch.manual_seed(7)
    return model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.5, top_k=0, num_return_sequences=2
    )


def left_padded(model, inputs):
    """Row 0 gets three padding tokens on the left, row 1 gets one."""
    pad = {"input_ids": torch.tensor([[0, 0, 0], [0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 0], [0, 1, 1]])}
    pad["mm_token_type_ids"] = torch.zeros(2, 3, dtype=torch.int)
    return greedy(model, {k: torch.cat([pad[k], v], 1) if k in pad else v for k, v in inputs.items()})


def static_cache(model, inputs):
    return greedy(model, inputs, cache_implementation="static")


def given_cache(model, inputs):
    return greedy(model, inputs, **{CACHE_ARGUMENT: DynamicCache()})


def first_row(inputs):
    return {k: v[: len(v) // 2] if k in IMAGE_INPUTS else v[:1] for k, v in inputs.items()}


def prompt_lookup(model, inputs):
    return greedy(model, first_row(inputs), prompt_lookup_num_tokens=4)


def assisted(model, inputs):
    return greedy(model, first_row(inputs), assistant_model=build("llama", seed=5))


def chunked_prefill(model, inputs):
    return greedy(model, inputs, prefill_chunk_size=5)


def chunked_prefill_static(model, inputs):
    return greedy(model, inputs, prefill_chunk_size=5, cache_implementation="static")


def continued(model, inputs, added):
    """A second turn of `added` tokens on the cache of the first."""
    first = model.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, torch.arange(10, 10 + added).expand(len(first.sequences), -1)], 1)
    cache = {CACHE_ARGUMENT: cache_of_output(first)}
    return greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **cache)


def short_second_turn(model, inputs):
    return continued(model, inputs, added=4)


def long_second_turn(model, inputs):
    """Longer than the longest query that attends in latent space."""
    return continued(model, inputs, added=20)


MODES = [
    greedy,
    beam,
    sampling,
    left_padded,
    static_cache,
    given_cache,
    prompt_lookup,
    assisted,
    chunked_prefill,
    chunked_prefill_static,
    short_second_turn,
    long_second_turn,
]
TEXT_ONLY = (assisted,)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_dense_model(family, mode, dense, compressed, merged):
    if mode in TEXT_ONLY and FAMILIES[family] not in TEXT_FAMILIES:
        pytest.skip("assisted decoding is for text models")
    if family == "qwen2_vl" and mode.__name__.startswith("chunked") and transformers.__version__.startswith("5.17"):
        pytest.skip("transformers 5.17 cannot prefill Qwen2-VL in chunks, dense or not")
    inputs = prompt(family, batch=2)
    assert torch.equal(mode(compressed(family, 1.0), inputs), mode(dense(family), inputs))
    assert torch.equal(mode(compressed(family, 0.5), inputs), mode(merged(family, 0.5), inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_logits_equal_the_dense_model(family, dense, compressed):
    inputs = prompt(family, batch=2)
    with torch.no_grad():
        assert torch.allclose(compressed(family, 1.0)(**inputs).logits, dense(family)(**inputs).logits, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_step_equal_the_merged_model(family, compressed, merged):
    """Tokens can agree by luck; the scores of every step cannot."""
    inputs = prompt(family, batch=2)
    options = {"output_logits": True, "return_dict_in_generate": True}
    ours, reference = (greedy(m, inputs, **options) for m in (compressed(family, 0.5), merged(family, 0.5)))
    for ours_step, reference_step in zip(ours.logits, reference.logits):
        torch.testing.assert_close(ours_step, reference_step, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"cache_implementation": "static", "prefill_chunk_size": 5}],
    ids=["dynamic", "static", "static-chunked"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_holds_latents(family, options, compressed):
    if family == "qwen2_vl" and "prefill_chunk_size" in options and transformers.__version__.startswith("5.17"):
        pytest.skip("transformers 5.17 cannot prefill Qwen2-VL in chunks, dense or not")
    model = compressed(family, 0.5)
    out = greedy(model, prompt(family), return_dict_in_generate=True, **options)
    layers = cache_of_output(out).layers
    assert len(layers) == 3
    for layer in layers:
        assert isinstance(layer, LatentMixin)
        assert layer.keys.shape[-1] == layer.values.shape[-1] == 8
    assert [layer.owns_rows for layer in layers] == [True, False, False]
    assert all(layer.rows is layers[0].rows for layer in layers)


def test_decoding_does_not_expand_keys_or_values(compressed, monkeypatch):
    """Steps of one token attend in latent space; only a long second turn expands the cache."""
    from hf_wsvd.call import LatentCall

    expansions = []
    expand = LatentCall.expand
    monkeypatch.setattr(LatentCall, "expand", lambda call: expansions.append(call) or expand(call))
    model = compressed("llama", 0.5)
    for mode in (greedy, static_cache, beam, left_padded, prompt_lookup, short_second_turn):
        mode(model, prompt("llama", batch=2))
    assert not expansions
    long_second_turn(model, prompt("llama", batch=2))
    assert len(expansions) == 3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_attention_functions_read_expanded_keys(family, implementation, compressed, merged):
    """A user may switch attention; the cache still holds latents and the tokens stay the same."""
    model, inputs = compressed(family, 0.5), prompt(family, batch=2)
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(implementation)
    try:
        tokens, static = greedy(model, inputs), static_cache(model, inputs)
    finally:
        decoder.set_attn_implementation(before)
    expected = greedy(merged(family, 0.5), inputs)
    assert torch.equal(tokens, expected)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("max_cache_len", [None, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_wsvd_cache_is_the_same_cache_built_ahead(family, max_cache_len, compressed):
    model, inputs = compressed(family, 0.5), prompt(family, batch=2)
    cache = WSVDCache(model, max_cache_len=max_cache_len)
    assert all(isinstance(layer, LatentMixin) for layer in cache.layers)
    assert torch.equal(greedy(model, inputs, **{CACHE_ARGUMENT: cache}), greedy(model, inputs))


def test_wsvd_cache_can_be_reused_after_reset(compressed):
    model, inputs = compressed("llama", 0.5), prompt("llama", batch=2)
    expected = greedy(model, inputs)
    for max_cache_len in (None, 64):
        cache = WSVDCache(model, max_cache_len=max_cache_len)
        for _ in range(2):
            assert torch.equal(greedy(model, inputs, **{CACHE_ARGUMENT: cache}), expected)
            cache.reset()


def test_attention_weights_can_be_asked_for(dense):
    """Under an eager model every step returns the weights of the merged model."""
    model = copy.deepcopy(dense("llama"))
    model.set_attn_implementation("eager")
    ours = compress(model, WSVDConfig(rank_ratio=0.5, **CLOSED_FORM), calibration=[prompt("llama", batch=2)])
    reference = copy.deepcopy(ours).dequantize()
    options = {"output_attentions": True, "return_dict_in_generate": True}
    steps = [greedy(m, prompt("llama", batch=2), **options).attentions for m in (ours, reference)]
    for our_layers, reference_layers in zip(*steps):
        for our_weights, reference_weights in zip(our_layers, reference_layers):
            torch.testing.assert_close(our_weights, reference_weights, atol=1e-4, rtol=1e-4)
