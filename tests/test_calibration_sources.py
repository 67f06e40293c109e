"""`load_calibration`: every kind of source and preset, the choice of rows, what is recorded, what is refused."""

import base64
import io
import json
import subprocess
import sys

import datasets
import pytest
import torch
from PIL import Image
from tiny_text import byte_tokenizer, chat_tokenizer, tiny_llama
from tiny_vision import IMAGE_TOKEN_ID, tiny_llava, tiny_processor, tiny_questions

import hf_wsvd
from hf_wsvd import load_calibration
from hf_wsvd.calibration import CalibrationSet, calibration_info
from hf_wsvd.calibration.images import to_image


TEXTS = [{"text": f"text number {number}"} for number in range(12)]
SCIENCE = {
    "image": None,
    "question": "Which is warm?",
    "choices": ["ice", "sun"],
    "answer": 1,
    "hint": "Look up.",
    "lecture": "Stars are hot.",
}


def picture(colour=(200, 10, 10)):
    return Image.new("RGB", (16, 16), colour)


def encoded(image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def texts(batches, processor=None) -> list[str]:
    return [(processor or byte_tokenizer()).decode(batch["input_ids"][0].tolist()) for batch in batches]


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    """What `load_calibration` warned of."""
    found: list[str] = []
    monkeypatch.setattr("hf_wsvd.calibration.load.logger.warning", found.append)
    return found


# Sources ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The same twelve rows in every form that has a place on disk."""
    root, rows = tmp_path_factory.mktemp("places"), datasets.Dataset.from_list(TEXTS)
    rows.to_json(root / "rows.jsonl")
    (root / "rows.json").write_text(json.dumps(TEXTS))
    rows.to_parquet(root / "rows.parquet")
    rows.to_csv(root / "rows.csv")
    rows.save_to_disk(root / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(root / "saved_splits")
    (root / "folder").mkdir()
    rows.to_json(root / "folder" / "train.jsonl")
    rows.select([0]).to_json(root / "folder" / "test.jsonl")
    return root


PLACES = ["rows.jsonl", "rows.json", "rows.parquet", "rows.csv", "saved", "saved_splits", "folder"]
STREAMED = ["rows.jsonl", "rows.csv", "saved", "folder"]  # datasets sleeps five seconds after a stream of Parquet


@pytest.mark.parametrize(
    ("place", "streaming"), [*((place, False) for place in PLACES), *((place, True) for place in STREAMED)]
)
def test_rows_come_from_files_and_folders(places, place, streaming):
    batches = load_calibration(places / place, byte_tokenizer(), samples=12, streaming=streaming)
    assert sorted(texts(batches)) == sorted(row["text"] for row in TEXTS)
    assert {"dataset": place, "preset": "text", "seed": 0}.items() <= batches.source.items()
    assert str(places) not in json.dumps(batches.source)


@pytest.mark.parametrize("place", ["saved_splits", "folder"])
def test_a_split_is_chosen_by_name(places, place):
    batches = load_calibration(str(places / place), byte_tokenizer(), split="test", samples=1)
    assert texts(batches) == ["text number 0"]
    assert batches.source["split"] == "test"
    with pytest.raises(ValueError, match=r"(?s)(no split|Unknown split).*train.*test"):
        load_calibration(places / place, byte_tokenizer(), split="validation")


@pytest.mark.parametrize(("name", "streaming"), [("a.jsonl", False), ("a.jsonl", True), ("a.json", False)])
def test_strings_of_json_stay_strings(tmp_path, name, streaming):
    """Whatever they look like, and beside rows whose content is a list of parts."""
    answers = ["2", "true", "null", "[]", "4.50", '"a"', "{}"]
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    parts = [{"type": "text", "text": "in parts"}]
    rows += [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / name).write_text("\n".join(lines) if name == "a.jsonl" else f"[{', '.join(lines)}]")
    batches = load_calibration(tmp_path / name, chat_tokenizer(), samples=8, streaming=streaming)
    labelled = [batch["labels"][batch["labels"] != -100].tolist() for batch in batches]
    assert sorted(map(byte_tokenizer().decode, labelled)) == sorted(f"{text}</s>" for text in [*answers, "in parts"])
    assert batches.source == {"dataset": name, "split": "train", "preset": "messages", "seed": 0}


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ('[{"text": "a"}, {"text": "b"}]', 2),
        ('{"data": [{"text": "a"}, {"text": "b"}]}', 2),
        ('{"text": "a"}\n\n{"text": "b"}\n', 2),
        ('{"text": "a"}', 1),
        ('{"messages": [{"role": "user", "content": "a"}]}', 1),
        ('\ufeff[{"other": "c"}, {"text": "a"}]', 1),
    ],
)
def test_json_files_hold_rows_in_several_ways(tmp_path, content, count):
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    assert len(load_calibration(tmp_path / "a.json", chat_tokenizer(), samples=2)) == count


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "a.jsonl holds no rows"),
        ("a.jsonl", "\n \n", "a.jsonl holds no rows"),
        ("a.json", "", "a.json holds no rows"),
        ("a.json", "[]", "a.json holds no rows"),
        ("a.json", '{"data": []}', "a.json holds no rows"),
        ("a.jsonl", '{"text": "a"}\n\n"b"\n', "a.jsonl, line 3: a row must be a JSON object, got str"),
        ("a.json", '[{"text": "a"},\n\n 7]', "a.json, line 3: a row must be a JSON object, got int"),
        ("a.json", '{"data":\n["b"]}', "a.json, line 2: a row must be a JSON object, got str"),
        ("a.json", "7", "a.json must hold a list of rows, got int"),
        ("a.json", '[{"text":\n a}]', "a.json, line 2 is no JSON: Expecting value"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"', "a.jsonl, line 2 is no JSON: Expecting"),
        ("a.jsonl", b"\xff\xfe\xff", "a.jsonl is no UTF-8 text"),
        ("a.json", b"\xff\xfe\xff", "a.json is no UTF-8 text"),
        ("a.jsonl", "[" * 100_000, "a.jsonl, line 1 is no JSON"),
    ],
)
def test_broken_json_is_named_by_file_and_line(tmp_path, name, content, message, streaming):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"{message}"):
        load_calibration(tmp_path / name, byte_tokenizer(), streaming=streaming)


