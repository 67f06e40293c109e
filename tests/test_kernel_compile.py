"""Kernels compile for every architecture with no GPU, and none spills registers."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_wsvd.kernels.compile_ahead import Resources, _spills, covering, covering_plan, full_plan
from hf_wsvd.kernels.variants import ARCHITECTURES, Variant


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

KERNELS = Path(__file__).parent.parent / "kernels"
SAMPLES = Path(__file__).parent / "sample_kernels.py"
LISTING = re.compile(r"^def variants\(", re.MULTILINE)
SHARES = 2  # of the compilations, for as many processes of tests
MODULES = sorted(path.stem for path in KERNELS.glob("*.py") if LISTING.search(path.read_text()))


def rows_of(*command: str, cache: Path) -> list[dict]:
    """What a compiling process prints: one of its own, since kernels imported where Triton interprets do not compile.

    `cache` takes what Triton compiles in place of the user's cache.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    assert result.stdout, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def complaints(rows: list[dict]) -> list[str]:
    return [f"sm_{row['architecture']} {row['variant']}: {row['complaint']}" for row in rows if row["complaint"]]


@pytest.mark.parametrize("share", range(SHARES))
def test_variants_fit(share, tmp_path):
    """Those that show every type, word and largest number for sm_90, one of each kernel for the others."""
    command = ["-m", "hf_wsvd.kernels.compile_ahead", *MODULES, "--covering", "--share", str(share), str(SHARES)]
    assert complaints(rows_of(*command, "--json", cache=tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("module", MODULES)
def test_all_variants_fit_everywhere(module, architecture, tmp_path):
    command = ["-m", "hf_wsvd.kernels.compile_ahead", module, "--architectures", str(architecture), "--json"]
    assert complaints(rows_of(*command, cache=tmp_path)) == []


def test_every_kernel_that_is_launched_lists_variants():
    """A kernel without variants would be tested on a GPU alone."""
    sources = {path.stem: path.read_text() for path in KERNELS.glob("*.py")}
    launched = {
        node.func.value.id
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and re.search(rf"@(?:triton|gluon)\.jit[^\n]*\ndef {node.func.value.id}\(", "".join(sources.values()))
    }
    listing = "".join(sources[module] for module in MODULES)
    assert {kernel for kernel in launched if not re.search(rf"\b{kernel}\b", listing)} == set()


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> dict[str, dict]:
    """What compiling the sample kernels for sm_89, or sm_90 alone, says, by name."""
    rows = rows_of(str(SAMPLES), "89", "90", cache=tmp_path_factory.mktemp("compiled"))
    return {row["variant"]: row for row in rows}


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ("spills", r"spills registers in \d+ instructions, at \d+ registers a thread"),
        ("fills shared memory", r"takes \d{6} bytes of shared memory of 101376"),
        ("does not compile", "does not compile: CompilationError: .*"),
        ("lacks an argument", r"does not compile: ValueError: .*arguments missing: \['tokens'\]; not .*: \[\]"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_told(samples, sample, complaint):
    assert re.fullmatch(complaint, samples[sample]["complaint"], re.DOTALL)


def test_a_kernel_that_fits_is_not_complained_of(samples):
    assert samples["fits"]["complaint"] is None
    assert 1 <= samples["fits"]["registers"] <= 255
    assert samples["fits"]["spills"] == 0


def test_a_gluon_kernel_of_descriptors_is_compiled_for_its_architecture_alone(samples):
    row = samples["Gluon"]
    assert (row["complaint"], row["architecture"]) == (None, 90)
    assert row["shared"] >= 2 * 128 * 64


def test_shared_memory_is_judged_by_architecture():
    resources = Resources(registers=128, spills=0, shared=150 << 10)
    assert [resources.complaint(architecture) is None for architecture in (80, 89, 90)] == [True, False, True]


@pytest.mark.parametrize(
    ("registers", "spills", "fits"), [(255, 0, True), (80, 2, True), (80, 3, False), (255, 1, False)]
)
def test_one_number_in_memory_with_registers_to_spare_is_no_spill(registers, spills, fits):
    assert (Resources(registers, spills, shared=0).complaint(90) is None) == fits


def machine_code(prologue: str, body: list[str], parting: bool) -> str:
    """A dump of instructions: one before a loop, the loop, and what hands registers over if warps part."""
    listed = [prologue, *(["USETMAXREG.DEALLOC.CTAPOOL 0x18"] if parting else []), *body, "BRA 0x20", "EXIT"]
    return "\n".join(f"        /*{16 * place:04x}*/   {text} ;" for place, text in enumerate(listed))


@pytest.mark.parametrize(
    ("parting", "spilling", "spills"), [(False, 0, 1), (False, 3, 4), (True, 0, 0), (True, 1, 0), (True, 3, 3)]
)
def test_where_warps_part_a_loop_that_spills_rarely_is_let_through(parting, spilling, spills):
    body = ["LDL R1, [R1+0x4]"] * spilling + ["FADD R1, R1, R2"] * 80
    assert _spills(machine_code("STL [R1], R3", body, parting)) == spills


VARIANTS = [
    Variant(f"{kind} {rank} {bits}", "kernel", {"payload": kind}, {"RANK": rank, "BITS": bits})
    for kind in ("*bf16", "*fp16")
    for rank in (32, 64, 128)
    for bits in (2, 4, 8)
]


def test_covering_shows_every_type_and_word_and_the_largest_numbers_in_few_variants():
    variants = [
        variant._replace(constexprs={**variant.constexprs, "CODE": code}, name=f"{code} {variant.name}")
        for code in ("symmetric", "codebook", None)
        for variant in VARIANTS
    ]
    chosen = covering(variants)
    assert len(chosen) == 3
    assert {variant.signature["payload"] for variant in chosen} == {"*bf16", "*fp16"}
    assert {variant.constexprs["CODE"] for variant in chosen} == {"symmetric", "codebook", None}
    for name, largest in (("RANK", {128}), ("BITS", {8})):
        assert {variant.constexprs[name] for variant in chosen} >= largest


def test_covering_tells_kernels_apart():
    other = [variant._replace(name=f"other {variant.name}", kernel="other") for variant in VARIANTS]
    assert {variant.kernel for variant in covering(VARIANTS + other)} == {"kernel", "other"}


def test_quick_plan_covers_one_architecture_and_has_each_kernel_on_the_others():
    everything = [*VARIANTS, VARIANTS[0]._replace(name="other", kernel="other")]
    plan = covering_plan(everything)
    assert [variant for variant, architecture in plan if architecture == 90] == covering(everything)
    for architecture in {80, 89, 100, 120}:
        assert {variant.kernel for variant, of in plan if of == architecture} == {"kernel", "other"}
    assert len(plan) < len(VARIANTS)


def test_a_variant_is_planned_only_where_it_is_launched():
    only = [VARIANTS[0]._replace(architectures=(90, 100))]
    assert [architecture for _, architecture in full_plan(only, ARCHITECTURES)] == [90, 100]
    assert {architecture for _, architecture in covering_plan(only)} == {90, 100}
