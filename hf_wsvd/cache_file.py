"""A `WSVDCache` as one safetensors file. What is read is not trusted."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache_layers import GrowingLayer, GrowingSlidingWindowLayer
from .decoder import DecoderAttention, decoder_attentions
from .fingerprint import check_same, fingerprint
from .latent_layers import LatentDynamicLayer, LatentMixin, LatentSlidingWindowLayer
from .quantizer_config import CacheConfig
from .storage import Store
from .tensor_file import Entry, entries, expect, form, read_tensors, write_tensors
from .upgrade import share_rows
from .version import __version__


if TYPE_CHECKING:
    from .cache import WSVDCache

FORMAT_VERSION = 1
KEY = "key_value_cache"  # of the JSON in the file's metadata
KINDS: dict[str, type] = {
    "full": GrowingLayer,
    "sliding": GrowingSlidingWindowLayer,
    "latent": LatentDynamicLayer,
    "latent_sliding": LatentSlidingWindowLayer,
}
TOKEN_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32)}
SIDES = ("key", "value")
ROWS = ("cos", "sin")
LARGEST = 2**31  # of any count in a header


# Writing ------------------------------------------------------------------------------------------------------------


def save_cache(cache: WSVDCache, path: str | PathLike[str], input_ids: Tensor | None) -> None:
    """`WSVDCache.save`."""
    model = cache.model()
    if model is None:
        raise ValueError(
            "this cache cannot be saved: the model that it was made for is gone, whose weights it records"
        )
    if cache.offloading:
        raise ValueError("an offloading cache cannot be saved: make it without offloading=True")
    names = {kind: name for name, kind in KINDS.items()}
    for number, layer in enumerate(cache.layers):
        if type(layer) not in names:
            raise ValueError(f"this cache cannot be saved: layer {number} is a {type(layer).__name__}")
    length, batch = int(cache.get_seq_length()), 0
    rows = list({id(layer.rows): layer.rows for layer in cache.layers if rows_of(layer)}.values()) if length else []
    tensors: list[Entry] = []
    layers = []
    for number, layer in enumerate(cache.layers):
        record = {"kind": names[type(layer)], "window": window_of(layer), "record_past": records_past(layer)}
        if length:
            batch = batch or layer.key_store.batch if layer.stores() else 0
            check_layer(number, layer, batch, length)
            for side, store in zip(SIDES, layer.stores()):
                record[side] = {"heads": store.heads, "width": store.width, "dtype": dtype_name(store.dtype)}
                tensors += entries(f"layers.{number}.{side}", store.state())
            record["rows"] = rows.index(layer.rows) if rows_of(layer) else None
        layers.append(record)
    for number, held in enumerate(rows):
        tensors += entries(f"rows.{number}", {n: s.state()["tokens"] for n, s in zip(ROWS, held.stores())})
    if input_ids is not None:
        check_ids(input_ids, model, batch, length)
        tensors += entries("input_ids", {"tokens": input_ids.to(torch.int64)})
    header = {
        "version": FORMAT_VERSION,
        "hf_wsvd": __version__,
        "cache_config": cache.cache_config.to_dict(),
        "model": fingerprint(model),
        "batch": batch,
        "length": length,
        "layers": layers,
        "rows": len(rows),
    }
    write_tensors(Path(path), KEY, header, tensors)


def rows_of(layer: Any) -> Any:
    """The layer of rotary rows; None for a layer without."""
    return getattr(layer, "rows", None)


def window_of(layer: Any) -> int | None:
    """Tokens that a query sees at most; None for all."""
    return getattr(layer, "sliding_window", None)


def records_past(layer: Any) -> bool:
    """Whether a sliding layer keeps tokens beyond its window, for a crop to come."""
    return bool(getattr(layer, "record_past", False))


def check_layer(number: int, layer: Any, batch: int, length: int) -> None:
    """Raise ValueError unless the stores of a filled layer hold what a cache of so many tokens holds."""
    expect(bool(layer.stores()), f"layer {number} holds no tokens, others hold {length}")
    expect(layer.get_seq_length() == length, f"layer {number} has seen {layer.get_seq_length()} tokens, not {length}")
    least = most = length
    if layer.is_sliding:
        least = min(length, layer.sliding_window - 1)
        most = length if layer.record_past else least
    stores = {"key": layer.key_store, "value": layer.value_store}
    kept = len(layer.key_store)
    if rows_of(layer) is not None:
        stores |= {"rows": layer.rows.key_store, "rows (sin)": layer.rows.value_store}
    for name, store in stores.items():
        right = len(store) == kept and least <= kept <= most
        right = right and (store.batch == batch or (name.startswith("rows") and store.batch == 1))
        found = f"{store.batch} sequences of {len(store)} tokens"
        expect(right, f"{name} of layer {number} holds {found}, wanted {batch} of {least} to {most}")


def check_ids(input_ids: Tensor, model: PreTrainedModel, batch: int, length: int) -> None:
    """Raise ValueError unless these are token ids of all sequences of a cache, and perhaps of more tokens."""
    right = input_ids.ndim == 2 and input_ids.dtype in (torch.int64, torch.int32)
    right = right and input_ids.shape[0] == batch and input_ids.shape[1] >= length
    expect(right, f"input_ids are {form(input_ids)}, wanted [{batch}, at least {length}] int64")
    table = model.get_input_embeddings()
    count = getattr(table, "num_embeddings", None) or LARGEST
    expect(input_ids.numel() == 0 or int(input_ids.min()) >= 0, "input_ids are negative")
    expect(input_ids.numel() == 0 or int(input_ids.max()) < count, f"input_ids reach {int(input_ids.max())}")


# Reading ------------------------------------------------------------------------------------------------------------


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
    """Bring a new cache to the state of a file, whose model has been compared. Takes what it reads out of `tensors`."""
    length, batch = count_of(header, "length"), count_of(header, "batch")
    expect((length == 0) == (batch == 0), f"{batch} sequences of {length} tokens")
    records = header.get("layers")
    expect(isinstance(records, list) and len(records) == len(cache.layers), "another number of layers")
    attentions = {attention.layer: attention for attention in decoder_attentions(model)}
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
    """Give an empty layer the stores of a file."""
    like = []
    for side in SIDES:
        found = record.get(side)
        expect(isinstance(found, dict), f"the {side} of layer {number} has no record")
        heads, width = count_of(found, "heads"), count_of(found, "width")
        name = found.get("dtype")
        expect(isinstance(name, str) and name in TOKEN_DTYPES, f"dtype={name!r:.80} in layer {number}")
        dtype = TOKEN_DTYPES[name]
        if attention is not None:
            projection = getattr(attention.module, f"{side[0]}_proj")
            wanted = attention.heads, projection.rank if isinstance(layer, LatentMixin) else attention.head_dim
            message = (
                f"the {side} of layer {number} has {heads} heads of width {width}, not {wanted[0]} of {wanted[1]}"
            )
            expect((heads, width) == wanted, message)
            dtype = projection.weight.dtype if projection.weight.dtype in TOKEN_DTYPES.values() else dtype
        expect(heads > 0 and width > 0, f"the {side} of layer {number} has {heads} heads of width {width}")
        like.append((TOKEN_DTYPES[name], torch.empty((size[0], heads, 0, width), dtype=dtype, device="meta")))
    layer.lazy_initialization(*(tokens for _, tokens in like))
    layer.device = device
    for side, store, (dtype, tokens) in zip(SIDES, layer.stores(), like):
        prefix = f"layers.{number}.{side}."
        state = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        load_store(prefix, store, state, dtype, device)
    if layer.is_sliding:
        layer.cumulative_length = size[1]


def load_store(prefix: str, store: Store, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Fill a store. Tokens that were kept in the saving model's `dtype` come to that of this one."""
    for name, value in state.items():
        whole = name.rpartition(".")[2] in ("tokens", "recent") and value.dtype == dtype
        state[name] = value.to(device, store.dtype if whole else value.dtype)
    try:
        store.load_state(state)
    except ValueError as error:
        raise ValueError(f"{prefix.removesuffix('.')}: {error}") from error