def test_json_lines_are_streamed_from_a_shuffled_buffer(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(3000)) + "no JSON")
    first, again, other = (
        texts(load_calibration(path, byte_tokenizer(), samples=50, seed=seed, streaming=True)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) == 50
    assert max(map(int, first)) < 1050
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(1100)))
    everything = texts(load_calibration(path, byte_tokenizer(), samples=1100, streaming=True))
    assert sorted(map(int, everything)) == list(range(1100))


def test_rows_come_from_memory():
    dataset = datasets.Dataset.from_list(TEXTS)
    streams = (dataset.to_iterable_dataset(), datasets.IterableDataset.from_generator(lambda: iter(TEXTS)))
    for source in (TEXTS, dataset, dataset.with_format("torch"), datasets.DatasetDict(train=dataset), *streams):
        batches = load_calibration(source, byte_tokenizer(), samples=12)
        assert sorted(texts(batches)) == sorted(row["text"] for row in TEXTS)
        assert batches.source["dataset"] == "in memory"


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_sets_are_opened_by_name(monkeypatch, streaming):
    calls = []

    def load_dataset(**arguments):
        calls.append(arguments)
        dataset = datasets.Dataset.from_list(TEXTS)
        return dataset.to_iterable_dataset() if streaming else dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    batches = load_calibration(
        "someone/texts", byte_tokenizer(), name="plain", split="test", samples=2, streaming=streaming, seed=5
    )
    assert calls == [{"path": "someone/texts", "name": "plain", "split": "test", "streaming": streaming}]
    names = {"dataset": "someone/texts", "dataset_name": "plain", "split": "test", "preset": "text", "seed": 5}
    assert batches.source == names


def test_a_stream_is_read_no_further_than_needed():
    read = []

    def endless():
        while True:
            read.append(1)
            yield {"text": f"text number {len(read)}"}

    assert len(load_calibration(datasets.IterableDataset.from_generator(endless), byte_tokenizer(), samples=5)) == 5
    assert len(read) < 1100


