"""The documentation runs: every python block of a page, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_wsvd


ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# The Hub page needs a server; tests/test_hub.py runs what it shows.
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.name != "hub.md"]


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda page: page.name)
def test_snippets_run_as_written(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("name", [name for name in hf_wsvd.__all__ if not name.startswith("__")])
def test_every_public_name_is_documented(name):
    text = "\n".join(page.read_text() for page in (*PAGES, ROOT / "docs" / "hub.md"))
    assert re.search(rf"\b{name}\b", text), f"{name} is exported and stands nowhere in the documentation"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
