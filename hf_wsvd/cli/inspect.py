"""`hf-wsvd inspect`: what a compressed checkpoint is, and with `--verify` whether it still computes what it did."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub import HfApi
from transformers import AutoConfig, PretrainedConfig

from ..auto_class import auto_class_of
from ..card import PACKED_TOKENS, packed_fields
from ..estimate import estimate_memory
from ..evaluate.cache_size import cache_size
from ..evaluate.tables import text_table
from ..files import check_output_file
from ..headguard.heat_map import save_heat_map
from ..headguard.summary import guard_lines, guard_summary
from ..quantizer_config import WSVDConfig
from ..self_check import PARTS
from ..self_check_file import MAX_FILE_BYTES, SELF_CHECK_FILE, download_self_check, read_self_check
from ..verification import verify as verify_model
from .compress import DTYPES, check_device


def inspect(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a compressed checkpoint.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Load the model and repeat its self-check; exit code 1 if it differs.")
    ] = False,
    dtype: Annotated[str, typer.Option(help=f"With --verify: {', '.join(DTYPES)}; auto: the checkpoint's.")] = "auto",
    device: Annotated[str, typer.Option(help="With --verify: cpu, cuda:0, or auto to spread.")] = "cpu",
    heads: Annotated[
        Path | None, typer.Option(help="Write a heat map of the guarded heads there, a .png file.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Let --heads replace a file.")] = False,
) -> None:
    """Print ranks, key layouts, KV cache bytes a token, calibration, self-check and files of a checkpoint."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    check_device(device)
    if heads is None and overwrite:
        raise ValueError("--overwrite needs --heads")
    if heads is not None:
        if heads.suffix.lower() != ".png":
            raise ValueError(f"--heads {heads}: the heat map is a .png file")
        check_output_file(heads, overwrite)
    description = describe(model, revision)
    if heads is not None:
        write_heat_map(description, heads)
    if verify:
        description["verification"] = repeat(model, revision, dtype, device, description["self_check"])
    typer.echo(json.dumps(description, indent=2) if as_json else text(description))
    if verify and not description["verification"]["passed"]:
        problems = "; ".join(description["verification"]["problems"])
        typer.echo(f"hf-wsvd: self-check failed: {problems}", err=True)
        raise typer.Exit(1)