def fill_rows(cache: WSVDCache, header: dict[str, Any], tensors: dict[str, Tensor], size: tuple[int, int]) -> None:
    """Fill the rotary rows. Layers may share them otherwise than when they were saved, on other devices."""
    count = count_of(header, "rows")
    expect(count <= len(cache.layers), f"rows={count}")
    held = [{name: tensors.pop(f"rows.{number}.{name}", None) for name in ROWS} for number in range(count)]
    filled: dict[int, int] = {}
    for number, (layer, record) in enumerate(zip(cache.layers, header["layers"])):
        source = record.get("rows")
        if rows_of(layer) is None:
            expect(source is None, f"layer {number} has rotary rows {source!r:.80}")
            continue
        expect(type(source) is int and 0 <= source < count, f"layer {number} has rotary rows {source!r:.80}")
        first = filled.setdefault(id(layer.rows), source)
        same = first == source or all(torch.equal(held[first][name], held[source][name]) for name in ROWS)
        expect(same, f"layers that share rotary rows have rows {first} and {source}, which differ")
        if layer.owns_rows:
            fill_row_layer(layer, source, held[source], size)
    expect(set(range(count)) <= {record.get("rows") for record in header["layers"]}, "rotary rows of no layer")


def fill_row_layer(layer: LatentMixin, number: int, held: dict[str, Tensor | None], size: tuple[int, int]) -> None:
    """Fill the rows that `layer` owns from `cos` and `sin`, `[B or 1, 1, S, d/2]`."""
    for name, value in held.items():
        expect(value is not None, f"it lacks rows.{number}.{name}")
        right = value.ndim == 4 and value.shape[1] == 1 and value.shape[0] in (1, size[0]) and value.shape[3] > 0
        right = right and value.dtype in TOKEN_DTYPES.values() and value.shape == held["cos"].shape
        expect(right and bool(value.isfinite().all()), f"rows.{number}.{name} is {form(value)}, or not finite")
    tokens = [held[name].to(layer.device, layer.key_store.dtype) for name in ROWS]
    layer.rows.lazy_initialization(*(value[:, :, :0] for value in tokens))
    for store, value in zip(layer.rows.stores(), tokens):
        store.load_state({"tokens": value})
    if layer.is_sliding:
        layer.rows.cumulative_length = size[1]


def device_of(model: PreTrainedModel, attention: DecoderAttention | None) -> torch.device:
    """Where a layer computes, also where its weights are offloaded."""
    if attention is None:
        return model.device
    device = attention.module.k_proj.weight.device
    if device.type == "meta":
        hook = getattr(attention.module.k_proj, "_hf_hook", None)
        return torch.empty(0, device=getattr(hook, "execution_device", None) or "cpu").device
    return device


def count_of(record: dict[str, Any], name: str) -> int:
    """A number of things; ValueError for anything else that JSON can hold."""
    value = record.get(name)
    expect(type(value) is int and 0 <= value < LARGEST, f"{name}={value!r:.80}")
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a header has for a dtype of tokens. ValueError for other dtypes."""
    name = str(dtype).removeprefix("torch.")
    expect(name in TOKEN_DTYPES, f"tokens in {name} cannot be saved")
    return name
