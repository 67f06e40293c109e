"""Caches that keep tokens of images, and guarded heads of them, in other forms than the rest, in whole models."""

from __future__ import annotations

import copy

import pytest
import tiny_vision_families as families
import torch
from crossed import crossed
from tiny_models import IMAGE_TOKEN
from tiny_models import build as build_model
from transformers import CompileConfig, DynamicCache
from transformers.cache_utils import StaticLayer

import hf_wsvd
from hf_wsvd import CacheConfig, WSVDCache, WSVDConfig
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.decoder import decoder_of
from hf_wsvd.image_tokens import (
    TEXT_ONLY,
    current_image_tokens,
    set_image_tokens,
    unwatch_image_tokens,
    watch_image_tokens,
)
from hf_wsvd.quantizer_config import GuardMap
from hf_wsvd.storage import make_store
from hf_wsvd.storage.static_classes import StaticTokenClassStore
from hf_wsvd.storage.token_classes import TokenClassStore


LAYERS, HEADS = 3, 2
# One head, both, none: keys and values differ.
SOME = {"key": {0: {1: 16}, 1: {0: 16, 1: 8}}, "value": {1: {1: 16}}}
EVERY = {side: {layer: dict.fromkeys(range(HEADS), 16) for layer in range(LAYERS)} for side in ("key", "value")}
SCHEMES = {
    "minmax": {"scheme": "minmax", "bits": 2},
    "grouped": {"scheme": "minmax", "bits": 3, "group_size": 8},
    "hadamard": {"scheme": "hadamard", "bits": 3},
    "turboquant": {"scheme": "turboquant", "bits": 2},
    "kivi": {"scheme": "kivi", "bits": 2, "group_size": 4, "residual_length": 4},
    "fp8": {"scheme": "fp8"},
    "text-packed": {"bits": 2, "text_bits": 8},
}
STATIC = {name: options for name, options in SCHEMES.items() if name != "kivi"}
# Rows of these do not depend on each other, nor tokens on those beside them.
INDEPENDENT = {name: options for name, options in STATIC.items() if name != "fp8"}

static_crop = pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="static layers crop since transformers 5.24")
KINDS = ["dense", "compressed"]
FIXED = {"bits": 2, "max_cache_len": 48}

every_scheme = crossed(2, kind=KINDS, options=SCHEMES)
independent = crossed(2, kind=KINDS, options=INDEPENDENT)
static = crossed(2, kind=KINDS, options=STATIC)


def guard_map(heads=SOME, tokens="image", **fields):
    return GuardMap(**heads, num_key_value_heads=[HEADS] * LAYERS, tokens=tokens, **fields)


@pytest.fixture
def wide(dense, compressed):
    """A LLaVA in fp64: sums of another order move no number across a border."""
    return lambda kind: copy.deepcopy({"dense": dense, "compressed": compressed}[kind]("llava")).double()


def inputs_of(batch=1, tokens=14, starts=None, dtype=torch.float64):
    inputs = families.prompt("llava", batch, tokens, starts)
    return {**inputs, "pixel_values": inputs["pixel_values"].to(dtype)}


def generate(model, inputs, cache, tokens=6, **options):
    fixed = {"max_new_tokens": tokens, "do_sample": False, CACHE_ARGUMENT: cache}
    return model.generate(**inputs, **{**fixed, **options})


@torch.no_grad()
def forward(model, cache, **inputs):
    return model(use_cache=True, **{CACHE_ARGUMENT: cache}, **inputs).logits


def text_of(batch=1, count=3, seed=7):
    return torch.randint(3, 120, (batch, count), generator=torch.Generator().manual_seed(seed))


def filled(model, inputs, **options):
    cache = WSVDCache(model, **options)
    forward(model, cache, **inputs)
    return cache


# What is kept how


@pytest.mark.parametrize("starts", [[2, 2], [3, 7]], ids=["rows-alike", "rows-differ"])
@pytest.mark.parametrize("length", [None, 32], ids=["growing", "static"])
def test_with_every_head_guarded_it_is_the_stock_cache_bit_for_bit(starts, length, dense):
    model, inputs = dense("llava"), inputs_of(2, starts=starts, dtype=torch.float32)
    scores = {"output_logits": True, "return_dict_in_generate": True}
    wanted = generate(model, inputs, DynamicCache(config=model.config.get_text_config()), **scores)
    ours = generate(
        model, inputs, WSVDCache(model, bits=2, guard_map=guard_map(EVERY), max_cache_len=length), **scores
    )
    assert torch.equal(ours.sequences, wanted.sequences)
    for found, logits in zip(ours.logits, wanted.logits):
        if length is None:
            assert torch.equal(found, logits)
        else:  # masked columns change the order of sums
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


