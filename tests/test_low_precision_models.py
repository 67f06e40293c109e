"""Models whose weights are quantized: which layers, checkpoints, gradients, graphs, and the way back."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from low_precision_models import FORMATS, quantized
from model_facts import auto_class, logits
from safetensors.torch import load_file, save_file
from tiny_models import CLOSED_FORM, TEXT, build, calibration_batches, prompt
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompileConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import hf_wsvd
from hf_wsvd import CacheConfig, LowPrecisionConfig, WSVDConfig
from hf_wsvd.evaluate.cache_size import cache_size
from hf_wsvd.low_precision.chosen import chosen_linears
from hf_wsvd.low_precision.convert import quantized_modules
from hf_wsvd.low_precision.latent import QuantizedLatentProjection
from hf_wsvd.low_precision.linear import QuantizedLinear
from hf_wsvd.modules import LatentProjection


RTN = LowPrecisionConfig(method="rtn")
BLOCK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
BLOCK += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


# Which layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_vl"])
@pytest.mark.parametrize("rank_ratio", [0.5, None])
def test_the_linear_layers_of_the_text_decoder_are_quantized_and_nothing_else(family, rank_ratio):
    model = quantized(family, rank_ratio)
    found = quantized_modules(model)
    assert [name.split("layers.")[1] for name in found] == [f"{n}.{part}" for n in range(3) for part in BLOCK]
    latent = {name for name, module in found.items() if isinstance(module, QuantizedLatentProjection)}
    assert latent == {name for name in found if rank_ratio and name.endswith(("k_proj", "v_proj"))}
    assert not any("visi" in name for name in found)


def test_layers_and_modules_are_left_alone_by_either_config():
    settings = LowPrecisionConfig(method="rtn", modules_to_not_convert=["down_proj"])
    config = WSVDConfig(
        rank_ratio=None,
        self_check="none",
        low_precision=settings,
        modules_to_not_convert=["o_proj"],
        layers_to_not_convert=[1],
    )
    model = hf_wsvd.compress(build("llama"), config)
    names = {name.split("layers.")[1] for name in quantized_modules(model)}
    assert names == {f"{n}.{part}" for n in (0, 2) for part in BLOCK if not part.endswith(("o_proj", "down_proj"))}
    with pytest.raises(ValueError, match="no linear layer to quantize"):
        chosen_linears(build("llama"), WSVDConfig(low_precision=RTN, layers_to_not_convert=[0, 1, 2]))


def test_what_weighs_experts_is_left_alone_and_what_they_share_is_not():
    config = Qwen2MoeConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_experts=4)
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(config)
    assert isinstance(model.model.layers[0].mlp.shared_expert_gate, nn.Linear)
    names = {name.split("layers.0.")[-1] for name in chosen_linears(model, WSVDConfig(low_precision=RTN))}
    assert {"self_attn.o_proj", "mlp.shared_expert.up_proj"} <= names
    assert not any(name.endswith((".gate", "shared_expert_gate")) for name in names)


def test_a_layer_with_as_many_outputs_as_there_are_experts_is_no_router():
    config = Qwen2MoeConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=16
    )
    with torch.device("meta"):
        model = Qwen2MoeForCausalLM(config)
    assert model.model.layers[0].self_attn.k_proj.out_features == config.num_experts
    names = {name.split("layers.0.")[-1] for name in chosen_linears(model, WSVDConfig(low_precision=RTN))}
    assert {"self_attn.k_proj", "self_attn.v_proj"} <= names


# What comes out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_the_model_computes_with_its_rounded_weights(form):
    model = quantized(form=form)
    merged = copy.deepcopy(model).dequantize()
    error = (logits(model, "llama") - logits(merged, "llama")).norm() / logits(merged, "llama").norm()
    # Only rounded activations set the two apart.
    assert error < {16: 1e-5, 8: 0.1, 4: 0.8}[FORMATS[form]["activation_bits"]]
    assert error > 0 or FORMATS[form]["activation_bits"] == 16


@pytest.mark.parametrize("left_alone", ["k_proj", "v_proj"])
def test_dequantize_merges_latents_that_low_precision_left_alone_too(left_alone):
    settings = LowPrecisionConfig(method="rtn", activation_bits=16, modules_to_not_convert=[left_alone])
    config = WSVDConfig(**CLOSED_FORM, self_check="none", low_precision=settings)
    model = hf_wsvd.compress(build("llama"), config, calibration=calibration_batches("llama"))
    before = logits(model, "llama")
    plain = model.dequantize()
    assert not any(isinstance(module, LatentProjection) for module in plain.modules())
    torch.testing.assert_close(logits(plain, "llama"), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "llava"])
def test_dequantize_gives_a_plain_model(family, dense):
    model = quantized(family).dequantize()
    assert {type(m) for m in model.modules()} == {type(m) for m in dense(family).modules()}
    assert model.state_dict().keys() == dense(family).state_dict().keys()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    blocks = quantized(family).dequantize(dtype=torch.bfloat16).get_decoder().layers
    assert {linear.weight.dtype for linear in blocks.modules() if isinstance(linear, nn.Linear)} == {torch.bfloat16}


def test_8_bits_are_close_to_the_model_that_they_round(dense):
    wanted = logits(dense("llama"), "llama")
    found = {form: logits(quantized("llama", None, form), "llama") for form in FORMATS}
    errors = {form: ((of - wanted).norm() / wanted.norm()).item() for form, of in found.items()}
    assert errors["W8A16"] < errors["W8A8"] < 0.1
    assert errors["W8A8"] < min(errors["W8A4"], errors["W4A8"])


@pytest.mark.parametrize("form", ["W8A8", "W4A16"])
def test_a_layer_is_one_graph(form):
    projection = quantized(form=form).model.layers[0].self_attn.k_proj
    compiled = torch.compile(projection, fullgraph=True, backend="eager")
    with torch.no_grad():
        x = torch.randn(1, 3, projection.in_features)
        assert torch.equal(compiled(x), projection(x))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["W8A8", "W4A16", "W4A8"])
def test_a_decode_step_is_one_graph(form):
    model = quantized(form=form)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"max_new_tokens": 6, "do_sample": False}
    inputs = prompt("llama", batch=2)
    ours = model.generate(**inputs, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(ours, model.generate(**inputs, **options))
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 1
    assert not stats["graph_break"]


def test_adapters_train_beside_frozen_codes():
    model = quantized().train()
    codes = {name: module.weight.clone() for name, module in quantized_modules(model).items()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adapters = []
    for module in quantized_modules(model).values():
        down = nn.Parameter(torch.randn(2, module.in_features) * 0.1)
        up = nn.Parameter(torch.zeros(module.out_features, 2))
        adapters += [down, up]
        module.register_forward_hook(lambda _, args, y, down=down, up=up: y + args[0] @ down.T @ up.T)
    batch = prompt("llama", batch=2)
    optimizer = torch.optim.Adam(adapters, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert all(torch.equal(module.weight, codes[name]) for name, module in quantized_modules(model).items())


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["W8A8", "W4A16"])
@pytest.mark.parametrize(("family", "rank_ratio"), [("llama", 0.5), ("qwen2_vl", None)])
def test_a_sharded_checkpoint_comes_back_to_the_last_bit(form, family, rank_ratio, tmp_path):
    model = quantized(family, rank_ratio, form, "probe")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = auto_class(family).from_pretrained(tmp_path)
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(loaded, family), logits(model, family))
    assert loaded.config.quantization_config == model.config.quantization_config
    assert hf_wsvd.verify(loaded).passed
    half = auto_class(family).from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, module in quantized_modules(half).items():
        assert torch.equal(module.weight, before[f"{name}.weight"])
        assert torch.equal(module.weight_scales, before[f"{name}.weight_scales"])
    assert hf_wsvd.verify(half).passed


def test_layers_offloaded_to_disk_compute_the_same(tmp_path):
    model = quantized()
    model.save_pretrained(tmp_path)
    places = {f"model.layers.{n}": place for n, place in enumerate(("cpu", "disk", "disk"))}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    assert loaded.model.layers[2].mlp.up_proj.weight.is_meta
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


@pytest.mark.parametrize("norm", ["cpu", "disk"])
def test_rotations_hold_where_their_layers_are_offloaded(norm, tmp_path):
    low_precision = LowPrecisionConfig(method="quarot")
    config = WSVDConfig(rank_ratio=None, self_check="none", low_precision=low_precision)
    model = hf_wsvd.compress(build("llama"), config, calibration=calibration_batches("llama"))
    model.save_pretrained(tmp_path)
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers": "disk", "model.norm": norm}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offload")
    assert loaded.model.layers[0].self_attn.q_proj.weight.is_meta
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


def test_a_decoder_of_fused_projections_is_saved_and_comes_back(tmp_path):
    """Its attention has no keys and values of its own to speak of, on the card as elsewhere."""
    model = Phi3ForCausalLM(Phi3Config(**TEXT)).eval()
    model = hf_wsvd.compress(model, WSVDConfig(rank_ratio=None, self_check="none", low_precision=RTN))
    model.save_pretrained(tmp_path)
    assert "## KV cache" not in (tmp_path / "README.md").read_text()
    with pytest.raises(ValueError, match="no attention with `k_proj`"):
        cache_size(model.config)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), "llama"), logits(model, "llama"))


def test_a_dense_checkpoint_is_quantized_while_it_loads(dense, statistics, tmp_path):
    dense("llama").save_pretrained(tmp_path)
    plain = {**CLOSED_FORM, "self_check": "none", "low_precision": RTN}
    config = WSVDConfig(**plain, calibration=statistics("llama"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    again = hf_wsvd.compress(build("llama"), WSVDConfig(**plain), statistics=statistics("llama"))
    assert torch.equal(logits(loaded, "llama"), logits(again, "llama"))
    config.low_precision = LowPrecisionConfig()
    with pytest.raises(ValueError, match=r"method='wsvd_qat' measures .* choose method='rtn'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_codes_are_never_taken_for_weights(tmp_path):
    """Square layers of 8 bits without ranks have as many codes as weights, under the same name."""
    quantized(rank_ratio=None).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    with pytest.raises(RuntimeError, match="mismatch"):
        LlamaForCausalLM.from_pretrained(tmp_path, config=config)


NAME = "model.layers.1.mlp.up_proj"
DAMAGES = {
    "codes of another shape": (lambda t: {f"{NAME}.weight": t[f"{NAME}.weight"][:3].clone()}, rf"{NAME}\.weight of"),
    "codes as floats": (lambda t: {f"{NAME}.weight": t[f"{NAME}.weight"].float()}, "dtype F32"),
    "scales of another shape": (lambda t: {f"{NAME}.weight_scales": torch.ones(3, 1)}, r"has shape \(3, 1\)"),
    "scales as integers": (lambda t: {f"{NAME}.weight_scales": t[f"{NAME}.weight_scales"].int()}, "dtype I32"),
    "no scales": (lambda t: {f"{NAME}.weight_scales": None}, "is missing"),
    "scales with NaN": (lambda t: {f"{NAME}.weight_scales": t[f"{NAME}.weight_scales"] * float("nan")}, "not finite"),
    "negative scales": (lambda t: {f"{NAME}.weight_scales": -t[f"{NAME}.weight_scales"]}, "negative"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of W8A8; copy before changing it."""
    folder = tmp_path_factory.mktemp("saved")
    quantized().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage, saved, tmp_path):
    edit, message = DAMAGES[damage]
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= edit(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "corrupted checkpoint" in str(error.value)


HOSTILE = {
    "bits": ({"weight_bits": 2}, r"weight_bits=2 is not allowed; allowed: one of \(8, 4\)"),
    "other bits": ({"weight_bits": 4}, "corrupted checkpoint"),
    "activation bits": ({"activation_bits": "8"}, "activation_bits='8'"),
    "group size": ({"group_size": 7}, r"q_proj: group_size=7 is not allowed; allowed: a divisor of 48"),
    "huge group": ({"group_size": 10**12}, "group_size=1000000000000"),
    "method": ({"method": "__import__('os')"}, "method="),
    "unknown field": ({"weight_bit": 8}, r"unknown field 'weight_bit' \(did you mean 'weight_bits'\?\)"),
    "all left alone": ({"modules_to_not_convert": ["layers"]}, "no linear layer to quantize"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.usefixtures("no_weights")
def test_a_hostile_config_is_refused_before_anything_is_allocated(case, saved, tmp_path):
    fields, message = HOSTILE[case]
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    edit_low_precision(tmp_path, fields)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def edit_low_precision(folder: Path, fields: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["low_precision"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_checkpoints_of_earlier_formats_have_whole_weights(version):
    stored = {name: value for name, value in WSVDConfig().to_dict().items() if name != "low_precision"}
    assert WSVDConfig.from_dict(stored | {"version": version}).low_precision is None


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_ratio", [0.5, None])
def test_a_weight_that_is_not_finite_is_named_and_the_model_left_as_it_was(rank_ratio):
    model = build("llama")
    model.model.layers[2].mlp.down_proj.weight.data[3, 5] = float("inf")
    before = copy.deepcopy(model.state_dict())
    data = None if rank_ratio is None else calibration_batches("llama")
    config = WSVDConfig(rank_ratio=rank_ratio, **CLOSED_FORM, low_precision=RTN, self_check="none")
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.down_proj|not finite"):
        hf_wsvd.compress(model, config, calibration=data)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_after_a_failure_nothing_binds_the_model():
    model = build("llama")
    model.model.layers[2].mlp.down_proj.weight.data[3, 5] = float("nan")
    before = vars(model.model).keys() | vars(model).keys()
    config = WSVDConfig(rank_ratio=None, cache=CacheConfig(bits=4), self_check="none", low_precision=RTN)
    with pytest.raises(ValueError, match="not finite"):
        hf_wsvd.compress(model, config)
    assert vars(model.model).keys() | vars(model).keys() == before
    assert not model.model._forward_pre_hooks


@pytest.mark.usefixtures("no_weights")
def test_a_compressed_checkpoint_is_not_rounded_as_it_loads(saved):
    config = WSVDConfig(low_precision=LowPrecisionConfig(weight_bits=4, method="rtn"))
    with pytest.raises(ValueError, match=r"low_precision=.* None for a compressed checkpoint"):
        AutoModelForCausalLM.from_pretrained(saved, quantization_config=config)


@pytest.mark.usefixtures("no_weights")
def test_statistics_that_nothing_is_fitted_on_are_refused_before_weights_are_read(dense, statistics, tmp_path):
    dense("llama").save_pretrained(tmp_path)
    config = WSVDConfig(rank_ratio=None, low_precision=RTN, calibration=statistics("llama"))
    with pytest.raises(ValueError, match="no rank to fit"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_an_offloaded_dense_model_is_refused(dense, tmp_path):
    dense("llama").save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=places | {"lm_head": "cpu"}, offload_folder=tmp_path / "offload"
    )
    config = WSVDConfig(rank_ratio=None, self_check="none", low_precision=RTN)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj is offloaded"):
        hf_wsvd.compress(model, config)


def test_a_layer_of_zeros_is_no_obstacle():
    model = build("llama")
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    compressed = hf_wsvd.compress(model, WSVDConfig(rank_ratio=None, self_check="none", low_precision=RTN))
    assert isinstance(compressed.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert torch.isfinite(logits(compressed, "llama")).all()


@pytest.mark.usefixtures("no_weights")
def test_a_group_size_that_does_not_divide_is_refused_before_weights_are_read(dense, tmp_path):
    dense("llama").save_pretrained(tmp_path)
    config = WSVDConfig(low_precision=LowPrecisionConfig(4, 16, 32, method="rtn"))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj: group_size=32 .* a divisor of 48"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


# Bytes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["W8A8", "W4A16"])
def test_an_estimate_counts_codes_and_scales_as_they_are_allocated(form, dense):
    model = quantized(form=form)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert hf_wsvd.estimate_memory(model, 16).weights_bytes == held
    low_precision = LowPrecisionConfig(method="rtn", **FORMATS[form])
    options = {"rank_ratio": 0.5, "low_precision": low_precision, "dtype": "float32"}
    assert hf_wsvd.estimate_memory(dense("llama").config, 16, **options).weights_bytes == held
    with pytest.raises(ValueError, match="this one is quantized already"):
        hf_wsvd.estimate_memory(model, 16, low_precision=low_precision)
