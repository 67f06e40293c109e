"""`WSVDCache` with packed storage, over dense and compressed models: tokens depend on what is stored and nothing else.

By default the first tokens of an empty cache attend to exact keys and values (`prefill="exact"`); tests that compare
ways to feed the same tokens have `prefill="stored"`. They compute in fp64: sums of another order differ by so little
that hardly a number to be stored is on another side of a border.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import transformers
from crossed import crossed
from test_families import build as build_family
from tiny_models import TEXT, build
from transformers import CompileConfig, DynamicCache, StaticCache

from hf_wsvd import WSVDCache, cache_nbytes
from hf_wsvd.cache_layers import GrowingLayer, GrowingSlidingWindowLayer
from hf_wsvd.compat import CACHE_ARGUMENT


TOKEN_WISE = {
    "bf16": {"scheme": "bf16"},
    "fp16": {"scheme": "fp16"},
    "fp8": {"scheme": "fp8"},
    "8-bit": {"bits": 8},
    "4-bit": {"bits": 4},
    "minmax-4-grouped": {"scheme": "minmax", "bits": 4, "group_size": 8},
    "3-bit": {"bits": 3},
    "k4-v2": {"key_bits": 4, "value_bits": 2},
    "turboquant-4": {"scheme": "turboquant", "bits": 4},
    "turboquant-2": {"scheme": "turboquant", "bits": 2},
    "layers": {"bits": 8, "layers": {1: {"bits": 2}}, "skip_layers": [-1], "skip_heads": {0: [1]}},
}
WINDOWED = {
    "4-bit-windows": {"bits": 4, "sink_length": 2, "residual_length": 4},
    "fp8-windows": {"scheme": "fp8", "sink_length": 1, "residual_length": 3},
    "kivi-4": {"scheme": "kivi", "bits": 4, "group_size": 4, "residual_length": 8},
    "kivi-2-sink": {"scheme": "kivi", "bits": 2, "group_size": 8, "residual_length": 8, "sink_length": 2},
}
ALL = {**TOKEN_WISE, **WINDOWED}
# fp8 has one scale for all first tokens of all rows: tokens fed otherwise read a little otherwise.
INDEPENDENT = {name: options for name, options in TOKEN_WISE.items() if name != "fp8"}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}

KINDS = ["dense", "compressed"]

token_wise = crossed(2, kind=KINDS, options=TOKEN_WISE)
independent = crossed(2, kind=KINDS, options=INDEPENDENT)
every_scheme = pytest.mark.parametrize("options", ALL.values(), ids=ALL)
both = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def model_of(dense, compressed):
    return lambda kind, family="llama": {"dense": dense, "compressed": compressed}[kind](family)


@pytest.fixture
def wide(model_of):
    """`model_of` in fp64."""
    return lambda *case: copy.deepcopy(model_of(*case)).double()


@pytest.fixture
def any_model(dense, compressed):
    """A model by what its cache is like."""
    models = {
        "llama": lambda: dense("llama"),
        "mistral": lambda: dense("mistral"),
        "gemma3": gemma3,
        "latents": lambda: compressed("llama"),
        "latents-of-a-window": lambda: compressed("mistral"),
    }
    return lambda case: models[case]()


def ids_of(batch=2, length=14, seed=3):
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model, ids, cache, **kwargs):
    """Logits of all `ids`, which are appended to `cache`."""
    return model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs).logits


def generate(model, ids, cache, tokens=8, **kwargs):
    options = {"max_new_tokens": tokens, "do_sample": False, CACHE_ARGUMENT: cache, **kwargs}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def filled(model, ids, **options):
    cache = WSVDCache(model, **options)
    forward(model, ids, cache)
    return cache


# Generation


@independent
def test_speculative_decoding_gives_the_tokens_of_greedy_decoding(kind, options, wide):
    """Tokens that are taken back leave no trace; those that stay were read as greedy decoding reads them.

    On an empty cache: in transformers 5.24 the stock cache too gives other tokens when it holds a prompt already.
    """
    model, ids, stored = wide(kind), ids_of(1, 8).repeat(1, 2), {**options, "prefill": "stored"}
    wanted = generate(model, ids, WSVDCache(model, **stored))
    for mode in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": build("llama", seed=5).double()}):
        assert torch.equal(generate(model, ids, WSVDCache(model, **stored), **mode), wanted)


@pytest.mark.parametrize("options", [TOKEN_WISE["4-bit"], TOKEN_WISE["turboquant-4"]], ids=["4-bit", "turboquant-4"])
@both
def test_speculative_decoding_over_a_window(kind, options, wide):
    model, ids, stored = wide(kind, "mistral"), ids_of(1, 8).repeat(1, 2), {**options, "prefill": "stored"}
    wanted = generate(model, ids, WSVDCache(model, **stored))
    assert torch.equal(generate(model, ids, WSVDCache(model, **stored), prompt_lookup_num_tokens=3), wanted)


class RebuildingCache(WSVDCache):
    """Reorders by loading the selected rows of its state into new stores."""

    def reorder_cache(self, beam_idx):
        for layer in self.layers:
            for side in ("key", "value"):
                old = getattr(layer, f"{side}_store")
                like = torch.empty(1, old.heads, 1, old.width, dtype=old.dtype)
                new = layer.new_store(side, like)
                shared = ("scale", "hidden")  # not one for each row
                new.load_state({n: t if n.endswith(shared) else t[beam_idx] for n, t in old.state().items()})
                setattr(layer, f"{side}_store", new)


@pytest.mark.parametrize(
    ("kind", "family", "options"),
    [
        *(pytest.param("dense", "llama", options, id=name) for name, options in ALL.items()),
        pytest.param("dense", "mistral", TOKEN_WISE["4-bit"], id="mistral-4-bit"),
        pytest.param("dense", "mistral", WINDOWED["kivi-4"], id="mistral-kivi-4"),
        pytest.param("compressed", "llama", TOKEN_WISE["4-bit"], id="latents-4-bit"),
        pytest.param("compressed", "llama", WINDOWED["kivi-4"], id="latents-kivi-4"),
        pytest.param("compressed", "mistral", WINDOWED["4-bit-windows"], id="latents-mistral-4-bit-windows"),
    ],
)
def test_beam_search_equals_rebuilding_at_every_step(kind, family, options, model_of):
    model, ids = model_of(kind, family), ids_of(2, 10)
    scored = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    ours, wanted = (generate(model, ids, cls(model, **options), 6, **scored) for cls in (WSVDCache, RebuildingCache))
    assert torch.equal(ours.sequences, wanted.sequences)
    torch.testing.assert_close(ours.sequences_scores, wanted.sequences_scores)


@independent
def test_left_padded_rows_equal_single_rows(kind, options, wide):
    model, ids = wide(kind), ids_of(2, 12)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, more = WSVDCache(model, **options), ids_of(2, 1, seed=9)
    forward(model, ids, cache, attention_mask=mask[:, :-1], position_ids=places[:, :-1])
    together = forward(model, more, cache, attention_mask=mask, position_ids=places[:, -1:])
    for row, start in ((0, 4), (1, 0)):
        alone = forward(model, more[row : row + 1], filled(model, ids[row : row + 1, start:], **options))
        torch.testing.assert_close(together[row : row + 1], alone, **CLOSE)


@independent
def test_turns_equal_one_pass(kind, options, wide):
    """A second turn on the cache of the first gives what a new cache gives for the whole conversation."""
    model, ids = wide(kind), ids_of(2, 9)
    stored = {**options, "prefill": "stored"}
    cache = WSVDCache(model, **stored)
    first = generate(model, ids, cache, 4)
    longer = torch.cat([first, ids_of(2, 5, seed=7)], dim=1)
    wanted = generate(model, longer, WSVDCache(model, **stored), 6)
    assert torch.equal(generate(model, longer, cache, 6), wanted)
    assert torch.equal(generate(model, longer, WSVDCache(model, **stored), 6, prefill_chunk_size=4), wanted)


@crossed(3, case=["llama", "mistral", "gemma3", "latents", "latents-of-a-window"], options=INDEPENDENT)
def test_a_prompt_in_pieces_equals_a_prompt_in_one(case, options, any_model):
    model = copy.deepcopy(any_model(case)).double()
    ids, stored = ids_of(2, 21), {**options, "prefill": "stored"}
    whole, cache = WSVDCache(model, **stored), WSVDCache(model, **stored)
    wanted = forward(model, ids, whole)
    pieces = torch.cat([forward(model, piece, cache) for piece in ids.split([5, 1, 9, 1, 5], dim=1)], dim=1)
    # The softmax of latent attention is in fp32: a scale may come to lie on the other side of a border of fp16, by one
    # step, which the logits show. Codes are the same.
    moved = False
    for layer, other in zip(whole.layers, cache.layers):
        for store, other_store in zip(layer.stores(), other.stores()):
            for name, kept in store.packed().items():
                if kept.dtype == torch.uint8:
                    assert torch.equal(kept, other_store.packed()[name])
                elif name.endswith("scales"):
                    torch.testing.assert_close(other_store.packed()[name], kept, rtol=2**-10, atol=1e-7)
                    moved = moved or not torch.equal(other_store.packed()[name], kept)
    torch.testing.assert_close(pieces, wanted, rtol=1e-3, atol=5e-3 if moved else 5e-4)


def gemma3(sliding_window=8):
    """A sliding layer, one of full attention, a sliding one."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return build_family(
        "gemma3_text", {"query_pre_attn_scalar": 16, "sliding_window": sliding_window, "layer_types": kinds}
    )


