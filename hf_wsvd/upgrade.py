"""From the empty stock layers of any cache to layers with latents or packed storage, in place."""

from __future__ import annotations

from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .cache_layers import (
    GrowingLayer,
    GrowingSlidingWindowLayer,
)
from .latent_layers import (
    LatentDynamicLayer,
    LatentMixin,
    LatentPackedStaticLayer,
    LatentPackedStaticSlidingWindowLayer,
    LatentSlidingWindowLayer,
    LatentStaticLayer,
    LatentStaticSlidingWindowLayer,
)
from .quantizer_config import LayerStorage
from .static_layers import PackedStaticLayer, PackedStaticSlidingWindowLayer
from .storage import check_static


# (latent, packed) to the class that takes the place of a stock one.
SUCCESSORS: dict[type, dict[tuple[bool, bool], type]] = {
    DynamicLayer: {
        (False, False): GrowingLayer,
        (False, True): GrowingLayer,
        (True, False): LatentDynamicLayer,
        (True, True): LatentDynamicLayer,
    },
    DynamicSlidingWindowLayer: {
        (False, False): GrowingSlidingWindowLayer,
        (False, True): GrowingSlidingWindowLayer,
        (True, False): LatentSlidingWindowLayer,
        (True, True): LatentSlidingWindowLayer,
    },
    StaticLayer: {
        (False, True): PackedStaticLayer,
        (True, False): LatentStaticLayer,
        (True, True): LatentPackedStaticLayer,
    },
    StaticSlidingWindowLayer: {
        (False, True): PackedStaticSlidingWindowLayer,
        (True, False): LatentStaticSlidingWindowLayer,
        (True, True): LatentPackedStaticSlidingWindowLayer,
    },
}


def upgraded(layer: CacheLayerMixin, latent: bool, storage: LayerStorage) -> CacheLayerMixin | None:
    """A layer of ours with the limits and state of an empty stock layer; None where there is none of its kind.

    Raises:
        ValueError: storage that a layer of fixed size cannot have.
    """
    successor = SUCCESSORS.get(type(layer), {}).get((latent, not storage.whole))
    if successor is None or (layer.is_initialized and int(layer.get_seq_length()) > 0):
        return None
    if isinstance(layer, StaticLayer):
        check_static(storage.key, layer.is_sliding)
        check_static(storage.value, layer.is_sliding)
    new = successor.__new__(successor)
    state = {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}
    vars(new).update(state)
    if layer.is_sliding:  # the first tokens leave its window
        storage = storage._replace(
            key=storage.key._replace(sink_length=0), value=storage.value._replace(sink_length=0)
        )
    new.storage = storage
    # A static layer may have been given dense shapes ahead of time (`early_initialization`): allocate anew.
    new.keys = new.values = None
    new.is_initialized = False
    return new


def latent_layer(cache: object, layer_idx: int, row_key: tuple | None, storage: LayerStorage) -> LatentMixin | None:
    """The latent layer of `cache` for decoder layer `layer_idx`, upgrading an empty stock layer in place.

    Args:
        row_key: what layers must share to share rotary rows (device and kind of rotation); None without rotation.
        storage: of a layer that is not latent yet.

    Returns:
        None where latents cannot be held: no cache, a cache of another kind, or dense keys in it already.
    """
    if not isinstance(cache, Cache):
        return None
    create_layers(cache, layer_idx + 1)
    layer = cache.layers[layer_idx]
    if not isinstance(layer, LatentMixin):
        layer = upgraded(layer, True, storage)
        if layer is None:
            return None
        cache.layers[layer_idx] = layer
    if layer.rows is None and row_key is not None:
        share_rows(cache, layer, row_key)
    return layer


def create_layers(cache: Cache, count: int) -> None:
    """Let a cache that creates its layers as they are met have at least `count`."""
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) < count:
            cache.layers.append(cache.layer_class_to_replicate())


def share_rows(cache: Cache, layer: LatentMixin, row_key: tuple) -> None:
    """Give `layer` the rotary rows of an earlier layer with the same key and kind, or rows of its own."""
    layer.rows_key = (*row_key, layer.rows_class)
    for other in cache.layers:
        if isinstance(other, LatentMixin) and other.rows is not None and other.rows_key == layer.rows_key:
            layer.rows = other.rows
            return
    layer.rows, layer.owns_rows = layer.new_rows(), True
