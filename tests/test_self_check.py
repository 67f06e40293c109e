"""The self-check of a checkpoint: recorded at the fit, written, read, repeated, and what it catches."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_facts import auto_class, hooks, logits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, calibration_batches, prompt
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging

import hf_wsvd
from hf_wsvd import WSVDConfig, renew_self_check, verify
from hf_wsvd.calibration.answers import TOP
from hf_wsvd.calibration.cached_run import steps
from hf_wsvd.calibration.samples import ANSWER_BYTES, MAX_BYTES, MAX_SAMPLES, MAX_TOKENS, keep_samples
from hf_wsvd.cli.app import run
from hf_wsvd.self_check import self_check_of, set_self_check
from hf_wsvd.self_check_file import MAX_FILE_BYTES, SELF_CHECK_FILE, read_self_check


@pytest.fixture(scope="module")
def saved(compressed, tmp_path_factory) -> Path:
    """A compressed Llama on disk. Shared: copy before changing it."""
    folder = tmp_path_factory.mktemp("saved") / "llama"
    compressed("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def warnings_of(caplog, action: Callable):
    """The result of `action` and the warnings of hf_wsvd meanwhile."""
    logger = logging.get_logger("hf_wsvd")
    logger.addHandler(caplog.handler)
    try:
        result = action()
    finally:
        logger.removeHandler(caplog.handler)
    # Where other handlers pass records on, they arrive twice.
    return result, list({record.message for record in caplog.records if record.levelname == "WARNING"})


# Recording ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_passes_and_a_wrong_key_layout_does_not(family, compressed, tmp_path):
    model = compressed(family)
    check = self_check_of(model)
    assert check.source == "calibration"
    assert check.decode.tokens > check.prefill.tokens > 0
    model.save_pretrained(tmp_path)
    result = verify(auto_class(family).from_pretrained(tmp_path))
    assert result.passed
    assert result.recorded == {"prefill": check.prefill, "decode": check.decode}
    for part, distance in result.recomputed.items():
        assert vars(distance) == pytest.approx(vars(result.recorded[part]), abs=1e-5)
    assert max(result.drift.values()) < 1e-7

    config = json.loads((tmp_path / "config.json").read_text())
    layouts = config["quantization_config"]["key_layout"]
    config["quantization_config"]["key_layout"] = [text.replace("halves", "interleaved") for text in layouts]
    assert config["quantization_config"]["key_layout"] != layouts
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = verify(auto_class(family).from_pretrained(tmp_path))
    assert not result.passed
    assert result.drift["prefill"] < 1e-9, "a prompt reads no latents"
    assert result.drift["decode"] > 0.05
    assert {problem.partition(":")[0] for problem in result.problems} == {"decode"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_half_precision_passes_wherever_it_is_used(family, dtype, compressed, dense, tmp_path):
    compressed(family).save_pretrained(tmp_path / "full")
    result = verify(auto_class(family).from_pretrained(tmp_path / "full", dtype=dtype))
    assert result.passed, result.problems
    assert max(result.drift.values()) > 0
    config = WSVDConfig(refinement_steps=6)
    half = hf_wsvd.compress(copy.deepcopy(dense(family)).to(dtype), config, calibration=calibration_batches(family))
    half.save_pretrained(tmp_path / "half")
    assert self_check_of(half).dtype == str(dtype).removeprefix("torch.")
    for options in ({}, {"dtype": torch.float32}):
        result = verify(auto_class(family).from_pretrained(tmp_path / "half", **options))
        assert result.passed, result.problems


def test_offloaded_layers_pass(saved, tmp_path):
    layers = {f"model.layers.{i}": place for i, place in enumerate(("cpu", "disk", "disk"))}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(saved, device_map=layers | rest, offload_folder=tmp_path)
    assert verify(model).passed


def test_nothing_is_disturbed(compressed):
    model = copy.deepcopy(compressed("qwen2_vl")).train()
    model.model.visual.eval()
    model(**prompt("qwen2_vl"))
    deltas, state, count = model.model.rope_deltas, torch.get_rng_state(), hooks(model)
    assert verify(model).passed
    assert model.model.rope_deltas is deltas
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.model.visual.training, hooks(model)) == (True, False, count)


def test_without_calibration_samples_arbitrary_tokens_serve(dense, statistics):
    measured = statistics("llama")
    bare = replace(measured, samples=[], probe=None)
    model = hf_wsvd.compress(copy.deepcopy(dense("llama")), WSVDConfig(refinement="none"), statistics=bare)
    check = self_check_of(model)
    assert check.source == "probe"
    assert len(check.samples) == 1
    assert verify(model).passed


@pytest.mark.parametrize("from_statistics", [True, False])
def test_calibration_data_stay_out_of_the_checkpoint_where_the_config_says_so(
    from_statistics, dense, statistics, tmp_path
):
    options = {"refinement": "none", "calibration": statistics("llama")}
    if not from_statistics:
        options["calibration"] = calibration_batches("llama")
    dense("llama").save_pretrained(tmp_path / "dense")
    for choice, source in (("calibration", "calibration"), ("probe", "probe"), ("none", None)):
        config = WSVDConfig(self_check=choice, **options)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
        check = self_check_of(model)
        assert (check and check.source) == source
        model.save_pretrained(tmp_path / choice)
        assert (tmp_path / choice / SELF_CHECK_FILE).exists() is (source is not None)


def test_samples_that_the_model_cannot_continue_are_left_out(dense):
    batch = prompt("llava", tokens=6)  # ends with the image
    config = WSVDConfig(refinement="none")
    model = hf_wsvd.compress(copy.deepcopy(dense("llava")), config, calibration=[batch])
    assert self_check_of(model).source == "probe"
    model = hf_wsvd.compress(copy.deepcopy(dense("llava")), config, calibration=[batch, prompt("llava", tokens=8)])
    (sample,) = self_check_of(model).samples
    assert (sample.split, sample.length) == (6, 8)
    assert verify(model).passed


def test_a_model_that_cannot_be_checked_is_compressed_all_the_same(compressed, dense, caplog, tmp_path, monkeypatch):
    def refuse(*args):
        raise RuntimeError("no cache of this kind")

    monkeypatch.setattr("hf_wsvd.calibration.dense_side.run", refuse)
    config, batches = WSVDConfig(refinement="none"), calibration_batches("llama")
    model, warnings = warnings_of(
        caplog, lambda: hf_wsvd.compress(copy.deepcopy(dense("llama")), config, calibration=batches)
    )
    assert ["without a self-check: no cache of this kind" in warning for warning in warnings] == [True]
    with pytest.raises(ValueError, match="verify: LlamaForCausalLM carries no self-check"):
        verify(model)
    compressed("llama").save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / SELF_CHECK_FILE).exists(), "it belongs to other weights"


def test_models_that_were_never_compressed_are_refused(dense, compressed):
    for model in (dense("llama"), copy.deepcopy(compressed("llama")).dequantize()):
        with pytest.raises(ValueError, match="verify: LlamaForCausalLM holds no layer compressed"):
            verify(model)
        assert self_check_of(model) is None


def test_a_trained_model_passes_once_its_record_is_renewed(compressed, tmp_path):
    model = copy.deepcopy(compressed("llama"))
    model.model.layers[1].mlp.down_proj.weight.data *= 1.3
    assert not verify(model).passed
    dense_side = self_check_of(model).samples[0].dense
    check = renew_self_check(model)
    assert check is self_check_of(model)
    assert torch.equal(check.samples[0].dense, dense_side)
    model.save_pretrained(tmp_path)
    assert verify(AutoModelForCausalLM.from_pretrained(tmp_path)).passed
    assert verify(compressed("llama")).passed, "copies of a model share no record"


# What is kept of calibration data -----------------------------------------------------------------------------------


def test_text_is_kept_without_padding_and_short():
    ids = torch.arange(1, 601).view(3, 200)
    mask = torch.ones_like(ids)
    mask[0, :150] = 0  # padded on the left
    mask[1, 1:] = 0  # a single token
    samples: list = []
    keep_samples(samples, {"input_ids": ids, "attention_mask": mask, "labels": ids}, torch.float32)
    assert [sample["input_ids"].tolist() for sample in samples] == [
        [list(range(151, 201))],
        [list(range(401, 401 + MAX_TOKENS))],
    ]
    assert all(set(sample) == {"input_ids", "attention_mask"} for sample in samples)
    for _ in range(5):
        keep_samples(samples, {"input_ids": ids}, torch.float32)
    assert len(samples) == MAX_SAMPLES
    assert samples[0]["input_ids"].untyped_storage().nbytes() == 50 * 8, "no view of the whole batch"


def test_images_are_kept_whole_as_far_as_they_fit():
    def batch(rows: int, side: int) -> dict:
        ids = torch.ones(rows, 9, dtype=torch.int64)
        return {"input_ids": ids, "pixel_values": torch.rand(rows, 3, side, side, dtype=torch.float64)}

    samples: list = []
    side = int(((MAX_BYTES - 9 * ANSWER_BYTES) / 3 / 2) ** 0.5)  # fits in half precision
    for rows, size in ((1, 2 * side), (2, side - 16), (2, 8), (1, side), (1, 8)):
        keep_samples(samples, batch(rows, size), torch.bfloat16)
    assert [tuple(sample["pixel_values"].shape) for sample in samples] == [
        (1, 3, side - 16, side - 16),
        (1, 3, 8, 8),
        (1, 3, 8, 8),
    ]
    assert {sample["pixel_values"].dtype for sample in samples} == {torch.bfloat16}
    samples = []
    patches = {"input_ids": torch.ones(2, 9, dtype=torch.int64), "pixel_values": torch.rand(32, 4)}
    keep_samples(samples, patches, torch.float32)
    assert samples[0]["input_ids"].shape == (2, 9), "which patches belong to which row is the model's own affair"


@pytest.mark.parametrize(
    ("split", "length", "expected"),
    [
        (116, 128, [(0, 116), (116, 122), (122, 123)]),
        (6, 8, [(0, 6), (6, 7), (7, 8)]),
        (1, 2, [(0, 1), (1, 2)]),
        (4, 7, [(0, 4), (4, 6), (6, 7)]),
    ],
)
def test_steps_cover_the_sequence(split, length, expected):
    found = list(steps(split, length))
    assert found[: len(expected)] == expected
    assert [end for _, end in found] == [begin for begin, _ in found[1:]] + [length]


def test_only_the_likely_tokens_are_kept(compressed):
    check = self_check_of(compressed("llama"))
    sample = check.samples[0]
    assert sample.top.shape == (16, TOP)  # of a vocabulary of 128
    torch.testing.assert_close(sample.dense.exp().sum(1), torch.ones(16))
    assert (sample.dense[:, :TOP].diff(dim=1) <= 0).all()


def test_the_recorded_kl_bounds_that_of_all_tokens_from_below(compressed, dense):
    check = self_check_of(compressed("llama"))
    whole = 0.0
    for sample in check.samples:
        p, q = (
            model(**sample.inputs).logits[0, : sample.split].log_softmax(-1)
            for model in (dense("llama"), compressed("llama"))
        )
        whole += (p.exp() * (p - q)).sum().item()
    assert 0.5 * whole < check.prefill.kl * check.prefill.tokens < whole


# Files --------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_saved_again_keeps_its_self_check(saved, tmp_path):
    again = AutoModelForCausalLM.from_pretrained(saved)
    again.save_pretrained(tmp_path / "again")
    AutoModel.from_pretrained(saved).save_pretrained(tmp_path / "base")
    for name in ("again", "base"):
        first, second = (load_file(where / SELF_CHECK_FILE) for where in (saved, tmp_path / name))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
    assert read_self_check(tmp_path / "again" / SELF_CHECK_FILE).summary() == self_check_of(again).summary()
    copied = copy.deepcopy(again)
    assert self_check_of(copied) is self_check_of(again)
    assert (saved / SELF_CHECK_FILE).stat().st_size < 200_000


def test_the_size_is_bounded_whatever_the_batch():
    batch = prompt("llava", batch=64, tokens=140)
    batch["image_sizes"] = torch.ones(3, 2, dtype=torch.int64)  # what belongs to which row is not known
    samples: list = []
    keep_samples(samples, batch, torch.float32)
    assert samples == []
    assert ANSWER_BYTES > TOP * 3 * 4, "tokens and both models' log-probabilities"


def test_what_could_not_be_read_is_not_written(compressed, caplog, tmp_path):
    model = copy.deepcopy(compressed("llama"))
    check = self_check_of(model)
    odd = replace(check.samples[0], inputs=check.samples[0].inputs | {"Odd name": torch.ones(1)})
    set_self_check(model, replace(check, samples=[odd]))
    _, warnings = warnings_of(caplog, lambda: model.save_pretrained(tmp_path))
    assert ["saved without its self-check" in warning for warning in warnings] == [True]
    assert not (tmp_path / SELF_CHECK_FILE).exists()


def test_the_card_states_it(saved):
    card = " ".join((saved / "README.md").read_text().split())
    decode = read_self_check(saved / SELF_CHECK_FILE).decode
    assert f"KL to the dense model {decode.kl:.4f} nats a token" in card
    assert f"of {decode.tokens} positions" in card


def rewrite(file: Path, edit: Callable[[dict, dict], None]) -> None:
    """Change tensors and JSON header of a self-check in place."""
    with safe_open(file, "pt") as handle:
        header = json.loads(handle.metadata()["self_check"])
    tensors = load_file(file)
    edit(tensors, header)
    save_file(tensors, file, metadata={"self_check": json.dumps(header)})


DAMAGE: dict[str, Callable[[dict, dict], object]] = {
    "answers in half precision": lambda t, h: t.update({"0.dense": t["0.dense"].half()}),
    "answers that are none": lambda t, h: t.update({"0.compressed": torch.zeros_like(t["0.compressed"])}),
    "answers that are NaN": lambda t, h: t["0.dense"].fill_(float("nan")),
    "answers of another shape": lambda t, h: t.update({"0.dense": t["0.dense"][:-1].contiguous()}),
    "no answers": lambda t, h: t.pop("1.compressed"),
    "top tokens as floats": lambda t, h: t.update({"0.top": t["0.top"].float()}),
    "negative tokens": lambda t, h: t["0.top"].fill_(-1),
    "no inputs": lambda t, h: t.pop("0.inputs.input_ids"),
    "ids as floats": lambda t, h: t.update({"0.inputs.input_ids": t["0.inputs.input_ids"].float()}),
    "ids of another shape": lambda t, h: t.update({"0.inputs.input_ids": t["0.inputs.input_ids"][0].clone()}),
    "mask of another shape": lambda t, h: t.update({"0.inputs.attention_mask": torch.ones(1, 3)}),
    "an argument that is no input": lambda t, h: t.update({"0.inputs.use_cache": torch.ones(1)}),
    "a name that is none": lambda t, h: t.update({"0.inputs.__class__": torch.ones(1)}),
    "an unknown tensor": lambda t, h: t.update({"9.inputs.input_ids": torch.ones(1, 4, dtype=torch.int64)}),
    "complex inputs": lambda t, h: t.update({"0.inputs.pixel_values": torch.ones(1, dtype=torch.complex64)}),
    "split outside": lambda t, h: h.update(splits=[16, 4, 4, 4]),
    "split as text": lambda t, h: h.update(splits=["4"] * 4),
    "too many samples": lambda t, h: h.update(splits=[4] * 1000),
    "no split": lambda t, h: h.pop("splits"),
    "numbers that are not finite": lambda t, h: h["decode"].update(kl=float("inf")),
    "agreement above one": lambda t, h: h["decode"].update(agreement=2),
    "other counts": lambda t, h: h["prefill"].update(tokens=10**9),
    "another version": lambda t, h: h.update(version=99),
    "another source": lambda t, h: h.update(source="\x1b[2J"),
    "versions that steer": lambda t, h: h.update(versions={"torch": 3}),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_file_that_is_no_self_check_is_refused(case, folder):
    rewrite(folder / SELF_CHECK_FILE, DAMAGE[case])
    with pytest.raises(ValueError, match=r"wsvd_self_check\.safetensors is not a valid self-check: ."):
        read_self_check(folder / SELF_CHECK_FILE)


def test_damaged_files_stop_no_load(folder, caplog, compressed):
    file = folder / SELF_CHECK_FILE
    content = file.read_bytes()
    for damaged in (b"", content[:5], content[:1000], content[:-7], content[:8] + b"\xff" * 40 + content[48:]):
        file.write_bytes(damaged)
        caplog.clear()
        model, warnings = warnings_of(caplog, lambda: AutoModelForCausalLM.from_pretrained(folder))
        assert ["not a readable self-check" in warning for warning in warnings] == [True]
        assert torch.equal(logits(model, "llama"), logits(compressed("llama"), "llama"))
        assert self_check_of(model) is None


def test_a_file_too_large_is_not_read(folder, monkeypatch):
    with (folder / SELF_CHECK_FILE).open("ab") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    monkeypatch.setattr("hf_wsvd.self_check_file.safe_open", None)
    with pytest.raises(ValueError, match=r"holds 16,777,217 bytes; a self-check holds at most 16,777,216"):
        read_self_check(folder / SELF_CHECK_FILE)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("0.inputs.input_ids", torch.full((1, 16), 10**6), "ids from 0 to 127"),
        ("0.inputs.position_ids", torch.ones(5, 1, 1, 16, dtype=torch.int64), "cannot run on its self-check"),
        ("0.top", torch.full((16, TOP), 10**6, dtype=torch.int32), "outside the vocabulary of 128"),
    ],
)
def test_a_self_check_of_another_model_is_an_error_of_verify(name, value, message, folder):
    rewrite(folder / SELF_CHECK_FILE, lambda tensors, header: tensors.update({name: value}))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        verify(model)


# Command line -------------------------------------------------------------------------------------------------------


def output_of(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect_shows_and_verifies(saved, capsys):
    code, plain, _ = output_of(capsys, "inspect", saved)
    assert code == 0
    assert "4 samples of the calibration data, recorded in float32" in plain
    assert "decode, recorded" in plain
    assert "decode, now" not in plain
    for options in ([], ["--dtype", "bfloat16"]):
        code, out, errors = output_of(capsys, "inspect", saved, "--verify", *options)
        assert (code, errors) == (0, "")
        assert "decode, now" in out
        assert "passed, by the tolerances of" in out
    code, out, _ = output_of(capsys, "inspect", saved, "--verify", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["verification"]["passed"] is True
    assert facts["verification"]["decode"]["recorded"] == facts["self_check"]["decode"]


def test_a_perturbed_factor_fails_with_exit_code_1(folder, capsys):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.up"][0] *= 1.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    code, out, errors = output_of(capsys, "inspect", folder, "--verify")
    assert code == 1
    assert "FAILED" in out
    assert errors.startswith("hf-wsvd: self-check failed: ")
    assert errors.count("\n") == 1
    assert "nats from the recorded ones" in errors


def test_without_a_usable_self_check_verify_is_an_error(folder, capsys):
    file = folder / SELF_CHECK_FILE
    file.write_bytes(file.read_bytes()[:-7])
    code, out, errors = output_of(capsys, "inspect", folder, "--verify")
    assert (code, out) == (2, "")
    assert "cannot be verified" in errors
    assert errors.count("\n") == 1
    assert "damaged: " in output_of(capsys, "inspect", folder)[1]
    with file.open("wb") as handle:
        handle.truncate(MAX_FILE_BYTES + 1)
    assert output_of(capsys, "inspect", folder, "--verify")[0] == 2
    file.unlink()
    code, out, errors = output_of(capsys, "inspect", folder, "--verify")
    assert (code, out) == (2, "")
    assert "it has no self-check (wsvd_self_check.safetensors)" in errors
    assert output_of(capsys, "inspect", folder)[0] == 0
    for arguments, message in ((["--dtype", "int8"], "--dtype must be one of"), (["--device", "quantum"], "--device")):
        code, _, errors = output_of(capsys, "inspect", folder, "--verify", *arguments)
        assert code == 2
        assert message in errors