# Operations


@token_wise
def test_cropped_tokens_leave_no_trace(kind, options, wide):
    model, ids = wide(kind), ids_of(2, 14)
    cache, untouched = filled(model, ids[:, :9], **options), filled(model, ids[:, :9], **options)
    forward(model, ids_of(2, 4, seed=8), cache)
    cache.crop(-4)
    torch.testing.assert_close(forward(model, ids[:, 9:], cache), forward(model, ids[:, 9:], untouched), **CLOSE)


@crossed(2, kind=KINDS, options=ALL)
def test_operations_on_the_batch(kind, options, model_of):
    """Rows read as they did, whatever their number; a copy, a reset and a move change nothing else."""
    model, ids, more = model_of(kind), ids_of(3, 19), ids_of(3, 2, seed=9)
    cache = filled(model, ids, **options)
    wanted = forward(model, more, copy.deepcopy(cache))
    for operation, order in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([1])), [1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: [layer.offload() or layer.prefetch() for layer in c.layers], [0, 1, 2]),
    ):
        changed = copy.deepcopy(cache)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in changed.layers]
        operation(changed)
        for layer, (keys, values) in zip(changed.layers, before):
            torch.testing.assert_close(layer.keys, keys[order])
            torch.testing.assert_close(layer.values, values[order])
        torch.testing.assert_close(forward(model, more[order], changed), wanted[order], **CLOSE)
        assert changed.memory_report().total == changed.nbytes
    torch.testing.assert_close(forward(model, more, cache), wanted, **CLOSE)
    cache.reset()
    new = WSVDCache(model, **options)
    torch.testing.assert_close(forward(model, ids[:1], cache), forward(model, ids[:1], new))  # another batch