def write_heat_map(description: dict[str, Any], path: Path) -> None:
    """The heat map of a checkpoint's guarded heads; ValueError if it has none."""
    guard_map = WSVDConfig(**description["quantization_config"]).guard_map
    if guard_map is None:
        raise ValueError(
            f"{description['model']} has no guarded heads to draw: `hf-wsvd headguard` chooses some, and "
            "WSVDConfig(head_guard=...)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_heat_map(guard_map, path)


def repeat(
    model: str, revision: str | None, dtype: str, device: str, recorded: dict[str, Any] | None
) -> dict[str, Any]:
    """Load the model, run its self-check and return what came out; ValueError if it has none, or a damaged one."""
    if recorded is None or "error" in recorded:
        reason = f"it has no self-check ({SELF_CHECK_FILE})" if recorded is None else recorded["error"]
        raise ValueError(f"{model} cannot be verified: {reason}")
    source = {"revision": revision, "trust_remote_code": False}
    auto_class = auto_class_of(AutoConfig.from_pretrained(model, **source))
    device_map = {} if device == "cpu" else {"device_map": device}
    return verify_model(auto_class.from_pretrained(model, dtype=dtype, **device_map, **source)).to_dict()


def describe(model: str, revision: str | None = None) -> dict[str, Any]:
    """The facts as JSON: model, architecture, quantization_config, cache, self_check, files.

    Raises ValueError for a checkpoint that hf_wsvd did not compress, OSError where there is no config.
    """
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    try:
        size = cache_size(config)
    except ValueError as error:
        raise ValueError(f"{model}: {error}") from error
    quantization = config.quantization_config
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    present, guard_map = files(model, revision), WSVDConfig(**quantization).guard_map
    return {
        "model": model,
        "architecture": ", ".join(config.architectures or ["unknown"]),
        "quantization_config": quantization,
        "cache": size.to_dict(),
        "packed_cache": packed_cache(config),
        "head_guard": None if guard_map is None else guard_summary(guard_map),
        "summary": size.summary(),
        "self_check": self_check(model, revision, present.get(SELF_CHECK_FILE)),
        "files": present,
    }


def packed_cache(config: PretrainedConfig) -> dict[str, Any] | None:
    """How the caches that the model makes by itself are packed, and what they take; None if they are not.

    All tokens count as of images where these are kept otherwise than others.
    """
    quantization = config.quantization_config
    cache = WSVDConfig(**(quantization if isinstance(quantization, dict) else quantization.to_dict())).storage
    if cache is None:
        return None
    estimate = estimate_memory(config, PACKED_TOKENS, image_tokens=PACKED_TOKENS)
    return {
        "config": packed_fields(cache),
        "tokens_of": "images" if cache.by_class else "any kind",
        "tokens": PACKED_TOKENS,
        "bytes_per_token": estimate.cache_bytes // PACKED_TOKENS,
        "share_of_dense": estimate.share_of_dense,
    }


def self_check(model: str, revision: str | None, size: int | None) -> dict[str, Any] | None:
    """What the checkpoint records of itself, None if nothing; {"error": reason} if that cannot be read.

    Args:
        size: bytes of its file, None where there is none.
    """
    if size is None:
        return None
    try:
        if size > MAX_FILE_BYTES:  # not downloaded
            raise ValueError(f"{SELF_CHECK_FILE} holds {size:,} bytes; a self-check holds at most {MAX_FILE_BYTES:,}")
        return read_self_check(download_self_check(model, revision)).summary()
    except ValueError as error:
        return {"error": str(error)}


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
    packed = description["packed_cache"]
    if packed is not None:
        lines.append(
            f"  packed as {json.dumps(packed['config'])}: {packed['bytes_per_token']:,} bytes a token in all, "
            f"{packed['share_of_dense']:.1%} of dense, at {packed['tokens']:,} tokens of {packed['tokens_of']}"
        )
    if packed is not None and description["head_guard"] is not None:
        lines += ["", "guarded heads"]
        lines += [f"  {printable(line)}" for line in guard_lines(WSVDConfig(**quantization).guard_map)]
    low_precision = WSVDConfig(**quantization).low_precision
    if low_precision is not None:
        lines += ["", "low precision", f"  {low_precision.summary()}"]
    lines += ["", "fit", *(f"  {line}" for line in fit_lines(quantization))]
    info = quantization.get("calibration_info") or {}
    lines += ["", "calibration"]
    lines += [f"  {printable(name)}: {printable(value)}" for name, value in info.items()] or ["  not recorded"]
    lines += ["", "self-check", *self_check_lines(description)]
    lines += ["", "files"] + [f"  {size:>14,}  {printable(name)}" for name, size in description["files"].items()]
    return "\n".join(lines)


def self_check_lines(description: dict[str, Any]) -> list[str]:
    """The self-check's numbers, those of a verification beside them."""
    recorded, now = description["self_check"], description.get("verification")
    if recorded is None or "error" in recorded:
        return ["  none" if recorded is None else f"  damaged: {printable(recorded['error'])}"]
    kind = "of the calibration data" if recorded["source"] == "calibration" else "of arbitrary tokens"
    made = f"{recorded['dtype']}, transformers {recorded['transformers']}, torch {recorded['torch']}"
    rows = []
    for part in PARTS:
        rows.append([f"{part}, recorded", *distance_cells(recorded[part]), ""])
        if now is not None:
            rows.append([f"{part}, now", *distance_cells(now[part]["recomputed"]), f"{now[part]['drift']:.6f}"])
    table = text_table(["", "KL to dense, nats", "same top token", "positions", "KL to recorded, nats"], rows)
    lines = [f"  {recorded['samples']} samples {kind}, recorded in {printable(made)}"]
    lines += [f"  {line}".rstrip() for line in table.splitlines()]
    if now is not None:
        lines.append(f"  {'passed' if now['passed'] else 'FAILED'}, by the tolerances of {now['dtype']}")
    return lines


def distance_cells(distance: dict[str, Any]) -> list[str]:
    """One part of a self-check for a table."""
    return [f"{distance['kl']:.4f}", f"{distance['agreement']:.1%}", f"{distance['tokens']:,}"]


def fit_lines(quantization: dict[str, Any]) -> list[str]:
    """Method, rank allocation and refinement of the fit, and what the refinement brought."""
    fit = quantization.get("fit_info") or {}
    lines = [f"{name}: {printable(fit[name])}" for name in ("method", "rank_allocation", "refinement") if name in fit]
    measured = fit.get("refinement_kl")
    if isinstance(measured, dict):
        before, after, steps, held = (measured.get(name) for name in ("before", "after", "steps", "held_out"))
        numbers = [f"{n:.4g}" if isinstance(n, int | float) else printable(n) for n in (before, after)]
        where = f"{printable(held)} held-out groups of calibration sequences" if held else "the calibration data"
        lines.append(
            f"KL to the dense model on {where}: {' before, '.join(numbers)} with {printable(steps)} steps kept"
        )
    return lines or ["not recorded"]


def printable(value: Any) -> str:
    """A checkpoint's text without what could steer a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in str(value))
