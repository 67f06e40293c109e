"""Which heads are chosen, what the map records of it, and the file of scores."""

from __future__ import annotations

import copy
import json

import pytest
import tiny_models
import torch
from head_data import Batch, padded, row, rows
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_wsvd.calibration import CalibrationSet, calibration_info, collect_statistics
from hf_wsvd.headguard import (
    HeadMeasures,
    heads_from_scores,
    load_head_scores,
    measure_heads,
    save_head_scores,
    select_heads,
)
from hf_wsvd.headguard.scoring import HeadScores
from hf_wsvd.quantizer_config import SELECTORS, GuardMap, HeadGuardConfig


DATA_FREE = ("random", "boundary_layers")
MEASURED = tuple(name for name in SELECTORS if name not in (*DATA_FREE, "restoration"))


def paper(options: dict | None = None) -> dict:
    """Fields of a `HeadGuardConfig` of the paper's selector."""
    return {"selector": "headguard", **(options or {})}


def heads(guard_map: GuardMap) -> list[tuple[int, int]]:
    return sorted((guard.layer, guard.head) for guard in guard_map if guard.side == "key")


def measures(key: Tensor, value: Tensor | None = None, **options) -> HeadMeasures:
    """Of a decoder with scores that are given."""
    config = HeadGuardConfig(selector="boundary_layers", tokens="image", **options)
    counts = [int((row_ != float("-inf")).sum()) for row_ in key]
    return HeadMeasures(config, counts, HeadScores(key, key if value is None else value))


@pytest.mark.parametrize(
    ("fraction", "count"),
    [(1.0, 12), (0.5, 6), (0.3, 4), (0.29, 3), (1 / 8, 2), (1 / 24, 1), (1e-6, 1)],
)
def test_the_fraction_is_rounded_and_one_head_is_guarded_at_least(fraction, count):
    scores = torch.rand(3, 4)
    chosen = heads(measures(scores, fraction=fraction).guard_map())
    assert len(chosen) == count
    wanted = scores.flatten().topk(count).indices
    assert chosen == sorted(divmod(int(number), 4) for number in wanted)


