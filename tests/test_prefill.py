"""Long prompts go through the decoder in pieces, and everything is as if they had gone in one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tiny_vision_families
import torch
from tiny_models import FAMILIES, IMAGE_TOKEN, prompt
from transformers import DynamicCache

from hf_wsvd import WSVDCache, image_tokens, prefill, set_prefill_chunk
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.decoder import decoder_of
from hf_wsvd.image_tokens import ImageTokens, current_image_tokens


TOKENS = 17
SIZE = 5
QUICK = [("mistral", False), ("qwen2_vl", False), ("llava", True)]


@contextmanager
def chunk(model, tokens) -> Iterator[list[int]]:
    """Tokens of every forward of the decoder's first layer inside, where prompts go in pieces of `tokens`."""
    lengths: list[int] = []
    set_prefill_chunk(model, tokens)
    handle = decoder_of(model).layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    try:
        yield lengths
    finally:
        handle.remove()
        set_prefill_chunk(model)


def steps(model, inputs, cache, **options):
    """Logits of a prompt's last token and three greedy steps after it."""
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, CACHE_ARGUMENT: cache, **options}
    return torch.stack(model.generate(**inputs, return_dict_in_generate=True, **options).logits)


def padded(inputs):
    """A token of padding before the first row."""
    inputs = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    inputs["attention_mask"][0, :1] = 0
    return inputs


@pytest.mark.parametrize(
    ("family", "fixed"),
    [
        pytest.param(family, fixed, marks=() if (family, fixed) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for fixed in (False, True)
    ],
)
def test_pieces_are_the_whole(family, fixed, dense):
    model, size = dense(family), {"max_cache_len": 32} if fixed else {}
    inputs = padded(prompt(family, batch=2, tokens=TOKENS))
    wanted = steps(model, inputs, WSVDCache(model, **size))
    with chunk(model, SIZE) as lengths:
        found = steps(model, inputs, WSVDCache(model, **size))
    assert lengths == [4, 4, 4, 5, 1, 1, 1]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("idefics3", "paligemma"))],
)
def test_other_vision_language_models(family):
    """Qwen3-VL adds features of images to hidden states; tokens of an image in Gemma 3 see each other, in PaliGemma
    all of the prompt does, and go in one piece."""
    model, inputs = tiny_vision_families.build(family), tiny_vision_families.prompt(family, 2, TOKENS, [2, 7])
    wanted = steps(model, inputs, WSVDCache(model))
    with chunk(model, SIZE) as lengths:
        found = steps(model, inputs, WSVDCache(model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
    expected = {"gemma3": [2, 5, 5, 5], "paligemma": [TOKENS]}
    assert lengths[:-3] == expected.get(family, [4, 4, 4, 5])


def test_latents_in_any_cache(compressed):
    model, inputs = compressed("llama"), padded(prompt("llama", batch=2, tokens=TOKENS))
    wanted = steps(model, inputs, DynamicCache(config=model.config))
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 2, "prefill_chunk_size": 12}):
        whole = wanted if "num_beams" not in options else steps(model, inputs, None, **options)
        with chunk(model, SIZE) as lengths:
            found = steps(model, inputs, None, **options)
        assert max(lengths) <= SIZE
        torch.testing.assert_close(found, whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_padded_pieces_in_a_cache_that_masks_a_prompt_alone(family, compressed):
    model, inputs = compressed(family), padded(prompt(family, batch=2, tokens=TOKENS))
    wanted = steps(model, inputs, WSVDCache(model, max_cache_len=32))
    with chunk(model, SIZE) as lengths:
        found = steps(model, inputs, WSVDCache(model, max_cache_len=32))
    assert max(lengths) <= SIZE
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


def test_every_hidden_state_of_a_second_turn(compressed):
    model, ids = compressed("mistral"), prompt("mistral", tokens=40)["input_ids"]
    outputs = []
    for tokens in (None, 7):
        cache = WSVDCache(model)
        with chunk(model, tokens), torch.no_grad():
            for piece in ids.split(20, dim=1):
                out = model.model(piece, use_cache=True, **{CACHE_ARGUMENT: cache})
        outputs.append(out.last_hidden_state)
        as_tuple = model.model(ids, return_dict=False)[0]
        assert as_tuple.shape == (1, 40, 48)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-4)


STORED = {"scheme": "minmax", "bits": 4, "prefill": "stored"}


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({}, True),
        (STORED, True),
        ({"bits": 4}, False),
        pytest.param({**STORED, "residual_length": 4}, False, marks=pytest.mark.slow),
        ({**STORED, "layers": {1: {"scheme": "fp8", "bits": 8}}}, False),
    ],
    ids=str,
)
def test_by_default_only_where_nothing_changes(options, pieces, dense, monkeypatch):
    monkeypatch.setattr(prefill, "PIECE_TOKENS", 10)
    monkeypatch.setattr(prefill, "SHORTEST_PIECE", 6)
    model = dense("llama").double()
    try:
        inputs = prompt("llama", batch=2, tokens=TOKENS)
        with chunk(model, None):
            wanted = steps(model, inputs, WSVDCache(model, **options))
        with chunk(model, "auto") as lengths:
            found = steps(model, inputs, WSVDCache(model, **options))
        assert lengths[:-3] == ([5, 6, 6] if pieces else [TOKENS])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
        with chunk(model, 9) as lengths:
            steps(model, inputs, WSVDCache(model, **options))
        assert lengths[:-3] == [8, 9], "as the caller wants it"
    finally:
        model.float()