def test_plain_text_gives_windows_over_the_whole_text(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("b" * 300)
    (tmp_path / "books" / "a.txt").write_text("a" * 300)
    batches = load_calibration(tmp_path / "books", byte_tokenizer(), samples=3, max_tokens=100)
    first, middle, last = texts(batches)
    assert (first, last) == ("a" * 100, "b" * 100)
    assert "\n\n" in middle
    assert batches.source == {"dataset": "books", "preset": "text", "seed": 0}
    (single,) = load_calibration(str(tmp_path / "books" / "a.txt"), byte_tokenizer(), samples=1, max_tokens=5)
    assert texts([single]) == ["aaaaa"]


def test_a_short_text_gives_no_window_twice(tmp_path, warnings):
    (tmp_path / "a.txt").write_text("hello")
    for options, wanted in (({}, ["hello"]), ({"max_tokens": 4}, ["hell", "ello"]), ({"max_tokens": 1}, [*"helo"])):
        assert texts(load_calibration(tmp_path / "a.txt", byte_tokenizer(), **options)) == wanted
        assert f"{len(wanted)} of the 64 sequences that were asked for" in warnings.pop()
    (tmp_path / "a.txt").write_text("hello there")
    first_and_last = load_calibration(tmp_path / "a.txt", byte_tokenizer(), samples=2, max_tokens=8)
    assert texts(first_and_last) == ["hello th", "lo there"]
    assert not warnings


def test_an_image_folder_asks_for_descriptions(tmp_path, warnings):
    picture().save(tmp_path / "a.png")
    (batch,) = load_calibration(tmp_path, tiny_processor(), samples=1)
    assert texts([batch], tiny_processor())[0].endswith("Describe this image.\nassistant: ")
    assert (batch["labels"] == -100).all()
    assert "calibration needs answers: no sequence has a labelled token" in warnings[0]
    assert "with preset 'image', what gives one is a column text or caption" in warnings[0]
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "A red square."}))
    (batch,) = load_calibration(tmp_path, tiny_processor(), samples=1)
    assert texts([batch], tiny_processor())[0].endswith("Describe this image.\nassistant: A red square.</s>")


# Presets ------------------------------------------------------------------------------------------------------------


def test_questions_about_images_run_through_the_model():
    processor, model = tiny_processor(), tiny_llava()
    batches = load_calibration(tiny_questions(), processor, samples=5)
    assert batches.source["preset"] == "question"
    for batch in batches:
        assert (batch["input_ids"] == IMAGE_TOKEN_ID).sum() == 4
        assert model(**batch).loss.isfinite()
    assert hf_wsvd.collect_statistics(model, batches).info["preset"] == "question"


def test_scienceqa_asks_for_a_letter():
    prompt = (
        "user: Context: Look up.\nWhich is warm?\nA. ice\nB. sun\n"
        "Answer with the option's letter from the given choices directly.\nassistant: B</s>"
    )
    batches = load_calibration([SCIENCE], chat_tokenizer(), samples=1)
    assert batches.source["preset"] == "scienceqa"
    assert texts(batches) == [prompt]
    assert (batches[0]["labels"] != -100).sum() == 2
    (seen,) = load_calibration([{**SCIENCE, "image": picture()}], tiny_processor(), samples=1)
    assert texts([seen], tiny_processor()) == [prompt.replace("user: ", "user: " + "<image>" * 4)]
    (short,) = load_calibration([{**SCIENCE, "hint": ""}], chat_tokenizer(), samples=1)
    assert texts([short])[0].startswith("user: Which is warm?\n")


def test_scienceqa_rows_are_those_that_a_model_can_see_whole(warnings):
    rows = [SCIENCE] * 3 + [{**SCIENCE, "image": picture()}] * 2
    assert len(load_calibration(rows, chat_tokenizer(), samples=5)) == 3
    assert len(load_calibration(rows, tiny_processor(), samples=5)) == 2
    assert "3 of the 5 sequences that were asked for; rows left out: 2 with an image, which" in warnings[0]
    assert "2 of the 5 sequences that were asked for; rows left out: 3 without an image" in warnings[1]


IMAGES = {
    "decoded": lambda folder: {"image": picture()},
    "stored": lambda folder: {"image": {"bytes": encoded(picture()), "path": None}},
    "path": lambda folder: {"path": "red.png", "url": None},
    "base64": lambda folder: {"base64": base64.b64encode(encoded(picture())).decode()},
    "address": lambda folder: {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(encoded(picture())).decode()},
    },
    "column": lambda folder: {"text": None},
}


