"""A `WSVDCache` out of a file, which is not trusted."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache_file import (
    FORMAT_VERSION,
    KEY,
    KINDS,
    ROWS,
    SIDES,
    TOKEN_DTYPES,
    check_ids,
    check_layer,
    rows_of,
    window_of,
)
from .decoder import DecoderAttention, decoder_attentions
from .fingerprint import check_same
from .latent_layers import LatentMixin
from .quantizer_config import CacheConfig
from .storage import Store
from .tensor_file import expect, form, read_tensors
from .upgrade import share_rows


if TYPE_CHECKING:
    from .cache import WSVDCache

# Where the model does not tell: a codec's constants grow with the square of its width.
LARGEST_HEADS, LARGEST_WIDTH, MOST_WIDTHS = 4096, 1024, 4


def load_cache(
    cls: type[WSVDCache], path: str | PathLike[str], model: PreTrainedModel, device: torch.device | str | None
) -> WSVDCache:
    """`WSVDCache.load`."""
    path = Path(path)
    header, tensors = read_tensors(path, KEY)
    try:
        expect(header.get("version") == FORMAT_VERSION, f"format version {header.get('version')!r:.80}")
        check_same(header.get("model"), model)
        config = header.get("cache_config")
        expect(isinstance(config, dict), f"cache_config={config!r:.80}")
        guard_map = config.get("guard_map")  # a path would have another file of this machine read
        expect(guard_map is None or isinstance(guard_map, dict), f"guard_map={guard_map!r:.80}")
        cache = cls(model, cache_config=CacheConfig.parse(config))
        fill(cache, model, header, tensors, None if device is None else torch.empty(0, device=device).device)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error
    return cache


def fill(
    cache: WSVDCache,
    model: PreTrainedModel,
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    device: torch.device | None,
) -> None:
    """Bring a new cache of the right model to the state of a file, taking what is read out of `tensors`."""
    length, batch = count_of(header, "length"), count_of(header, "batch")
    expect((length == 0) == (batch == 0), f"{batch} sequences of {length} tokens")
    records = header.get("layers")
    expect(isinstance(records, list) and len(records) == len(cache.layers), "another number of layers")
    attentions = {attention.layer: attention for attention in decoder_attentions(model)}
    sides = [
        record.get(side)
        for number, record in enumerate(records)
        if number not in attentions and isinstance(record, dict)
        for side in SIDES
    ]
    widths = {str(side.get("width"))[:20] for side in sides if isinstance(side, dict)}
    expect(len(widths) <= MOST_WIDTHS, f"heads have {len(widths)} different widths")
    for number, (layer, record) in enumerate(zip(cache.layers, records)):
        check_kind(number, layer, record)
        if record["record_past"]:
            layer.activate_past_recording()
        if length:
            attention = attentions.get(number)
            place = device or device_of(model, attention)
            fill_layer(number, layer, record, tensors, attention, place, (batch, length))
            if isinstance(layer, LatentMixin):
                layer.is_empty = False
                binding = attention.module._wsvd
                if binding.layout.rotation != "none":
                    share_rows(cache, layer, (str(place), binding.row_group))
    fill_rows(cache, header, tensors, (batch, length))
    for number, layer in enumerate(cache.layers if length else ()):
        check_layer(number, layer, batch, length)
    input_ids = tensors.pop("input_ids.tokens", None)
    if input_ids is not None:
        check_ids(input_ids, model, batch, length)
        cache.input_ids = input_ids.to(device or model.get_input_embeddings().weight.device, copy=True)
    expect(not tensors, f"it holds unknown tensors: {', '.join(sorted(tensors)[:3])}")


def check_kind(number: int, layer: Any, record: Any) -> None:
    """Raise ValueError unless a layer's record is of the kind that the model's own cache has there."""
    expect(isinstance(record, dict), f"layer {number} has no record")
    kind = record.get("kind")
    expect(isinstance(kind, str) and KINDS.get(kind) is type(layer), f"layer {number} is {kind!r:.80}")
    window, past = record.get("window"), record.get("record_past")
    expect(window == window_of(layer), f"the window of layer {number} is {window!r:.80}, not {window_of(layer)}")
    expect(isinstance(past, bool) and (layer.is_sliding or not past), f"record_past={past!r:.80} in layer {number}")


def fill_layer(
    number: int,
    layer: Any,
    record: dict[str, Any],
    tensors: dict[str, Tensor],
    attention: DecoderAttention | None,
    device: torch.device,
    size: tuple[int, int],
) -> None:
    """Give an empty layer the stores of a file; `size` is batch and length."""
    dtypes, empty = [], []
    for side in SIDES:
        found = record.get(side)
        expect(isinstance(found, dict), f"the {side} of layer {number} has no record")
        dtypes.append(token_dtype(found, number))
        heads, width, dtype = shape_of(
            f"{side} of layer {number}", found, attention, side, isinstance(layer, LatentMixin)
        )
        empty.append(torch.empty((size[0], heads, 0, width), dtype=dtype or dtypes[-1], device=device))
    layer.lazy_initialization(*empty)
    for side, store, dtype in zip(SIDES, layer.stores(), dtypes):
        prefix = f"layers.{number}.{side}."
        state = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        load_store(prefix, store, state, dtype, device)
    if layer.is_sliding:
        layer.cumulative_length = size[1]


def token_dtype(record: dict[str, Any], number: int) -> torch.dtype:
    """The dtype that a record names."""
    name = record.get("dtype")
    expect(isinstance(name, str) and name in TOKEN_DTYPES, f"dtype={name!r:.80} in layer {number}")
    return TOKEN_DTYPES[name]


def shape_of(
    label: str, record: dict[str, Any], attention: DecoderAttention | None, side: str, latent: bool
) -> tuple[int, int, torch.dtype | None]:
    """Heads, width and dtype of a side's tokens in this model; ValueError for a record of others.

    Where the layer is of a kind that hf_wsvd does not know, the record tells heads and width, and the dtype is None.
    """
    if attention is None:
        heads, width = count_of(record, "heads", LARGEST_HEADS), count_of(record, "width", LARGEST_WIDTH)
        expect(heads > 0 and width > 0, f"{label} has {heads} heads of width {width}")
        return heads, width, None
    projection = getattr(attention.module, f"{side[0]}_proj")
    heads, width = attention.heads, projection.width if latent else attention.head_dim
    found = record.get("heads"), record.get("width")
    expect(found == (heads, width), f"{label} has {str(found)[:80]} as heads and width, not {heads} and {width}")
    dtype = projection.weight.dtype
    return heads, width, dtype if dtype in TOKEN_DTYPES.values() else None


def load_store(prefix: str, store: Store, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Fill a store. Tokens that were kept whole, in the saving model's `dtype`, come to that of this one."""
    for name, value in state.items():
        whole = name.rpartition(".")[2] in ("tokens", "recent")
        expect(not whole or value.dtype == dtype, f"{prefix}{name} is {form(value)}, wanted {dtype}")
        state[name] = value.to(device, store.dtype if whole else value.dtype)
    try:
        store.load_state(state)
    except ValueError as error:
        raise ValueError(f"{prefix.removesuffix('.')}: {error}") from error


