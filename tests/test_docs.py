"""The documentation runs: every python block of a page, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import hf_wsvd
from hf_wsvd.assets import demo_model_path
from hf_wsvd.fit import fit


ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
# The Hub page needs a server; tests/test_hub.py runs what it shows.
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.name != "hub.md"]


with_snippets = pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: page.name
)


def run_snippets(page: Path) -> None:
    namespace: dict = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.fixture(scope="module")
def demo_model_in_fp32(tmp_path_factory) -> Path:
    """The embedded checkpoint in fp32: many CPUs take fifty times as long for a backward pass in its bf16."""
    folder = tmp_path_factory.mktemp("demo") / "model"
    AutoModelForImageTextToText.from_pretrained(demo_model_path(), dtype=torch.float32).save_pretrained(folder)
    AutoProcessor.from_pretrained(demo_model_path()).save_pretrained(folder)
    return folder


@pytest.fixture
def quick_fits(demo_model_in_fp32, monkeypatch) -> None:
    """The embedded model is in fp32, calibration sets have at most 4 samples and refinement has at most 2 steps.

    Whatever a page says or the defaults are. All else is as written, and the model's answers must be right.
    """

    def at_most(name, function, most, default=None):
        return lambda *args, **options: function(*args, **{**options, name: min(options.get(name, default), most)})

    default_calibration = at_most("samples", hf_wsvd.default_calibration, 4, default=64)
    monkeypatch.setattr("hf_wsvd.surgery.default_calibration", default_calibration)
    monkeypatch.setattr(hf_wsvd, "default_calibration", default_calibration)
    monkeypatch.setattr(hf_wsvd, "load_calibration", at_most("samples", hf_wsvd.load_calibration, 4, default=64))
    monkeypatch.setattr(fit, "distill", at_most("steps", fit.distill, 2))
    monkeypatch.setattr("hf_wsvd.assets.demo_model_path", lambda: demo_model_in_fp32)


@with_snippets
def test_snippets_run(page, quick_fits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(page)


@pytest.mark.slow
@with_snippets
def test_snippets_run_as_written(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(page)


@pytest.mark.parametrize("name", [name for name in hf_wsvd.__all__ if not name.startswith("__")])
def test_every_public_name_is_documented(name):
    text = "\n".join(page.read_text() for page in (*PAGES, ROOT / "docs" / "hub.md"))
    assert re.search(rf"\b{name}\b", text), f"{name} is exported and stands nowhere in the documentation"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