@independent
def test_without_guards_and_classes_it_is_the_uniform_cache(kind, options, wide):
    model, inputs = wide(kind), inputs_of(2, starts=[3, 6])
    options = {name: value for name, value in options.items() if name != "text_bits"}
    empty = GuardMap(num_key_value_heads=[HEADS] * LAYERS, tokens="all")
    uniform, ours = (filled(model, inputs, **options, guard_map=given) for given in (None, empty))
    for layer, other in zip(uniform.layers, ours.layers):
        for store, other_store in zip(layer.stores(), other.stores()):
            assert not isinstance(other_store, TokenClassStore)
            assert torch.equal(store.read(), other_store.read())


@crossed(2, kind=KINDS, heads={"no-guards": {}, "guards": SOME}, options=INDEPENDENT)
def test_tokens_read_back_by_class_and_head(kind, heads, options, wide):
    """Against an oracle: positions of images and heads of the cache in the model's dtype, packed by themselves."""
    model, inputs = wide(kind), inputs_of(2, starts=[3, 6])
    plain, ours = (
        filled(model, inputs),
        filled(model, inputs, **options, text_bits=16, guard_map=guard_map(heads))
        if ("text_bits" not in options)
        else filled(model, inputs, **options, guard_map=guard_map(heads)),
    )
    mask = inputs["input_ids"] == IMAGE_TOKEN
    for number, (layer, reference) in enumerate(zip(ours.layers, plain.layers)):
        for side, store, whole in zip(("key", "value"), layer.stores(), reference.stores()):
            spec, wanted = getattr(layer.storage, side), whole.read().clone()
            forms = dict.fromkeys(range(HEADS), spec) | {h: guard for guard, own in spec.guards for h in own}
            for head, form in forms.items():
                for rows, kept in ((mask, form._replace(text=None, guards=())), (~mask, spec.text)):
                    for row in range(2):
                        alone = make_store(kept, side, 1, whole.width, whole.dtype)
                        alone.append(wanted[row : row + 1, head : head + 1, rows[row]])
                        wanted[row, head, rows[row]] = alone.read()[0, 0]
            torch.testing.assert_close(store.read(), wanted, rtol=0, atol=1e-5, msg=f"{side} of layer {number}")


@every_scheme
def test_bytes_are_those_of_all_tensors(kind, options, wide):
    model = wide(kind)
    for starts in ([2, 2], [3, 7]):
        cache = filled(model, inputs_of(2, starts=starts), **options, guard_map=guard_map())
        report = cache.memory_report()
        assert report.total == cache.nbytes
        assert (report.sum("places") > 0) == (starts == [3, 7])
        # One map for all layers, as long as nothing happens to it.
        assert report.sum("places") in (0, 2 * 14 * 4)


def test_guards_cost_what_they_keep():
    model = families.build("llava")
    sizes = [
        filled(model, inputs_of(1, dtype=torch.float32), scheme="minmax", bits=2, **options).memory_report()
        for options in ({"text_bits": 16}, {"guard_map": guard_map({"key": {0: {1: 16}}})})
    ]
    packed, whole = 16 * 2 // 8 + 4, 16 * 4  # codes and two scales, or fp32
    payload = [report.sum("payload") + report.sum("scales") for report in sizes]
    assert payload[1] - payload[0] == 4 * (whole - packed)  # four image tokens of one head


# How tokens are fed


@independent
def test_left_padded_rows_equal_single_rows(kind, options, wide):
    """Images in other places, and a row that is shorter."""
    model, inputs = wide(kind), inputs_of(2, 14, starts=[8, 3])
    inputs["attention_mask"][0, :5] = 0
    inputs["input_ids"][0, :5] = 0
    together, kept = generate(model, inputs, WSVDCache(model, **options, guard_map=guard_map())), inputs
    for row, start in ((0, 5), (1, 0)):
        alone = {name: value[row : row + 1] for name, value in kept.items()}
        alone = {n: v[:, start:] if n in ("input_ids", "attention_mask") else v for n, v in alone.items()}
        single = generate(model, alone, WSVDCache(model, **options, guard_map=guard_map()))
        assert torch.equal(single[0], together[row, start:])