def fill_rows(cache: WSVDCache, header: dict[str, Any], tensors: dict[str, Tensor], size: tuple[int, int]) -> None:
    """Fill the rotary rows. Layers may share them otherwise than when they were saved, on other devices."""
    count = count_of(header, "rows", len(cache.layers))
    held = [take_rows(number, tensors, size[0]) for number in range(count)]
    filled: dict[int, int] = {}
    used = set()
    for number, (layer, record) in enumerate(zip(cache.layers, header["layers"])):
        source = record.get("rows")
        if rows_of(layer) is None:
            expect(source is None, f"layer {number} has rotary rows {source!r:.80}")
            continue
        expect(type(source) is int and 0 <= source < count, f"layer {number} has rotary rows {source!r:.80}")
        used.add(source)
        first = filled.setdefault(id(layer.rows), source)
        pairs = zip(held[first], held[source])
        same = first == source or all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
        expect(same, f"layers that share rotary rows have rows {first} and {source}, which differ")
        if layer.owns_rows:
            fill_row_layer(layer, held[source], token_dtype(record["key"], number), size[1])
    expect(len(used) == count, f"of rotary rows {count}, layers use {len(used)}")


def take_rows(number: int, tensors: dict[str, Tensor], batch: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[B or 1, 1, S, d/2]`, checked."""
    names = [f"rows.{number}.{name}" for name in ROWS]
    cos, sin = (tensors.pop(name, None) for name in names)
    for name, value in zip(names, (cos, sin)):
        expect(value is not None, f"it lacks {name}")
        right = value.ndim == 4 and value.shape[1] == 1 and value.shape[0] in (1, batch) and value.shape[3] > 0
        right = right and value.dtype in TOKEN_DTYPES.values() and (value.shape, value.dtype) == (cos.shape, cos.dtype)
        expect(right and bool(value.isfinite().all()), f"{name} is {form(value)}, or not finite")
    return cos, sin


def fill_row_layer(layer: LatentMixin, rows: tuple[Tensor, Tensor], dtype: torch.dtype, length: int) -> None:
    """Fill the rows that `layer` owns; those in the saving model's `dtype` come to that of this one."""
    dtype = layer.key_store.dtype if rows[0].dtype == dtype else rows[0].dtype
    rows = [value.to(layer.device, dtype) for value in rows]
    layer.rows.lazy_initialization(*(value[:, :, :0] for value in rows))
    for store, value in zip(layer.rows.stores(), rows):
        store.load_state({"tokens": value})
    if layer.is_sliding:
        layer.rows.cumulative_length = length


def device_of(model: PreTrainedModel, attention: DecoderAttention | None) -> torch.device:
    """Where a layer computes, also where its weights are offloaded."""
    if attention is None:
        return model.device
    device = attention.module.k_proj.weight.device
    if device.type == "meta":
        hook = getattr(attention.module.k_proj, "_hf_hook", None)
        return torch.empty(0, device=getattr(hook, "execution_device", None) or "cpu").device
    return device


def count_of(record: dict[str, Any], name: str, largest: int = 2**31) -> int:
    """A number of things; ValueError for anything else that JSON can hold."""
    value = record.get(name)
    expect(type(value) is int and 0 <= value <= largest, f"{name}={value!r:.80}")
    return value
