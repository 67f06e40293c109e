"""WSVDConfig: what it accepts and refuses, and that JSON keeps it."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.quantizers import AutoQuantizationConfig

from hf_wsvd import CacheConfig, LowPrecisionConfig, WSVDConfig
from hf_wsvd.quantizer_config import FORMAT_VERSION, GuardMap, HeadGuardConfig, KeyLayout


GUARD_MAP = {"key": {0: {1: 16}}, "num_key_value_heads": [2, 2]}

# One config a field, each with values other than the defaults.
ACCEPTED = [
    {"rank_ratio": 1},
    {"rank_ratio": 1e-6},
    {"rank_ratio": [0.25, 0.5, 1.0]},
    {"rank_ratio": [0.5, None, 0.5]},
    {"rank_ratio": None},
    {"k_rank_ratio": 0.25},
    {"v_rank_ratio": 0.75},
    {"k_rank_ratio": 0.25, "v_rank_ratio": [0.5, 0.5]},
    {"k_rank": 1},
    {"v_rank": 64},
    {"k_rank": [8, None, 4], "v_rank": [None, None, 1]},
    {"rank_multiple": 1},
    {"rank_multiple": 256},
    {"layers_to_not_convert": []},
    {"layers_to_not_convert": [0, 31]},
    {"modules_to_not_convert": ["v_proj", "layers.3.self_attn"]},
    {"damping": 0},
    {"damping": 0.5},
    {"q_rank_ratio": 0.5},
    {"q_rank": [8, None, 4]},
    {"rank_allocation": "uniform"},
    {"rank_floor": 8},
    {"method": "svd_llm"},
    {"gradient_damping": 0},
    {"gradient_damping": 1.0},
    {"refinement": "none"},
    {"refinement": "fisher"},
    {"refinement_steps": 1},
    {"refinement_learning_rate": 1e-3},
    {"latent_rotation": "none"},
    {"latent_rotation": "hadamard"},
    {"seed": 7},
    {"self_check": "probe"},
    {"cache": CacheConfig(bits=4, layers={0: {"bits": 8}})},
    {"cache": CacheConfig(bits=4), "head_guard": HeadGuardConfig(fraction=0.25, selector="random", protect="kv")},
    {"low_precision": LowPrecisionConfig(weight_bits=4, activation_bits=16, group_size=64, method="rtn")},
    {"k_full_heads": [[1], None, [0, 3]]},
    {"v_full_heads": [None, [0]]},
    {"fit_info": {"predicted_loss": 0.5}},
    {"calibration_info": {"samples": 2, "tokens": 9, "sha256": "00"}},
    {"key_layout": ["none:halves", "before:interleaved", "after:interleaved_halves", "before_by_token:none", None]},
    {"decoder_shape": {"num_hidden_layers": 3}},
    {"version": FORMAT_VERSION},
]

# field, wrong value, what the message must say is allowed
REFUSED = [
    *[("rank_ratio", value, "(0, 1]") for value in (0, -0.5, 1.01, 50, "0.5", True, [], [0.5, 2], ["a"], {"a": 1})],
    ("rank_ratio", float("nan"), "(0, 1]"),
    ("k_rank_ratio", 0.0, "(0, 1]"),
    ("v_rank_ratio", float("inf"), "(0, 1]"),
    *[("k_rank", value, "from 1 to head_dim") for value in (0, -8, 1.5, "8", True, [], [8, 0], [8, "8"], {"0": 8})],
    ("v_rank", [None, -1], "from 1 to head_dim"),
    *[("rank_multiple", value, "from 1 to 256") for value in (0, -1, 257, 8.0, "8", None, True, [8])],
    *[("layers_to_not_convert", value, "decoder layer numbers") for value in (3, "3", {3})],
    *[("layers_to_not_convert", value, "at least 0") for value in ([-1], [0.5], ["0"], [True])],
    *[("modules_to_not_convert", value, "a list of module names") for value in ("v_proj", [3], [""], {"v_proj": 1})],
    *[("damping", value, "from 0") for value in (-1e-9, float("nan"), float("inf"), "0", None, True)],
    ("q_rank_ratio", 1.5, "(0, 1]"),
    ("q_rank", 0, "from 1 to head_dim"),
    *[("rank_allocation", value, "'uniform', 'gradient'") for value in ("even", 1, ["uniform"])],
    *[("rank_floor", value, "at least 1") for value in (0, -8, 1.5, "8", True)],
    *[("method", value, "'svd', 'asvd', 'svd_llm', 'wsvd'") for value in ("palu", None, 3)],
    *[("gradient_damping", value, "from 0 to 1") for value in (-0.1, 1.1, float("nan"), "0", None, True)],
    *[("refinement", value, "'none', 'fisher', 'distillation'") for value in ("lora", False, 1)],
    *[("refinement_steps", value, "at least 1") for value in (0, 1.5, "100", None, True)],
    *[("refinement_learning_rate", value, "from 1e-09 to 1") for value in (0, -1e-3, 2, float("inf"), "1", None)],
    *[("latent_rotation", value, "'none', 'hadamard'") for value in ("random", False, 1)],
    *[("seed", value, "from 0") for value in (-1, 0.5, "0", None, True)],
    *[("self_check", value, "'calibration', 'probe', 'none'") for value in (True, None, "samples")],
    *[("cache", value, "a CacheConfig, a dict of its fields, or None") for value in (4, "int4", [4])],
    *[
        ("head_guard", value, "a HeadGuardConfig, a GuardMap, a dict of fields, or None")
        for value in (0.1, "kv", [0.1])
    ],
    *[("low_precision", value, "a LowPrecisionConfig, a dict of its fields, or None") for value in (8, "w8a8", [8])],
    *[("k_full_heads", value, "sorted heads") for value in (1, "1", [1], [[2, 1]], [[-1]], [[1, 1]], [[True]])],
    ("v_full_heads", {"0": [1]}, "sorted heads"),
    *[("fit_info", value, "a dict") for value in ([], "text", 3)],
    *[("calibration_info", value, "a dict") for value in ([], "text", 3)],
    *[("key_layout", value, "one entry a decoder layer") for value in ("none:halves", 3, {"0": "none:halves"})],
    *[("key_layout", [value], "NORM") for value in ("", "halves", "none:", "none:halves:x", "sideways:halves", 7)],
    *[("decoder_shape", value, "a dict") for value in ([3], "llama", 0)],
    *[("version", value, f"from 1 to {FORMAT_VERSION}") for value in (0, -1, "1", 1.0, None, True)],
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_json_keeps_every_accepted_value(fields):
    config = WSVDConfig(**fields)
    for name, value in fields.items():
        assert getattr(config, name) == value
    stored = json.loads(json.dumps(config.to_dict()))
    assert stored["quant_method"] == "wsvd"
    assert WSVDConfig(**stored) == config
    assert AutoQuantizationConfig.from_dict(stored) == config
    assert WSVDConfig.from_dict(stored) == config


@pytest.mark.parametrize(("field", "value", "allowed"), REFUSED, ids=lambda x: str(x)[:30])
def test_a_wrong_value_is_named_with_its_field_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match="WSVDConfig") as error:
        WSVDConfig(**{field: value})
    wrong = value[0] if isinstance(value, list) and len(value) == 1 and field != "rank_ratio" else value
    message = str(error.value)
    assert f"{field}=" in message
    assert repr(wrong) in message
    assert allowed in message


def test_every_field_has_accepted_and_refused_values_above():
    fields = set(WSVDConfig().to_dict()) - {"quant_method"}
    assert fields == {name for accepted in ACCEPTED for name in accepted}
    assert fields == {name for name, _, _ in REFUSED}


def test_methods_without_gradients_are_uniform_and_not_refined():
    config = WSVDConfig(method="svd")
    assert (config.rank_allocation, config.refinement) == ("uniform", "none")
    with pytest.raises(ValueError, match=r"rank_allocation='gradient' is not allowed.*method='svd'"):
        WSVDConfig(method="svd", rank_allocation="gradient")
    config = WSVDConfig()
    assert (config.method, config.rank_allocation, config.refinement) == ("wsvd", "gradient", "distillation")


def test_unknown_fields_are_refused_with_the_nearest_known_one():
    with pytest.raises(ValueError, match=r"'rank_ration' \(did you mean 'rank_ratio'\?\)"):
        WSVDConfig(rank_ration=0.5)
    with pytest.raises(ValueError, match=r"unknown field\(s\) 'zzz'; allowed: .*'rank_ratio'"):
        WSVDConfig(zzz=1)
    with pytest.raises(ValueError, match="did you mean 'k_rank'"):
        AutoQuantizationConfig.from_dict({"quant_method": "wsvd", "k_rnk": 8})


def test_a_newer_format_asks_for_an_upgrade_instead_of_blaming_its_fields():
    with pytest.raises(ValueError, match=r"newer hf_wsvd.*pip install -U hf_wsvd.*future_field"):
        WSVDConfig(version=FORMAT_VERSION + 1, future_field=3)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_guards_are_no_matter_of_the_version(version):
    fields = {"cache": {"bits": 4}, "head_guard": {"fraction": 0.5}}
    assert WSVDConfig(version=version, **fields).head_guard == HeadGuardConfig(fraction=0.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_guard": {}}, "only together with a cache"),
        ({"head_guard": {}, "cache": {"bits": 4, "guard_map": GUARD_MAP}}, "None where cache has a guard_map"),
        ({"head_guard": {"rank": "full"}, "cache": {"bits": 4}, "rank_ratio": None}, "every head has its full rank"),
        ({"head_guard": {"fractoin": 0.5}, "cache": {"bits": 4}}, r"did you mean 'fraction'\?"),
        ({"head_guard": {"guard_map": "map.json"}, "cache": {"bits": 4}}, r"head_guard\['guard_map'\]='map.json'"),
        ({"cache": {"bits": 4, "guard_map": "/etc/hosts"}}, r"cache\['guard_map'\]='/etc/hosts' is not allowed"),
    ],
)
def test_guards_that_say_nothing_or_name_files_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        WSVDConfig(**fields)


def test_a_finished_guard_map_is_part_of_the_storage_and_of_the_json():
    config = WSVDConfig(cache={"bits": 4}, head_guard={"guard_map": GUARD_MAP})
    assert config.guard_map == config.storage.guard_map == GuardMap(**GUARD_MAP)
    assert config.cache.guard_map is None
    assert WSVDConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert WSVDConfig(cache={"bits": 4}, head_guard={}).guard_map is None
    assert WSVDConfig(cache={"bits": 4, "guard_map": GUARD_MAP}).guard_map == GuardMap(**GUARD_MAP)


@pytest.mark.parametrize("version", [1, 2])
def test_older_checkpoints_load_as_what_they_are(version):
    stored = {k: v for k, v in WSVDConfig().to_dict().items() if k != "latent_rotation"} | {"version": version}
    assert WSVDConfig.from_dict(stored).latent_rotation == "none"
    assert WSVDConfig().latent_rotation == "hadamard"


def test_another_quant_method_is_refused():
    with pytest.raises(ValueError, match="quant_method='gptq'"):
        WSVDConfig(quant_method="gptq")


def test_what_a_checkpoint_adds_for_its_readers_is_accepted_and_not_kept():
    assert WSVDConfig(quant_method="wsvd", hf_wsvd_version="9.9") == WSVDConfig()


def test_tuples_and_lists_are_the_same_configuration():
    assert WSVDConfig(k_rank=(8, None), rank_ratio=(0.5, 0.5)) == WSVDConfig(k_rank=[8, None], rank_ratio=[0.5, 0.5])


def test_configs_are_equal_by_their_fields():
    assert WSVDConfig(k_rank=8) == WSVDConfig(k_rank=8)
    assert WSVDConfig(k_rank=8) != WSVDConfig(v_rank=8)
    assert WSVDConfig() != "wsvd"


class NeverCopied:
    """Calibration data that must travel by reference: a generator, a DataLoader."""

    def __deepcopy__(self, memo):
        raise AssertionError("calibration data were copied")


def test_calibration_data_stay_in_memory_and_are_never_copied():
    data = NeverCopied()
    config = WSVDConfig(calibration=data, k_rank=[4, 8])
    twin = copy.deepcopy(config)
    assert twin.calibration is data
    assert twin == config
    assert twin.k_rank is not config.k_rank
    assert "calibration" not in config.to_dict()
    assert "calibration" not in json.loads(config.to_json_string())
    assert "NeverCopied" not in repr(config)
    model_config = LlamaConfig(quantization_config=config)
    assert copy.deepcopy(model_config).quantization_config.calibration is data


def test_to_dict_hands_out_no_live_state():
    config = WSVDConfig(k_rank=[4, 8])
    config.to_dict()["k_rank"].append(3)
    assert config.k_rank == [4, 8]
    assert dict(config) == config.to_dict()


def test_calibration_tensors_do_not_reach_config_json(tmp_path):
    config = WSVDConfig(calibration=[{"input_ids": torch.ones(1, 4, dtype=torch.long)}])
    LlamaConfig(quantization_config=config).save_pretrained(tmp_path)
    stored = AutoConfig.from_pretrained(tmp_path).quantization_config
    assert WSVDConfig(**stored) == config


@pytest.mark.parametrize("norm", ["none", "before", "before_by_token", "after"])
@pytest.mark.parametrize("rotation", ["none", "halves", "interleaved", "interleaved_halves"])
def test_key_layouts_read_back_what_they_write(norm, rotation):
    layout = KeyLayout(norm, rotation)
    assert KeyLayout.parse(str(layout)) == layout


def test_no_key_layout_stays_none():
    assert KeyLayout.parse(None) is None
