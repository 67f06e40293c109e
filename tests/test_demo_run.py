"""The demo on a tiny random model, which answers nothing right: what is checked is the bookkeeping and the report."""

import json
import re
from html.parser import HTMLParser

import pytest
from tiny_vision import tiny_llava, tiny_processor

from hf_wsvd.cli.app import run
from hf_wsvd.demo import run as demo_run
from hf_wsvd.demo.dataset import evaluation_set
from hf_wsvd.demo.questions import QUESTION_TYPES
from hf_wsvd.demo.report import EXAMPLES, render_report
from hf_wsvd.demo.run import parse_ratios, results_table, run_demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Output folder of a run at two ratios with two questions a type."""
    model_path = tmp_path_factory.mktemp("model")
    tiny_llava().save_pretrained(model_path)
    tiny_processor().save_pretrained(model_path)
    output = tmp_path_factory.mktemp("out") / "new" / "folder"
    run_demo(output, questions=2, ratios=[0.5, 0.25], seed=3, model_path=model_path)
    return output


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_results_hold_every_question_and_model(results):
    assert [row["label"] for row in results["rows"]] == ["dense", "WSVD 0.5", "WSVD 0.25"]
    for row in results["rows"]:
        assert set(row["accuracy"]) == {*QUESTION_TYPES, "all"}
        assert row["accuracy"]["all"]["total"] == 2 * len(QUESTION_TYPES)
        assert row["latency"]["context"] == results["context"] == demo_run.CONTEXT
    assert len(results["questions"]) == 2 * len(QUESTION_TYPES)
    assert all(set(question["answers"]) == {"dense", "WSVD 0.5", "WSVD 0.25"} for question in results["questions"])
    assert "--questions 2 --ratios 0.5,0.25 --seed 3" in results["command"]
    assert {"transformers", "torch", "device", "threads"} <= set(results["environment"])


def test_results_are_measured(results):
    dense, half, most = results["rows"]
    width = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head dim, bytes
    assert dense["kv_bytes_per_token"] == width
    assert dense["divergence"] is None
    # Half of every head, the rotary rows that all layers share (16 numbers), and at most 8 spare tokens
    tokens = half["cache"]["tokens"]
    assert width / 2 + 64 <= half["kv_bytes_per_token"] <= (width / 2 + 64) * (tokens + 8) / tokens
    assert half["divergence"]["kl"] > 0
    assert half["divergence"]["tokens"] == most["divergence"]["tokens"] > len(results["questions"])


class Reader(HTMLParser):
    """Counts start tags, checks that they close, and keeps addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.counts, self.addresses = [], {}, []

    def handle_starttag(self, tag, attributes):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_stands_alone(folder):
    html = (folder / "report.html").read_text()
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert reader.counts["img"] == EXAMPLES
    assert reader.counts["svg"] == 2
    assert reader.counts["circle"] == 3 + 2  # accuracy of all three models, KL of two
    assert all(address.startswith("data:image/png;base64,") for address in reader.addresses)
    assert not re.search(r"https?://|<script|@import|url\(", html)


def test_report_marks_answers_and_escapes_them(results):
    dataset = evaluation_set(seed=3, questions_per_type=2)
    results = json.loads(json.dumps(results))
    first = results["questions"][0]
    first["answers"] = {"dense": first["answer"], "WSVD 0.5": "<b>no</b>", "WSVD 0.25": ""}
    html = render_report(results, dataset)
    assert f'<dd class="right">✓ {first["answer"]}</dd>' in html
    assert '<dd class="wrong">✗ &lt;b&gt;no&lt;/b&gt;</dd>' in html
    assert '<dd class="wrong">✗ (nothing)</dd>' in html


def test_console_table_has_a_line_a_model(results):
    lines = results_table(results).splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["dense", "WSVD 0.5", "WSVD 0.25"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_ratios():
    assert parse_ratios("0.75, 0.5,0.5") == [0.75, 0.5]
    for wrong in ("1", "0", "half", "0.5,", "nan"):
        with pytest.raises(ValueError, match="--ratios"):
            parse_ratios(wrong)


def test_errors_come_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hf_wsvd.cli.demo.run_demo", lambda *args: pytest.fail("work was started"))
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["--output-dir", str(tmp_path / "file")], "file cannot be created: File exists"),
        (["--output-dir", str(tmp_path / "file" / "below")], "cannot be created"),
        (["--output-dir", str(tmp_path / "out"), "--ratios", "0.5,2"], "'2'"),
        (["--output-dir", str(tmp_path / "out"), "--questions", "0"], "questions"),
    ):
        assert run(["demo", *arguments]) == 2
        line = capsys.readouterr().err.strip()
        assert "\n" not in line
        assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_embedded_model_keeps_its_answers_at_half_the_rank(tmp_path):
    results = run_demo(tmp_path, questions=2, ratios=[0.5])
    dense, half = results["rows"]
    assert dense["accuracy"]["all"]["correct"] >= 13  # of 14; it was trained to all
    assert half["accuracy"]["all"]["correct"] >= 13
    assert half["divergence"]["agreement"] > 0.95
    assert 0.5 < half["kv_share_of_dense"] < 0.55
    assert results["seconds"] < 300