def test_equal_scores_go_to_lower_layers_then_to_lower_heads():
    scores = torch.tensor([[0.0, 1.0, 1.0], [2.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    assert heads(measures(scores, fraction=4 / 9).guard_map()) == [(0, 1), (0, 2), (1, 0), (1, 1)]


def test_layers_may_have_other_numbers_of_heads_or_none():
    absent = float("-inf")
    scores = torch.tensor([[1.0, 2.0, 3.0], [absent] * 3, [-5.0, absent, absent]])
    guard_map = measures(scores, fraction=1.0).guard_map()
    assert heads(guard_map) == [(0, 0), (0, 1), (0, 2), (2, 0)]
    assert guard_map.num_key_value_heads == [3, 0, 1]
    assert guard_map.scores == {"key": [[1.0, 2.0, 3.0], [], [-5.0]]}


def test_keys_or_keys_and_values_each_by_their_own_scores():
    key, value = torch.tensor([[3.0, 1.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    only_keys = measures(key, value, fraction=0.5, protect="k", bits=8).guard_map()
    assert (only_keys.key, only_keys.value) == ({0: {0: 8}, 1: {0: 8}}, {})
    both = measures(key, value, fraction=0.5, protect="kv").guard_map()
    assert (both.key, both.value) == ({0: {0: 16}, 1: {0: 16}}, {1: {0: 16, 1: 16}})
    assert both.scores == {"key": key.tolist(), "value": value.tolist()}
    alike = measures(key, fraction=0.5, protect="kv").guard_map()
    assert alike.key == alike.value == only_keys.key | {0: {0: 16}, 1: {0: 16}}
    assert set(alike.scores) == {"key"}


def test_scores_are_kept_to_six_digits():
    scores = torch.tensor([[1 / 3, 123456.789], [1e-9 / 7, -2 / 3e6]])
    assert measures(scores).guard_map().scores["key"] == [[0.333333, 123457.0], [1.42857e-10, -6.66667e-07]]


@pytest.mark.parametrize("selector", MEASURED)
def test_every_selector_gives_a_map_that_json_keeps(dense, selector, tmp_path):
    batches = CalibrationSet(rows("qwen2_vl"), {"dataset": "mine", "seed": 3})
    config = HeadGuardConfig(selector=selector, fraction=1 / 3, protect="kv")
    guard_map = select_heads(dense("qwen2_vl"), batches, config)
    assert len(heads(guard_map)) == 2
    assert guard_map.key == guard_map.value
    assert (guard_map.tokens, guard_map.selector) == ("image", selector)
    assert guard_map.num_key_value_heads == [2, 2, 2]
    assert guard_map.info["calibration"] == {**calibration_info(rows("qwen2_vl")), "dataset": "mine", "seed": 3}
    assert (guard_map.info["fraction"], guard_map.info["protect"], guard_map.info["scores_on"]) == (
        1 / 3,
        "kv",
        "dense",
    )
    assert ("sensitivity" in guard_map.info) == (selector in ("headguard", "image_only", "output_only"))
    guard_map.save(tmp_path / "map.json")
    assert GuardMap.parse(tmp_path / "map.json") == guard_map
    assert select_heads(dense("qwen2_vl"), iter(batches), config.to_dict()).key == guard_map.key


def test_random_heads_depend_on_the_seed_alone(dense):
    def chosen(seed: int) -> list[tuple[int, int]]:
        config = HeadGuardConfig(selector="random", seed=seed, fraction=0.5)
        return heads(select_heads(dense("llava"), config=config))

    assert chosen(0) == chosen(0)
    assert len({tuple(chosen(seed)) for seed in range(20)}) > 5
    assert {head for seed in range(20) for head in chosen(seed)} == {
        (layer, head) for layer in range(3) for head in (0, 1)
    }
    assert select_heads(dense("llava"), config={"selector": "random", "seed": 5}).info["seed"] == 5


@pytest.mark.parametrize("count", range(1, 7))
def test_boundary_layers_come_from_both_ends(dense, count):
    order = [(0, 0), (0, 1), (2, 0), (2, 1), (1, 0), (1, 1)]
    config = HeadGuardConfig(selector="boundary_layers", fraction=count / 6)
    assert heads(select_heads(dense("llava"), config=config)) == sorted(order[:count])


def looking_at_the_image(model: PreTrainedModel) -> PreTrainedModel:
    """Query heads 2 and 3 of layer 1, which share KV head 1, attend to image tokens and to nothing else.

    One channel of the hidden states tells images, another is constant on text. The keys have the first, the queries
    the second, in a channel that rotation hardly turns.
    """
    model = copy.deepcopy(model)
    text, projector = model.model.language_model, model.model.multi_modal_projector.linear_2
    text.embed_tokens.weight.data[:, 0], text.embed_tokens.weight.data[:, 1] = 0, 50
    projector.weight.data[:2] = 0
    projector.bias.data[0], projector.bias.data[1] = 50, 0
    attention, slow = text.layers[1].self_attn, 7
    attention.k_proj.weight.data[16:] = 0
    attention.k_proj.weight.data[16 + slow, 0] = 10
    attention.q_proj.weight.data[32:] = 0
    attention.q_proj.weight.data[[32 + slow, 48 + slow], 1] = 10
    return model


@pytest.mark.parametrize(
    ("selector", "score"),
    [
        # All attention of the text after the image, none of the two tokens before it; rows of 8, 11 and 5 text tokens.
        ("attention_mass", (6 / 8 + 9 / 11 + 3 / 5) / 3),
        # Three answer tokens look at one of four tokens of evidence; in the shortest row a token of the image, which
        # looks anywhere, predicts the first of them.
        ("retrieval", (3 / 4 + 3 / 4 + 2 / 4) / 3),
    ],
)
def test_a_head_that_looks_at_the_image_is_chosen(dense, selector, score):
    batch = padded(rows("llava"), "left")
    batch["evidence_mask"] = batch["input_ids"] == tiny_models.IMAGE_TOKEN
    guard_map = select_heads(looking_at_the_image(dense("llava")), batch, {"selector": selector, "fraction": 1 / 6})
    assert heads(guard_map) == [(1, 1)]
    assert guard_map.scores["key"][1][1] == pytest.approx(score, abs=1e-3)


def test_a_head_without_values_has_no_sensitivity(dense):
    model = copy.deepcopy(dense("llava"))
    model.model.language_model.layers[2].self_attn.v_proj.weight.data[:16] = 0
    config = HeadGuardConfig(selector="headguard", sensitivity="absolute", fraction=5 / 6)
    assert (2, 0) not in heads(select_heads(model, rows("llava"), config))
    raw = measure_heads(model, rows("llava"), config).raw
    assert raw["image_gradient"][:, 2, :2].abs().max() == raw["output_gradient"][:, 2, :2].abs().max() == 0


def test_a_head_with_a_large_key_bias_or_range_is_chosen(dense):
    config = HeadGuardConfig(selector="key_range", tokens="all", fraction=1 / 6)
    biased = copy.deepcopy(dense("qwen2"))
    biased.model.layers[1].self_attn.k_proj.bias.data[16:] = 100
    assert heads(select_heads(biased, [row("qwen2")], config)) == [(1, 1)]
    wide = copy.deepcopy(dense("llama"))
    wide.model.layers[2].self_attn.k_proj.weight.data[:16] *= 20
    assert heads(select_heads(wide, [row("llama")], config)) == [(2, 0)]


def test_a_text_only_model_guards_all_tokens(dense):
    guard_map = select_heads(dense("llama"), rows("llama"), {"selector": "output_only", "fraction": 0.5})
    assert guard_map.tokens == "all"
    assert len(heads(guard_map)) == 3
    unlabelled = [{name: value for name, value in b.items() if name != "labels"} for b in rows("llama")]
    every = {"selector": "output_only", "text_loss": "all"}
    assert (
        select_heads(dense("llama"), unlabelled, every).scores
        == select_heads(dense("llama"), rows("llama"), every).scores
    )


def test_a_finished_map_is_taken_if_it_fits(dense):
    guard_map = GuardMap(key={0: {1: 8}}, num_key_value_heads=[2, 2, 2])
    assert select_heads(dense("llava"), config=HeadGuardConfig(guard_map=guard_map)) is guard_map
    other = GuardMap(key={0: {1: 8}}, num_key_value_heads=[2, 2])
    with pytest.raises(ValueError, match=r"another model: a decoder of 2 layers.*has 3 layers"):
        select_heads(dense("llava"), config=HeadGuardConfig(guard_map=other))


def test_evidence_is_for_selectors_alone(dense):
    """A fit on the same data sees and keeps none of it."""
    with_evidence = collect_statistics(dense("llava"), rows("llava"))
    plain = collect_statistics(dense("llava"), without(rows("llava"), "evidence_mask"))
    for name in ("gram", "gradient"):
        held = getattr(plain, name)
        assert all(torch.equal(getattr(with_evidence, name)[key], held[key]) for key in held)
    kept = [*(a.inputs for a in with_evidence.answered), *(s.inputs for s in with_evidence.samples)]
    assert kept
    assert not any("evidence_mask" in inputs for inputs in kept)


def without(batches: list[Batch], column: str) -> list[Batch]:
    return [{name: value for name, value in batch.items() if name != column} for batch in batches]


@pytest.mark.parametrize("selector", ["headguard", "image_only", "retrieval"])
def test_data_without_answers_name_the_labels(dense, selector):
    for batches in (
        without(rows("llava"), "labels"),
        [b | {"labels": torch.full_like(b["labels"], -100)} for b in rows("llava")],
    ):
        with pytest.raises(ValueError, match=f"selector='{selector}' needs labels"):
            select_heads(dense("llava"), batches, {"selector": selector})


@pytest.mark.parametrize("selector", ["headguard", "image_only", "attention_mass", "key_range"])
def test_data_without_images_are_an_error(dense, selector):
    with pytest.raises(ValueError, match=f"selector='{selector}' needs images"):
        select_heads(dense("llava"), rows("llama"), {"selector": selector})


@pytest.mark.parametrize("selector", ["headguard", "output_only"])
def test_data_without_text_are_an_error(dense, selector):
    batches = [{**b, "attention_mask": (b["input_ids"] == tiny_models.IMAGE_TOKEN).long()} for b in rows("llava")]
    message = "needs labels" if selector == "headguard" else "needs text: no row"
    with pytest.raises(ValueError, match=f"selector='{selector}' {message}"):
        select_heads(dense("llava"), batches, {"selector": selector})


@pytest.mark.parametrize("fields", [{"seed": 2**63}, {"seed": -1}, {"bits": 16.0}], ids=str)
def test_numbers_of_another_kind_or_size_are_refused(fields):
    with pytest.raises(ValueError, match=r"HeadGuardConfig: (seed|bits)=.* is not allowed"):
        HeadGuardConfig(**fields)


@pytest.mark.parametrize("score", [10**400, float("nan"), True, "1"])
def test_scores_are_numbers_that_a_picture_can_show(score):
    with pytest.raises(ValueError, match=r"scores.*allowed: numbers"):
        GuardMap(num_key_value_heads=[1], scores={"key": [[score]]})


@pytest.mark.parametrize("text", ["[" * 100_000, '{"num_key_value_heads": [' + "9" * 5000 + "]}", "\x00", None])
def test_a_file_that_holds_no_map_is_refused(text, tmp_path):
    path = tmp_path / "map.json"
    path.mkdir() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=r"map\.json is no JSON file"):
        GuardMap.parse(path)


def test_an_image_and_an_answer_must_meet_in_a_row(dense):
    image, text = row("llava"), row("llama")
    del image["labels"]
    with pytest.raises(ValueError, match="an image and labels"):
        select_heads(dense("llava"), [image, text], paper())


def test_retrieval_needs_evidence(dense):
    with pytest.raises(ValueError, match=r"needs a column evidence_mask.*batch 0"):
        select_heads(dense("llava"), without(rows("llava"), "evidence_mask"), {"selector": "retrieval"})
    wrong = [b | {"evidence_mask": b["evidence_mask"][:, 1:]} for b in rows("llava")]
    with pytest.raises(ValueError, match=r"evidence_mask of calibration batch 0 must have shape \[1, 12\]"):
        select_heads(dense("llava"), wrong, {"selector": "retrieval"})
    nothing = [b | {"evidence_mask": torch.zeros_like(b["evidence_mask"])} for b in rows("llava")]
    with pytest.raises(ValueError, match=r"an answer .* and evidence"):
        select_heads(dense("llava"), nothing, {"selector": "retrieval"})


@pytest.mark.parametrize("selector", ["headguard", "image_only", "attention_mass", "retrieval"])
def test_a_text_only_model_has_no_image_scores(dense, selector):
    with pytest.raises(ValueError, match=rf"selector='{selector}'.*LlamaForCausalLM.*output_only.*tokens='all'"):
        select_heads(dense("llama"), rows("llama"), {"selector": selector})
    with pytest.raises(ValueError, match="tokens='image' needs a model that reads images"):
        select_heads(dense("llama"), rows("llama"), {"selector": "random", "tokens": "image"})


def test_missing_or_wrong_data_are_errors(dense):
    with pytest.raises(ValueError, match=r"selector='headguard' needs calibration data.*None"):
        select_heads(dense("llava"), None, paper())
    with pytest.raises(ValueError, match="empty"):
        select_heads(dense("llava"), [], paper())
    embedded = [{"inputs_embeds": torch.zeros(1, 4, 48), "labels": torch.zeros(1, 4, dtype=torch.int64)}]
    with pytest.raises(ValueError, match="batch 0 needs a column input_ids"):
        select_heads(dense("llava"), embedded, paper())
    with pytest.raises(ValueError, match=r"fraction=1\.5"):
        select_heads(dense("llava"), rows("llava"), {"fraction": 1.5})


@pytest.mark.parametrize("selector", [*MEASURED, *DATA_FREE])
def test_a_file_of_scores_gives_the_same_map(dense, selector, tmp_path):
    path = tmp_path / "scores.safetensors"
    found = measure_heads(dense("llava"), rows("llava"), {"selector": selector, "fraction": 0.5})
    save_head_scores(path, found)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert heads_from_scores(path) == found.guard_map()
    again = load_head_scores(path)
    assert again.raw.keys() == found.raw.keys()
    assert all(torch.equal(again.raw[name].nan_to_num(), value.nan_to_num()) for name, value in found.raw.items())


@pytest.mark.parametrize(
    "options",
    [
        {"fraction": 0.5, "protect": "kv", "bits": 8},
        {"sensitivity": "squared"},
        {"normalization": "layer"},
        {"answer": "log_probability"},
        {"selector": "output_only", "sensitivity": "signed"},
        {"selector": "image_only", "tokens": "all"},
    ],
    ids=str,
)
def test_a_file_of_scores_gives_the_map_of_other_options(dense, options, tmp_path):
    path = tmp_path / "scores.safetensors"
    save_head_scores(path, measure_heads(dense("llava"), rows("llava"), paper()))
    assert heads_from_scores(path, paper(options)) == select_heads(dense("llava"), rows("llava"), paper(options))


@pytest.mark.parametrize(
    ("made_with", "asked_for", "message"),
    [
        ({}, {"selector": "key_range"}, "selector='key_range' is not allowed"),
        ({"selector": "output_only"}, {"selector": "headguard"}, "selector='headguard' is not allowed"),
        ({}, {"image_queries": "text"}, "image_queries='text' is not allowed: .*image_queries='all'"),
        ({}, {"text_loss": "all"}, "text_loss='all' is not allowed"),
        ({}, {"answer": "candidate_probability"}, "answer='candidate_probability' is not allowed"),
        ({"selector": "key_range"}, {"selector": "key_range", "tokens": "all"}, "tokens='all' is not allowed"),
        ({"selector": "random"}, {"selector": "random", "seed": 1}, "seed=1 is not allowed"),
    ],
    ids=str,
)
def test_options_that_need_another_measurement_are_refused(dense, made_with, asked_for, message):
    found = measure_heads(dense("llava"), rows("llava"), paper(made_with))
    with pytest.raises(ValueError, match=message):
        found.guard_map(HeadGuardConfig(**paper(asked_for)))


@pytest.fixture
def score_file(dense, tmp_path):
    path = tmp_path / "scores.safetensors"
    save_head_scores(path, measure_heads(dense("llava"), rows("llava"), paper()))
    return path


def rewritten(path, tensors=None, **fields) -> None:
    """The file with tensors or fields of its header exchanged."""
    from hf_wsvd.tensor_file import read_tensors

    header, held = read_tensors(path, "head_scores")
    held = {name: value.clone() for name, value in held.items()} | (tensors or {})
    save_file({n: v for n, v in held.items() if v is not None}, path, {"head_scores": json.dumps(header | fields)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version is 99"),
        ({"config": {"selector": "best", "tokens": "all"}}, "selector='best'"),
        ({"config": {}}, "not those of a measurement"),
        ({"config": {"tokens": "image", "guard_map": "/etc/hostname"}}, "not those of a measurement"),
        ({"config": {"selector": "key_range", "tokens": "all"}}, "do not fit"),
        ({"num_key_value_heads": [2, 2]}, "scores.key is"),
        ({"num_key_value_heads": [3, 3, 3]}, "scores.key is"),
        ({"num_key_value_heads": [10**9]}, "num_key_value_heads"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"info": 3}, "no mappings"),
        ({"compressed": None}, "whether the model was compressed"),
        ({"tensors": {"scores.key": None}}, "lacks scores.key"),
        ({"tensors": {"scores.key": torch.full((3, 2), float("nan"))}}, "not finite"),
        ({"tensors": {"scores.value": torch.zeros(3, 2)}}, "not those of its measures"),
        ({"tensors": {"raw.image_gradient": torch.zeros(3, 3, 5)}}, "do not fit"),
        ({"tensors": {"raw.image_gradient": torch.zeros(3, 5)}}, "raw.image_gradient is"),
        ({"tensors": {"raw.output_gradient": None}}, "do not fit"),
        ({"tensors": {"raw.output_gradient": torch.full((3, 3, 4), float("inf"))}}, "infinity"),
        ({"tensors": {"other": torch.zeros(3)}}, "unknown tensor"),
    ],
    ids=str,
)
def test_a_damaged_file_of_scores_is_refused(score_file, change, message):
    rewritten(score_file, **change)
    with pytest.raises(ValueError, match=message):
        heads_from_scores(score_file)


def test_a_file_that_is_no_file_of_scores_is_refused(score_file, tmp_path):
    with pytest.raises(FileNotFoundError):
        heads_from_scores(tmp_path / "other.safetensors")
    score_file.write_bytes(score_file.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a readable head scores file"):
        heads_from_scores(score_file)
    save_file({"a": torch.zeros(1)}, score_file)
    with pytest.raises(ValueError, match="holds no head scores"):
        heads_from_scores(score_file)
