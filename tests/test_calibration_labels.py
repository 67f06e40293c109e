"""Labels of calibration data: the answers' tokens and nothing else, read back by decoding them."""

import pytest
import torch
from PIL import Image
from tiny_text import byte_tokenizer, chat_tokenizer
from tiny_vision import IMAGE_TOKEN_ID, tiny_llava, tiny_processor, tiny_questions

from hf_wsvd.calibration import default_calibration, load_calibration, validate_batches
from hf_wsvd.calibration.chat import answer_batches, chat_sequence


PROCESSORS = {"tokenizer": chat_tokenizer, "bos": lambda: chat_tokenizer(bos=True), "processor": tiny_processor}
TURNS = [
    ("system", "Be brief."),
    ("user", "What is it?"),
    ("assistant", "A cat."),
    ("user", "Which colour?"),
    ("assistant", "Grey, "),
    ("user", "Sure?"),
    ("assistant", "Yes"),
]
EMPTY = "{% for message in messages %}{{ message.content }}{% endfor %}"


def talk(turns):
    return [{"role": role, "content": content} for role, content in turns]


def picture(size=(16, 16)):
    return Image.new("RGB", size, (200, 10, 10))


def labelled(processor, batch) -> list[str]:
    """The texts of the runs of labelled tokens of the one sequence, which must be the input's own."""
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    assert labels.shape == ids.shape
    assert labels.dtype == torch.int64
    kept = labels != -100
    assert torch.equal(labels[kept], ids[kept])
    runs, current = [], []
    for token, keep in zip([*ids.tolist(), 0], [*kept.tolist(), False]):
        if keep:
            current.append(token)
        elif current:
            runs.append(processor.decode(current))
            current = []
    return runs


@pytest.mark.parametrize("kind", PROCESSORS)
def test_every_assistant_turn_is_labelled_with_its_end(kind):
    processor = PROCESSORS[kind]()
    (batch,) = load_calibration([{"messages": talk(TURNS)}], processor, samples=1)
    assert labelled(processor, batch) == ["A cat.</s>", "Grey, </s>", "Yes</s>"]


def test_images_before_and_between_the_answers_do_not_move_the_labels():
    processor = tiny_processor()
    turns = talk(TURNS)
    turns[1]["content"] = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    turns[3]["content"] = [{"type": "text", "text": "And this"}, {"type": "image"}, {"type": "image"}]
    row = {"messages": turns, "images": [picture(), picture((30, 20)), picture((20, 40))]}
    (batch,) = load_calibration([row], processor, samples=1)
    assert (batch["input_ids"] == IMAGE_TOKEN_ID).sum() == 3 * 4
    assert batch["pixel_values"].shape == (3, 3, 16, 16)
    assert labelled(processor, batch) == ["A cat.</s>", "Grey, </s>", "Yes</s>"]
    (checked,) = validate_batches([batch], tiny_llava())
    assert tiny_llava()(**checked).loss.isfinite()


def test_an_end_of_turn_with_a_line_break_belongs_to_the_answer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]\n{{ message.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    (batch,) = load_calibration([{"messages": talk(TURNS[1:5])}], tokenizer, samples=1)
    assert labelled(tokenizer, batch) == ["A cat.</s>\n", "Grey, </s>\n"]


def test_a_token_across_prompt_and_answer_belongs_to_the_answer():
    """A tokenizer that joins the prompt's last character with the answer's first one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={s: n for n, s in enumerate([*alphabet, ":Y"])}, merges=[(":", "Y")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (batch,) = load_calibration([{"question": "Sure?", "answer": "Yes"}], tokenizer, samples=1)
    assert labelled(tokenizer, batch) == [":Yes;"]


def test_an_answer_that_the_template_rewrites_later_is_not_labelled():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (  # only the last answer keeps what was thought before it
        "{% for message in messages %}{{ message.role }}: "
        "{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}{{ message.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (batch,) = load_calibration([{"messages": talk(TURNS[1:5])}], tokenizer, samples=1)
    assert labelled(tokenizer, batch) == ["<think></think>Grey, \n"]


def test_a_template_that_changes_the_question_has_no_answer_positions():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + EMPTY
    with pytest.raises(ValueError, match=r"row 0: The chat template does not keep the prompt"):
        load_calibration([{"question": "a", "answer": "b"}], tokenizer, samples=1)
    processor = tiny_processor()
    processor.chat_template = "{{ messages | length }}" + processor.chat_template
    with pytest.raises(ValueError, match="does not keep the prompt"):
        next(answer_batches(processor, tiny_questions(2)))


def test_a_conversation_without_an_answer_ends_in_the_generation_prompt():
    tokenizer = chat_tokenizer()
    batch = chat_sequence(tokenizer, talk(TURNS[:2]))
    assert tokenizer.decode(batch["input_ids"][0]).endswith("user: What is it?\nassistant: ")
    assert labelled(tokenizer, batch) == []
    assert labelled(tokenizer, chat_sequence(tokenizer, talk(TURNS[:4]))) == ["A cat.</s>"]


def test_labels_of_a_batch_are_those_of_its_sequences():
    processor, dataset = tiny_processor(), tiny_questions(3)
    (batch,) = answer_batches(processor, dataset)
    for number, row in enumerate(dataset):
        (single,) = answer_batches(processor, [row])
        attended = batch["attention_mask"][number] == 1
        assert torch.equal(batch["labels"][number, attended], single["labels"][0])
        assert (batch["labels"][number, ~attended] == -100).all()


def test_text_is_labelled_but_for_the_beginning_of_sequence():
    rows = [{"text": "abc" * 20}]
    (batch,) = load_calibration(rows, byte_tokenizer(), samples=1, max_tokens=10)
    assert labelled(byte_tokenizer(), batch) == ["abcabcabca"]
    (batch,) = load_calibration(rows, byte_tokenizer(bos=True), samples=1, max_tokens=10)
    assert batch["input_ids"][0, 0] == 256
    assert labelled(byte_tokenizer(), batch) == ["abcabcabc"]


def test_the_built_in_sets_have_labels():
    processor = tiny_processor()
    scenes = default_calibration(tiny_llava(), processor, samples=3)
    for batch in scenes:
        (answer,) = labelled(processor, batch)
        assert processor.decode(batch["input_ids"][0]).endswith("assistant: " + answer)
        assert answer.endswith("</s>")
    assert scenes.source == {"dataset": "built-in scenes", "seed": 0}
