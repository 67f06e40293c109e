"""The measurements, each against a value worked out by other means."""

import math

import datasets
import pytest
import torch
from tiny_text import byte_tokenizer, tiny_llama
from tiny_vision import IMAGE_TOKEN_ID, tiny_llava, tiny_processor, tiny_questions
from transformers import DynamicCache

from hf_wsvd.calibration.chat import answer_batches
from hf_wsvd.evaluate.accuracy import Accuracy, accuracy_by_type, answer_questions
from hf_wsvd.evaluate.divergence import counted_logits, divergence
from hf_wsvd.evaluate.latency import decode_latency, text_tokens
from hf_wsvd.evaluate.memory import kv_bytes_per_token
from hf_wsvd.evaluate.perplexity import perplexity


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def ids(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


# Perplexity


def test_perplexity_of_one_window_is_the_models_own_loss(model):
    text = "The quick brown fox jumps over the lazy dog."
    tokens = byte_tokenizer()(text, return_tensors="pt")["input_ids"]
    result = perplexity(model, byte_tokenizer(), text, window=64, stride=32)
    assert result.tokens == tokens.shape[1] - 1
    assert result.nats_per_token == pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nats_per_token))


def test_perplexity_scores_every_token_once_with_its_windows_context(model):
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    tokens = byte_tokenizer()(text, return_tensors="pt")["input_ids"][0]
    window, stride = 16, 6
    expected = []
    ends = [16, 22, 28, 34, 40, 46, 52]  # by hand: window, then by stride, then the end of 52 tokens
    for position in range(1, 52):
        end = next(end for end in ends if end > position)
        context = tokens[max(end - window, 0) : position]
        expected.append(-model(context[None]).logits[0, -1].log_softmax(-1)[tokens[position]].item())
    result = perplexity(model, byte_tokenizer(), text, window=window, stride=stride)
    assert result.tokens == 51
    assert result.nats_per_token == pytest.approx(sum(expected) / 51, rel=1e-5)
    assert perplexity(model, byte_tokenizer(), text, max_tokens=10).tokens == 9


def test_perplexity_puts_the_beginning_of_sequence_before_each_window(model):
    text = "abcdefgh"
    tokens = torch.tensor([[256, *text.encode()]])
    tokenizer = byte_tokenizer(bos=True)
    tokens[0, 1:] = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    log_p = model(tokens).logits[0, 1:-1].log_softmax(-1)
    expected = -log_p.gather(-1, tokens[0, 2:, None]).mean().item()
    assert perplexity(model, tokenizer, text).nats_per_token == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "arguments"), [("a", {}), ("abc", {"window": 8, "stride": 8}), ("abc", {"stride": 0})]
)
def test_perplexity_refuses(model, text, arguments):
    with pytest.raises(ValueError, match=r"tokens|stride"):
        perplexity(model, byte_tokenizer(), text, **arguments)


# Divergence


def test_divergence_of_a_model_with_itself_is_zero(model):
    result = divergence(model, model, [{"input_ids": ids(2, 9)}])
    assert (result.kl, result.agreement, result.tokens) == (0.0, 1.0, 16)


@pytest.mark.parametrize("chunk", [3, 1024])
def test_divergence_is_the_mean_over_counted_positions(model, chunk):
    other = tiny_llama(seed=1)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    labels = torch.full((2, 7), -100)
    labels[0, 5:] = labels[1, 6:] = 0
    batch = {"input_ids": ids(2, 7), "attention_mask": mask, "labels": labels}
    p, q = (m(input_ids=batch["input_ids"], attention_mask=mask).logits.double().softmax(-1) for m in (model, other))
    for positions, wanted in (
        ("answer", [(0, 4), (0, 5), (1, 5)]),
        ("all", [(0, t) for t in (3, 4, 5)] + [(1, t) for t in range(6)]),
    ):
        expected = sum((p[i, t] * (p[i, t] / q[i, t]).log()).sum().item() for i, t in wanted) / len(wanted)
        same = sum((p[i, t].argmax() == q[i, t].argmax()).item() for i, t in wanted) / len(wanted)
        result = divergence(model, other, [batch], positions, chunk=chunk)
        assert result.tokens == len(wanted)
        assert result.kl == pytest.approx(expected, rel=1e-4)
        assert result.agreement == pytest.approx(same)
        logits = [counted_logits(model, batch, positions)]
        assert divergence(logits, other, [batch], positions, chunk=chunk) == result


