"""Whole models decode through kernels from what their caches keep, and agree with the torch path.

Kernels are stood in for by their definition here, with all checks of their arguments; what Triton makes of them is
for tests/test_fused_attention.py, and a few models here that it interprets.
"""

from __future__ import annotations

import copy
import importlib

import kernel_models
import pytest
import torch
from kernel_models import Counted, both_ways, checked_definition, decode
from test_families import build as build_family
from tiny_models import build, calibration_batches, prompt
from tiny_vision_families import prompt as image_prompt
from transformers import CompileConfig, DynamicCache

import hf_wsvd
from hf_wsvd import WSVDCache, attention
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.kernels import explain, fused_attention, ops, use
from hf_wsvd.kernels.decode_oracle import fused_attention_oracle
from hf_wsvd.quantizer_config import GuardMap
from hf_wsvd.storage import Store
from hf_wsvd.storage.packed import PackedStore


LAYERS = 3
SCHEMES = {
    "int8": {"bits": 8},
    "int4-grouped": {"scheme": "minmax", "bits": 4, "group_size": 4},
    "int2": {"scheme": "minmax", "bits": 2},
    "symmetric": {"scheme": "minmax", "bits": 4, "symmetric": True},
    "hadamard": {"scheme": "hadamard", "bits": 4},
    "turboquant": {"scheme": "turboquant", "bits": 3},
    "fp8": {"scheme": "fp8"},
    "fp16": {"scheme": "fp16"},
    "windows": {"scheme": "minmax", "bits": 4, "sink_length": 2, "residual_length": 4},
    "other-values": {"key_bits": 8, "value_bits": 4},
    "skipped-head": {"bits": 4, "skip_heads": {0: [0], 1: [1]}},
}


@pytest.fixture
def own(dense, compressed):
    """A model to change: `own("dense" or "latent", family)`; dense ones have their attention function set."""

    def copy_of(kind, family):
        if kind == "latent":
            return copy.deepcopy(compressed(family))
        model = copy.deepcopy(dense(family))
        model.set_attn_implementation("wsvd")
        return model

    return copy_of


def padded_prompt(family, batch=2, tokens=12):
    inputs = prompt(family, batch, tokens)
    inputs["attention_mask"][0, :3] = 0
    return inputs


def assert_served(difference, counted, steps=3, layers=LAYERS):
    assert counted.calls == steps * layers
    # Another order of sums may move one number of a later token across the border of its code, no more.
    assert difference < 1e-3


# What is read, and from where


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_read_as_it_is_kept(scheme, kind, own, by_definition, monkeypatch):
    model, reads = own(kind, "llama"), []
    unpack = PackedStore.read
    monkeypatch.setattr(PackedStore, "read", lambda store: reads.append(store) or unpack(store))
    difference, counted = both_ways(model, padded_prompt("llama"), SCHEMES[scheme])
    assert_served(difference, counted)
    torch_reads = len(reads)
    decode(model, padded_prompt("llama"), WSVDCache(model, **SCHEMES[scheme]), (1, 3))
    assert len(reads) == torch_reads


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("family", ["llama_mha", "qwen2", "qwen3", "mistral", "qwen2_vl"])
def test_every_family_decodes_through_kernels(family, kind, own, by_definition):
    inputs = prompt(family, 2) if family == "qwen2_vl" else padded_prompt(family)
    assert_served(*both_ways(own(kind, family), inputs, {"bits": 8}))


@pytest.mark.parametrize("family", ["llama", "llama_mha", "qwen2", "qwen3", "mistral"])
def test_latents_in_the_model_s_dtype_are_read_too(family, own, by_definition):
    difference, counted = both_ways(own("latent", family), padded_prompt(family), {})
    assert_served(difference, counted)
    parts = counted.last[1]
    assert [(part.key.code, part.key.bits) for part in parts] == [("float", 32)]


