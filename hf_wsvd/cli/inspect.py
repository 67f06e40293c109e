"""`hf-wsvd inspect`: what a compressed checkpoint is, from its config and file list; no weights are read."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import HfApi
from transformers import AutoConfig

from ..evaluate.cache_size import cache_size


def inspect(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a compressed checkpoint.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print ranks, key layouts, KV cache bytes a token, calibration and files of a compressed checkpoint."""
    description = describe(model, revision)
    typer.echo(json.dumps(description, indent=2) if as_json else text(description))


def describe(model: str, revision: str | None = None) -> dict[str, Any]:
    """The facts as JSON: model, architecture, quantization_config, cache, files.

    Raises ValueError for a checkpoint that hf_wsvd did not compress, OSError where there is no config.
    """
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    try:
        size = cache_size(config)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    quantization = config.quantization_config
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return {
        "model": model,
        "architecture": ", ".join(config.architectures or ["unknown"]),
        "quantization_config": quantization,
        "cache": size.to_dict(),
        "summary": size.summary(),
        "files": files(model, revision),
    }


def files(model: str, revision: str | None) -> dict[str, int]:
    """Name -> bytes of every file of the checkpoint."""
    folder = Path(model)
    if folder.is_dir():
        return {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
    info = HfApi().model_info(model, revision=revision, files_metadata=True)
    return {sibling.rfilename: sibling.size or 0 for sibling in sorted(info.siblings, key=lambda s: s.rfilename)}


def text(description: dict[str, Any]) -> str:
    """The facts for people. Layers that are alike share a line."""
    quantization, cache = description["quantization_config"], description["cache"]
    lines = [f"{description['model']}: {description['architecture']}", description["summary"], "", "layers"]
    groups: list[tuple[list[int], tuple]] = []
    for layer in cache["layers"]:
        facts = (layer["k_rank"], layer["v_rank"], layer["key_layout"], layer["bytes"], layer["dense_bytes"])
        if groups and groups[-1][1] == facts:
            groups[-1][0].append(layer["layer"])
        else:
            groups.append(([layer["layer"]], facts))
    for numbers, (k_rank, v_rank, layout, size, dense) in groups:
        span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        ranks = "dense" if layout is None else f"K {k_rank}, V {v_rank} of {cache['head_dim']}, key layout {layout}"
        lines.append(f"  {span:>7}  {ranks}: {size:,} bytes a token (dense {dense:,})")
    lines.append(f"  rotary rows, shared by the layers: {cache['rotary_bytes']:,} bytes a token")
    info = quantization.get("calibration_info") or {}
    lines += ["", "calibration"] + [f"  {printable(name)}: {printable(value)}" for name, value in info.items()]
    lines += ["", "files"] + [f"  {size:>14,}  {printable(name)}" for name, size in description["files"].items()]
    return "\n".join(lines)


def printable(value: Any) -> str:
    """A checkpoint's text without what could steer a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(value))
