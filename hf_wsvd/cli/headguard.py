"""`hf-wsvd headguard`: choose the KV heads of a model that keep more bits, and write a checkpoint that guards them."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoConfig, PreTrainedModel

from ..auto_class import auto_class_of
from ..calibration.batches import Batch
from ..card import PACKED_TOKENS
from ..files import check_output, replaced_folder
from ..guarding import check_guards, check_storage
from ..headguard import measure_heads, save_head_scores
from ..headguard.selectors import ENTRIES
from ..headguard.summary import guard_lines, image_bytes_per_token, overlap, without_guards
from ..quantizer import compress as compress_model
from ..quantizer_config import CacheConfig, GuardMap, HeadGuardConfig, WSVDConfig
from ..surgery import guard_compressed
from . import guard_options as guards
from .compress import DTYPES, check_device, find_model, load_dense, load_processor
from .dataset_options import (
    Dataset,
    DatasetName,
    MaxTokens,
    PresetName,
    Samples,
    Seed,
    Split,
    Streaming,
    built_in_batches,
    dataset_batches,
)


SCORES_FILE = "head_scores.safetensors"


def headguard(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a dense model, or of a compressed one.")],
    output_dir: Annotated[Path, typer.Option("-o", "--output-dir", help="Folder to write; new or empty.")],
    bits: guards.Bits = None,
    scheme: guards.Scheme = None,
    group_size: guards.GroupSize = None,
    text_bits: guards.TextBits = None,
    fraction: guards.Fraction = 0.125,
    selector: guards.SelectorName = "restoration",
    protect: guards.Protect = "k",
    guard_bits: guards.GuardBits = 16,
    tokens: guards.Tokens = None,
    sensitivity: guards.Sensitivity = "absolute",
    answer: guards.Answer = "probability",
    image_queries: guards.ImageQueries = "all",
    text_loss: guards.TextLoss = "prompt",
    normalization: guards.Normalization = "global",
    dataset: Dataset = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    preset: PresetName = None,
    streaming: Streaming = False,
    samples: Samples = 64,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto keeps the checkpoint's.")] = "auto",
    device: Annotated[str, typer.Option(help="Device to measure on (cpu, cuda:0), or auto to spread.")] = "cpu",
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder or repository.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output folder that is not empty.")
    ] = False,
) -> None:
    """Choose the KV heads that keep more bits in a packed cache, and save the checkpoint with its processor."""
    check_output(output_dir, overwrite)
    if Path(model).resolve().is_relative_to(output_dir.resolve()):
        raise ValueError(f"{output_dir} is, or holds, the model whose heads are to be chosen")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    check_device(device)
    guard = HeadGuardConfig(
        fraction=fraction,
        selector=selector,
        protect=protect,
        tokens=tokens,
        bits=guard_bits,
        sensitivity=sensitivity,
        answer=answer,
        image_queries=image_queries,
        text_loss=text_loss,
        normalization=normalization,
        seed=seed if selector == "random" else 0,  # else that of the data
    )
    options = {"bits": bits, "scheme": scheme, "group_size": group_size, "text_bits": text_bits}
    options = {name: value for name, value in options.items() if value is not None}
    CacheConfig.parse(options)  # before any work
    config = compressed_config(model, gguf_file)
    cache = cache_of(config, options)
    source, auto_class = find_model(model, gguf_file) if config is None else source_of(model)
    processor = load_processor(model, source, auto_class)
    batches = dataset_batches(  # before the weights: data that do not fit fail early
        processor,
        dataset=dataset,
        dataset_name=dataset_name,
        split=split,
        preset=preset,
        streaming=streaming,
        samples=samples,
        max_tokens=max_tokens,
        seed=seed,
    )
    measuring = ENTRIES[selector].data
    if batches is not None and not measuring:
        raise ValueError(f"--selector {selector} measures nothing: leave out --dataset")
    loaded = load_any(model, source, auto_class, dtype, device, compressed=config is not None)
    check_guards(loaded, WSVDConfig(rank_ratio=None, cache=cache, head_guard=guard))
    check_storage(loaded, cache)
    if batches is None and measuring:
        batches = built_in_batches(loaded, processor, samples, max_tokens, seed)
    measures = measure_heads(loaded, batches, guard, cache=cache)
    guard_map = measures.guard_map()
    lines = summary(loaded, cache, guard_map, batches)
    guard = dataclasses.replace(guard, guard_map=guard_map)
    if config is None:
        compress_model(loaded, WSVDConfig(rank_ratio=None, cache=cache, head_guard=guard))
    else:
        guard_compressed(loaded, loaded.config.quantization_config, cache, guard)
    with replaced_folder(output_dir) as partial:
        loaded.save_pretrained(partial)
        processor.save_pretrained(partial)
        save_head_scores(partial / SCORES_FILE, measures)
    typer.echo(f"{output_dir}: {sum(f.stat().st_size for f in output_dir.rglob('*') if f.is_file()) / 1e6:.1f} MB")
    for line in lines:
        typer.echo(line)
    held = (
        "what every sample said of every head, for other choices"
        if measures.raw
        else "the scores, for other fractions"
    )
    typer.echo(f"{SCORES_FILE} holds {held} without the model")


def compressed_config(model: str, gguf_file: str | None) -> WSVDConfig | None:
    """The config of a checkpoint that hf_wsvd compressed; None for any other, which `find_model` then judges."""
    if gguf_file is not None:
        return None
    found = getattr(AutoConfig.from_pretrained(model, trust_remote_code=False), "quantization_config", None)
    return WSVDConfig(**found) if isinstance(found, dict) and found.get("quant_method") == "wsvd" else None


def source_of(model: str) -> tuple[dict[str, Any], Any]:
    """As `find_model`, for a compressed checkpoint."""
    source = {"trust_remote_code": False}
    return source, auto_class_of(AutoConfig.from_pretrained(model, **source))


def cache_of(config: WSVDConfig | None, options: dict[str, Any]) -> CacheConfig:
    """The packed cache that the options ask for, over what the checkpoint has; ValueError if there is none."""
    present = None if config is None else config.cache
    if present is None and not {"bits", "scheme"} & set(options):
        raise ValueError("--bits is missing: the model has no packed cache yet from which heads could be guarded")
    return dataclasses.replace(without_guards(present or CacheConfig()), **options)


def load_any(
    model: str, source: dict[str, Any], auto_class: Any, dtype: str, device: str, *, compressed: bool
) -> PreTrainedModel:
    """The model in evaluation mode, dense or compressed."""
    if not compressed:
        return load_dense(model, source, auto_class, dtype, device)
    device_map = {} if device == "cpu" else {"device_map": device}
    return auto_class.from_pretrained(model, dtype=dtype, **device_map, **source).eval()


def summary(
    model: PreTrainedModel, cache: CacheConfig, guard_map: GuardMap, batches: Iterable[Batch] | None
) -> list[str]:
    """Heads by layer, bytes of an image's tokens, and what a look at the range of the keys would have guarded."""
    guarded = dataclasses.replace(cache, guard_map=guard_map)
    sizes = [image_bytes_per_token(model, each, PACKED_TOKENS) for each in (guarded, cache)]
    tokens = "an image" if guard_map.tokens == "image" else "text"
    lines = [
        *guard_lines(guard_map),
        f"a token of {tokens}: {sizes[0]:,.0f} bytes in all layers, {sizes[1]:,.0f} without guards, "
        f"at {PACKED_TOKENS:,} tokens",
    ]
    if batches is not None and guard_map.selector != "key_range":
        heads = len({(guard.layer, guard.head) for guard in guard_map})
        by_range = HeadGuardConfig(
            fraction=heads / sum(guard_map.num_key_value_heads), selector="key_range", tokens=guard_map.tokens
        )
        share = overlap(guard_map, measure_heads(model, batches, by_range, cache=cache).guard_map())
        lines.append(f"for comparison: {share:.0%} of them are among the {heads} heads that selector key_range takes")
    return lines