OTHERS = {
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},  # a softcap, every second layer sliding
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 8},  # a norm of 1 + weight
    "cohere": {},  # rotation of neighbours
    "glm": {},  # of half the head
    "hunyuan_v1_dense": {},  # a norm after the rotation
    "opt": {"num_key_value_heads": 4, "head_dim": 12},  # no rotation, biases
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_norms_rotations_and_softcaps_of_other_families(model_type, by_definition):
    model = build_family(model_type, OTHERS[model_type])
    if model_type == "gemma2":
        model.model.config.attn_logit_softcapping = 2.0
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 2.0
    config = hf_wsvd.WSVDConfig(rank_ratio=0.5, self_check="none", refinement="none", rank_allocation="uniform")
    model = hf_wsvd.compress(model, config, calibration=calibration_batches("llama"))
    assert_served(*both_ways(model, padded_prompt("llama", tokens=14), {"bits": 8}))


# Heads and tokens in several forms


def guards(key=(), value=(), tokens="image"):
    maps = {side: {layer: dict.fromkeys(heads, 16) for layer in range(LAYERS)} for side, heads in
            (("key", key), ("value", value)) if heads}  # fmt: skip
    return GuardMap(**maps, num_key_value_heads=[2] * LAYERS, tokens=tokens)


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("starts", [[2, 2], [3, 7]], ids=["rows-alike", "rows-differ"])
@pytest.mark.parametrize("options", [{"text_bits": 8}, {"guard_map": guards((1,), (1,))}], ids=["text", "guards"])
def test_tokens_of_images_in_another_form(options, starts, kind, own, by_definition):
    inputs = image_prompt("llava", 2, 14, starts)
    difference, counted = both_ways(own(kind, "llava"), inputs, {"scheme": "minmax", "bits": 2, **options})
    assert_served(difference, counted)
    placed = [part.places is not None for part in counted.last[1]]
    assert any(placed)  # text is before and after the image
    assert all(placed) is (starts == [3, 7])


@pytest.mark.parametrize("side", ["key", "value"])
def test_guards_of_one_side_split_the_run_of_the_other(side, own, by_definition):
    options = {"bits": 4, "text_bits": 4, "guard_map": guards(**{side: (1,)})}
    difference, counted = both_ways(own("latent", "llava"), image_prompt("llava", 2, 14), options)
    assert_served(difference, counted)
    parts = counted.last[1]
    # Text before the image, its two heads apart, text behind it.
    assert sorted((part.first, part.key.payload.shape[2], part.heads) for part in parts if part.heads) == [
        (2, 4, (0,)),
        (2, 4, (1,)),
    ]
    assert sorted((part.first, part.key.payload.shape[2]) for part in parts if not part.heads) == [(0, 2), (6, 13)]
    plain = {"key": "value", "value": "key"}[side]
    assert len({getattr(part, plain).payload.untyped_storage().data_ptr() for part in parts}) == 1  # no copies


def test_guards_of_one_side_alone_in_rows_that_differ_go_the_torch_way(own, by_definition):
    options = {"bits": 4, "text_bits": 4, "guard_map": guards(key=(1,))}
    difference, counted = both_ways(own("latent", "llava"), image_prompt("llava", 2, 14, [3, 7]), options)
    assert (counted.calls, difference) == (0, 0)


@pytest.mark.parametrize("starts", [[2, 2], [3, 7]], ids=["rows-alike", "rows-differ"])
@pytest.mark.parametrize("length", [None, 32], ids=["growing", "static"])
def test_guards_of_image_keys_alone(length, starts, own, by_definition):
    """As a head guard has them by default: text is kept whole on both sides."""
    options = {"bits": 4, "guard_map": guards(key=(1,)), "max_cache_len": length}
    assert_served(*both_ways(own("latent", "llava"), image_prompt("llava", 2, 14, starts), options))


