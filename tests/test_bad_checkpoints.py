"""Checkpoints that are damaged, hostile or made for another model: an error before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_facts import logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_wsvd import WSVDConfig


# Checkpoints that are damaged ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(compressed, tmp_path_factory) -> Callable[..., Path]:
    """`checkpoint(tmp_path, **options)`: a fresh copy of a saved tiny model, for a test to damage."""

    def save(folder: Path, family: str = "llama", **options) -> Path:
        compressed(family).save_pretrained(folder, **options)
        return folder

    return save


def edit_tensors(folder: Path, edit: Callable[[dict], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


NAME = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize("part", ["up", "weight"])
def test_a_missing_factor_is_an_error_instead_of_random_numbers(checkpoint, tmp_path, part):
    checkpoint(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(f"{NAME}.{part}"))
    with pytest.raises(ValueError, match=rf"corrupted checkpoint: {NAME}\.{part} of shape .* is missing in .*/model"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_factor_under_a_foreign_prefix_does_not_count(checkpoint, tmp_path):
    checkpoint(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"evil.{NAME}.up": tensors.pop(f"{NAME}.up")}))
    with pytest.raises(ValueError, match=rf"corrupted checkpoint: {NAME}\.up of shape .* is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_factor_of_integers_is_an_error(checkpoint, tmp_path):
    checkpoint(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{NAME}.up": tensors[f"{NAME}.up"].int()}))
    with pytest.raises(ValueError, match=rf"{NAME}\.up of shape .* dtype I32"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("part", ["up", "weight"])
def test_a_factor_of_the_wrong_shape_is_an_error(checkpoint, tmp_path, part):
    checkpoint(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({f"{NAME}.{part}": torch.zeros(7, 3)}))
    with pytest.raises(ValueError, match=rf"{NAME}\.{part} of shape .* has shape \(7, 3\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -200])
def test_a_file_cut_short_is_an_error_with_its_name(checkpoint, tmp_path, keep):
    file = checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_header_of_garbage_is_an_error(checkpoint, tmp_path):
    file = checkpoint(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_missing_shard_is_an_error(checkpoint, tmp_path):
    checkpoint(tmp_path, max_shard_size="20KB")
    missing = sorted(tmp_path.glob("model-*.safetensors"))[2]
    missing.unlink()
    with pytest.raises((OSError, ValueError), match=missing.name):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Checkpoints of other models, and hostile ones ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": 2}, r"another architecture \(llama\): num_hidden_layers=3 \(this model: 2\)"),
        ({"hidden_size": 64}, r"hidden_size=48 \(this model: 64\)"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads=\[2\] \(this model: \[4\]\)"),
        ({"head_dim": 32}, r"head_dim=\[16\] \(this model: \[32\]\)"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(checkpoint, tmp_path, changed, message):
    checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


HOSTILE = {
    "rank": ({"k_rank": 10**9}, "k_rank=1000000000"),
    "ranks": ({"v_rank": [8, 10**18, 8]}, "v_rank=1000000000000000000"),
    "negative rank": ({"k_rank": [-8, 8, 8]}, "k_rank"),
    "rank as text": ({"k_rank": "8"}, "k_rank='8'"),
    "ratio as text": ({"rank_ratio": "0.5"}, "rank_ratio='0.5'"),
    "multiple": ({"rank_multiple": 10**9}, "rank_multiple=1000000000"),
    "many ranks": ({"k_rank": [8] * 100_000}, "a list of 100000"),
    "many layouts": ({"key_layout": ["none:halves"] * 100_000}, "key_layout has 100000 entries"),
    "too few layouts": ({"key_layout": []}, "key_layout has 0 entries"),
    "layout": ({"key_layout": ["__import__('os')"] * 3}, "NORM:ROTATION"),
    "layout as number": ({"key_layout": [1, 2, 3]}, "NORM:ROTATION"),
    "no layouts": ({"key_layout": None}, "lacks `decoder_shape` or `key_layout`"),
    "no shape": ({"decoder_shape": None}, "lacks `decoder_shape` or `key_layout`"),
    "empty shape": ({"decoder_shape": {}}, "another architecture"),
    "shape as text": ({"decoder_shape": "llama"}, "decoder_shape='llama'"),
    "skipped layer": ({"layers_to_not_convert": [10**9]}, "layers_to_not_convert=1000000000"),
    "other ranks": ({"k_rank": [4, 4, 4]}, "corrupted checkpoint"),
    "no ranks": ({"k_rank": [None] * 3, "v_rank": [None] * 3}, "no layer to convert"),
    "norm that is not there": ({"key_layout": ["before:halves"] * 3}, "key_layout"),
    "unknown field": ({"post_init_hook": "os.system"}, "unknown field"),
    "newer version": ({"version": 99}, "newer hf_wsvd"),
    "version as text": ({"version": "99"}, "version='99'"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.usefixtures("no_weights")
def test_a_hostile_config_is_refused_before_anything_is_allocated(case, checkpoint, tmp_path):
    fields, message = HOSTILE[case]
    edit_config(checkpoint(tmp_path), **fields)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_ranks_of_a_compressed_checkpoint_cannot_be_changed_by_loading(checkpoint, tmp_path):
    checkpoint(tmp_path)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=WSVDConfig(k_rank=4))
    assert loaded.config.quantization_config.k_rank == [8, 8, 8]
    assert loaded.model.layers[0].self_attn.k_proj.rank == 8


# Saving -------------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_the_model_usable(compressed, tmp_path):
    model = compressed("llama")
    before, fields = logits(model, "llama"), model.config.quantization_config.to_dict()
    file = tmp_path / "file"
    file.write_text("precious")
    for target in (file, file / "model"):
        with pytest.raises(OSError, match="file"):
            model.save_pretrained(target)
    assert file.read_text() == "precious"
    assert torch.equal(logits(model, "llama"), before)
    assert model.config.quantization_config.to_dict() == fields