@every_scheme
def test_sliding_layers_keep_their_window_and_full_ones_their_sink(options):
    model = gemma3()
    cache = filled(model, ids_of(2, 20), **options)
    for step in range(12):
        forward(model, ids_of(2, 1, seed=step), cache)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds == [GrowingSlidingWindowLayer, GrowingLayer, GrowingSlidingWindowLayer]
    assert [layer.keys.shape[2] for layer in cache.layers] == [7, 32, 7]
    assert cache.get_seq_length() == 32
    assert all(not layer.storage.key.sink_length for layer in (cache.layers[0], cache.layers[2]))
    assert cache.layers[1].storage.key.sink_length == options.get("sink_length", 0)


def test_a_window_of_one_token(dense):
    """Nothing is kept between calls."""
    model = gemma3(sliding_window=1)
    for options in ({}, TOKEN_WISE["fp8"], TOKEN_WISE["4-bit"], WINDOWED["kivi-4"]):
        cache = filled(model, ids_of(2, 5), **options)
        assert torch.isfinite(forward(model, ids_of(2, 1), cache)).all()
        assert cache.layers[0].keys is cache.layers[0].values is None


# Other models


def hybrid():
    shape = {k: v for k, v in TEXT.items() if k != "num_hidden_layers"}
    config = transformers.Lfm2Config(**shape, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def test_layers_without_keys_pass_through():
    model, ids = hybrid(), ids_of(2, 9)
    stock = DynamicCache(config=model.config)
    assert torch.equal(generate(model, ids, WSVDCache(model)), generate(model, ids, DynamicCache(config=model.config)))
    cache = WSVDCache(model, bits=8, prefill="stored")
    generate(model, ids, cache)
    assert [type(ours) is type(theirs) for ours, theirs in zip(cache.layers, stock.layers)] == [True, False, True]
    assert type(cache.layers[1]) is GrowingLayer
    report = cache.memory_report()
    assert report.layers[1].payload == 2 * 2 * 2 * 16 * 16  # K and V, batch, heads, tokens, width
    assert report.layers[0].total == report.layers[0].other > 0
    assert report.total == cache.nbytes


def test_models_that_cannot_be_packed_are_refused():
    shape = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    with pytest.raises(ValueError, match="no layer of FalconH1ForCausalLM can be packed"):
        WSVDCache(build_family("falcon_h1", shape), bits=4)
    t5 = transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=64)
    with pytest.raises(ValueError, match="encoder-decoder"):
        WSVDCache(transformers.T5ForConditionalGeneration(t5), bits=4)