@independent
def test_cropped_tokens_leave_no_trace(kind, options, wide):
    model, inputs = wide(kind), inputs_of(2, starts=[3, 6])
    cache, untouched = (filled(model, inputs, **options, guard_map=guard_map()) for _ in range(2))
    forward(model, cache, input_ids=text_of(2, 4))
    cache.crop(-4)
    more = text_of(2, 3, seed=8)
    assert torch.equal(forward(model, cache, input_ids=more), forward(model, untouched, input_ids=more))
    cache.crop(-12)  # into the images
    for layer in cache.layers:
        assert layer.get_seq_length() == 5
        assert layer.keys.shape[2] == 5


@independent
def test_speculative_decoding_gives_the_tokens_of_greedy_decoding(kind, options, wide):
    model, inputs = wide(kind), inputs_of(1, 14)
    stored = {**options, "prefill": "stored", "guard_map": guard_map()}
    wanted = generate(model, inputs, WSVDCache(model, **stored))
    for mode in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": build_model("llava", seed=5).double()}):
        assert torch.equal(generate(model, inputs, WSVDCache(model, **stored), **mode), wanted)


class RebuildingCache(WSVDCache):
    """Reorders by loading the selected rows of its state into new stores."""

    def reorder_cache(self, beam_idx):
        for layer in self.layers:
            for side in ("key", "value"):
                old = getattr(layer, f"{side}_store")
                new = layer.new_store(side, torch.empty(1, old.heads, 1, old.width, dtype=old.dtype))
                shared = ("scale", "hidden", "segments")  # not one for each row
                new.load_state({n: t if n.endswith(shared) else t[beam_idx] for n, t in old.state().items()})
                setattr(layer, f"{side}_store", new)


@every_scheme
def test_beam_search_equals_rebuilding_at_every_step(kind, options, wide):
    model, inputs = wide(kind), inputs_of(2, starts=[3, 6])
    scored = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    ours, wanted = (
        generate(model, inputs, cls(model, **options, guard_map=guard_map()), **scored)
        for cls in (WSVDCache, RebuildingCache)
    )
    assert torch.equal(ours.sequences, wanted.sequences)
    torch.testing.assert_close(ours.sequences_scores, wanted.sequences_scores)


def test_sampling_of_several_sequences_equals_single_draws(wide):
    model, options = wide("dense"), {"bits": 2, "guard_map": guard_map()}
    drawn = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3}
    torch.manual_seed(3)
    ours = generate(model, inputs_of(), WSVDCache(model, **options), **drawn)
    repeated = {name: value.repeat_interleave(3, 0) for name, value in inputs_of().items()}
    torch.manual_seed(3)
    wanted = generate(model, repeated, WSVDCache(model, **options), do_sample=True, temperature=1.5)
    assert torch.equal(ours, wanted)


@independent
def test_a_second_turn_with_an_image_equals_one_pass(kind, options, wide):
    """A later image is told too, whatever came before."""
    model = wide(kind)
    stored = {**options, "prefill": "stored", "guard_map": guard_map()}
    first, second = inputs_of(2, 12, starts=[3, 6]), inputs_of(2, 9, starts=[4, 2])
    cache = filled(model, first, **stored)
    forward(model, cache, input_ids=text_of(2, 4))
    found = forward(model, cache, input_ids=second["input_ids"], pixel_values=second["pixel_values"])
    ids = torch.cat([first["input_ids"], text_of(2, 4), second["input_ids"]], dim=1)
    pixels = torch.stack([first["pixel_values"], second["pixel_values"]], dim=1).flatten(0, 1)
    wanted = forward(model, WSVDCache(model, **stored), input_ids=ids, pixel_values=pixels)[:, -9:]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=5e-3)
    mask = ids == IMAGE_TOKEN
    store = cache.layers[0].key_store
    assert sum(segment.tokens for segment in store.segments) == mask.shape[1]