def test_heads_of_full_rank_beside_narrow_ones(by_definition, statistics):
    config = hf_wsvd.WSVDConfig(
        rank_ratio=0.5,
        refinement="none",
        self_check="none",
        cache={"scheme": "minmax", "bits": 4},
        head_guard=hf_wsvd.HeadGuardConfig(guard_map=guards((1,), (0,), tokens="all"), rank="full"),
    )
    model = hf_wsvd.compress(build("llama"), config, statistics=statistics("llama"))
    difference, counted = both_ways(model, padded_prompt("llama"), {})
    assert_served(difference, counted)
    attention = model.model.layers[-1].self_attn
    widths = {(part.heads, part.key.width, part.value.width) for part in counted.last[1]}
    assert widths == {((0,), attention.k_proj.rank, 16), ((1,), 16, attention.v_proj.rank)}


# Caches of other kinds


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_static_caches(family, kind, own, by_definition):
    assert_served(*both_ways(own(kind, family), padded_prompt(family), {"bits": 4, "max_cache_len": 32}))


@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_static_caches_of_images(kind, own, by_definition):
    inputs = image_prompt("llava", 2, 14, [3, 7])
    assert_served(*both_ways(own(kind, "llava"), inputs, {"bits": 4, "text_bits": 8, "max_cache_len": 32}))


@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_assisted_decoding_over_a_sliding_window(kind, own, by_definition):
    """Recorded tokens before the window are kept but not seen."""
    model, inputs = own(kind, "mistral"), prompt("mistral", 1, 14)
    options = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
    caches = [WSVDCache(model, bits=8) for _ in range(2)]
    with use("torch"):
        wanted = model.generate(**inputs, **options, **{CACHE_ARGUMENT: caches[0]})
    attention.fused_attention = counted = Counted(checked_definition)
    assert torch.equal(model.generate(**inputs, **options, **{CACHE_ARGUMENT: caches[1]}), wanted)
    assert counted.calls
    for ours, theirs in zip(caches[1].layers, caches[0].layers):
        torch.testing.assert_close(ours.keys, theirs.keys)


@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_tokens_recorded_before_a_window_are_not_seen(kind, own, by_definition):
    model, found = own(kind, "mistral"), []
    for kernel in ("torch", "auto"):
        cache = WSVDCache(model, bits=8)
        for layer in cache.layers:
            layer.activate_past_recording()
        with use(kernel):
            found.append(decode(model, padded_prompt("mistral", tokens=14), cache, (1, 3, 1)))
        assert [len(layer.key_store) for layer in cache.layers] == [14 + 5] * LAYERS
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-3)


def test_a_window_is_trimmed_after_the_step_that_reads_it(own, by_definition):
    model = own("latent", "mistral")
    cache = WSVDCache(model, bits=8)
    decode(model, prompt("mistral", 1, 14), cache, (1, 1))
    assert [len(layer.key_store) for layer in cache.layers] == [7] * LAYERS


def test_a_model_s_own_packed_caches_are_read(by_definition):
    config = hf_wsvd.WSVDConfig(rank_ratio=None, cache={"bits": 8})
    model = hf_wsvd.compress(build("llama"), config)
    attention.fused_attention = counted = Counted(checked_definition)
    model.generate(**prompt("llama"), max_new_tokens=4, do_sample=False)
    assert counted.calls == 3 * LAYERS


# Compiled steps


def defined(parts, call):
    """What the operator behind `fused_attention` runs, by its definition."""
    options = {"softcap": call.softcap, "lengths": call.lengths, "norm": call.norm, "scaling": call.scaling}
    return fused_attention_oracle(call.query, parts, call.rotation, call.mask, **options).to(call.query.dtype)


STATIC = [
    pytest.param("latent", "qwen3", {}, marks=pytest.mark.slow),
    ("latent", "llama", {"scheme": "hadamard", "bits": 4}),
    pytest.param("dense", "llama", {"scheme": "turboquant", "bits": 4}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "family", "options"), STATIC)
