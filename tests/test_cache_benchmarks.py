"""The benchmarks of caches: how bytes are counted, how a cache is read and scored, rows and tables."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts there import one another
from tiny_models import build, calibration_batches  # noqa: E402

import cache_bytes  # noqa: E402
import cache_quality  # noqa: E402
import cache_tasks  # noqa: E402
import context_questions  # noqa: E402
import tables  # noqa: E402
from accuracy_measure import EvaluationBatch, counted_states  # noqa: E402
from cache_settings import QUANTIZED, REFERENCE, SCHEMES, VARIANTS, Setting, held_bytes  # noqa: E402
from hf_wsvd import WSVDConfig, cache_nbytes, collect_statistics, compress  # noqa: E402


ENVIRONMENT = {"threads": 1, "load_average": 0.0, "transformers": "5", "torch": "2", "device": "cpu"}


class Wrapped(torch.Tensor):
    """A tensor made of two others, as optimum-quanto's are."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_every_storage_is_counted_once():
    storage = torch.zeros(100)
    wrapped = Wrapped(torch.zeros(64, dtype=torch.uint8), torch.zeros(2))
    pair = (torch.zeros(10, dtype=torch.uint8), {"scale": torch.zeros(3), "shape": (1, 2), "kind": torch.Tensor})
    assert held_bytes([storage[:3], storage[50:]]) == 400
    assert held_bytes({"a": wrapped, "b": pair, "c": [wrapped]}) == 64 + 8 + 10 + 12


def test_a_cache_is_counted_as_the_package_counts_it():
    model, cache = build("llama"), DynamicCache()
    model(input_ids=torch.arange(10)[None], use_cache=True, **{cache_tasks.CACHE_ARGUMENT: cache})
    assert held_bytes(cache.layers) == cache_nbytes(cache)


def test_a_stock_cache_has_sixteen_bits_an_element():
    row = cache_bytes.bits_row(cache_bytes.tiny_llama(64), REFERENCE, 32)
    assert row["bits_per_element"] == 16
    assert row["label"] == "DynamicCache"


def test_settings_have_names_of_their_own():
    settings = [REFERENCE, *QUANTIZED, *SCHEMES, *VARIANTS]
    assert len({setting.label for setting in settings}) == len(settings)
    setting = Setting("WSVDCache", {"scheme": "minmax", "key_bits": 4, "value_bits": 2, "sink_length": 4})
    assert setting.label == "minmax K4 V2 bit, sink_length 4"
    assert setting.options == {"sink_length": 4}
    assert Setting("WSVDCache", {"bits": 4}).label == "default 4 bit"
    assert Setting("QuantizedCache", {"backend": "fp8"}).label == "QuantizedCache fp8 8 bit"


def given(model) -> list[EvaluationBatch]:
    """Sequences whose prompts have 3, 5 and 3 tokens, padded on the right."""
    ids = torch.arange(27).view(3, 9) % model.config.vocab_size
    labels = torch.full_like(ids, -100)
    for row, (prompt, end) in enumerate([(3, 6), (5, 9), (3, 5)]):
        labels[row, prompt:end] = ids[row, prompt:end]
    return [EvaluationBatch({"input_ids": ids[:2]}, labels[:2]), EvaluationBatch({"input_ids": ids[2:]}, labels[2:])]


def task_of(model) -> cache_tasks.CacheTask:
    batches, order = cache_tasks.equally_long(given(model), 8)
    assert order == [2, 0, 1]
    assert [batch.pieces for batch in batches] == [(2, 4), (4, 5)]
    kinds = ["answer", "other", "answer"]
    task = cache_tasks.CacheTask("context", "tiny", {}, model, None, batches, "exact", kinds, order)
    task.prepare(torch.float32)
    return task


def test_a_cache_read_in_pieces_gives_what_the_model_gives():
    task = task_of(build("llama"))
    for batch, states in zip(task.batches, task.dense_states):
        cached = cache_tasks.cached_states(task.model, batch, DynamicCache())
        torch.testing.assert_close(cached, states, atol=1e-5, rtol=1e-5)
    scored = torch.cat(task.dense_states)
    whole = torch.cat([counted_states(task.model, batch) for batch in given(task.model)])  # rows 0, 1, 2
    torch.testing.assert_close(scored, torch.cat([whole[7:], whole[:7]]), atol=1e-5, rtol=1e-5)