@pytest.mark.parametrize("form", IMAGES)
def test_images_of_messages_come_in_many_forms(form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture().save("red.png")
    part = {"type": "image", **IMAGES[form](tmp_path)}
    content = [part, {"type": "text", "text": "What?"}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Red"}]}
    row |= {"images": [picture()]} if form == "column" else {}
    (batch,) = load_calibration([row], tiny_processor(), samples=1)
    question = {"question": "What?", "answer": "Red", "image": picture()}
    (wanted,) = load_calibration([question], tiny_processor(), samples=1)
    assert {name: value.tolist() for name, value in batch.items()} == {n: v.tolist() for n, v in wanted.items()}


def test_images_without_placeholder_open_the_first_question():
    talk = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Red"}]
    for column in ({"image": picture()}, {"images": [picture()]}):
        (batch,) = load_calibration([{"conversations": talk, **column}], tiny_processor(), samples=1)
        assert texts([batch], tiny_processor()) == ["user: " + "<image>" * 4 + "What?\nassistant: Red</s>"]


@pytest.mark.parametrize("place", ["a.json", "a.parquet", "memory"])
def test_conversations_of_llava_get_their_images(place, tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    picture().save(tmp_path / "images" / "red.png")
    turns = [
        ("system", "Be short."),
        ("human", "<image>\nWhat?"),
        ("gpt", "Red"),
        ("user", "Sure?"),
        ("assistant", "2"),
    ]
    spoken = [{"from": speaker, "value": text} for speaker, text in turns]
    rows = [{"id": "7", "image": "images/red.png", "conversations": spoken}]
    if place == "a.json":
        (tmp_path / place).write_text(json.dumps(rows))
    elif place == "a.parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / place)
    else:
        monkeypatch.chdir(tmp_path)
    (batch,) = load_calibration(rows if place == "memory" else tmp_path / place, tiny_processor(), samples=1)
    wanted = "system: Be short.\nuser: " + "<image>" * 4 + "What?\nassistant: Red</s>user: Sure?\nassistant: 2</s>"
    assert texts([batch], tiny_processor()) == [wanted]
    labels = batch["labels"][batch["labels"] != -100]
    assert tiny_processor().decode(labels.tolist()) == "Red</s>2</s>"
    assert tiny_llava()(**batch).loss.isfinite()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<image>\nWhat?", "<>What?"),
        ("What?\n<image>", "What?<>"),
        ("<image>\n<image>\n\nWhat?", "<><>\nWhat?"),
        ("Here: <image> and <image>, what?", "Here: <> and <>, what?"),
        ("What?", "<>What?"),
    ],
)
def test_placeholders_of_llava_stand_where_they_are_written(text, wanted):
    count = wanted.count("<>")
    spoken = [{"from": "human", "value": text}, {"from": "gpt", "value": "Red"}]
    row = {"conversations": spoken, "images": [picture()] * count}
    (batch,) = load_calibration([row], tiny_processor(), samples=1)
    assert texts([batch], tiny_processor()) == [f"user: {wanted.replace('<>', '<image>' * 4)}\nassistant: Red</s>"]
    assert len(batch["pixel_values"]) == count


def test_columns_get_the_names_that_a_preset_needs():
    rows = [{"query": "What?", "label": "Red", "text": "unused"}]
    batches = load_calibration(rows, chat_tokenizer(), samples=1, columns={"question": "query", "answer": "label"})
    assert texts(batches) == ["user: What?\nassistant: Red</s>"]


@pytest.mark.parametrize("row", [{"question": "Which?"}, {"question": "Which?", "choices": ["ice", "sun"]}])
def test_rows_without_an_answer_are_used_without_labels(row, warnings):
    rows = [{**row, "answer": 1}, {**row, "answer": None}, row]
    batches = load_calibration(rows, chat_tokenizer(), samples=3)
    assert sorted(bool((batch["labels"] != -100).any()) for batch in batches) == [False, False, True]
    assert sum(text.endswith("assistant: ") for text in texts(batches)) == 2
    assert "2 of 3 sequences have no answer, so no labels" in warnings.pop()
    load_calibration(rows[1:2], chat_tokenizer(), samples=1)
    assert "calibration needs answers: no sequence has a labelled token" in warnings[0]
    assert "the column answer" in warnings[0]


def test_text_alone_for_a_model_with_images_gives_a_warning(tmp_path, warnings):
    row = {"question": "a", "answer": "b"}
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    for source in ([row], tmp_path / "a.jsonl", tmp_path / "a.txt"):
        load_calibration(source, tiny_processor(), samples=1)
        assert warnings.pop().endswith("no sequence holds an image, which LlavaProcessor takes")
        load_calibration(source, chat_tokenizer(), samples=1)
        load_calibration([{**row, "image": picture()}, row], tiny_processor(), samples=2)
        assert not warnings


# The choice of rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_the_same_seed_gives_the_same_rows(streaming):
    dataset = datasets.Dataset.from_list(TEXTS)
    source = dataset.to_iterable_dataset() if streaming else dataset
    first, again, other = (load_calibration(source, byte_tokenizer(), samples=6, seed=seed) for seed in (1, 1, 2))
    assert len(first) == len(set(texts(first))) == 6
    assert calibration_info(first) == calibration_info(again)
    assert texts(first) != texts(other)


def test_rows_that_cannot_be_used_are_left_out_and_counted(warnings):
    rows = [{"question": "a" * (10 + 90 * (number % 2)), "answer": "b"} for number in range(10)]
    batches = load_calibration(rows, chat_tokenizer(), samples=10, max_tokens=60)
    assert [batch["input_ids"].shape[1] for batch in batches] == [10 + len("user: \nassistant: b") + 1] * 5
    assert "5 of the 10 sequences that were asked for; rows left out: 5 longer than max_tokens=60" in warnings[0]
    assert len(load_calibration([{"text": " "}, {"text": None}, {"text": "a"}], byte_tokenizer(), samples=1)) == 1
    with pytest.raises(ValueError, match=r"no row of .* can be used; rows left out: 10 longer than max_tokens=5"):
        load_calibration(rows, chat_tokenizer(), samples=10, max_tokens=5)


# What is recorded ---------------------------------------------------------------------------------------------------


def test_the_source_is_recorded_with_the_contents(places):
    batches = load_calibration(places / "saved", byte_tokenizer(), samples=4, seed=7)
    model = hf_wsvd.compress(tiny_llama(), hf_wsvd.WSVDConfig(calibration=batches))
    info = model.config.quantization_config.calibration_info
    source = {"dataset": "saved", "preset": "text", "seed": 7}
    assert info == {**calibration_info(batches), **source}
    assert "source" not in hf_wsvd.collect_statistics(tiny_llama(), list(batches)).info
    assert isinstance(batches, CalibrationSet)


def test_datasets_is_imported_only_when_a_data_set_is_opened():
    code = """
import sys
sys.modules["datasets"] = None  # importing it fails
import hf_wsvd
from tiny_text import byte_tokenizer, tiny_llama
print(len(hf_wsvd.default_calibration(tiny_llama(), byte_tokenizer(), samples=2, max_tokens=9)))
print(len(hf_wsvd.load_calibration([{"text": "abc"}], byte_tokenizer(), samples=1)))
"""
    path = [entry for entry in sys.path if entry]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"], capture_output=True, text=True
    )
    assert result.stdout.split() == ["2", "1"], result.stderr


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([{"prompt": "a", "reply": "b"}], {}, "columns found: prompt, reply; one of these .* text: text"),
        ([{"question": "a"}], {"preset": "question"}, "found: question; preset 'question' needs question, answer "),
        ([{"conversations": []}], {"preset": "text"}, "preset 'text' needs text"),
        (TEXTS, {"preset": "chat"}, "preset must be one of messages, scienceqa, question, image, text.*'chat'"),
        (TEXTS, {"columns": {"question": "query"}}, "columns names query; columns found: text"),
        (TEXTS, {"samples": 0}, "at least 1"),
        (TEXTS, {"split": "test"}, "has no splits; got split='test'"),
        (TEXTS, {"name": "plain"}, "has no configuration; got name='plain'"),
        ([], {}, "holds no row"),
        (["a text"], {}, "must be mappings, got str"),
        (7, {}, "source must be a Hub id.* got int"),
        ([{"text": "a"}, {"text": ["b"]}], {}, "row 1: text must be a string, got list"),
        (
            [{"messages": [{"author": "human", "text": "a"}]}],
            {},
            r"row 0: messages\[0\] needs role.*found author, text",
        ),
        ([{"conversations": [{"from": "bot", "value": "a"}]}], {}, r"conversations\[0\] must be from .* got 'bot'"),
        ([{"conversations": [{"from": "human", "value": "<image>"}]}], {}, "row 0: .* the row has none left"),
        ([{"conversations": [{"from": "gpt", "value": 3}]}], {}, r"value of conversations\[0\] must be a string"),
        ([{"messages": []}], {}, "messages must be a list .* not empty"),
        ([{**SCIENCE, "answer": 2}], {}, "row 0: answer must be the index of one of 2 choices, got 2"),
        ([{**SCIENCE, "choices": []}], {}, "row 0: choices must be a list"),
        ([{"image": picture(), "question": "a", "answer": "b"}], {}, "has an image, and .* takes none"),
    ],
)
def test_data_that_do_not_fit_are_refused(source, options, message):
    with pytest.raises(ValueError, match=message):
        load_calibration(source, chat_tokenizer(), **options)


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ([{"type": "image"}], [], r"messages\[0\] has an image without .* the row has none left"),
        ([{"type": "image"}], [picture()] * 2, "2 images in the row, 1 placeholders"),
        ([{"type": "image", "path": "none.png"}], None, "no image file 'none.png'"),
        ([{"type": "image", "image": 3}], None, "must be a picture"),
        ([{"type": "image", "image": encoded(picture())[:60]}], None, "the image cannot be read"),
        ([{"type": "video", "path": "a.mp4"}], None, "must have type text.*or type image"),
        (7, None, "string or a list of parts, got int"),
    ],
)
def test_messages_that_do_not_fit_are_refused(content, images, message):
    row = {"messages": [{"role": "user", "content": content}], "images": images}
    with pytest.raises(ValueError, match=rf"row 0: .*{message}"):
        load_calibration([row], tiny_processor(), samples=1)


