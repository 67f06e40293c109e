"""`hf-wsvd calibrate`, and `compress --calibration` on what it wrote."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_cli import error_of
from tiny_text import byte_tokenizer, tiny_llama
from tiny_vision import tiny_llava, tiny_processor
from transformers import AutoModelForCausalLM

import hf_wsvd
from hf_wsvd.cli.app import run
from hf_wsvd.cli.calibrate import partial_of


FAST = ["--samples", "4", "--max-tokens", "64"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders of a dense text model ("text") and a dense vision-language model ("vision")."""
    root = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(root / "text")
    byte_tokenizer().save_pretrained(root / "text")
    tiny_llava().save_pretrained(root / "vision")
    tiny_processor().save_pretrained(root / "vision")
    return root


@pytest.fixture(scope="module")
def stats(models) -> Path:
    """Statistics of the text model on the built-in set."""
    path = models / "stats.safetensors"
    assert run(["calibrate", str(models / "text"), "-o", str(path), *FAST]) == 0
    return path


def test_calibrate_then_compress(models, stats, tmp_path, capsys):
    assert not partial_of(stats).exists()
    assert run(["calibrate", str(models / "text"), "-o", str(tmp_path / "new" / "a.safetensors"), *FAST]) == 0
    first, following = capsys.readouterr().out.strip().splitlines()
    assert "4 sequences, 256 tokens in 2 layers, measured in float32, without Fisher" in first
    assert following.startswith(f"Next: hf-wsvd compress {models / 'text'} -o DIR --calibration {tmp_path}")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.safetensors"]
    assert (tmp_path / "new" / "a.safetensors").read_bytes() == stats.read_bytes()
    for ratio in ("0.5", "0.75"):
        out = tmp_path / f"out-{ratio}"
        arguments = [str(models / "text"), "-o", str(out), "--rank-ratio", ratio, "--calibration", str(stats)]
        assert run(["compress", *arguments]) == 0
        info = json.loads((out / "config.json").read_text())["quantization_config"]["calibration_info"]
        assert (info["samples"], info["dataset"]) == (4, "built-in documentation")
        assert "stats" not in (out / "config.json").read_text()
        assert AutoModelForCausalLM.from_pretrained(out).generate(torch.tensor([[5]]), max_new_tokens=2).shape == (
            1,
            3,
        )


def test_vision_model_with_fisher_and_dtype(models, tmp_path, capsys):
    path = tmp_path / "stats.safetensors"
    arguments = [str(models / "vision"), "-o", str(path), "--samples", "4", "--fisher", "--dtype", "bfloat16"]
    assert run(["calibrate", *arguments]) == 0
    output = capsys.readouterr().out
    assert "measured in bfloat16, with Fisher information" in output
    assert "--dtype bfloat16" in output
    loaded = hf_wsvd.load_statistics(path)
    assert (loaded.dtype, set(loaded.fisher) == set(loaded.weight)) == ("bfloat16", True)
    line = error_of(capsys, ["compress", models / "vision", "-o", tmp_path / "out", "--calibration", path])
    assert "measured in bfloat16, the model is float32" in line
    compressed = [str(models / "vision"), "-o", str(tmp_path / "out"), "--calibration", str(path)]
    assert run(["compress", *compressed, "--dtype", "bfloat16"]) == 0


def test_a_data_set_is_read(models, tmp_path):
    (tmp_path / "text.txt").write_text("A text of some length. " * 20)
    arguments = ["-o", str(tmp_path / "a.st"), "--dataset", str(tmp_path / "text.txt"), *FAST]
    assert run(["calibrate", str(models / "text"), *arguments]) == 0
    assert hf_wsvd.load_statistics(tmp_path / "a.st").info["dataset"] == "text.txt"


def test_an_interrupted_command_goes_on(models, stats, tmp_path, capsys, monkeypatch):
    path = tmp_path / "a.safetensors"
    arguments = ["calibrate", str(models / "text"), "-o", str(path), *FAST]

    def failing(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr("hf_wsvd.cli.calibrate.save_statistics", failing)
        assert run(arguments) == 130
    assert [file.name for file in tmp_path.iterdir()] == [partial_of(path).name]
    assert "other calibration data" in error_of(capsys, [*arguments, "--seed", "1"])
    assert "remove it to start anew" in error_of(capsys, [*arguments, "--fisher"])
    assert run(arguments) == 0
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == stats.read_bytes()


def test_outputs_that_are_there_or_cannot_be_written(models, stats, tmp_path, capsys):
    text = models / "text"
    assert "pass --overwrite" in error_of(capsys, ["calibrate", text, "-o", stats, *FAST])
    assert "is a folder" in error_of(capsys, ["calibrate", text, "-o", tmp_path, *FAST])
    assert "cannot be written" in error_of(capsys, ["calibrate", text, "-o", stats / "a", *FAST])
    assert "--dtype must be one of" in error_of(capsys, ["calibrate", text, "-o", tmp_path / "a", "--dtype", "int8"])
    assert "needs --dataset" in error_of(capsys, ["calibrate", text, "-o", tmp_path / "a", "--split", "test"])
    shutil.copy(stats, tmp_path / "old")
    assert run(["calibrate", str(text), "-o", str(tmp_path / "old"), "--overwrite", *FAST, "--samples", "5"]) == 0
    assert hf_wsvd.load_statistics(tmp_path / "old").info["samples"] == 5


def test_compress_refuses_statistics_that_do_not_fit(models, stats, tmp_path, capsys):
    command = ["compress", models / "text", "-o", tmp_path / "out", "--calibration"]
    for option, value in (("--dataset", "text.txt"), ("--max-tokens", "5")):
        assert f"{option} says nothing beside it" in error_of(capsys, [*command, stats, option, value])
    assert "does not exist" in error_of(capsys, [*command, tmp_path / "none"])
    (tmp_path / "cut").write_bytes(stats.read_bytes()[:-7])
    assert "truncated?" in error_of(capsys, [*command, tmp_path / "cut"])
    tiny_llama(seed=3).save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    other = ["compress", tmp_path / "other", "-o", tmp_path / "out", "--calibration", stats]
    assert "its weights are others" in error_of(capsys, other)
    assert not (tmp_path / "out").exists()


def test_the_file_holds_no_path(stats, models):
    with safe_open(stats, "pt") as opened:
        assert str(models) not in json.dumps(opened.metadata())


def test_sigterm_keeps_what_was_measured(tmp_path):
    """Batch systems send it before they kill."""
    script = """
import os, signal, sys
from hf_wsvd.cli.calibrate import terminated_like_interrupted
try:
    with terminated_like_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
except KeyboardInterrupt:
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 7
