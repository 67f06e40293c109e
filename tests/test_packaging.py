"""The wheel: what it holds, and that it leaves the top-level name `kernels` to Hugging Face's library."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
# Folder in the repository -> folder in the wheel.
PACKAGES = {"hf_wsvd": "hf_wsvd", "kernels": "hf_wsvd/kernels", "quantizer_config": "hf_wsvd/quantizer_config"}


def run(*command: str, cwd: Path) -> str:
    result = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build writes into the folder that it builds."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(output), str(source), cwd=output)
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel), cwd=target)
    return target


def test_wheel_installs_nothing_beside_hf_wsvd(names):
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"hf_wsvd"}


@pytest.mark.parametrize("folder", PACKAGES)
def test_every_file_of_a_package_is_in_the_wheel(names, folder):
    """A sub-package or a data file that setup.cfg does not name works from the checkout and fails once installed."""
    sources = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {f"{PACKAGES[folder]}/{path.relative_to(ROOT / folder).as_posix()}" for path in sources}
    assert expected - names == set()


def test_wheel_holds_entry_point_and_licences(wheel, names):
    (metadata,) = {name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA")}
    assert {f"{metadata}/licenses/LICENSE", f"{metadata}/licenses/NOTICE"} <= names
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(f"{metadata}/entry_points.txt").decode()
        fields = archive.read(f"{metadata}/METADATA").decode()
    assert "hf-wsvd = hf_wsvd.cli:main" in entry_points
    assert re.search(r"^License(-Expression)?: Apache-2.0$", fields, re.MULTILINE)


def test_installed_wheel_imports_beside_hugging_face_kernels(installed, tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(installed)!r})
import hf_wsvd, hf_wsvd.kernels, hf_wsvd.quantizer_config, kernels
for module in (hf_wsvd, hf_wsvd.kernels, hf_wsvd.quantizer_config):
    assert module.__file__.startswith({str(installed)!r}), module.__file__
assert kernels is not hf_wsvd.kernels and callable(kernels.get_kernel), kernels.__file__
from importlib.metadata import distribution
from pathlib import Path
assert Path(kernels.__file__) in [Path(file.locate()) for file in distribution("kernels").files], kernels.__file__
"""
    run("-c", script, cwd=tmp_path)


def test_no_file_imports_kernels_from_the_top_level():
    """From the checkout's root, `import kernels` would find this repository's folder, elsewhere another library."""
    folders = [*PACKAGES, "tests", "benchmarks", "examples", "docs"]
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    imported = {}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            if any(module.split(".")[0] in ("kernels", "quantizer_config") for module in modules):
                imported[str(path)] = modules
    assert len(sources) > 10
    assert imported == {}
