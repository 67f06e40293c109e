"""A `WSVDCache` as one safetensors file: its form, and how it is written."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .cache_layers import GrowingLayer, GrowingSlidingWindowLayer
from .fingerprint import fingerprint
from .latent_layers import LatentDynamicLayer, LatentSlidingWindowLayer
from .tensor_file import Entry, entries, expect, form, write_tensors
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
TOKEN_DTYPES = {
    **{"float16": torch.float16, "bfloat16": torch.bfloat16},
    **{"float32": torch.float32, "float64": torch.float64},
}
SIDES = ("key", "value")
ROWS = ("cos", "sin")


def save_cache(cache: WSVDCache, path: str | PathLike[str], input_ids: Tensor | None) -> None:
    """`WSVDCache.save`."""
    model = cache._model()
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
            expect(bool(layer.stores()), f"layer {number} holds no tokens, others hold {length}")
            batch = batch or layer.key_store.batch
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
    count = getattr(model.get_input_embeddings(), "num_embeddings", 2**63)
    lowest, highest = (int(number) for number in input_ids.aminmax()) if input_ids.numel() else (0, 0)
    expect(lowest >= 0 and highest < count, f"input_ids run from {lowest} to {highest}, of {count} tokens")


def dtype_name(dtype: torch.dtype) -> str:
    """The name that a header has for a dtype of tokens. ValueError for other dtypes."""
    name = str(dtype).removeprefix("torch.")
    expect(name in TOKEN_DTYPES, f"tokens in {name} cannot be saved")
    return name