def test_scores_stand_in_the_order_of_the_sequences(monkeypatch):
    seen = {}

    def metrics(sums, kinds):
        seen["tokens"] = sums.tokens.tolist()
        return {}

    monkeypatch.setitem(cache_tasks.METRICS, "context", metrics)
    task = task_of(build("llama"))
    scores = task.scores(task.dense, REFERENCE)
    assert seen["tokens"] == [3, 4, 2]
    assert abs(scores.metrics["kl"].value) < 1e-6
    assert 8 * scores.cache_bytes / scores.dense_elements == 32


def test_packed_caches_of_dense_and_latent_models():
    model = build("llama")
    statistics = collect_statistics(model, calibration_batches("llama"))
    task = task_of(model)
    config = WSVDConfig(rank_ratio=0.5, refinement="none", self_check="none")
    latent = compress(build("llama"), config, statistics=statistics)
    coarse = Setting("WSVDCache", {"scheme": "minmax", "bits": 2})
    for kind in (task.dense, latent):
        whole, packed = (task.scores(kind, setting) for setting in (REFERENCE, coarse))
        assert packed.cache_bytes < whole.cache_bytes
        assert packed.metrics["kl"].value > whole.metrics["kl"].value


def test_questions_come_in_groups_of_one_length():
    lengths = [7, 5, 7, 6, 5, 5, 9, 9, 7]
    assert context_questions.grouped_by_length(lengths, 2, 2) == [[1, 4], [0, 2]]
    with pytest.raises(ValueError, match="3 lengths have 2 questions, wanted 4"):
        context_questions.grouped_by_length(lengths, 2, 4)


def test_a_question_ends_where_its_answer_begins():
    example = {"input": "\nQuestion: who?\nContext: It was Ann .", "target_scores": {"Ann": 1, "Bob": 0}}
    assert context_questions.passage_question(example) == "Context: It was Ann .\nQuestion: who?\nAnswer:"
    assert context_questions.other_answer(example) == "Bob"


def test_rows_and_table_of_qualities(tmp_path):
    scores = cache_tasks.CacheScores({"accuracy_mean": cache_tasks.Score(0.9, 0.01)}, 1000, 2000)
    rows = []
    for cache in ("dense", "latent"):
        for setting in (REFERENCE, Setting("WSVDCache", {"scheme": "kivi", "bits": 2})):
            identity = {"task": "vlm", "cache": cache, "label": setting.label}
            rows += cache_quality.rows_of(identity, setting, scores)
    assert rows[1]["bits_per_element"] == 4
    assert (rows[1]["scheme"], rows[1]["key_bits"], rows[1]["options"]) == ("kivi", 2, {})
    results = {"command": "python x", "environment": ENVIRONMENT, "dtype": "bfloat16", "tasks": {"vlm": {"n": 1}}}
    (tmp_path / "cache_quality.json").write_text(json.dumps({**results, "rows": rows}))
    page = tables.rewritten("<!-- table:cache_quality -->\n<!-- end -->", tmp_path)
    assert "| kivi 2 bit | 4.00 | 90.00 ± 1.00 | 4.00 | 90.00 ± 1.00 |" in page


def test_table_of_memory(tmp_path):
    row = {"label": "a", "cache_bytes": 2e6, "bits_per_element": 8.5, "peak_bytes": None, "prefill_s": 1.5}
    row |= {"ms_per_token": 20.0, "fastest_ms_per_token": 10.0}
    failed = [{"label": "b", "reason": "no such backend"}]
    results = {"command": "python x", "environment": ENVIRONMENT, "model": "m", "versions": {"hqq": "1"}}
    results |= {"prompt_tokens": 4096, "new_tokens": 4, "rows": [row], "failed": failed}
    (tmp_path / "cache_memory_cpu.json").write_text(json.dumps(results))
    page = tables.rewritten("<!-- table:cache_memory_cpu -->\n<!-- end -->", tmp_path)
    assert "| a | 2.0 | 8.50 |  | 1.50 | 20.0 | 10.0 |" in page
    assert "b did not run: no such backend. cpu" in page