# The model's own dtype


STOCK_MODES = {
    "greedy": {},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant_model": True},
    "chunked": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("mode", STOCK_MODES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_without_a_scheme_it_is_the_stock_cache_bit_for_bit(family, mode, dense):
    model = gemma3() if family == "gemma3" else dense(family)
    options = dict(STOCK_MODES[mode])
    if options.pop("assistant_model", None):
        options["assistant_model"] = build("llama", seed=5)
    single = mode in ("lookup", "assisted")
    ids = ids_of(1, 7).repeat(1, 2) if single else ids_of(2, 13)
    outputs = []
    for cache in (WSVDCache(model), DynamicCache(config=model.config)):
        torch.manual_seed(7)
        out = generate(model, ids, cache, return_dict_in_generate=True, output_logits=not single, **options)
        outputs.append((out.sequences, *(() if single else out.logits)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outputs, strict=True))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_max_cache_len_is_the_static_cache(family, dense):
    model, ids = gemma3() if family == "gemma3" else dense(family), ids_of(2, 13)
    ours, theirs = WSVDCache(model, max_cache_len=32), StaticCache(model.config, 32)
    for piece in ids.split([9, 1, 1, 2], dim=1):
        torch.testing.assert_close(forward(model, piece, ours), forward(model, piece, theirs))


# Fixed size

STATIC = {
    "8-bit": {"bits": 8},
    "fp8": {"scheme": "fp8"},
    "hadamard-4": {"scheme": "hadamard", "bits": 4},
    "skip": {"bits": 4, "skip_layers": [0], "skip_heads": {1: [1]}},
}


@crossed(3, case=["llama", "gemma3", "latents", "latents-of-a-window"], options=STATIC, prefill=["exact", "stored"])
def test_a_packed_cache_of_fixed_size_equals_one_that_grows(case, options, prefill, any_model):
    model = any_model(case)
    options = {**options, "prefill": prefill}
    static, growing = WSVDCache(model, max_cache_len=32, **options), WSVDCache(model, **options)
    for round_ in range(2):  # again after a reset, with other tokens
        ids = ids_of(2, 17, seed=round_)
        for piece in ids.split([11, 1, 1, 3, 1], dim=1):
            torch.testing.assert_close(forward(model, piece, static), forward(model, piece, growing), **CLOSE)
            assert static.memory_report().total == static.nbytes == bytes_held(static)
        static.reset()
        growing.reset()


def test_cropping_a_packed_cache_of_fixed_size(dense):
    model, ids = dense("llama"), ids_of(2, 14)
    if not hasattr(StaticCache(model.config, 24).layers[0], "crop"):
        pytest.skip("static layers crop since transformers 5.24")
    for options in STATIC.values():
        cache, untouched = (WSVDCache(model, max_cache_len=24, **options) for _ in range(2))
        forward(model, ids_of(2, 3, seed=8) * 0 + 5, cache)
        cache.crop(-3)  # to nothing: as good as new
        for each in (cache, untouched):
            forward(model, ids[:, :9], each)
        forward(model, ids_of(2, 4, seed=8), cache)
        cache.crop(-4)
        torch.testing.assert_close(forward(model, ids[:, 9:], cache), forward(model, ids[:, 9:], untouched), **CLOSE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, id=f"{kind}-{name}", marks=() if name == quick else pytest.mark.slow)
        for kind, quick in (("dense", "hadamard-4"), ("compressed", "fp8"))
        for name, options in STATIC.items()
    ],
)
def test_a_packed_step_of_fixed_size_is_one_graph(kind, options, model_of):
    """Traced once, for all steps of two prompts."""
    model = copy.deepcopy(model_of(kind))
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (8, 10):
        ids = ids_of(2, length)
        ours = generate(model, ids, WSVDCache(model, max_cache_len=20, **options), 6, compile_config=config)
        assert torch.equal(ours, generate(model, ids, WSVDCache(model, **options), 6))
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 1
    assert not stats["graph_break"]