@independent
def test_a_prompt_in_pieces_equals_a_prompt_in_one(kind, options, wide):
    """Text after an image, in pieces, without a call of the image."""
    model, inputs, more = wide(kind), inputs_of(2, starts=[3, 6]), text_of(2, 11)
    stored = {**options, "prefill": "stored", "guard_map": guard_map()}
    caches = [filled(model, inputs, **stored) for _ in range(2)]
    wanted = forward(model, caches[0], input_ids=more)
    pieces = [forward(model, caches[1], input_ids=piece) for piece in more.split([5, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), wanted, rtol=1e-3, atol=5e-3)


# Operations


@every_scheme
def test_operations_on_the_batch(kind, options, wide):
    model, more = wide(kind), text_of(3, 2)
    cache = filled(model, inputs_of(3, starts=[3, 6, 2]), **options, guard_map=guard_map())
    forward(model, cache, input_ids=text_of(3, 5))
    wanted = forward(model, copy.deepcopy(cache), input_ids=more)
    for operation, order in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: [layer.offload() or layer.prefetch() for layer in c.layers], [0, 1, 2]),
    ):
        changed = copy.deepcopy(cache)
        operation(changed)
        torch.testing.assert_close(forward(model, changed, input_ids=more[order]), wanted[order], rtol=1e-4, atol=1e-4)
        assert changed.memory_report().total == changed.nbytes
    cache.reset()
    inputs = inputs_of(1)
    new = filled(model, inputs, **options, guard_map=guard_map())
    forward(model, cache, **inputs)
    for layer, other in zip(cache.layers, new.layers):
        assert torch.equal(layer.keys, other.keys)


@every_scheme
def test_a_saved_cache_goes_on_as_it_would_have(kind, options, dense, compressed, tmp_path):
    model = {"dense": dense, "compressed": compressed}[kind]("llava")
    inputs, more = inputs_of(2, starts=[3, 6], dtype=torch.float32), text_of(2, 3)
    cache = filled(model, inputs, **options, guard_map=guard_map(selector="headguard"))
    cache.save(tmp_path / "cache.safetensors", input_ids=inputs["input_ids"])
    loaded = WSVDCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.cache_config == cache.cache_config
    assert torch.equal(forward(model, loaded, input_ids=more), forward(model, cache, input_ids=more))


# Fixed size


@static
def test_a_static_cache_gives_the_tokens_of_a_growing_one(kind, options, wide):
    model = wide(kind)
    for starts in ([2, 2], [3, 7]):
        inputs = inputs_of(2, starts=starts)
        stored = {**options, "prefill": "stored", "guard_map": guard_map()}
        growing, fixed = WSVDCache(model, **stored), WSVDCache(model, **stored, max_cache_len=24)
        assert torch.equal(generate(model, inputs, growing), generate(model, inputs, fixed))
        assert isinstance(fixed.layers[0].key_store, StaticTokenClassStore)
        length = fixed.get_seq_length()
        for ours, other in zip(fixed.layers, growing.layers):
            torch.testing.assert_close(ours.keys[:, :, :length], other.keys, rtol=0, atol=1e-5)
        assert fixed.memory_report().total == fixed.nbytes


