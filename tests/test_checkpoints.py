"""Checkpoints: saved, sharded, mapped, offloaded, cast, loaded under other heads, without hf_wsvd, and dequantized."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_facts import auto_class, logits, projections
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, prompt
from transformers import AutoModel, Cache, PreTrainedModel

import hf_wsvd


@torch.no_grad()
def generated(model: PreTrainedModel, family: str) -> torch.Tensor:
    return model.generate(**prompt(family), max_new_tokens=6, do_sample=False)


def stored_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_to_the_same_numbers(family, compressed, tmp_path):
    model = compressed(family, k_rank=5)
    model.save_pretrained(tmp_path)
    loaded = auto_class(family).from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert projections(loaded) == projections(model)
    assert loaded.config.quantization_config == model.config.quantization_config
    assert torch.equal(logits(loaded, family), logits(model, family))
    assert torch.equal(generated(loaded, family), generated(model, family))
    loaded.save_pretrained(tmp_path / "again")
    assert stored_config(tmp_path / "again") == stored_config(tmp_path)
    first, again = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_files_hold_factors_a_config_and_nothing_private(compressed, tmp_path):
    compressed("qwen2").save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        layer = "model.layers.1.self_attn"
        names = {name for name in file.keys() if name.startswith((f"{layer}.k", f"{layer}.v"))}  # noqa: SIM118
        assert names == {f"{layer}.{side}_proj.{kind}" for side in "kv" for kind in ("weight", "up", "bias")}
        assert file.get_slice(f"{layer}.k_proj.weight").get_shape() == [2 * 8, 48]
        assert file.get_slice(f"{layer}.k_proj.up").get_shape() == [2, 16, 8]
        assert file.metadata()["hf_wsvd_version"] == hf_wsvd.__version__
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "wsvd"
    assert "wsvd" not in json.dumps(config), "the attention function is chosen at load, not stored"


LOADS = {
    "mapped to the CPU": {"device_map": "cpu"},
    "mapped by size": {"device_map": "auto"},
    "with a plain SDPA decoder": {"attn_implementation": "sdpa"},
    "with an eager decoder": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
@pytest.mark.parametrize("how", LOADS)
def test_a_sharded_checkpoint_loads(family, how, compressed, tmp_path):
    model = compressed(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    loaded = auto_class(family).from_pretrained(tmp_path, **LOADS[how])
    torch.testing.assert_close(logits(loaded, family), logits(model, family), rtol=0, atol=2e-5)
    assert torch.equal(generated(loaded, family), generated(model, family))


def offloaded(model: PreTrainedModel, folder: Path, family: str, **options) -> PreTrainedModel:
    """The checkpoint in `folder` with the first decoder layer on the CPU and the others on disk."""
    layers = next(n for n, _ in model.named_modules() if n.endswith("layers.0") and "visi" not in n)[: -len(".0")]
    outside = [name for name, module in model.named_modules() if module._parameters and not name.startswith(layers)]
    device_map = dict.fromkeys(outside, "cpu") | {f"{layers}.{i}": d for i, d in enumerate(("cpu", "disk", "disk"))}
    return auto_class(family).from_pretrained(
        folder, device_map=device_map, offload_folder=folder / "offload", **options
    )


def cache_of(output: dict) -> Cache:
    return next(value for value in output.values() if isinstance(value, Cache))


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "llava"])
def test_layers_offloaded_to_cpu_and_disk_give_the_same_tokens(family, compressed, tmp_path):
    model = compressed(family)
    model.save_pretrained(tmp_path)
    loaded = offloaded(model, tmp_path, family)
    assert "meta" in {p.device.type for p in loaded.parameters()}
    assert torch.equal(logits(loaded, family), logits(model, family))
    out = loaded.generate(**prompt(family), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, generated(model, family))
    assert [layer.keys.shape[-1] for layer in cache_of(out).layers] == [8, 8, 8], "latents, not dense keys"


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "llava"])
@pytest.mark.parametrize("where", ["whole", "offloaded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_checkpoint_loads_in_half_precision(family, where, dtype, compressed, tmp_path):
    model = compressed(family)
    model.save_pretrained(tmp_path)
    if where == "whole":
        loaded = auto_class(family).from_pretrained(tmp_path, dtype=dtype)
    else:
        loaded = offloaded(model, tmp_path, family, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    cast = copy.deepcopy(model)
    for parameter in cast.parameters():  # not the rotary frequencies, which loading keeps in fp32
        parameter.data = parameter.data.to(dtype)
    batch = {n: v.to(dtype) if v.is_floating_point() else v for n, v in prompt(family, batch=2).items()}
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, cast(**batch).logits)
        out = loaded.generate(**batch, max_new_tokens=4, return_dict_in_generate=True)
    assert {layer.keys.dtype for layer in cache_of(out).layers} == {dtype}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_causal_checkpoint_loads_as_its_base_and_the_base_as_causal(family, compressed, tmp_path):
    model, batch = compressed(family), prompt(family, batch=2)
    model.save_pretrained(tmp_path / "causal")
    base = AutoModel.from_pretrained(tmp_path / "causal")
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        hidden = base(**batch).last_hidden_state
        assert torch.equal(hidden, model.model(**batch).last_hidden_state)
    causal = auto_class(family).from_pretrained(tmp_path / "base")  # its language head starts anew
    with torch.no_grad():
        assert torch.equal(causal.model(**batch).last_hidden_state, hidden)


@pytest.mark.parametrize("family", ["llama", "qwen2", "llava", "qwen2_vl"])
def test_a_dequantized_model_saves_as_an_ordinary_checkpoint(family, compressed, tmp_path):
    model = copy.deepcopy(compressed(family))
    model.save_pretrained(tmp_path / "compressed")  # leaves config.dtype a string
    model.dequantize().save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    loaded = auto_class(family).from_pretrained(tmp_path / "plain")
    assert getattr(loaded, "hf_quantizer", None) is None
    assert torch.equal(logits(loaded, family), logits(model, family))
    reloaded = auto_class(family).from_pretrained(tmp_path / "compressed").dequantize()
    assert torch.equal(logits(reloaded, family), logits(model, family))


def test_dequantize_in_another_dtype(compressed):
    model = copy.deepcopy(compressed("llama")).dequantize(dtype=torch.bfloat16)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.dtype == attention.v_proj.weight.dtype == torch.bfloat16


WITHOUT_HF_WSVD = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("full")
batch = load_file("wanted.safetensors")
logits = batch.pop("logits")
assert torch.equal(model(**batch).logits, logits)
try:
    AutoModelForCausalLM.from_pretrained("half")
except RuntimeError as error:
    assert "mismatch" in str(error), error
else:
    raise AssertionError("random weights were accepted")
assert not any(name.startswith("hf_wsvd") for name in sys.modules)
"""


def test_without_importing_hf_wsvd_cut_ranks_fail_to_load_and_full_rank_is_the_dense_model(
    compressed, dense, tmp_path
):
    compressed("llama").save_pretrained(tmp_path / "half")
    compressed("llama", 1).save_pretrained(tmp_path / "full")
    wanted = {**prompt("llama", batch=2), "logits": logits(dense("llama"), "llama")}
    save_file(wanted, tmp_path / "wanted.safetensors")
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_HF_WSVD], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