def test_paths_in_data_from_elsewhere_are_not_opened(tmp_path):
    picture().save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="do not come from this machine"):
        to_image(str(tmp_path / "a.png"), None)


def test_broken_files_are_named(tmp_path, places):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": b}\n')
    (tmp_path / "bad.parquet").write_text("no table")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    for name, message in (
        ("bad.jsonl", "line 2 is no JSON"),
        ("bad.parquet", "Parquet"),
        ("bad.txt", "no UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=rf"{name}.*{message}"):
            load_calibration(tmp_path / name, byte_tokenizer())
    with pytest.raises(ValueError, match=r"rows\.jsonl is one file and has the split 'train' alone; got split='test'"):
        load_calibration(places / "rows.jsonl", byte_tokenizer(), split="test")
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        load_calibration(tmp_path / "none.jsonl", byte_tokenizer())
    with pytest.raises(ValueError, match="someone/nothing does not load"):
        load_calibration("someone/nothing", byte_tokenizer())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_image_is_named_by_its_row(tmp_path, streaming):
    for number in range(3):
        picture().save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"row \d cannot be read: cannot identify image file"):
        load_calibration(tmp_path, tiny_processor(), samples=3, streaming=streaming)


def test_a_processor_must_have_what_the_rows_need():
    with pytest.raises(ValueError, match=r"preset 'question' needs a chat template, and .* has none"):
        load_calibration([{"question": "a", "answer": "b"}], byte_tokenizer())
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="row 0: roles must alternate"):
        load_calibration([{"question": "a", "answer": "b"}], tokenizer, samples=1)


def test_a_processor_of_images_takes_text_alone():
    (batch,) = load_calibration([{"text": "abc"}], tiny_processor(), samples=1)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert tiny_llava()(**batch).loss.isfinite()
    (batch,) = load_calibration([{"question": "a", "answer": "b"}], tiny_processor(), samples=1)
    assert "pixel_values" not in batch
    assert isinstance(batch["labels"], torch.Tensor)
