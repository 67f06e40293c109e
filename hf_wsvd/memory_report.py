"""Where the bytes of a cache are: by layer and by kind, adding up to what torch has allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .latent_layers import LatentMixin
from .storage import Codec, Store
from .storage.token_buffer import TokenBuffer


KINDS = ("payload", "scales", "window", "places", "rotary_rows", "constants", "other", "slack")


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer.

    Attributes:
        layer: decoder layer number.
        layer_class: name of the cache layer's class.
        payload: tokens in the form in which they are kept.
        scales: what turns packed tokens back into numbers.
        window: tokens kept in the model's dtype beside packed ones (sink, newest).
        places: where in its store each token is, in batches whose rows have their images in different places.
        rotary_rows: cos and sin of the cached tokens, which latent layers share; in the first of them.
        constants: rotations and codebooks, which all layers share; in the first of them.
        other: everything else, such as lengths and the states of linear attention.
        slack: allocated for tokens to come.
    """

    layer: int
    layer_class: str
    payload: int = 0
    scales: int = 0
    window: int = 0
    places: int = 0
    rotary_rows: int = 0
    constants: int = 0
    other: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of all layers; `print` shows a table."""

    layers: list[LayerMemory]

    def sum(self, kind: str) -> int:
        """Bytes of one kind ("payload", "scales", ...) over all layers; ValueError for a kind that there is not."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not allowed; allowed: one of {KINDS}")
        return sum(getattr(layer, kind) for layer in self.layers)

    @property
    def total(self) -> int:
        """Equals `cache_nbytes`."""
        return sum(layer.total for layer in self.layers)

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {"layers": [vars(layer) for layer in self.layers], "total": self.total}

    def __str__(self) -> str:
        from .evaluate.tables import text_table

        kinds = [kind for kind in KINDS if self.sum(kind)]
        rows = [
            [
                f"{layer.layer} {layer.layer_class}",
                *(f"{getattr(layer, kind):,}" for kind in kinds),
                f"{layer.total:,}",
            ]
            for layer in self.layers
        ]
        rows.append(["all", *(f"{self.sum(kind):,}" for kind in kinds), f"{self.total:,}"])
        return text_table(["layer", *(kind.replace("_", " ") for kind in kinds), "bytes"], rows)


def memory_report(cache: Cache) -> MemoryReport:
    """The report of any cache; layers of transformers count as payload."""
    seen: set[int] = set()
    return MemoryReport([layer_memory(number, layer, seen) for number, layer in enumerate(cache.layers)])


def layer_memory(number: int, layer: object, seen: set[int]) -> LayerMemory:
    """Bytes of one layer, without the storages in `seen`, to which its own are added."""
    bytes_of = dict.fromkeys(KINDS, 0)
    used: dict[int, int] = {}
    kind_of: dict[int, str] = {}

    def note(kind: str, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()._cdata
        used[storage] = used.get(storage, 0) + size
        kind_of[storage] = kind

    for store in stores_of(layer):
        for piece in store.pieces():
            note(piece.kind, piece.tensor, piece.used)
    if isinstance(layer, LatentMixin) and layer.rows is not None:
        for store in stores_of(layer.rows):
            for piece in store.pieces():
                note("rotary_rows", piece.tensor, piece.used)
        for name in ("keys", "values") if not stores_of(layer.rows) and layer.rows.is_initialized else ():
            tensor = getattr(layer.rows, name)
            note("rotary_rows", tensor, tensor.nbytes)
    if not stores_of(layer) and isinstance(layer, CacheLayerMixin) and layer.is_initialized:
        for tensor in (layer.keys, layer.values):
            note("payload", tensor, tensor.nbytes)
    for tensor in allocations(layer):
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        kind = kind_of.get(storage._cdata, "other")
        size = min(used.get(storage._cdata, storage.nbytes()), storage.nbytes())
        bytes_of[kind] += size
        bytes_of["slack"] += storage.nbytes() - size
    return LayerMemory(number, type(layer).__name__, **bytes_of)


def stores_of(layer: object) -> tuple[Store, ...]:
    """The stores of a layer of ours that has tokens."""
    return layer.stores() if hasattr(layer, "stores") else ()


def allocations(layer: object) -> Iterator[Tensor]:
    """Every tensor that a cache layer holds."""
    yield from _tensors(layer, set())


def _tensors(value: object, visited: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        # Subclasses of quantization libraries hold their tensors as attributes and have no storage of their own.
        held = (
            [entry for entry in vars(value).values() if isinstance(entry, Tensor)] if type(value) is not Tensor else []
        )
        yield from held or [value]
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    entries: Iterable[object] = ()
    if isinstance(value, dict):
        entries = value.values()
    elif isinstance(value, list | tuple):
        entries = value
    elif isinstance(value, Store | TokenBuffer | Codec) or is_cache_layer(value):
        entries = vars(value).values()
    for entry in entries:
        yield from _tensors(entry, visited)


def is_cache_layer(value: object) -> bool:
    """Whether an object is a layer of a cache, of any kind (those of linear attention have a class of their own)."""
    return hasattr(value, "reorder_cache") and hasattr(value, "reset")
