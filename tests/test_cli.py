"""The commands, in process; every error must be one line and exit code 2."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny_text import byte_tokenizer, chat_tokenizer, tiny_llama
from tiny_vision import tiny_llava, tiny_processor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

import hf_wsvd
from hf_wsvd.card import kv_bytes_per_token as kv_bytes_per_token_of_card
from hf_wsvd.cli.app import run
from hf_wsvd.evaluate.memory import kv_bytes_per_token
from hf_wsvd.files import replaced_folder, write_text


FAST = ["--samples", "4", "--max-tokens", "64", "--rank-allocation", "uniform", "--refinement", "none"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a dense text model ("text"), a dense vision-language model ("vision") and the first compressed."""
    root = tmp_path_factory.mktemp("models")
    tiny_llama().save_pretrained(root / "text")
    byte_tokenizer().save_pretrained(root / "text")
    tiny_llava().save_pretrained(root / "vision")
    tiny_processor().save_pretrained(root / "vision")
    assert run(["compress", str(root / "text"), "-o", str(root / "compressed"), *FAST]) == 0
    return root


def error_of(capsys, arguments) -> str:
    """Run a command that must fail; its one line."""
    capsys.readouterr()
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line, end = captured.err.split("\n")
    assert end == ""
    assert line.startswith("hf-wsvd: error: ")
    return line


def test_compressed_text_model_loads_and_generates(models, capsys):
    model = AutoModelForCausalLM.from_pretrained(models / "compressed")
    tokenizer = AutoTokenizer.from_pretrained(models / "compressed")
    assert model.config.quantization_config.k_rank == [8, 8]
    inputs = tokenizer("some text", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3, do_sample=False).shape == (1, 12)
    arguments = ["--k-rank", "4", "--v-rank", "12", "--bits", "8", "--overwrite", *FAST]
    assert run(["compress", str(models / "text"), "-o", str(models / "other"), *arguments]) == 0
    output = capsys.readouterr().out
    assert "2 of 2 layers hold latents (K rank 4, V rank 12 of 16)" in output
    config = AutoModelForCausalLM.from_pretrained(models / "other").config.quantization_config
    assert (config.v_rank, config.cache.bits) == ([12, 12], 8)


def test_compressed_vision_model_keeps_its_processor(models, tmp_path):
    assert run(["compress", str(models / "vision"), "-o", str(tmp_path / "out"), "--rank-ratio", "0.75", *FAST]) == 0
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(text="<image>What?", images=Image.new("RGB", (16, 16)), return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=2).shape[0] == 1
    assert model.config.quantization_config.k_rank == [12, 12]
    assert model.config.quantization_config.calibration_info["samples"] == 4


def test_ranks_are_allocated_and_factors_refined_unless_told_otherwise(models, tmp_path, capsys):
    arguments = ["--samples", "4", "--max-tokens", "64", "--refinement-steps", "2", "--seed", "3"]
    assert run(["compress", str(models / "text"), "-o", str(tmp_path / "out"), *arguments]) == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.quantization_config
    assert sum(config.k_rank + config.v_rank) == 32
    assert config.fit_info["rank_allocation"] == "gradient"
    assert set(config.fit_info["refinement_kl"]) == {"before", "after", "steps", "held_out"}
    assert (config.refinement_steps, config.seed) == (2, 3)
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "rank_allocation: gradient" in output
    assert "KL to the dense model on the calibration data: " in output
    arguments = ["compress", models / "text", "-o", tmp_path / "none", "--refinement", "none", *arguments[-4:-2]]
    assert "--refinement-steps are those of the distillation" in error_of(capsys, arguments)


