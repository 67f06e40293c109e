"""The benchmark of guarded heads: the fast evaluator beside the real packed cache, evidence, rows and tables."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts there import one another
from tiny_models import CLOSED_FORM, TEXT, build, calibration_batches  # noqa: E402
from tiny_vision import IMAGE_TOKEN_ID, tiny_llava, tiny_processor, tiny_questions  # noqa: E402

import headguard  # noqa: E402
import headguard_check  # noqa: E402
import headguard_choices  # noqa: E402
import headguard_heads  # noqa: E402
import headguard_questions  # noqa: E402
import headguard_rows  # noqa: E402
import headguard_scores  # noqa: E402
import tables  # noqa: E402
from headguard_choices import Base, Choice  # noqa: E402
from headguard_evaluator import Evaluator  # noqa: E402
from hf_wsvd import CacheConfig, WSVDConfig, collect_statistics, compress  # noqa: E402
from hf_wsvd.demo.scenes import tile_names  # noqa: E402
from hf_wsvd.quantizer_config import GuardMap  # noqa: E402


ENVIRONMENT = {"threads": 1, "load_average": 0.0, "transformers": "5", "torch": "2", "device": "cpu"}
PROMPT, IMAGE = 9, slice(2, 6)
GUARDS = {
    "keys": GuardMap({0: {1: 16}, 2: {0: 16}}, {}, [2, 2, 2]),
    "keys and values at 4 bits": GuardMap({0: {0: 4}}, {1: {0: 4, 1: 4}}, [2, 2, 2]),
    "nothing": GuardMap({}, {}, [2, 2, 2]),
}


def latents() -> torch.nn.Module:
    statistics = collect_statistics(build("llava"), calibration_batches("llava"))
    config = WSVDConfig(rank_ratio=0.5, self_check="none", **CLOSED_FORM)
    return compress(build("llava"), config, statistics=statistics)


MODELS = {"dense": lambda: build("llava"), "latent": latents}


@pytest.fixture(scope="module", params=MODELS)
def evaluator(request) -> Evaluator:
    """Over random prompts in two batches; the expected answers are those that the model gives without packing."""
    model = MODELS[request.param]()
    generator = torch.Generator().manual_seed(3)
    batches = []
    for rows, prompt in ((24, PROMPT), (9, PROMPT + 1)):
        embeds = torch.randn(rows, prompt + 4, TEXT["hidden_size"], generator=generator)
        with torch.no_grad():
            states = model.get_decoder()(inputs_embeds=embeds, use_cache=False).last_hidden_state
            best = model.get_output_embeddings()(states).argmax(-1)
        labels = torch.full(best.shape, -100)
        for row in range(rows):  # answers of different lengths
            end = prompt + 2 + row % 3
            labels[row, prompt + 1 : end] = best[row, prompt : end - 1]
        batches.append(headguard_questions.QuestionBatch(embeds, labels, IMAGE, prompt))
    return Evaluator(model, headguard_heads.heads_of(model, batches))


def test_without_packing_every_answer_is_as_expected(evaluator):
    assert evaluator.right().all()


@pytest.mark.parametrize("guards", GUARDS)
@pytest.mark.parametrize("base", [Base("minmax", 2, 2), Base("hadamard", 3, 2)], ids=lambda base: base.label)
def test_answers_and_bits_are_those_of_the_real_cache(evaluator, base, guards):
    guard_map, heads = GUARDS[guards], evaluator.heads
    guarded = headguard_choices.guarded_heads(guard_map)
    packed = heads.packed(base.config)
    guard = heads.packed(base.config, 4) if "4 bits" in guards else None
    found = evaluator.right(packed, guarded, guard)
    config = CacheConfig(**{**base.config.to_dict(), "guard_map": guard_map})
    real, bits = headguard_check.really_right(heads.model, heads.batches, config)
    assert torch.equal(found, real)
    assert 0 < int(found.sum()) < len(found)  # packing decides some answers, not all
    assert headguard_rows.bits_of(heads, packed, guarded, guard).whole_cache == pytest.approx(bits)


def test_guarding_every_head_is_no_packing(evaluator):
    packed = evaluator.heads.packed(Base("minmax", 2, 2).config)
    everything = torch.ones(2, 3, 2, dtype=torch.bool)
    bits = headguard_rows.bits_of(evaluator.heads, packed, everything)
    assert evaluator.right(packed, everything).all()
    assert bits == headguard_rows.bits_of(evaluator.heads, None)


def test_questions_keep_the_place_of_their_image():
    rows = [{**row, "image": row["image"]} for row in tiny_questions(4)]
    model = tiny_llava()
    found = headguard_questions.evaluation_questions(model, tiny_processor(), rows, 8, torch.float32)
    assert sorted(found.kinds) == ["at", "at", "list", "list"]
    for batch in found.batches:
        assert batch.image.stop - batch.image.start == 4
        first = batch.labels[0, batch.prompt + 1 :]
        assert batch.counted.sum(1)[0] == (first != -100).sum()
        assert (batch.labels[:, : batch.prompt + 1] == -100).all()


def test_evidence_is_the_tiles_that_an_answer_tells_of():
    names = torch.tensor([5, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10, 11, 12, 13, 5, 14])
    twice, once = (tile_names()[number] for number in (5, 7))
    evidence = headguard_questions.evidence_cells
    assert evidence("What is in row 2, column 3?", names).nonzero()[:, 0].tolist() == [6]
    assert evidence("List row 4.", names).nonzero()[:, 0].tolist() == [12, 13, 14, 15]
    assert evidence(f"How many {twice} are there?", names).nonzero()[:, 0].tolist() == [0, 4, 14]
    assert evidence(f"Where is the {once}?", names).nonzero()[:, 0].tolist() == [7]
    with pytest.raises(ValueError, match="no evidence is known for 'Is there a dog"):
        evidence("Is there a dog?", names)


def test_scenes_to_choose_heads_on():
    rows = headguard_questions.guarding_rows(0, 6)
    assert [row["question_type"] for row in rows] == ["at", "at", "list", "list", "count", "where"]
    for row in rows:
        named = int(row["cells"].sum())
        expected = {"at": 1, "list": 4, "where": 1}.get(row["question_type"]) or int(row["answer"])
        assert named == expected
    image = Image.new("RGB", (16, 16))
    small = [{**row, "image": image, "cells": torch.arange(16) % 2 == 0} for row in rows]
    processor = tiny_processor()
    # Four image tokens are no grid of 4 x 4 tiles.
    with pytest.raises(ValueError, match="4 image tokens"):
        headguard_questions.guarding_batches(processor, small, IMAGE_TOKEN_ID, 0)


@pytest.mark.parametrize(
    ("values", "ranks"), [([3.0, 1.0, 2.0], [2, 0, 1]), ([1.0, 1.0, 5.0], [0.5, 0.5, 2]), ([4.0, 4.0, 4.0], [1, 1, 1])]
)
def test_equal_numbers_share_their_mean_rank(values, ranks):
    assert headguard_scores.mean_ranks(torch.tensor(values)).tolist() == ranks


def test_rank_correlation():
    first = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert headguard_scores.spearman(first, first.exp()) == pytest.approx(1)
    assert headguard_scores.spearman(first, -first) == pytest.approx(-1)
    assert headguard_scores.spearman(first, torch.ones(4)) == 0


def row_of(base: Base, accuracy: float, bits: float, **choice) -> dict:
    choice = Choice(base, **choice)
    measured = {"bits_per_element": bits, "whole_cache_bits_per_element": bits + 1, "slack_bits_per_element": 0.0}
    return {"cache": "dense", **choice.row, "question_type": "mean", "accuracy": accuracy, **measured}


@pytest.fixture
def results() -> dict:
    coarse = Base("hadamard", 2, 2)
    cell = {"fraction": 1 / 8, "protect": "kv", "guard_bits": 16}
    rows = [row_of(coarse, 0.5, 2.5, selector="none")]
    rows[0].update(fraction=0.0, protect=None, guard_bits=None)
    rows += [row_of(coarse, 0.8, 4.2, selector="headguard", seed=seed, **cell) for seed in (0, 1)]
    rows[2]["accuracy"] = 0.6
    rows.append(row_of(coarse, 0.9, 4.2, selector="restoration", seed=0, **cell))
    uniform = []
    for base, accuracy, bits in (
        (coarse, 0.5, 2.5),
        (Base("hadamard", 4, 4), 0.7, 4.21),
        (Base("minmax", 4, 4), 0.95, 4.0),
    ):
        row = row_of(base, accuracy, bits)
        uniform.append({"label": base.label, **row})
    settings = {
        "questions_per_type": 5,
        "scenes": 4,
        "dtype": "float32",
        "dense_full_precision": 0.99,
        "key_biases": False,
    }
    agreement = [
        {"cache": "dense", "selector": "random", "seed": seed, "spearman": value, "overlap": {"0.125": value}}
        for seed, value in enumerate((0.0, 0.5))
    ]
    found = {"command": "python x", "environment": ENVIRONMENT, "settings": settings, "refused": [], "checks": []}
    found |= {"rows": rows, "uniform": uniform, "agreement": agreement}
    headguard_rows.add_controls(found)
    return found


def test_the_control_of_a_row_is_the_best_uniform_storage_at_no_more_bits(results):
    none, first = results["rows"][:2]
    assert (none["uniform_control"], none["best_uniform_accuracy"]) == ("hadamard 2 bit", 0.5)
    assert (first["uniform_control"], first["uniform_control_accuracy"]) == ("hadamard 4 bit", 0.7)
    assert (first["best_uniform"], first["best_uniform_accuracy"]) == ("minmax 4 bit", 0.95)


def test_results_are_json_with_a_line_for_each_row(results):
    text = headguard_rows.written(results)
    assert json.loads(text) == results
    assert sum(line.startswith('{"cache":"dense"') for line in text.splitlines()) == len(results["rows"])


def test_tables(results, tmp_path):
    (tmp_path / "headguard_vlm.json").write_text(json.dumps(results))
    names = ("main", "selectors", "recipes", "uniform_wins", "agreement")
    page = "".join(f"<!-- table:headguard_vlm_{name} -->\n<!-- end -->\n" for name in names)
    page = tables.rewritten(page, tmp_path)
    assert (
        "| hadamard 2 bit | 1/8 | 50.0 | 70.0 ± 14.1 |  | 90.0 | 70.0 (hadamard 4 bit) | 95.0 (minmax 4 bit) |" in page
    )
    assert "| headguard, dense | KV | 70.0 ± 14.1 |  |  |" in page
    assert "| dense | 3 |  |  |  | 50.0 | 2.50 | hadamard 2 bit |" in page
    assert "| dense | hadamard 2 bit | KV | 1 of 2 | 2 of 2 |" in page
    assert "| dense | random | 0.25 | 25 |" in page
    assert "this model has no key biases" in page


def test_a_cell_that_is_known_is_not_measured_again():
    base = Base("hadamard", 2, 2)
    choices = list(headguard_choices.table_choices(base, ["headguard", "random", "boundary_layers"], [0, 7]))
    assert len(choices) == 1 + (2 + 5) * 4 * 2 + 1 * 4
    assert len({tuple(choice.row.items()) for choice in choices}) == len(choices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--questions", "0"], "--questions 0: at least 1"),
        (["--check", "-1"], "--check and --seeds: at least 0"),
        (["--selectors", "loudest"], "invalid choice: 'loudest'"),
        (["--checkpoint", "nowhere"], "--checkpoint nowhere: no such folder"),
    ],
)
def test_arguments_that_nothing_can_be_measured_with(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        headguard.parse_arguments(["--checkpoint", str(tmp_path), "--output", "x.json", *arguments])
    assert message in capsys.readouterr().err


def scene_llava(folder: Path) -> None:
    """A tiny random LLaVA that reads scenes: an image token for each tile."""
    model, processor = tiny_llava(), tiny_processor()
    config = model.config
    config.vision_config.image_size, config.image_seq_length = 32, 16
    type(model)(config).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    processor.image_processor.size, processor.image_processor.crop_size = size, size
    processor.save_pretrained(folder)


def test_a_second_run_measures_what_is_missing(tmp_path, monkeypatch, capsys):
    scene_llava(tmp_path / "model")
    monkeypatch.setattr(headguard, "BASES", [Base("minmax", 2, 2), Base("minmax", 2, 2, 5)])
    monkeypatch.setattr(headguard, "UNIFORM", [Base("minmax", 2, 2), Base("minmax", 4, 4)])
    monkeypatch.setattr(headguard, "RECIPE_BASES", [])
    output = tmp_path / "results.json"
    arguments = ["headguard.py", "--checkpoint", str(tmp_path / "model"), "--output", str(output), "--limit", "2"]
    # Not the script's own number of threads: it would last for all tests that follow.
    arguments += ["--threads", str(torch.get_num_threads())]
    arguments += ["--caches", "dense", "--seeds", "4", "--check", "1", "--selectors"]

    def run(*selectors: str) -> dict:
        monkeypatch.setattr(sys, "argv", [*arguments, *selectors])
        headguard.main()
        return json.loads(output.read_text())

    first = run("retrieval")
    assert len(first["rows"]) == (1 + 4) * 5
    assert len(first["uniform"]) == 2 * 5
    assert [entry["group_size"] for entry in first["refused"]] == [5]
    assert "group_size" in first["refused"][0]["reason"]
    assert first["checks"][0]["equal"] == 1
    assert "minmax 2 bit" in capsys.readouterr().out
    seen = []
    monkeypatch.setattr(
        Evaluator, "right", lambda self, *a, _right=Evaluator.right: seen.append(a) or _right(self, *a)
    )
    second = run("retrieval", "boundary_layers")
    assert len(seen) == 1 + 4  # full precision, and the new selector's cells
    assert second["rows"][: len(first["rows"])] == first["rows"]
    assert len(second["rows"]) == len(first["rows"]) + 4 * 5
