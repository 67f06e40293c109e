"""`CacheConfig`: what it accepts and refuses, that JSON keeps it, and what it means for each layer."""

from __future__ import annotations

import json

import pytest

from hf_wsvd.quantizer_config import (
    WHOLE_LAYER,
    CacheConfig,
    GuardMap,
    HeadGuardConfig,
    LayerStorage,
    StorageSpec,
    WSVDConfig,
)


ACCEPTED = [
    {},
    *[{"bits": bits} for bits in (16, 8, 4, 3, 2)],
    {"key_bits": 4, "value_bits": 2},
    {"scheme": "bf16"},
    {"scheme": "fp16", "bits": 16},
    {"scheme": "fp8"},
    {"scheme": "minmax", "bits": 3, "group_size": 16, "symmetric": True},
    {"scheme": "hadamard", "key_bits": 4, "value_bits": 16},
    {"scheme": "turboquant", "bits": 3},
    {"scheme": "kivi", "bits": 2, "group_size": 16, "residual_length": 64},
    {"bits": 4, "sink_length": 4, "residual_length": 0},
    {"bits": 4, "skip_layers": [0, -1]},
    {"bits": 4, "skip_heads": {0: [1, 0], -1: [2]}},
    {"bits": 4, "layers": {0: {"bits": 8}, -1: {"scheme": "turboquant", "bits": 2}}},
    {"bits": 4, "prefill": "stored"},
]

