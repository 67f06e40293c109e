"""`hf-wsvd headguard` and what `inspect` and `compress` say of guarded heads, end to end on tiny models."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from test_cli import error_of
from tiny_text import chat_tokenizer, tiny_llama
from tiny_vision import tiny_llava, tiny_processor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from hf_wsvd.cli.app import run
from hf_wsvd.headguard import heads_from_scores, load_head_scores
from hf_wsvd.headguard.heat_map import FRAME, LABELS, LARGEST_CELL, MARGIN, TITLE, heat_map
from hf_wsvd.quantizer_config import GuardMap


FAST = ["--samples", "4", "--rank-allocation", "uniform", "--refinement", "none"]


HEADGUARD = ["headguard", "{vision}", "-o", "{new}"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: "vision" and "text" (dense), "guarded" (the first with guards), "latent" (compressed, then guarded)."""
    root = tmp_path_factory.mktemp("models")
    tiny_llava().save_pretrained(root / "vision")
    tiny_processor().save_pretrained(root / "vision")
    tiny_llama().save_pretrained(root / "text")
    chat_tokenizer().save_pretrained(root / "text")
    guard = ["--samples", "7", "--fraction", "0.5", "--bits", "2"]
    assert run(["headguard", str(root / "vision"), "-o", str(root / "guarded"), *guard]) == 0
    assert run(["compress", str(root / "vision"), "-o", str(root / "half"), *FAST]) == 0
    assert (
        run(
            [
                "headguard",
                str(root / "half"),
                "-o",
                str(root / "latent"),
                *guard,
                "--protect",
                "kv",
                "--selector",
                "headguard",
            ]
        )
        == 0
    )
    return root


def guard_map_of(folder) -> GuardMap:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return GuardMap.parse(config["head_guard"]["guard_map"])


