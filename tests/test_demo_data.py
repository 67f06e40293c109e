"""The demo's scenes and questions, its evaluation set and the shipped model."""

import re
import time
from collections import Counter

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from hf_wsvd.assets import demo_model_path, tiles_path
from hf_wsvd.demo.checkpoint import build_model, build_processor
from hf_wsvd.demo.dataset import calibration_set, evaluation_rows, evaluation_set, messages, training_batches
from hf_wsvd.demo.questions import DIRECTIONS, FORMS, QUESTION_TYPES, ask
from hf_wsvd.demo.scenes import GRID, Scenes, is_held_out, load_tiles, render, sample_scenes, tile_names, to_images


def expected_answer(grid: list[str], question: str) -> str:
    """What a person would answer, from the question's text and the sixteen names."""
    place = {name: divmod(cell, GRID) for cell, name in enumerate(grid)}  # right for names that occur once
    if match := re.fullmatch(r"What is in row (\d), column (\d)\?", question):
        return grid[(int(match[1]) - 1) * GRID + int(match[2]) - 1]
    if match := re.fullmatch(r"List row (\d)\.", question):
        start = (int(match[1]) - 1) * GRID
        return ", ".join(grid[start : start + GRID])
    if match := re.fullmatch(r"How many (\w+) are there\?", question):
        return str(grid.count(match[1]))
    if match := re.fullmatch(r"Is there a (\w+)\?", question):
        return "yes" if match[1] in grid else "no"
    if match := re.fullmatch(r"Where is the (\w+)\?", question):
        assert grid.count(match[1]) == 1
        row, column = place[match[1]]
        return f"row {row + 1}, column {column + 1}"
    if match := re.fullmatch(r"What is directly (.+) the (\w+)\?", question):
        assert grid.count(match[2]) == 1
        (row, column), (down, right) = place[match[2]], DIRECTIONS[match[1]]
        assert 0 <= row + down < GRID
        assert 0 <= column + right < GRID
        return grid[(row + down) * GRID + column + right]
    match = re.fullmatch(r"Is the (\w+) (left of|right of|above|below) the (\w+)\?", question)
    assert grid.count(match[1]) == grid.count(match[3]) == 1
    (row, column), (other_row, other_column) = place[match[1]], place[match[3]]
    holds = {
        "left of": column < other_column,
        "right of": column > other_column,
        "above": row < other_row,
        "below": row > other_row,
    }[match[2]]
    return "yes" if holds else "no"


HAND_MADE = [
    "pizza owl car owl",
    "bat ring owl gift",
    "gift shark rice owl",
    "socks dna olive coin",
]


def hand_made_scene() -> tuple[list[str], Scenes]:
    grid = " ".join(HAND_MADE).split()
    names = torch.tensor([[tile_names().index(name) for name in grid]])
    return grid, Scenes(names, torch.zeros_like(names), torch.tensor([[200, 210, 220]], dtype=torch.uint8))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.question_type} {form.direction or ''}".strip())
def test_answers_on_a_hand_made_scene(form):
    grid, scene = hand_made_scene()
    slots, valid = ask(form, scene.names, 50, torch.Generator().manual_seed(0))
    assert valid.all()
    texts = {form.text(row) for row in slots[0].tolist()}
    assert len(texts) > 3
    for question, answer in texts:
        assert answer == expected_answer(grid, question)


def test_forms_that_a_scene_cannot_answer_are_invalid():
    names = torch.zeros(1, 16, dtype=torch.long)  # sixteen times the same: nothing occurs once
    valid = {form.question_type: ask(form, names, 3, torch.Generator().manual_seed(0))[1].any() for form in FORMS}
    assert {name for name in QUESTION_TYPES if valid[name]} == {"at", "list", "count", "exists"}


@pytest.mark.parametrize("styles", ["seen", "unseen"])
def test_answers_of_the_evaluation_set(styles):
    generator = torch.Generator().manual_seed(5)
    rows = evaluation_rows(seed=5, questions_per_type=40, styles=styles)
    scenes = sample_scenes(2 * 40 + 64, generator, "evaluation", styles)
    for question, answer, scene in zip(rows["question"], rows["answer"], rows["scene"]):
        assert answer == expected_answer([tile_names()[name] for name in scenes.names[scene]], question)


def test_evaluation_set_is_deterministic():
    first, second = evaluation_set(7, 8), evaluation_set(7, 8)
    for column in ("question", "answer", "question_type", "scene"):
        assert first[column] == second[column]
    assert [image.tobytes() for image in first["image"]] == [image.tobytes() for image in second["image"]]
    assert first["question"] != evaluation_set(8, 8)["question"]
    # Another version of torch must ask the same questions.
    assert first[0]["question"] == "What is in row 1, column 3?"
    assert first[0]["answer"] == "goat"
    assert first[0]["image"].size == (128, 128)
    assert evaluation_set(7, 8, tile_size=42)[0]["image"].size == (168, 168)