# fields, what the message must name, what it must say is allowed
REFUSED = [
    *[({"bits": value}, "bits=", "one of (16, 8, 4, 3, 2)") for value in (5, 0, -4, 4.0, "4", True)],
    *[({"scheme": value, "bits": 4}, "scheme=", "'turboquant'") for value in ("int4", 4, ["minmax"])],
    ({"scheme": "kivi", "bits": 8}, "bits=8", "(16, 4, 2) with scheme='kivi'"),
    ({"scheme": "turboquant", "bits": 8}, "bits=8", "(16, 4, 3, 2)"),
    ({"scheme": "fp8", "bits": 4}, "bits=4", "(16, 8)"),
    ({"scheme": "minmax"}, "bits=None", "(8, 4, 3, 2)"),
    ({"scheme": "minmax", "key_bits": 4}, "bits=None", "(8, 4, 3, 2)"),
    *[({"bits": 4, "group_size": value}, "group_size=", "at least 1") for value in (0, -8, 1.5, "8", True)],
    ({"scheme": "turboquant", "bits": 4, "group_size": 8}, "group_size=8", "None with scheme='turboquant'"),
    *[({"bits": 4, "symmetric": value}, "symmetric=", "true, false or None") for value in ("yes", 2)],
    ({"scheme": "fp8", "symmetric": True}, "symmetric=True", "None with scheme='fp8'"),
    *[({"bits": 4, "sink_length": value}, "sink_length=", "at least 0") for value in (-1, 1.5, "4", None, True)],
    *[({"bits": 4, "residual_length": value}, "residual_length=", "at least 0") for value in (-1, 1.5, "4", True)],
    *[({"skip_layers": value}, "skip_layers=", "decoder layer numbers") for value in (3, "3", [0.5], [True], {1: 2})],
    *[({"skip_heads": value}, "skip_heads=", "") for value in ([0], {0: 1}, {"a": [1]}, {0: [-1]}, {0: ["1"]})],
    *[({"layers": value}, "layers", "") for value in ([0], {0: 4}, {0: {"bits": 5}}, {0: {"prefill": "exact"}})],
    *[({"bits": 4, "prefill": value}, "prefill=", "'exact' or 'stored'") for value in ("approximate", None, True)],
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_json_keeps_it(fields):
    config = CacheConfig.parse(fields)
    kept = json.loads(json.dumps(config.to_dict()))
    assert CacheConfig.parse(kept) == config
    assert CacheConfig.parse(config) is config
    assert CacheConfig.parse(kept).storage(0, 3, False) == config.storage(0, 3, False)
    assert set(kept) == {name for name, value in fields.items() if value != getattr(CacheConfig, name)}


@pytest.mark.parametrize(("fields", "named", "allowed"), REFUSED, ids=str)
def test_what_is_refused_is_named(fields, named, allowed):
    with pytest.raises(ValueError, match="is not allowed; allowed: ") as caught:
        CacheConfig(**fields)
    assert named in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(("name", "meant"), [("bit", "bits"), ("key_bit", "key_bits"), ("skip_layer", "skip_layers")])
def test_unknown_fields(name, meant):
    with pytest.raises(ValueError, match=f"unknown field '{name}' .did you mean '{meant}'"):
        CacheConfig.parse({name: 4})
    with pytest.raises(ValueError, match="unknown field 'xyz'; allowed"):
        CacheConfig.parse({"xyz": 4})


@pytest.mark.parametrize("value", ["8", 8, [], True])
def test_parse_refuses_what_is_no_config(value):
    with pytest.raises(ValueError, match="a CacheConfig, a dict of its fields, or None"):
        CacheConfig.parse(value)
    assert CacheConfig.parse(None) is None


def specs(config, layer=0, layers=4, latent=False):
    return config.storage(layer, layers, latent)[:2]


def test_bits_alone_choose_the_scheme():
    assert CacheConfig().storage(0, 4, False) == WHOLE_LAYER
    assert specs(CacheConfig(bits=16)) == (StorageSpec(), StorageSpec())
    assert specs(CacheConfig(bits=8)) == (StorageSpec("minmax", 8, symmetric=True),) * 2
    assert specs(CacheConfig(bits=4)) == (StorageSpec("hadamard", 4),) * 2
    assert specs(CacheConfig(bits=4), latent=True) == (StorageSpec("minmax", 4),) * 2
    assert specs(CacheConfig(key_bits=4)) == (StorageSpec("hadamard", 4), StorageSpec())
    assert specs(CacheConfig(bits=2, key_bits=16)) == (StorageSpec(), StorageSpec("hadamard", 2))
    assert specs(CacheConfig(bits=2, key_bits=8))[0] == StorageSpec("minmax", 8, symmetric=True)


def test_schemes_have_their_bits_and_windows():
    assert specs(CacheConfig("fp8")) == (StorageSpec("fp8", 8),) * 2
    assert specs(CacheConfig("bf16")) == (StorageSpec("bf16", 16),) * 2
    assert specs(CacheConfig("kivi", bits=2)) == (StorageSpec("kivi", 2, residual_length=128),) * 2
    windows = {"sink_length": 4, "residual_length": 32}
    assert specs(CacheConfig("minmax", bits=4, **windows)) == (StorageSpec("minmax", 4, **windows),) * 2
    assert specs(CacheConfig("minmax", bits=8, symmetric=False)) == (StorageSpec("minmax", 8),) * 2
    assert specs(CacheConfig("minmax", key_bits=4, value_bits=16)) == (StorageSpec("minmax", 4), StorageSpec())


def test_layers_of_their_own():
    config = CacheConfig(
        bits=4,
        value_bits=2,
        skip_layers=[-1],
        skip_heads={0: [1, 0, 1]},
        layers={1: {"bits": 8}, -2: {"scheme": "turboquant", "key_bits": 3}},
        prefill="stored",
    )
    key, value = specs(config, 0)
    assert (key.bits, value.bits) == (4, 2)
    assert key.whole_heads == value.whole_heads == (0, 1)
    assert [spec.bits for spec in specs(config, 1)] == [8, 8]  # before the general bits of V
    assert [(spec.scheme, spec.bits) for spec in specs(config, 2)] == [("turboquant", 3), ("turboquant", 2)]
    assert config.storage(3, 4, False) == WHOLE_LAYER
    assert config.storage(0, 4, False).prefill == "stored"
    assert not LayerStorage(StorageSpec("fp8", 8)).whole


@pytest.mark.parametrize("field", ["skip_layers", "skip_heads", "layers"])
@pytest.mark.parametrize("number", [4, -5])
def test_layers_that_the_decoder_does_not_have(field, number):
    value = {"skip_layers": [number], "skip_heads": {number: [0]}, "layers": {number: {"bits": 8}}}[field]
    with pytest.raises(ValueError, match=f"{field}={number} is not allowed; allowed: .* from -4 to 3"):
        CacheConfig(bits=4, **{field: value}).storage(0, 4, False)


def test_a_config_holds_nothing_of_the_caller():
    given = {"bits": 4, "skip_layers": [0], "layers": {"1": {"bits": 8}}, "skip_heads": {"0": [1]}}
    config = CacheConfig.parse(given)
    given["layers"]["1"]["bits"] = 2
    given["skip_layers"].append(1)
    given["skip_heads"]["0"].append(2)
    assert config == CacheConfig(bits=4, skip_layers=[0], layers={1: {"bits": 8}}, skip_heads={0: [1]})
    config.to_dict()["skip_heads"]["0"].append(5)
    assert config.skip_heads == {0: [1]}


GUARDS = {"key": {0: {1: 16}, 1: {0: 8, 2: 16}}, "value": {1: {0: 3}}, "num_key_value_heads": [3] * 4}


def test_guards_hold_for_text_if_they_are_over_all_tokens_and_else_not():
    """Text in the bits of images is no reason to guard it, and bits of its own are none to leave it out."""
    whole, packed = StorageSpec(), StorageSpec("minmax", 8, symmetric=True)
    of_images = specs(CacheConfig(bits=8, text_bits=8, guard_map=GUARDS), 0)[0]
    assert of_images.guards[0][0] == whole
    assert of_images.text == packed
    everywhere = specs(CacheConfig(bits=2, text_bits=8, guard_map={**GUARDS, "tokens": "all"}), 0)[0]
    assert everywhere.text == packed._replace(guards=((whole, everywhere.guards[0][1]),))
    assert specs(CacheConfig(bits=8, text_bits=8, guard_map={**GUARDS, "tokens": "all"}), 0)[0].text is None


@pytest.mark.parametrize("bits", [4.0, True, "4", [4]])
def test_text_bits_are_whole_numbers(bits):
    with pytest.raises(ValueError, match=r"text_bits=.* is not allowed"):
        CacheConfig(bits=2, text_bits=bits)


def test_text_bits_are_those_of_tokens_that_are_not_of_images():
    config = CacheConfig(bits=2, text_bits=16, sink_length=4)
    assert config.by_class
    assert specs(config) == (StorageSpec("hadamard", 2, sink_length=4, text=StorageSpec()),) * 2
    assert specs(CacheConfig(bits=2, text_bits=8))[0].text == StorageSpec("minmax", 8, symmetric=True)
    # Windows are of tokens of images; KIVI has no 8 bits.
    assert specs(CacheConfig("kivi", bits=2, text_bits=8))[0].text == StorageSpec("minmax", 8, symmetric=True)
    # Text that is kept as images are is no class of its own.
    assert specs(CacheConfig(bits=4, text_bits=4)) == (StorageSpec("hadamard", 4),) * 2


def test_guards_are_bits_of_heads_and_text_is_whole_with_them():
    key, value = specs(CacheConfig(bits=2, guard_map=GUARDS), 0)
    assert key.guards == ((StorageSpec(), (1,)),)
    assert (key.text, value.text, value.guards) == (StorageSpec(), StorageSpec(), ())
    key, value = specs(CacheConfig(bits=2, guard_map=GUARDS), 1)
    assert key.guards == ((StorageSpec(), (2,)), (StorageSpec("minmax", 8, symmetric=True), (0,)))
    assert value.guards == ((StorageSpec("hadamard", 3), (0,)),)
    # Never fewer bits than the rest; over all tokens there are no classes.
    key, value = specs(CacheConfig(bits=4, guard_map={**GUARDS, "tokens": "all"}), 1)
    assert value.guards == ((StorageSpec("hadamard", 4), (0,)),)
    assert key.text is value.text is None


def test_guards_of_another_number_of_layers_are_refused():
    with pytest.raises(ValueError, match=r"guard_map=.* allowed: a map of 2 decoder layers"):
        CacheConfig(bits=4, guard_map=GUARDS).storage(0, 2, False)


@pytest.mark.parametrize("fields", [{"text_bits": 16}, {"guard_map": GUARDS}])
def test_classes_and_guards_need_something_to_be_packed(fields):
    with pytest.raises(ValueError, match="only together with bits or a scheme"):
        CacheConfig(**fields)
    assert CacheConfig.parse(CacheConfig(bits=4, **fields).to_dict()) == CacheConfig(bits=4, **fields)


SOME_MAP = GuardMap(key={0: {1: 4}}, num_key_value_heads=[2])


def test_guards_that_would_do_nothing_are_refused():
    guard_map = SOME_MAP
    with pytest.raises(ValueError, match=r"guards of 4 bits.*more bits than \{'key': 4\}"):
        CacheConfig(bits=4, guard_map=guard_map)
    with pytest.raises(ValueError, match=r"more bits than \{'key': 8\}"):
        CacheConfig(key_bits=8, value_bits=2, guard_map=guard_map)
    assert CacheConfig(bits=4, layers={0: {"bits": 2}}, guard_map=guard_map).guard_map is guard_map
    for bits, given in ((4, 4), (8, 4)):
        with pytest.raises(
            ValueError, match=rf"head_guard.bits={given} is not allowed; allowed: more than the {bits}"
        ):
            WSVDConfig(rank_ratio=None, cache=CacheConfig(bits=bits), head_guard=HeadGuardConfig(bits=given))


def test_a_finished_map_is_a_head_guard():
    guard_map = GuardMap(key={0: {1: 4}}, num_key_value_heads=[2])
    assert WSVDConfig(rank_ratio=None, cache=CacheConfig(bits=2), head_guard=guard_map).guard_map is guard_map


def test_a_cache_in_the_models_dtype_has_nothing_to_guard():
    """As where a checkpoint with guards is loaded with `cache=CacheConfig(bits=16)`."""
    config = WSVDConfig(rank_ratio=None, cache=CacheConfig(bits=16), head_guard=HeadGuardConfig(guard_map=SOME_MAP))
    assert config.storage.guard_map is None
