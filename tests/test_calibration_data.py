"""The default calibration set, the check of any set, and what a checkpoint records of it."""

import datasets
import pytest
import torch
from tiny_text import byte_tokenizer, tiny_llama
from tiny_vision import IMAGE_TOKEN_ID, tiny_llava, tiny_processor
from transformers import BatchEncoding

from hf_wsvd.calibration import collect_statistics
from hf_wsvd.calibration.data import calibration_info, default_calibration, validate_batches
from hf_wsvd.calibration.documentation import documentation_text, documentation_topics


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def test_halves_of_the_documentation_share_no_paragraph():
    halves = [documentation_topics("calibration"), documentation_topics("evaluation")]
    assert not set(halves[0]) & set(halves[1])
    paragraphs = [
        {" ".join(part.split()) for text in half.values() for part in text.split("\n\n") if part.strip()}
        for half in halves
    ]
    assert not paragraphs[0] & paragraphs[1]
    assert all(len(documentation_text(half)) > 100_000 for half in ("calibration", "evaluation"))
    with pytest.raises(ValueError, match="half"):
        documentation_topics("test")


def test_default_text_set_is_spread_and_repeatable(model):
    tokenizer = byte_tokenizer()
    batches = default_calibration(model, tokenizer, samples=8, max_tokens=100, seed=3)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 100)] * 8
    text = documentation_text("calibration", seed=3)
    starts = [text.encode().find(tokenizer.decode(batch["input_ids"][0]).encode()) for batch in batches]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] == len(text.encode()) - 100
    again = default_calibration(model, tokenizer, samples=8, max_tokens=100, seed=3)
    assert calibration_info(again) == calibration_info(batches)
    other = default_calibration(model, tokenizer, samples=8, max_tokens=100, seed=4)
    assert calibration_info(other)["sha256"] != calibration_info(batches)["sha256"]


def test_default_text_set_keeps_the_beginning_of_sequence(model):
    batches = default_calibration(model, byte_tokenizer(bos=True), samples=3, max_tokens=20)
    assert [batch["input_ids"][0, 0].item() for batch in batches] == [256] * 3
    assert all(batch["input_ids"].shape == (1, 20) for batch in batches)
    assert not any((batch["input_ids"][:, 1:] == 256).any() for batch in batches)


def test_default_image_set_holds_scenes_with_question_and_answer():
    vision_model, processor = tiny_llava(), tiny_processor()
    batches = default_calibration(vision_model, processor, samples=20, seed=1)
    assert len(batches) == 20
    texts = [processor.decode(batch["input_ids"][0].tolist()) for batch in batches]
    assert all(text.startswith("user: <image>") and text.endswith("</s>") for text in texts)
    openings = {text.split("<image>")[-1][:9] for text in texts}
    assert {"What is i", "List row ", "How many ", "Where is ", "Is there "} <= openings
    for batch in validate_batches(batches, vision_model):
        assert (batch["input_ids"] == IMAGE_TOKEN_ID).sum() == 4
        assert batch["pixel_values"].shape == (1, 3, 16, 16)
        vision_model(**batch)
    again = default_calibration(vision_model, processor, samples=20, seed=1)
    assert calibration_info(again) == calibration_info(batches)
    with pytest.raises(ValueError, match=r"chat template.*Pass calibration"):
        default_calibration(vision_model, byte_tokenizer())


def test_default_set_loads_the_tokenizer_of_the_model(model, tmp_path, monkeypatch):
    byte_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    assert len(default_calibration(model, samples=2, max_tokens=10)) == 2
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"tokenizer; none loads.*Pass calibration"):
        default_calibration(model)
    monkeypatch.setattr(model.config, "_name_or_path", "")
    with pytest.raises(ValueError, match=r"not loaded from a path.*Pass calibration"):
        default_calibration(model)
    with pytest.raises(ValueError, match="at least 1"):
        default_calibration(model, byte_tokenizer(), samples=0)


def test_accepted_forms_give_the_same_batches(model):
    ids = torch.arange(12).view(2, 6)
    rows = [{"input_ids": row[None]} for row in ids]
    dataset = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "caption": ["a", "b"]}).with_format(
        "torch", columns=["input_ids"], output_all_columns=True
    )
    forms = [
        rows,
        (BatchEncoding(row) for row in rows),
        dataset,
        torch.utils.data.DataLoader([{"input_ids": row} for row in ids], batch_size=1),
    ]
    for form in forms:
        checked = list(validate_batches(form, model))
        assert [list(batch) for batch in checked] == [["input_ids"]] * 2
        assert torch.equal(torch.cat([batch["input_ids"] for batch in checked]), ids)
    (single,) = validate_batches({"input_ids": ids}, model)
    assert torch.equal(single["input_ids"], ids)
    (embedded,) = validate_batches({"inputs_embeds": torch.zeros(1, 3, 64)}, model)
    assert embedded["inputs_embeds"].shape == (1, 3, 64)
    for batch in (single, embedded):
        model(**batch)