# Errors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 5}, "bits=5 is not allowed"),
        ({"scheme": "kivi", "bits": 3}, "bits=3 is not allowed"),
        ({"bits": 4, "group_size": 5}, "group_size=5 is not allowed"),
        ({"bits": 4, "skip_layers": [3]}, "skip_layers=3 is not allowed.* from -3 to 2"),
        ({"bits": 4, "skip_heads": {0: [2]}}, r"skip_heads=\[2\] is not allowed.* from 0 to 1"),
        ({"scheme": "kivi", "bits": 4, "residual_length": 48}, "residual_length=48 is not allowed.* multiple"),
        ({"bits": 4, "residual_length": 8, "max_cache_len": 32}, "leave out max_cache_len"),
        ({"scheme": "kivi", "bits": 4, "max_cache_len": 32}, "leave out max_cache_len"),
        ({"bitz": 4}, "did you mean 'bits'"),
        ({"bits": 4, "cache_config": {"bits": 4}}, "both given"),
    ],
    ids=str,
)
@both
def test_options_that_do_not_fit(kind, fields, message, model_of):
    with pytest.raises(ValueError, match=message):
        WSVDCache(model_of(kind), **fields)


@pytest.mark.parametrize("fixed", [{}, {"max_cache_len": 32}], ids=["growing", "fixed"])
@pytest.mark.parametrize("options", [{"bits": 8}, WINDOWED["kivi-4"], {}], ids=["8-bit", "kivi", "whole"])
def test_tokens_that_do_not_fit(options, fixed, dense):
    if fixed and options != {"bits": 8}:
        pytest.skip("no such cache of fixed size, or not ours")
    model = dense("llama")
    cache = filled(model, ids_of(2, 12), **options, **fixed)
    with pytest.raises(ValueError, match="holds 2 sequences and got tokens of 3"):
        forward(model, ids_of(3, 1), cache)
    layer = cache.layers[0]
    for shape in ((2, 4, 1, 16), (2, 2, 1, 8)):
        with pytest.raises(ValueError, match="belongs to another model"):
            layer.update(torch.zeros(shape), torch.zeros(shape))
    elsewhere = torch.zeros(2, 2, 1, 16, device="meta")
    with pytest.raises(ValueError, match="lies on cpu and got tokens on meta"):
        layer.update(elsewhere, elsewhere)
    for count, message in ((-13, "holds 12 tokens"), (3, "negative")):
        with pytest.raises(ValueError, match=message):
            cache.crop(count)
    assert cache.get_seq_length() == 12
    cache.reset()
    if not fixed:
        forward(model, ids_of(3, 4), cache)
        cache.crop(-4)
        other = torch.zeros(1, 4, 2, 16)
        with pytest.raises(ValueError, match="belongs to another model"):
            cache.layers[0].update(other, other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@every_scheme
def test_a_number_that_is_none_stays_with_its_token(options, bad, dense):
    """KIVI keys: with its channel of its group; there, it is read as a number."""
    model = dense("llama")
    tokens = torch.randn(2, 2, 24, 16)
    spoilt = tokens.clone()
    spoilt[1, 0, 18, 5] = bad
    read = []
    for each in (tokens, spoilt):
        layer = WSVDCache(model, **options).layers[1]
        layer.update(each[:, :, :16], each[:, :, :16])
        layer.update(each[:, :, 16:], each[:, :, 16:])
        read.append((layer.keys, layer.values))
    for side, (clean, dirty) in enumerate(zip(*read)):
        same = (clean == dirty).all(-1)
        assert not same[1, 0, 18]
        if options.get("scheme") == "kivi" and side == 0:
            touched = ~(clean == dirty)
            assert touched.sum() <= options["group_size"]
            assert touched[1, 0, :, 5].sum() == touched.sum()
        else:
            same[1, 0, 18] = True
            assert same.all()


# Memory


def bytes_held(value):
    """What an object holds, found by pickle and not by our own walk."""
    from test_storage_properties import held

    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held(value)}.values())