@crossed(2, kind=KINDS, starts={"rows-differ": [3, 7], "rows-alike": [2, 2]})
def test_a_static_decode_step_is_one_graph(kind, starts, dense, compressed):
    model = copy.deepcopy({"dense": dense, "compressed": compressed}[kind]("llava"))
    inputs = inputs_of(2, starts=starts, dtype=torch.float32)
    caches = [WSVDCache(model, bits=3, guard_map=guard_map(), max_cache_len=24) for _ in range(2)]
    wanted = generate(model, inputs, caches[0], disable_compile=True)
    torch.compiler.reset()
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    assert torch.equal(generate(model, inputs, caches[1], compile_config=config), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


@static_crop
def test_a_static_cache_is_cropped_and_used_again(wide):
    model, options = wide("dense"), {"bits": 2, "guard_map": guard_map(), "max_cache_len": 24}
    inputs = inputs_of(2, starts=[3, 6])
    cache, untouched = (filled(model, inputs, **options) for _ in range(2))
    forward(model, cache, input_ids=text_of(2, 4))
    cache.crop(-4)
    more = text_of(2, 3, seed=8)
    assert torch.equal(forward(model, cache, input_ids=more), forward(model, untouched, input_ids=more))
    cache.reset()
    other = inputs_of(2, 20, starts=[3, 12])
    new = filled(model, other, **options)
    forward(model, cache, **other)
    assert torch.equal(cache.layers[0].keys, new.layers[0].keys)


def test_later_images_of_a_static_cache_are_kept_as_text(wide):
    """They find no slot among those of the first prompt: whole, and where they belong."""
    model, second = wide("dense"), inputs_of(1, 8)
    stored = {"bits": 2, "guard_map": guard_map(), "prefill": "stored"}
    fixed, growing = WSVDCache(model, **stored, max_cache_len=24), WSVDCache(model, prefill="stored")
    for cache in (fixed, growing):
        forward(model, cache, input_ids=text_of(1, 5))
        forward(model, cache, **{name: second[name] for name in ("input_ids", "pixel_values")})
    for ours, other in zip(fixed.layers, growing.layers):
        torch.testing.assert_close(ours.keys[:, :, :13], other.keys, rtol=0, atol=1e-9)


@pytest.mark.parametrize("whole", [None, {1: [0]}], ids=["", "skip-heads"])
@pytest.mark.parametrize("length", [None, 20], ids=["growing", "static"])
@pytest.mark.parametrize("text_bits", [8, 2])
@pytest.mark.parametrize("tokens", ["image", "all"])
def test_guards_and_text_bits_each_hold_for_their_tokens(tokens, text_bits, length, whole, wide):
    """The guarded head is whole on images, or everywhere; the other one has the bits of each class."""
    model, inputs = wide("dense"), inputs_of(2, starts=[2, 6])
    guards = guard_map({"key": {1: {1: 16}}}, tokens)
    options = {"scheme": "minmax", "bits": 2, "skip_heads": whole}
    cache = filled(model, inputs, **options, text_bits=text_bits, guard_map=guards, max_cache_len=length)
    exact, packed, text = (
        filled(model, inputs, **form).layers[1].keys
        for form in ({}, {"scheme": "minmax", "bits": 2}, {"scheme": "minmax", "bits": text_bits})
    )
    image = (inputs["input_ids"] == IMAGE_TOKEN)[:, None, :, None]
    wanted = torch.where(image, packed, text)
    wanted[:, 1] = exact[:, 1] if tokens == "all" else torch.where(image, exact, text)[:, 1]
    if whole:
        wanted[:, 0] = exact[:, 0]
    assert torch.equal(cache.layers[1].keys[:, :, :14], wanted)


@static_crop
def test_a_static_cache_cropped_into_its_images_says_when_text_finds_no_room(wide):
    model = wide("dense")
    cache = filled(model, inputs_of(), bits=2, guard_map=guard_map(), max_cache_len=24)
    cache.crop(-10)  # in the middle of the image
    with pytest.raises(ValueError, match="room for 18 more tokens of text and got 19"):
        forward(model, cache, input_ids=text_of(1, 19))
    forward(model, cache, input_ids=text_of(1, 18))
    assert cache.get_seq_length() == 22


def test_a_sliding_window_of_fixed_size_is_refused():
    model = families.build("gemma3")
    with pytest.raises(ValueError, match="a sliding window of fixed size cannot keep tokens of images otherwise"):
        WSVDCache(model, bits=4, text_bits=16, max_cache_len=32)


def test_windows_of_guarded_heads_are_refused_in_a_fixed_size(wide):
    with pytest.raises(ValueError, match="cannot keep windows"):
        WSVDCache(wide("dense"), bits=4, residual_length=4, text_bits=16, max_cache_len=32)


# How image tokens are told


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_tells_its_image_tokens(family, monkeypatch):
    """In other places in every row, in generation and in a plain call; decode steps are text."""
    model, seen = families.build(family), []
    inputs = families.prompt(family, 2, 16, starts=[2, 5])
    append = TokenClassStore.append_marked

    def spy(store, tokens, image_tokens):
        seen.append(image_tokens)
        append(store, tokens, image_tokens)

    monkeypatch.setattr(TokenClassStore, "append_marked", spy)
    wanted = inputs["input_ids"] == IMAGE_TOKEN
    for call in (
        lambda cache: generate(model, inputs, cache, 3),
        lambda cache: forward(model, cache, **inputs),
        lambda cache: model.base_model(**inputs, use_cache=True, **{CACHE_ARGUMENT: cache}),
    ):
        seen.clear()
        call(WSVDCache(model, bits=4, text_bits=16))
        assert all(torch.equal(tokens.mask, wanted) for tokens in seen[: 2 * LAYERS])
        assert all(tokens.text_only and tokens.mask is None for tokens in seen[2 * LAYERS :])
        assert current_image_tokens() is None


def test_sliding_layers_keep_classes_apart_in_their_window():
    model = families.build("gemma3")
    inputs = families.prompt("gemma3", 2, 16, starts=[6, 9])
    plain, ours = WSVDCache(model), WSVDCache(model, bits=8, text_bits=16)
    tokens = [generate(model, inputs, cache, 10) for cache in (plain, ours)]
    assert torch.equal(*tokens)
    assert [layer.keys.shape[2] for layer in ours.layers] == [7, 25, 7]
    for layer, other in zip(ours.layers, plain.layers):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=0.1)