@pytest.mark.parametrize(
    "starts", [pytest.param(None, marks=pytest.mark.slow, id="alike"), pytest.param([2, 7], id="differ")]
)
def test_token_classes_of_every_piece(starts, dense):
    model = copy.deepcopy(dense("llava"))
    inputs = tiny_vision_families.prompt("llava", 2, TOKENS, starts)
    kept = []
    for tokens in (None, SIZE):
        cache = WSVDCache(model, scheme="minmax", bits=2, text_bits=8, prefill="stored")
        with chunk(model, tokens) as lengths:
            steps(model, inputs, cache)
        kept.append((len(lengths), cache.layers[0].keys))
    (whole, wanted), (pieces, found) = kept
    assert pieces > whole
    torch.testing.assert_close(found, wanted)


def test_a_cache_of_fixed_size_shares_out_its_slots_by_the_whole_prompt(dense):
    model = copy.deepcopy(dense("llava"))
    cache = WSVDCache(model, scheme="minmax", bits=2, text_bits=8, prefill="stored", max_cache_len=32)
    with chunk(model, SIZE) as lengths:
        steps(model, prompt("llava", tokens=TOKENS), cache)
    assert lengths[0] == TOKENS


def test_parts_of_token_classes():
    mask = torch.tensor([[False, True, True, False, False, True]])
    for tokens in (
        ImageTokens(mask),
        ImageTokens.of_rows_alike([(False, 0, 1), (True, 1, 3), (False, 3, 5), (True, 5, 6)]),
    ):
        assert tokens.part(2, 6).runs == [(True, 0, 1), (False, 1, 3), (True, 3, 4)]
    assert ImageTokens().part(2, 6).text_only


def test_what_stays_whole(dense, compressed):
    model, ids = compressed("llama"), prompt("llama", tokens=TOKENS)["input_ids"]
    outputs = ({"output_hidden_states": True}, {"output_attentions": True})
    with chunk(model, SIZE) as lengths:
        model(ids)  # gradients
        with torch.no_grad():
            for options in (*outputs, {"use_cache": False}):
                model(ids, **options)
    assert lengths == [TOKENS] * 4
    with chunk(dense("llama"), SIZE) as lengths:  # a cache that is not ours
        steps(dense("llama"), {"input_ids": ids}, DynamicCache())
    assert lengths[0] == TOKENS


@pytest.mark.parametrize("piece", [1, 4])
def test_a_failure_in_a_piece_leaves_nothing_behind(piece, dense):
    model, inputs = copy.deepcopy(dense("llava")), prompt("llava", tokens=TOKENS)
    options = {"scheme": "minmax", "bits": 2, "text_bits": 8, "prefill": "stored"}
    wanted = steps(model, inputs, WSVDCache(model, **options))
    with chunk(model, SIZE) as lengths:

        def fail(*args):
            if len(lengths) == piece:
                raise ZeroDivisionError

        handle = decoder_of(model).layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            steps(model, inputs, WSVDCache(model, **options))
        handle.remove()
        assert current_image_tokens() is None
        torch.testing.assert_close(steps(model, inputs, WSVDCache(model, **options)), wanted, rtol=0, atol=2e-4)


def test_hooks_that_exchange_the_inputs(compressed):
    """As one that casts them, or adds noise, does."""
    model, ids = copy.deepcopy(compressed("llama")), prompt("llama", tokens=TOKENS)["input_ids"]
    decoder_of(model).register_forward_pre_hook(lambda module, args, kwargs: (args, {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()
    }), with_kwargs=True)  # fmt: skip
    outputs = []
    for tokens in (None, SIZE):
        with chunk(model, tokens), torch.no_grad():
            outputs.append(model(ids).logits)
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-4)


def test_an_interruption_by_hand_leaves_nothing_for_the_next_forward(compressed):
    model, ids = copy.deepcopy(compressed("llama")), prompt("llama", tokens=TOKENS)["input_ids"]
    cache = WSVDCache(model)
    with chunk(model, SIZE) as lengths, torch.no_grad():

        def interrupt(*args):
            if len(lengths) == 4:
                raise KeyboardInterrupt

        handle = decoder_of(model).layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids, **{CACHE_ARGUMENT: cache})
        handle.remove()
        cache.reset()
        assert model(ids[:, :3], **{CACHE_ARGUMENT: cache}).logits.shape[1] == 3


def test_classes_that_the_caller_tells(dense):
    model, inputs = copy.deepcopy(dense("llava")), prompt("llava", tokens=TOKENS)
    mask = inputs["input_ids"] == IMAGE_TOKEN
    embedded = model.get_input_embeddings()(inputs["input_ids"].clamp(max=100))
    caches = [WSVDCache(model, scheme="minmax", bits=2, text_bits=8, prefill="stored") for _ in range(2)]
    for cache, tokens in zip(caches, (None, SIZE)):
        with chunk(model, tokens), image_tokens(mask), torch.no_grad():
            model(inputs_embeds=embedded, use_cache=True, **{CACHE_ARGUMENT: cache})
    torch.testing.assert_close(caches[0].layers[0].keys, caches[1].layers[0].keys)


@pytest.mark.parametrize("tokens", [0, -1, True, 2.0, "whole"])
def test_sizes_that_are_none(tokens, dense):
    with pytest.raises(ValueError, match=r"set_prefill_chunk: tokens=.* is not allowed; allowed: 'auto', None"):
        set_prefill_chunk(dense("llama"), tokens)


def test_no_model():
    with pytest.raises(ValueError, match="model must be a transformers model, got Linear"):
        set_prefill_chunk(torch.nn.Linear(2, 2))


def test_a_dense_model_again(compressed):
    model = copy.deepcopy(compressed("llama"))
    assert hasattr(decoder_of(model), "_wsvd_prefill")
    model.dequantize()
    assert not hasattr(decoder_of(model), "_wsvd_prefill")
