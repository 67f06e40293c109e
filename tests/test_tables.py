"""The tables in README.md and docs/ say what docs/results/ holds."""

import importlib.util
import json
from pathlib import Path

import pytest

from hf_wsvd.evaluate.tables import markdown_table, text_table


ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_committed_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert tables.rewritten(text, ROOT / "docs" / "results") == text


def test_every_table_stands_in_the_readme():
    text = (ROOT / "README.md").read_text()
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


def test_tables_align():
    assert text_table(["", "n"], [["a", "1"], ["bb", "10"]]) == "     n\n--  --\na    1\nbb  10"
    assert markdown_table(["", "n"], [["a", "1"]]) == "|  | n |\n| --- | ---: |\n| a | 1 |"