def test_a_call_that_does_not_show_its_images_is_refused(wide):
    model, inputs = wide("dense"), inputs_of()
    cache = WSVDCache(model, bits=4, text_bits=16)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    for call in (
        lambda: forward(model, cache, inputs_embeds=embeds),
        lambda: forward(decoder_of(model), cache, input_ids=inputs["input_ids"]),
    ):
        with pytest.raises(ValueError, match=r"with hf_wsvd.image_tokens\(mask\)"):
            call()
    assert current_image_tokens() is None


def test_a_caller_tells_the_image_tokens(wide):
    """What the caller says goes before what the inputs show."""
    model, inputs = wide("dense"), inputs_of()
    cache = WSVDCache(model, bits=4, text_bits=16)
    mask = torch.zeros(1, 14, dtype=torch.bool)
    mask[:, 4:9] = True
    with torch.no_grad(), hf_wsvd.image_tokens(mask):
        model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]), **{CACHE_ARGUMENT: cache})
    assert len(cache.layers[0].key_store.image) == 5
    other = pytest.raises(ValueError, match=r"mask is \[1, 14\], but the cache got \[1, 8\] tokens")
    with other, hf_wsvd.image_tokens(mask):
        forward(model, cache, **{name: inputs_of(1, 8)[name] for name in ("input_ids", "pixel_values")})
    for wrong in (mask.int(), mask[0], "mask"):
        with pytest.raises(ValueError, match="mask must be a bool tensor"), hf_wsvd.image_tokens(wrong):
            pass


def test_generation_from_embeddings_goes_on_by_itself(wide):
    """The caller tells of the prompt; the tokens that follow are known to be text."""
    model, inputs = wide("dense"), inputs_of()
    options = {"bits": 2, "guard_map": guard_map(), "prefill": "stored"}
    wanted = generate(model, inputs, WSVDCache(model, **options))[:, 14:]
    with torch.no_grad():
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        features = model.model.get_image_features(inputs["pixel_values"]).pooler_output
        embeds[:, 2:6] = torch.cat(list(features))
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    with hf_wsvd.image_tokens(inputs["input_ids"] == IMAGE_TOKEN):
        assert torch.equal(generate(model, given, WSVDCache(model, **options)), wanted)


def test_an_interrupted_forward_leaves_nothing_for_the_next(wide):
    """Hooks do not run after Ctrl-C: what it told must not stand when another call begins."""
    model, inputs, options = wide("dense"), inputs_of(), {"bits": 2, "guard_map": guard_map()}

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = decoder_of(model).layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model, WSVDCache(model, **options), input_ids=text_of(1, 14))
    hook.remove()
    other = wide("compressed")
    for next_one in (other, model):
        cache = filled(next_one, inputs, **options)
        assert len(cache.layers[0].key_store.image) == 4
    assert current_image_tokens() is None


def test_an_error_in_a_forward_leaves_nothing_told(wide):
    model = wide("dense")
    watch_image_tokens(model)
    with pytest.raises(IndexError):
        model(input_ids=text_of(1, 3) + 1000)
    assert current_image_tokens() is None


def test_what_a_compiled_frame_told_is_known_outside_of_it():
    """Dynamo leaves some frames alone, that of the cache may be one."""
    torch.compile(lambda: set_image_tokens(TEXT_ONLY), backend="eager")()
    try:
        assert current_image_tokens() is TEXT_ONLY
    finally:
        torch.compile(lambda: set_image_tokens(None), backend="eager")()
    assert current_image_tokens() is None