def test_batches_are_read_lazily(model):
    def endless():
        while True:
            yield {"input_ids": torch.zeros(1, 4, dtype=torch.long)}

    checked = validate_batches(endless(), model)
    assert [next(checked)["input_ids"].shape for _ in range(3)] == [(1, 4)] * 3


IDS = torch.zeros(1, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "empty"),
        ("wikitext", "got str"),
        (None, "got NoneType"),
        (["some text"], r"batch 0 must be a dict.*return_tensors"),
        ([{"input_ids": IDS}, {"pixel_values": torch.zeros(1), "text": "a"}], "batch 1 .*found: pixel_values, text"),
        ([{}], "found: none"),
        ([{"input_ids": [[1, 2]]}], "input_ids .* must be a tensor, got list"),
        ([{"input_ids": IDS.float()}], "dtype int64 or int32; found torch.float32"),
        ([{"input_ids": IDS[None]}], "shape .*not empty"),
        ([{"input_ids": IDS[:, :0]}], "not empty"),
        ([{"input_ids": IDS + 258}], "from 0 to 257.*258 to 258"),
        ([{"input_ids": IDS - 1}], "-1 to -1"),
        ([{"inputs_embeds": IDS[..., None]}], "floating"),
        ([{"inputs_embeds": torch.zeros(1, 1, 1, 1)}], "hidden"),
        ([{"input_ids": IDS, "attention_mask": IDS[:, 1:]}], "attention_mask .*found"),
        ([{"input_ids": IDS, "labels": IDS.float()}], "labels .*dtype int64 or int32; found torch.float32"),
        ([{"input_ids": IDS, "labels": IDS > 0}], "labels .*dtype int64 or int32; found torch.bool"),
        ([{"input_ids": IDS, "labels": IDS[:, 1:]}], r"labels .*shape \[1, 4\]; found \[1, 3\]"),
        ([{"input_ids": IDS, "labels": IDS[0]}], r"labels .*shape \[1, 4\]; found \[4\]"),
        ([{"inputs_embeds": torch.zeros(1, 3, 64), "labels": IDS}], r"labels .*shape \[1, 3\]; found \[1, 4\]"),
        ([{"input_ids": IDS, "labels": IDS + 258}], "labels .*-100 or ids from 0 to 257.*found 258"),
        ([{"input_ids": IDS, "labels": IDS - 1}], "labels .*-100 or ids from 0 to 257.*found -1"),
        ([{"input_ids": IDS, "pixel_values": torch.zeros(1, 3, 4, 4, dtype=torch.uint8)}], "pixel_values .*floating"),
    ],
)
def test_rejected_data_says_what_is_wrong(model, batches, message):
    with pytest.raises(ValueError, match=message):
        list(validate_batches(batches, model))


def test_labels_of_both_integer_dtypes_are_accepted(model):
    ids = torch.arange(8).view(2, 4)
    labels = ids.masked_fill(ids < 3, -100)
    found = []
    for dtype in (torch.int64, torch.int32):
        batch = {"input_ids": ids, "labels": labels.to(dtype)}
        (checked,) = validate_batches(batch, model)
        assert torch.equal(checked["labels"], labels)
        found.append(collect_statistics(model, [batch]).gradient[0, "k"])
    assert torch.equal(*found)
    (row,) = validate_batches([{"input_ids": ids[0], "labels": labels[0]}], model)
    assert row["labels"].shape == (1, 4)
    (embedded,) = validate_batches({"inputs_embeds": torch.zeros(2, 4, 64), "labels": labels}, model)
    assert torch.equal(embedded["labels"], labels)


def test_record_counts_attended_tokens_and_hashes_contents():
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    batches = [{"input_ids": torch.zeros(2, 5, dtype=torch.long), "attention_mask": mask}]
    info = calibration_info(batches)
    assert (info["samples"], info["tokens"]) == (2, 8)
    assert len(info["sha256"]) == 64
    half = [{**batches[0], "pixel_values": torch.zeros(1, 3, dtype=torch.bfloat16)}]
    digests = {calibration_info(data)["sha256"] for data in (batches, half, batches + batches)}
    assert len(digests) == 3
    assert calibration_info([{"inputs_embeds": torch.zeros(3, 7, 2)}])["tokens"] == 21