def test_a_compiled_static_step_has_the_kernel_in_its_graph(kind, family, options, own, by_definition, monkeypatch):
    model, inputs = own(kind, family), prompt(family, 2, tokens=20)  # longer than a step may be
    monkeypatch.setattr(attention, "fused_attention", fused_attention)
    module = importlib.import_module("hf_wsvd.kernels.fused_attention")  # the function has the same name
    monkeypatch.setattr(module, "check_query", lambda query: None)  # which refuses the CPU
    runs = []
    monkeypatch.setattr(ops, "attend", lambda parts, call: runs.append(parts) or defined(parts, call))
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    caches = [WSVDCache(model, **options, max_cache_len=32) for _ in range(2)]
    steps = {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(**inputs, **steps, compile_config=config, **{CACHE_ARGUMENT: caches[0]})
    wanted = model.generate(**inputs, **steps, disable_compile=True, **{CACHE_ARGUMENT: caches[1]})
    assert torch.equal(found, wanted)
    assert len(runs) == 2 * 5 * LAYERS
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 1
    assert not stats["graph_break"]


# What goes the torch way


def test_an_attention_that_uses_cached_values_beside_it_reads_unpacked_ones(by_definition):
    """Doge computes a mask from them: a trial tells."""
    model = build_family("doge", {})
    model.set_attn_implementation("wsvd")
    difference, counted = both_ways(model, prompt("llama"), {"bits": 8})
    assert (counted.calls, difference) == (0, 0)
    assert "no trial has shown" in explain(model, WSVDCache(model, bits=8))


def test_gradients_dropout_and_weights_go_the_torch_way(own, by_definition):
    model = own("latent", "llama")
    attention.fused_attention = counted = Counted(checked_definition)
    cache = DynamicCache(config=model.config)
    inputs = prompt("llama")
    model(**inputs, use_cache=True, **{CACHE_ARGUMENT: cache})
    out = model(input_ids=inputs["input_ids"][:, :1], use_cache=True, **{CACHE_ARGUMENT: cache})
    assert out.logits.requires_grad
    assert counted.calls == 0
    with torch.no_grad():
        model(input_ids=inputs["input_ids"][:, :1], use_cache=True, **{CACHE_ARGUMENT: cache})
    assert counted.calls == LAYERS


def test_a_storage_that_kernels_do_not_know_is_read_unpacked(own, by_definition):
    difference, counted = both_ways(own("latent", "llama"), prompt("llama"), {"scheme": "kivi", "bits": 4})
    assert (counted.calls, difference) == (0, 0)


def test_every_store_gives_what_it_reads_or_says_why_not():
    kinds = [Store]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    concrete = [kind for kind in kinds if not kind.__abstractmethods__]
    assert all("runs" in vars(kind) or "obstacle" in vars(kind) for kind in concrete)


# What Triton makes of it


INTERPRETED = [
    ("latent", "qwen3", {"scheme": "hadamard", "bits": 4}),
    ("dense", "mistral", {"bits": 8}),
    *[
        pytest.param(kind, family, options, marks=pytest.mark.slow)
        for kind in ("latent", "dense")
        for family in ("llama", "llama_mha", "qwen2", "qwen3", "llava")
        for options in ({"bits": 8}, {"scheme": "turboquant", "bits": 3}, {"scheme": "fp8"})
    ],
    *[
        pytest.param(kind, "llava", {"bits": 2, **options}, marks=pytest.mark.slow)
        for kind in ("latent", "dense")
        for options in ({"text_bits": 8}, {"guard_map": guards((1,), (1,))}, {"max_cache_len": 24})
    ],
]


@pytest.mark.parametrize(("kind", "family", "options"), INTERPRETED)
def test_interpreted_kernels_decode_as_the_torch_path_does(kind, family, options, interpreted):
    difference, calls = interpreted(kernel_models.interpreted, kind, family, options)
    assert calls == LAYERS
    assert difference < 5e-5