def test_calibration_scenes_are_training_scenes():
    rows = calibration_set(seed=7, questions_per_type=4)
    scenes = sample_scenes(2 * 4 + 64, torch.Generator().manual_seed(7), "train")
    assert not is_held_out(scenes.names).any()
    for row in rows:
        grid = [tile_names()[name] for name in scenes.names[row["scene"]]]
        assert row["answer"] == expected_answer(grid, row["question"])


def test_a_thousand_questions_a_type_are_quick_and_balanced():
    load_tiles()
    start = time.process_time()
    rows = evaluation_rows(questions_per_type=1000)
    assert time.process_time() - start < 30  # about 2 s on a free core
    assert Counter(rows["question_type"]) == dict.fromkeys(QUESTION_TYPES, 1000)
    groups = Counter()
    for kind, question, answer in zip(rows["question_type"], rows["question"], rows["answer"]):
        if kind in ("relation", "exists"):
            direction = re.search("left of|right of|above|below", question)
            groups[kind, direction and direction[0], answer] += 1
        elif kind == "neighbour":
            groups[kind, re.search("left of|right of|above|below", question)[0]] += 1
    assert {count for key, count in groups.items() if key[0] == "relation"} == {125}
    assert {count for key, count in groups.items() if key[0] == "neighbour"} == {250}
    assert {count for key, count in groups.items() if key[0] == "exists"} == {500}
    # A leading part is balanced as well.
    assert Counter(rows["question_type"][:56]) == dict.fromkeys(QUESTION_TYPES, 8)
    leading = [a for a, kind in zip(rows["answer"][:56], rows["question_type"]) if kind == "relation"]
    assert Counter(leading) == {"yes": 4, "no": 4}


def test_training_never_shows_an_evaluation_scene():
    generator = torch.Generator().manual_seed(0)
    evaluation = sample_scenes(500, generator, "evaluation")
    assert is_held_out(evaluation.names).all()
    training = sample_scenes(2000, generator, "train")
    assert not is_held_out(training.names).any()
    assert ((training.names % 2 == 1) | (training.styles < 2)).all()
    scenes, pixels = next(training_batches(16, generator, load_tiles()))
    assert not is_held_out(scenes.names).any()
    assert pixels.shape == (16, 3, 128, 128)
    distinct = torch.tensor([len(set(row)) for row in evaluation.names.tolist()])
    assert (distinct.min(), distinct.max()) == (5, 15)
    unseen = sample_scenes(50, generator, "evaluation", "unseen")
    assert ((unseen.names % 2 == 0) & (unseen.styles == 2)).all()


def test_rendering_blends_like_floats():
    _, scene = hand_made_scene()
    tiles = load_tiles(42)
    pixels = render(scene, tiles)
    assert pixels.shape == (1, 3, 168, 168)
    tile = tiles.pixels[scene.names[0, 6], 0].double()  # row 2, column 3
    background = scene.background[0].double()[:, None, None]
    blended = background + (tile[:3] - background) * tile[3:] / 255
    assert (pixels[0, :, 42:84, 84:126] - blended).abs().max() <= 0.5


def test_shipped_checkpoint_is_what_the_training_script_builds():
    processor, shipped = build_processor(), AutoProcessor.from_pretrained(demo_model_path())
    assert processor.tokenizer.get_vocab() == shipped.tokenizer.get_vocab()
    assert processor.chat_template == shipped.chat_template
    model = AutoModelForImageTextToText.from_pretrained(demo_model_path())
    built = build_model(processor.tokenizer)
    assert model.dtype == torch.bfloat16
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in built.state_dict().items()}
    config = model.config.text_config
    assert config.num_hidden_layers * config.num_attention_heads >= 48
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.head_dim == 64
    assert config.max_position_embeddings >= 4096


def test_shipped_model_answers():
    model = AutoModelForImageTextToText.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(demo_model_path())
    rows = evaluation_rows(seed=3, questions_per_type=4)
    inputs = processor.apply_chat_template(
        [messages(question, image) for question, image in zip(rows["question"], rows["image"])],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        processor_kwargs={"padding": True},
    )
    tokens = model.generate(**inputs, max_new_tokens=12)[:, inputs["input_ids"].shape[1] :]
    answers = processor.batch_decode(tokens, skip_special_tokens=True)
    right = sum(given == answer for given, answer in zip(answers, rows["answer"]))
    assert right >= 27  # of 28


def test_assets_are_small():
    files = [tiles_path(), *demo_model_path().iterdir()]
    assert sum(file.stat().st_size for file in files) <= 16_000_000
    # The image processor passes 128-pixel scenes through: what training saw is what inference sees.
    _, scene = hand_made_scene()
    pixels = render(scene, load_tiles())
    image_processor = AutoProcessor.from_pretrained(demo_model_path()).image_processor
    values = image_processor(to_images(pixels), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(values, pixels / 127.5 - 1, atol=1e-5, rtol=0)