def test_watching_is_done_once_and_undone():
    model = families.build("llava")
    hooks = lambda m: (len(m._forward_pre_hooks), len(m._forward_hooks))  # noqa: E731
    before = [hooks(module) for module in (model, model.base_model)]
    assert watch_image_tokens(model)
    assert not watch_image_tokens(model)
    copied = copy.deepcopy(model)
    for module in (model, model.base_model):
        assert hooks(module) == (1, 1)
    unwatch_image_tokens(model)
    assert [hooks(module) for module in (model, model.base_model)] == before
    # The copy has hooks of its own.
    cache = WSVDCache(copied, bits=4, text_bits=16)
    forward(copied, cache, **inputs_of(dtype=torch.float32))
    assert len(cache.layers[0].key_store.image) == 4
    assert not hasattr(model, "_wsvd_images")


# Configured models


def test_a_configured_model_packs_every_cache_by_class(dense):
    config = WSVDConfig(rank_ratio=None, cache=CacheConfig(bits=2, guard_map=guard_map()))
    model = hf_wsvd.compress(copy.deepcopy(dense("llava")), config)
    inputs = inputs_of(2, starts=[3, 6], dtype=torch.float32)
    out = generate(model, inputs, None, return_dict_in_generate=True)
    cache = getattr(out, CACHE_ARGUMENT)
    assert isinstance(cache.layers[0].key_store, TokenClassStore)
    assert torch.equal(out.sequences, generate(model, inputs, WSVDCache(model)))


# Models and maps that do not fit


def test_a_text_model_guards_all_tokens_or_none(dense):
    model = dense("llama")
    for options, message in (
        ({"text_bits": 16}, "text_bits tells tokens of images from others, but LlamaForCausalLM reads text alone"),
        ({"guard_map": guard_map()}, "guard_map.tokens .* allowed: 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            WSVDCache(model, bits=2, **options)
    cache = WSVDCache(model, bits=2, guard_map=guard_map(EVERY, "all"))
    ids = text_of(2, 9)
    assert torch.equal(forward(model, cache, input_ids=ids), forward(model, WSVDCache(model), input_ids=ids))
    assert torch.equal(cache.layers[0].keys, filled(model, {"input_ids": ids}).layers[0].keys)


def test_a_map_of_another_model_is_refused(dense):
    other = GuardMap(key={0: {3: 16}}, num_key_value_heads=[4] * LAYERS)
    with pytest.raises(ValueError, match="made for another model: a decoder of 3 layers of 4 KV heads"):
        WSVDCache(dense("llava"), bits=2, guard_map=other)
    config = WSVDConfig(rank_ratio=None, cache=CacheConfig(bits=2, guard_map=other))
    with pytest.raises(ValueError, match="made for another model"):
        hf_wsvd.compress(copy.deepcopy(dense("llava")), config)


# Estimates


@crossed(2, kind=KINDS, options={**SCHEMES, "static": FIXED}, decoding=[False, True])
def test_an_estimate_is_what_a_cache_takes(kind, options, decoding, dense, compressed):
    """Guarded heads of 8 bits beside others of the same scheme included."""
    model = {"dense": dense, "compressed": compressed}[kind]("llava")
    of_images = guard_map({"key": {0: {0: 8}, 1: {0: 16, 1: 16}}, "value": {2: {1: 8}}})
    settings = {**options, "guard_map": of_images}
    cache, mask = WSVDCache(model, **settings), torch.zeros(2, 40 - decoding, dtype=torch.bool)
    mask[:, :25] = True
    positions = torch.arange(40).expand(2, -1)
    with hf_wsvd.image_tokens(mask):
        forward(model, cache, input_ids=text_of(2, 40 - decoding), position_ids=positions[:, : 40 - decoding])
    if decoding:
        forward(model, cache, input_ids=text_of(2, 1), position_ids=positions[:, -1:])
    found = hf_wsvd.estimate_memory(model, 40, 2, image_tokens=25, decoding=decoding, **settings)
    assert found.cache_bytes == cache.nbytes
    assert found.report.to_dict() == cache.memory_report().to_dict()


def test_an_estimate_asks_for_the_number_of_image_tokens(dense):
    for given in (None, 41, -1, True):
        with pytest.raises(ValueError, match=f"image_tokens={given}.*a number from 0 to 40"):
            hf_wsvd.estimate_memory(dense("llava"), 40, bits=4, text_bits=16, image_tokens=given)
    alike = [hf_wsvd.estimate_memory(dense("llava"), 40, bits=4, image_tokens=given) for given in (None, 0, 25)]
    assert len({estimate.cache_bytes for estimate in alike}) == 1
