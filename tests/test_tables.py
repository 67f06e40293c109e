"""The tables in README.md and docs/ say what docs/results/ holds."""

import json
import sys
from pathlib import Path

import pytest

from hf_wsvd.evaluate.tables import markdown_table, text_table


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts there import one another
import tables  # noqa: E402


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_committed_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert tables.rewritten(text, ROOT / "docs" / "results") == text


def test_every_table_stands_on_a_page():
    text = "".join(page.read_text() for page in tables.pages())
    assert all(f"<!-- table:{name} -->" in text for name in tables.TABLES)


def test_a_changed_number_changes_the_page(tmp_path):
    results = json.loads((ROOT / "docs" / "results" / "decode_cpu.json").read_text())
    results["rows"][0]["step_ms"] = 123.45
    (tmp_path / "decode_cpu.json").write_text(json.dumps(results))
    page = tables.rewritten("before\n<!-- table:decode_cpu -->\nold\n<!-- end -->\nafter\n", tmp_path)
    assert page.startswith("before\n<!-- table:decode_cpu -->\n| ")
    assert page.endswith("<!-- end -->\nafter\n")
    assert "| 123.5 |" in page or "| 123.4 |" in page
    assert "old" not in page


def test_an_empty_table_waits_for_its_results(tmp_path):
    waiting = "<!-- table:decode_cpu -->\n<!-- end -->\n"
    assert tables.rewritten(waiting, tmp_path) == waiting
    with pytest.raises(FileNotFoundError):
        tables.rewritten(waiting.replace("\n<!-- end", "\nold\n<!-- end"), tmp_path)


def test_tables_align():
    assert text_table(["", "n"], [["a", "1"], ["bb", "10"]]) == "     n\n--  --\na    1\nbb  10"
    assert markdown_table(["", "n"], [["a", "1"]]) == "|  | n |\n| --- | ---: |\n| a | 1 |"