def alive():
    """Every storage of a tensor that Python knows, but for frozen objects."""
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}


@pytest.mark.parametrize("fixed", [{}, {"max_cache_len": 32}], ids=["growing", "fixed"])
@pytest.mark.parametrize("options", [{}, {"bits": 4}, WINDOWED["4-bit-windows"], WINDOWED["kivi-4"]], ids=str)
@pytest.mark.parametrize("case", ["llama", "gemma3", "latents", "latents-of-a-window"])
def test_the_report_is_what_torch_allocated(case, options, fixed, any_model, request):
    if fixed and ("residual_length" in options):
        pytest.skip("no such cache of fixed size")
    model = any_model(case)
    options = {**options, **fixed}
    filled(model, ids_of(), **options)  # what is made once (constants, masks' helpers)
    gc.collect()
    before = alive()
    gc.freeze()  # `alive` does not have to look at all there was
    request.addfinalizer(gc.unfreeze)
    cache = filled(model, ids_of(2, 21), **options)
    forward(model, ids_of(2, 1), cache)
    changes = [lambda: None, lambda: cache.batch_select_indices(torch.tensor([1])), lambda: cache.reset()]
    for change in changes[::2] if fixed else changes:
        change()
        gc.collect()
        report = cache.memory_report()
        new = sum(size for storage, size in alive().items() if storage not in before)
        assert report.total == cache.nbytes == cache_nbytes(cache) == bytes_held(cache)
        assert new == report.total - report.sum("constants")


def test_kinds_add_up_by_formula(dense):
    """Llama: 3 layers, 2 heads of 16, fp32; 2 rows of 21 tokens."""
    model, tokens = dense("llama"), 2 * 2 * 21
    plan = {"key_bits": 4, "value_bits": 8, "symmetric": False, "skip_layers": [2], "skip_heads": {1: [0]}}
    report = filled(model, ids_of(2, 21), scheme="minmax", **plan).memory_report()
    assert report.layers[0].payload == tokens * (8 + 16)
    assert report.layers[0].scales == tokens * 2 * (2 + 2)
    assert report.layers[1].payload == tokens // 2 * (8 + 16 + 2 * 64)
    assert report.layers[1].scales == tokens // 2 * 2 * (2 + 2)
    assert report.layers[2].payload == tokens * 2 * 64
    assert report.sum("scales") == report.layers[0].scales + report.layers[1].scales
    windows = filled(model, ids_of(2, 21), **WINDOWED["4-bit-windows"]).memory_report()
    assert windows.layers[0].window == 2 * 2 * (2 + 4) * 2 * 64
    assert windows.layers[0].payload == 2 * 2 * (21 - 6) * 2 * 8
    kivi = filled(model, ids_of(2, 21), **WINDOWED["kivi-4"]).memory_report()
    # Keys: 16 tokens in 4 groups, 5 as they are. Values: 13 and the newest 8.
    assert kivi.layers[0].window == 2 * 2 * (5 + 8) * 64
    assert kivi.layers[0].payload == 2 * 2 * (16 + 13) * 8
    assert kivi.layers[0].scales == 2 * 2 * (4 * 16 * 2 + 13 * 4 * 2) * 2
    fixed = filled(model, ids_of(2, 21), bits=8, max_cache_len=32).memory_report()
    assert fixed.layers[0].payload == tokens * 2 * 16
    assert fixed.layers[0].scales == tokens * 2 * 2
    assert fixed.layers[0].slack == 2 * 2 * 11 * 2 * (16 + 2)


@pytest.mark.parametrize(("bits", "limit"), [(8, 8.3), (4, 4.5), (2, 2.5)])
@pytest.mark.parametrize("width", [64, 128])
def test_bits_an_element(width, bits, limit):
    """Payload and scales over the numbers kept, at the default options."""
    torch.manual_seed(0)
    shape = {**TEXT, "head_dim": width, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    report = filled(model, ids_of(1, 40), bits=bits).memory_report()
    kept = report.sum("payload") + report.sum("scales")
    assert kept * 8 / (2 * 2 * 40 * width) <= limit
