"""Packed storage of keys and values: one contract, one file a scheme."""

from .build import check_static, make_static_store, make_store
from .codec import Codec, Packed
from .packed import append_both
from .static import StaticStore, clear_visible, static_stores
from .static_classes import counter_of
from .store import Piece, Store, id_of


__all__ = [
    "Codec",
    "Packed",
    "Piece",
    "StaticStore",
    "Store",
    "append_both",
    "check_static",
    "clear_visible",
    "counter_of",
    "id_of",
    "make_static_store",
    "make_store",
    "static_stores",
]