@pytest.mark.parametrize("name", ["guarded", "latent"])
def test_the_checkpoint_loads_generates_and_tells_its_scores(models, name):
    model = AutoModelForImageTextToText.from_pretrained(models / name)
    processor = AutoProcessor.from_pretrained(models / name)
    guard_map = model.config.quantization_config.guard_map
    assert len({(guard.layer, guard.head) for guard in guard_map}) == 2
    assert guard_map.info["calibration"]["dataset"] == "built-in scenes"
    assert bool(guard_map.value) == (name == "latent")
    image = Image.new("RGB", (16, 16), "red")
    inputs = processor(text="<image>What?", images=image, return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > 3
    scores = models / name / "head_scores.safetensors"
    assert heads_from_scores(scores).key == guard_map.key
    # What every sample said, where the selector asks each by itself.
    assert {len(measure) for measure in load_head_scores(scores).raw.values()} == ({7} if name == "latent" else set())


def test_a_compressed_model_keeps_its_factors(models):
    half, latent = (AutoModelForImageTextToText.from_pretrained(models / name) for name in ("half", "latent"))
    for name, parameter in half.named_parameters():
        assert torch.equal(latent.get_parameter(name), parameter)
    assert latent.config.quantization_config.k_rank == half.config.quantization_config.k_rank


def test_the_summary_says_what_is_guarded_and_what_that_takes(models, tmp_path, capsys):
    arguments = ["headguard", str(models / "vision"), "-o", str(tmp_path / "out"), "--samples", "4", "--bits", "4"]
    capsys.readouterr()
    assert run([*arguments, "--scheme", "minmax", "--selector", "boundary_layers", "--fraction", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 KV heads (50.0%) keep 16 bits for image tokens; sides: k; selector: boundary_layers" in out
    assert "layer 0: keys of heads 0, 1\n" in out
    # Four heads of 16 channels in fp32; 4 bits with 4 bytes of scale and zero: 12 bytes a head and side.
    assert f"a token of an image: {2 * 64 + 6 * 12} bytes in all layers, {8 * 12} without guards" in out
    assert run([*arguments, "--selector", "attention_mass", "--fraction", "0.25", "--overwrite"]) == 0
    assert "of them are among the 1 heads that selector key_range takes" in capsys.readouterr().out


def test_a_text_model_guards_all_tokens(models, tmp_path, capsys):
    arguments = [
        "headguard",
        str(models / "text"),
        "-o",
        str(tmp_path / "out"),
        "--samples",
        "4",
        "--max-tokens",
        "64",
    ]
    guard = ["--bits", "2", "--selector", "output_only", "--fraction", "0.25", "--guard-bits", "8"]
    assert run([*arguments, *guard]) == 0
    assert "keep 8 bits for all tokens" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.quantization_config.storage.guard_map.tokens == "all"


def test_compress_chooses_heads_too(models, tmp_path):
    arguments = ["compress", str(models / "vision"), "-o", str(tmp_path / "out"), *FAST, "--bits", "2"]
    assert run([*arguments, "--head-guard", "0.25", "--selector", "image_only", "--protect", "kv"]) == 0
    guard_map = guard_map_of(tmp_path / "out")
    assert (len(guard_map), guard_map.selector) == (2, "image_only")


def test_inspect_shows_the_guards_and_draws_them(models, tmp_path, capsys):
    capsys.readouterr()
    assert run(["inspect", str(models / "guarded"), "--heads", str(tmp_path / "new" / "heads.png")]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 KV heads (50.0%) keep 16 bits for image tokens; sides: k; selector: restoration" in out
    assert run(["inspect", str(models / "guarded"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["head_guard"]
    guard_map = guard_map_of(models / "guarded")
    assert facts["key"] == {str(layer): sorted(heads) for layer, heads in guard_map.key.items()}
    assert (facts["guarded_heads"], facts["heads"], facts["protect"]) == (2, 4, "k")
    with Image.open(tmp_path / "new" / "heads.png") as picture:
        assert picture.tobytes() == heat_map(guard_map).tobytes()


def test_the_heat_map_frames_guarded_heads_and_no_others():
    guard_map = GuardMap({0: {1: 16}}, {0: {0: 16}, 1: {1: 8}}, num_key_value_heads=[2, 2])
    picture, panel = heat_map(guard_map), LABELS + 2 * LARGEST_CELL + MARGIN
    for number, side in enumerate(("key", "value")):
        for layer in range(2):
            for head in range(2):
                x = MARGIN + number * panel + LABELS + head * LARGEST_CELL
                framed = picture.getpixel((x, TITLE + LABELS + layer * LARGEST_CELL)) == FRAME
                assert framed == (head in getattr(guard_map, side).get(layer, {}))


def test_the_heat_map_takes_any_scores_and_a_limit_of_heads():
    scores = {"key": [[0.0, 1e308], [-1e308, float("-inf")], []]}
    heat_map(GuardMap(num_key_value_heads=[2, 2, 0], scores=scores, selector="\x1b" * 100))
    heat_map(GuardMap(num_key_value_heads=[0]))
    with pytest.raises(ValueError, match="up to 65,536 heads"):
        heat_map(GuardMap(num_key_value_heads=[4096] * 17))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*HEADGUARD], "--bits is missing"),
        ([*HEADGUARD, "--bits", "5"], "bits=5"),
        ([*HEADGUARD, "--bits", "16"], "give it fewer bits"),
        ([*HEADGUARD, "--bits", "2", "--fraction", "0"], "a number in (0, 1]"),
        ([*HEADGUARD, "--bits", "2", "--fraction", "1.5"], "a number in (0, 1]"),
        ([*HEADGUARD, "--bits", "2", "--selector", "best"], "selector='best'"),
        ([*HEADGUARD, "--bits", "2", "--group-size", "5"], "group_size"),
        ([*HEADGUARD, "--bits", "2", "--selector", "retrieval", "--samples", "2"], "evidence"),
        ([*HEADGUARD, "--bits", "2", "--selector", "random", "--dataset", "x.json"], "x.json"),
        (["headguard", "{vision}", "-o", "{guarded}", "--bits", "2"], "not empty; pass --overwrite"),
        (["headguard", "{guarded}", "-o", "{guarded}", "--overwrite"], "is, or holds, the model"),
        (
            ["headguard", "{text}", "-o", "{new}", "--bits", "2", "--selector", "headguard"],
            "selector='headguard' needs a model that reads images",
        ),
        (
            ["headguard", "{text}", "-o", "{new}", "--bits", "2", "--tokens", "image"],
            "needs a model that reads images",
        ),
        (["compress", "{vision}", "-o", "{new}", "--head-guard", "0.5"], "head_guard"),
        (["compress", "{vision}", "-o", "{new}", "--selector", "random"], "--selector needs --head-guard"),
        (["inspect", "{half}", "--heads", "{new}.png"], "has no guarded heads to draw"),
        (["inspect", "{guarded}", "--heads", "{new}.jpg"], "is a .png file"),
        (["inspect", "{guarded}", "--overwrite"], "--overwrite needs --heads"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(models, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    places = {name: models / name for name in ("vision", "text", "guarded", "half")} | {"new": tmp_path / "nothing"}
    assert message in error_of(capsys, [argument.format(**places) for argument in arguments])
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_is_there_is_replaced_only_if_asked(models, tmp_path, capsys):
    picture = tmp_path / "heads.png"
    picture.write_text("mine")
    arguments = ["inspect", str(models / "guarded"), "--heads", str(picture)]
    assert "pass --overwrite" in error_of(capsys, arguments)
    assert picture.read_text() == "mine"
    assert run([*arguments, "--overwrite"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_leaves_nothing(models, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_wsvd.cli.headguard.save_head_scores", stop)
    arguments = ["headguard", str(models / "vision"), "-o", str(tmp_path / "out"), "--bits", "2"]
    assert run([*arguments, "--selector", "random"]) == 130
    assert list(tmp_path.iterdir()) == []
