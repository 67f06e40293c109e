"""`hf-wsvd estimate`: bytes of weights and cache at a length, for one storage or the usual ones."""

import json
from typing import Annotated, Any

import typer
from transformers import AutoConfig, PretrainedConfig

from ..decoder import decoder_attentions
from ..estimate import MemoryEstimate, check_counts, dense_bytes, estimate_on, human_bytes
from ..evaluate.tables import text_table
from ..meta_model import MetaModel
from ..quantizer_config import CacheConfig, LowPrecisionConfig
from .compress import DTYPES


USUAL_BITS = (16, 8, 4, 2)
USUAL_RANK_RATIO = 0.5


def estimate(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a dense or compressed model.")],
    tokens: Annotated[int, typer.Option(help="Tokens that the cache holds of each sequence.")] = 32768,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto: the checkpoint's.")] = "auto",
    bits: Annotated[int | None, typer.Option(help="Bits of keys and values: 16, 8, 4, 3 or 2.")] = None,
    scheme: Annotated[str | None, typer.Option(help="Storage scheme: minmax, hadamard, turboquant, kivi, ...")] = None,
    key_bits: Annotated[int | None, typer.Option(help="Bits of keys, in place of --bits.")] = None,
    value_bits: Annotated[int | None, typer.Option(help="Bits of values, in place of --bits.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Channels that share a scale.")] = None,
    sink_length: Annotated[int | None, typer.Option(help="First tokens kept in the model's dtype.")] = None,
    residual_length: Annotated[int | None, typer.Option(help="Newest tokens kept in the model's dtype.")] = None,
    rank_ratio: Annotated[
        float | None, typer.Option(help="What if the dense model were compressed to this share of every head.")
    ] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help="What if the dense model's weights were quantized to 8 or 4 bits.")
    ] = None,
    decoding: Annotated[
        bool, typer.Option("--decoding", help="After the next token, with the memory spare for more.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")] = None,
    image_tokens: Annotated[
        int | None, typer.Option(help="Of TOKENS, where the checkpoint keeps tokens of images in another form.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the bytes of every layer.")] = False,
) -> None:
    """Print the memory of weights and KV cache at a length, from the config alone."""
    check_counts(tokens, batch, None, decoding)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    fields = {
        "bits": bits,
        "scheme": scheme,
        "key_bits": key_bits,
        "value_bits": value_bits,
        "group_size": group_size,
        "sink_length": sink_length,
        "residual_length": residual_length,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    CacheConfig.parse(fields)  # before any work
    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False)
    meta = MetaModel(config, dtype=dtype)
    asked: dict[str, Any] = {} if rank_ratio is None else {"rank_ratio": rank_ratio}
    if weight_bits is not None:  # neither activations nor the method take memory
        asked["low_precision"] = LowPrecisionConfig(weight_bits=weight_bits, method="rtn")
    notes = length_notes(config, tokens)
    settings: dict[str, tuple[MetaModel, dict[str, Any]]]
    if fields or asked:
        chosen = MetaModel(config, dtype=dtype, **asked) if asked else meta
        weights = "" if weight_bits is None else f", weights {weight_bits} bit"
        settings = {name_of(chosen, fields, rank_ratio) + weights: (chosen, fields)}
    else:
        settings = usual_settings(config, meta, dtype)
    dense = dense_bytes(meta, tokens, batch, decoding)
    rows: dict[str, MemoryEstimate] = {}
    for name, (of, options) in settings.items():
        try:
            rows[name] = estimate_on(of, tokens, batch, decoding, options, dense, image_tokens)
        except ValueError as error:
            if len(settings) == 1:
                raise
            notes.append(f"{name}: {error}")
    if not rows:
        raise ValueError(notes[-1])
    if as_json:
        listed = [{"setting": name, **row.to_dict()} for name, row in rows.items()]
        head = {"model": model, "tokens": tokens, "batch": batch, "decoding": decoding}
        typer.echo(json.dumps({**head, "settings": listed, "notes": notes}, indent=2))
    else:
        typer.echo(text(model, rows, decoding))
        for note in notes:
            typer.echo(f"warning: {note}", err=True)


def usual_settings(
    config: PretrainedConfig, meta: MetaModel, dtype: str
) -> dict[str, tuple[MetaModel, dict[str, Any]]]:
    """Row name to model and storage: 16 to 2 bits, and of a dense model that can be compressed latents too."""
    models: list[tuple[MetaModel, float | None]] = [(meta, None)]
    if getattr(config, "quantization_config", None) is None and decoder_attentions(meta.model):
        models.append((MetaModel(config, dtype=dtype, rank_ratio=USUAL_RANK_RATIO), USUAL_RANK_RATIO))
    found: dict[str, tuple[MetaModel, dict[str, Any]]] = {}
    if meta.config is not None and meta.config.cache is not None:
        found["as the checkpoint says"] = (meta, {})
    for of, ratio in models:
        for bits in USUAL_BITS if ratio is None else USUAL_BITS[:3]:
            found[name_of(of, {"bits": bits}, ratio)] = (of, {"bits": bits})
    return found


def name_of(meta: MetaModel, fields: dict[str, Any], rank_ratio: float | None) -> str:
    """A row's name: what the cache holds, and in which form."""
    latent = meta.config is not None and meta.config.compresses
    held = "latents" if latent else "keys and values"
    ratio = "" if rank_ratio is None else f" of rank ratio {rank_ratio}"
    named = [
        value if name == "scheme" else f"{value} bit" if name == "bits" else f"{name.replace('_', ' ')} {value}"
        for name, value in fields.items()
    ]
    if fields.get("bits") == 16 and "scheme" not in fields:
        named[0] = str(meta.dtype).removeprefix("torch.")
    return ", ".join([f"{held}{ratio}", *named])


def length_notes(config: PretrainedConfig, tokens: int) -> list[str]:
    """A warning for more tokens than the model has positions."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        return [f"{tokens:,} tokens are more than the {limit:,} positions that the model was made for"]
    return []


def text(model: str, rows: dict[str, MemoryEstimate], decoding: bool) -> str:
    """The table for people, a dense `DynamicCache` first."""
    first = next(iter(rows.values()))
    state = "with memory spare for the next tokens" if decoding else "right after the prompt"
    table = [["DynamicCache", human_bytes(first.dense_cache_bytes), "100.0%", "", "", ""]]
    for name, row in rows.items():
        cells = [human_bytes(row.cache_bytes), f"{row.share_of_dense:.1%}", f"{row.bits_per_element:.2f}"]
        both = ["unknown" if size is None else human_bytes(size) for size in (row.weights_bytes, row.total)]
        table.append([name, *cells, *both])
    header = ["", "cache", "of dense", "bits an element", "weights", "with weights"]
    return f"{model}: {first.batch} x {first.tokens:,} tokens, {first.dtype}, {state}\n\n{text_table(header, table)}"