def test_weights_of_few_bits(models, tmp_path, capsys):
    low_precision = ["--weight-bits", "4", "--activation-bits", "16", "--low-precision-method", "rtn"]
    assert run(["compress", str(models / "text"), "-o", str(tmp_path), *low_precision, *FAST]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    capsys.readouterr()
    assert run(["inspect", str(tmp_path)]) == 0
    assert "weights of 4 bits with scales of groups, activations in the model's dtype" in capsys.readouterr().out
    sizes = {}
    for bits in ("8", "4"):
        assert run(["estimate", str(models / "text"), "--tokens", "64", "--weight-bits", bits, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["settings"]
        assert row["setting"].endswith(f"weights {bits} bit")
        sizes[bits] = row["weights_bytes"]
    assert sizes["4"] < sizes["8"] < sum(p.nbytes for p in tiny_llama().parameters())
    assert "4 bits" in (tmp_path / "README.md").read_text()


def test_weights_alone_need_no_data(models, tmp_path, capsys):
    options = ["--rank-ratio", "none", "--weight-bits", "8", "--low-precision-method", "rtn"]
    assert run(["compress", str(models / "text"), "-o", str(tmp_path), *options]) == 0
    assert "no layer holds latents" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not model.config.quantization_config.compresses
    assert model.config.quantization_config.calibration_info == {}


def test_dtype_is_kept_or_chosen(models, tmp_path):
    assert run(["compress", str(models / "text"), "-o", str(tmp_path / "out"), "--dtype", "bfloat16", *FAST]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(models / "compressed").dtype == torch.float32


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """Folder of a text model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tiny_llama().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def calibration_info_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]["calibration_info"]


def test_calibration_from_files(chat_model, tmp_path):
    (tmp_path / "text.txt").write_text("A text of some length. " * 20)
    rows = [{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}] * 2
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    conversation = len("user: Hello\nassistant: Hi</s>") - len("</s>") + 1
    for name, preset, (samples, tokens) in (
        ("text.txt", "text", (4, 256)),
        ("rows.jsonl", "messages", (2, 2 * conversation)),
    ):
        out = tmp_path / f"out-{preset}"
        assert run(["compress", str(chat_model), "-o", str(out), "--dataset", str(tmp_path / name), *FAST]) == 0
        info = calibration_info_of(out)
        assert (info["samples"], info["tokens"], info["dataset"]) == (samples, tokens, name)
        assert (info["preset"], info["seed"]) == (preset, 0)
        assert str(tmp_path) not in json.dumps(info)


def test_calibration_rows_with_images(models, tmp_path):
    Image.new("RGB", (20, 30), (200, 10, 10)).save(tmp_path / "red.png")
    content = [{"type": "image", "path": "red.png"}, {"type": "text", "text": "What colour?"}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Red"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    out = tmp_path / "out"
    arguments = ["--dataset", str(tmp_path / "rows.jsonl"), "--samples", "1", "--streaming"]
    assert run(["compress", str(models / "vision"), "-o", str(out), *arguments]) == 0
    assert calibration_info_of(out)["tokens"] == len("user: What colour?\nassistant: Red") + 4 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compress", "{text}"], "--output-dir"),
        (["compress", "{text}", "-o", "{new}", "--rank-ratio", "1.5"], "rank_ratio"),
        (["compress", "{text}", "-o", "{new}", "--rank-ratio", "half"], "must be a number or none, got half"),
        (["compress", "{text}", "-o", "{new}", "--weight-bits", "3"], "weight_bits=3 is not allowed"),
        (["compress", "{text}", "-o", "{new}", "--activation-bits", "8"], "--activation-bits needs --weight-bits"),
        (["compress", "{text}", "-o", "{new}", "--k-rank", "17"], "head_dim = 16"),
        (["compress", "{text}", "-o", "{new}", "--dtype", "int8"], "--dtype must be one of"),
        (["compress", "{text}", "-o", "{new}", "--device", "quantum"], "--device quantum"),
        (["compress", "{text}", "-o", "{new}", "--device", "cuda:99"], "--device cuda:99"),
        (["compress", "{text}", "-o", "{new}", "--samples", "0"], "samples"),
        (["compress", "{text}", "-o", "{text}"], "not empty; pass --overwrite"),
        (["compress", "{text}", "-o", "{text}/config.json"], "no folder"),
        (["compress", "{compressed}", "-o", "{new}"], "quantized already"),
        (["compress", "{new}", "-o", "{new}2"], "nothing"),
        (["compress", "{text}", "-o", "{new}", "--gguf-file", "no.gguf"], "no.gguf"),
        (["compress", "{text}", "-o", "{new}", "--dataset", "{bad}.csv"], "columns found: a, b"),
        (["compress", "{text}", "-o", "{new}", "--dataset", "{bad}.jsonl"], "line 2 is no JSON"),
        (["compress", "{text}", "-o", "{new}", "--dataset", "{bad}.md"], "end in .json"),
        (["compress", "{text}", "-o", "{new}", "--dataset", "{new}.txt"], "no file or folder"),
        (["compress", "{text}", "-o", "{new}", "--dataset", "{bad}.csv", "--split", "a"], "the split 'train' alone"),
        (["compress", "{text}", "-o", "{new}", "--split", "a", "--streaming"], "--split, --streaming needs --dataset"),
        (["compress", "{text}", "-o", "{new}", "--dataset", "{bad}.csv", "--preset", "chat"], "preset must be one of"),
        (["inspect", "{text}"], "not a checkpoint compressed by hf_wsvd"),
        (["inspect", "{new}"], "nothing"),
        (["frobnicate"], "frobnicate"),
        (["inspect", "{text}", "--frob"], "--frob"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(models, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": b}\n')
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    (tmp_path / "bad.md").write_text("text")
    before = sorted(path.name for path in tmp_path.iterdir())
    places = {name: models / name for name in ("text", "compressed")}
    places |= {"new": tmp_path / "nothing", "bad": tmp_path / "bad"}
    assert message in error_of(capsys, [argument.format(**places) for argument in arguments])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_unsupported_architecture_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    assert "BertModel is neither" in error_of(capsys, ["compress", tmp_path, "-o", tmp_path / "out"])


def test_code_of_a_repository_is_never_run(models, tmp_path, capsys, monkeypatch):
    config = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *args: "y")
    for arguments in (["compress", tmp_path, "-o", tmp_path / "out"], ["inspect", tmp_path]):
        error_of(capsys, arguments)
        assert not (tmp_path / "ran").exists()


def test_a_model_without_tokenizer_is_refused(models, tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "model")
    error_of(capsys, ["compress", tmp_path / "model", "-o", tmp_path / "out"])
    assert not (tmp_path / "out").exists()


def test_unexpected_errors_name_their_class(models, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("a bug\nin two lines")

    monkeypatch.setattr("hf_wsvd.cli.compress.load_dense", fail)
    line = error_of(capsys, ["compress", models / "text", "-o", models / "never"])
    assert "ZeroDivisionError: a bug in two lines (set HF_WSVD_TRACEBACK=1" in line
    monkeypatch.setenv("HF_WSVD_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run(["compress", str(models / "text"), "-o", str(models / "never")])


def test_overwriting_replaces_the_whole_folder_or_nothing(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old.txt").write_text("old")
    with pytest.raises(FileNotFoundError), replaced_folder(target) as partial:
        shutil.copy(tmp_path / "missing.txt", partial)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old.txt"]
    with replaced_folder(target) as partial:
        (partial / "new.txt").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~mask


def test_text_is_written_whole_or_not_at_all(tmp_path):
    write_text(tmp_path / "a.json", "one")
    write_text(tmp_path / "a.json", "two")
    assert (tmp_path / "a.json").read_text() == "two"
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.json", "three \ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "two"


def test_inspect_says_what_the_cache_holds(models, capsys):
    capsys.readouterr()
    assert run(["inspect", str(models / "compressed"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"]["config.json"] == (models / "compressed" / "config.json").stat().st_size
    assert facts["quantization_config"]["calibration_info"]["samples"] == 4
    model = AutoModelForCausalLM.from_pretrained(models / "compressed")
    measured = kv_bytes_per_token(model, {"input_ids": torch.zeros(1, 64, dtype=torch.long)}, decode_steps=0)
    assert facts["cache"]["bytes"] == measured.per_token
    assert facts["cache"]["dense_bytes"] == measured.dense_per_token
    assert facts["cache"]["bytes"] == kv_bytes_per_token_of_card(model)["compressed"]
    assert run(["inspect", str(models / "compressed")]) == 0
    output = capsys.readouterr().out
    assert "K 8, V 8 of 16, key layout none:halves: 128 bytes a token (dense 256)" in output
    assert "sha256: " in output


def test_version_and_help(capsys):
    capsys.readouterr()
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == hf_wsvd.__version__
    assert run([]) == 0
    output = capsys.readouterr().out
    assert all(f"\n  {command} " in output for command in ("demo", "compress", "inspect"))


def test_console_script_exits_with_2_after_an_error(tmp_path):
    script = Path(sys.executable).with_name("hf-wsvd")
    failed = subprocess.run([script, "inspect", str(tmp_path)], capture_output=True, text=True)
    assert failed.returncode == 2
    assert len(failed.stderr.strip().splitlines()) == 1


def test_overwrite_never_takes_the_working_directory_or_the_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    monkeypatch.chdir(tmp_path)
    for arguments in (["model", "-o", "."], ["model", "-o", ".."], ["elsewhere/model", "-o", "elsewhere"]):
        assert run(["compress", *arguments, "--overwrite"]) == 2
        assert "is, or holds, the" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    "fields",
    [
        {"decoder_shape": None},
        {"decoder_shape": {"num_key_value_heads": [2]}},
        {"decoder_shape": {"num_key_value_heads": "many", "head_dim": [8]}},
        {"k_rank": [99, 99]},
        {"k_rank": "full"},
        {"key_layout": ["none:spiral"]},
    ],
)
def test_inspect_refuses_a_tampered_config_in_one_sentence(fields, models, tmp_path, capsys):
    shutil.copytree(models / "compressed", tmp_path / "tampered")
    path = tmp_path / "tampered" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))
    line = error_of(capsys, ["inspect", path.parent])
    assert next(iter(fields)) in line
    assert "Error:" not in line