def test_divergence_refuses(model):
    with pytest.raises(ValueError, match="positions"):
        divergence(model, model, [{"input_ids": ids(1, 4)}], "some")
    with pytest.raises(ValueError, match="labels; columns found: input_ids"):
        divergence(model, model, [{"input_ids": ids(1, 4)}], "answer")
    with pytest.raises(ValueError, match="No position"):
        divergence(model, model, [{"input_ids": ids(1, 1)}])


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_cache_bytes_are_those_of_keys_and_values(dtype):
    model = tiny_llama(layers=3).to(dtype)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    result = kv_bytes_per_token(model, {"input_ids": ids(2, 20), "attention_mask": mask}, decode_steps=4)
    assert result.tokens == 24
    expected = 3 * 2 * 2 * 16 * dtype.itemsize  # layers, keys and values, KV heads, head dim
    assert result.per_token == result.dense_per_token == expected
    assert result.ratio == 1.0


# Latency


class CountingCache(DynamicCache):
    """Records how long each call made it."""

    lengths: list

    def update(self, *args, **kwargs):
        result = super().update(*args, **kwargs)
        self.lengths.append(self.get_seq_length(1))
        return result


def test_decode_latency_times_single_steps_after_the_context(model):
    caches = []

    def factory():
        cache = CountingCache(config=model.config)
        cache.lengths = []
        caches.append(cache)
        return cache

    result = decode_latency(model, 30, batch_size=2, steps=3, warmup=1, repeats=2, cache_factory=factory)
    assert [sorted(set(cache.lengths) - {0}) for cache in caches] == [[30, 31, 32, 33, 34]] * 2
    assert (result.context, result.batch_size, result.steps, result.device) == (30, 2, 6, "cpu")
    assert 0 < result.step < 10
    assert result.to_dict()["tokens_per_second"] == pytest.approx(2 / result.step)
    with pytest.raises(ValueError, match="at least 1"):
        decode_latency(model, 0)


def test_random_tokens_avoid_those_the_config_names(model):
    model.config.image_token_id = 7
    tokens = text_tokens(model, (4, 2000))
    del model.config.image_token_id
    assert tokens.shape == (4, 2000)
    assert set(tokens.unique().tolist()) == set(range(256)) - {7}


# Accuracy


def test_accuracy_by_type_counts_exact_matches():
    dataset = datasets.Dataset.from_dict(
        {"question_type": ["at", "where", "at", "at"], "answer": ["cat", "row 1, column 2", "dog", "owl"]}
    )
    result = accuracy_by_type(dataset, ["cat", "row 1,  column 2 ", "Dog", "ow"])
    assert list(result) == ["at", "where", "all"]
    assert [(a.correct, a.total) for a in result.values()] == [(1, 3), (1, 1), (2, 4)]
    assert result["at"].mean == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="3 answers for 4"):
        accuracy_by_type(dataset, ["cat"] * 3)


def test_batched_answers_are_those_of_one_question_at_a_time():
    vision_model, processor, dataset = tiny_llava(), tiny_processor(), tiny_questions()
    answers = answer_questions(vision_model, processor, dataset, batch_size=3, max_new_tokens=5)
    assert answers == answer_questions(vision_model, processor, dataset, batch_size=1, max_new_tokens=5)
    prompt = "user: <image>What is it?\nassistant: "
    inputs = processor(text=prompt, images=dataset[0]["image"], return_tensors="pt")
    generated = vision_model.generate(**inputs, max_new_tokens=5, do_sample=False)
    new = generated[0, inputs["input_ids"].shape[1] :]
    assert answers[0] == processor.decode(new, skip_special_tokens=True).strip()


def test_answer_batches_label_the_answer_and_its_end():
    processor, dataset = tiny_processor(), tiny_questions()
    batches = list(answer_batches(processor, dataset, batch_size=2))
    assert [batch["input_ids"].shape[0] for batch in batches] == [2, 2, 1]
    rows = [(batch["input_ids"][i], batch["labels"][i]) for batch in batches for i in range(len(batch["labels"]))]
    for row, (tokens, labels) in zip(dataset, rows):
        assert processor.decode(labels[labels != -100]) == f"{row['answer']}</s>"
        assert (tokens == IMAGE_TOKEN_ID).sum() == 4
        assert torch.equal(tokens[labels != -100], labels[labels != -100])
    result = divergence(tiny_llava(), tiny_llava(), batches, "answer")
    assert result.tokens == sum(len(row["answer"]) + 1 for row in dataset)


def test_standard_error_is_binomial_and_never_zero():
    assert Accuracy(498, 998).standard_error == pytest.approx(math.sqrt(0.25 / 998), rel=1e-3)
    assert 0 < Accuracy(10, 10).standard_error < 0.1
    assert math.isnan(Accuracy(0, 0).mean)
