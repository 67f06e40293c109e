"""The caches that the benchmarks compare, their names, and the bytes that they really hold."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache

from hf_wsvd import WSVDCache


@dataclass(frozen=True, eq=False)
class Setting:
    """One cache to measure.

    Attributes:
        kind: "DynamicCache" (of a compressed model: latents in the model's dtype), "QuantizedCache" or "WSVDCache".
        fields: what its constructor is given besides the model.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def scheme(self) -> str | None:
        """The scheme's or the backend's name; None for what is not quantized or follows from the bits."""
        return self.fields.get("backend") or self.fields.get("scheme")

    @property
    def bits(self) -> int | None:
        """Of the payload, if keys and values have the same."""
        fallback = 8 if self.scheme == "fp8" else 16 if self.scheme in ("bf16", "fp16") else None
        return self.fields.get("bits", self.fields.get("nbits", fallback))

    @property
    def side_bits(self) -> tuple[int | None, int | None]:
        """Of the keys' and of the values' payload."""
        return tuple(self.fields.get(name, self.bits) for name in ("key_bits", "value_bits"))

    @property
    def options(self) -> dict[str, Any]:
        """What is neither scheme nor bits."""
        known = ("backend", "scheme", "bits", "nbits", "key_bits", "value_bits")
        return {name: value for name, value in self.fields.items() if name not in known}

    @property
    def label(self) -> str:
        """As tables show it: `hadamard 2 bit, group_size 32`."""
        key, value = self.side_bits
        bits = "" if key is None else f"{key} bit" if key == value else f"K{key} V{value} bit"
        name = self.scheme if self.kind == "WSVDCache" else " ".join(filter(None, [self.kind, self.scheme]))
        return ", ".join(
            [
                " ".join(filter(None, [name or "default", bits])),
                *(f"{name} {value}" for name, value in self.options.items()),
            ]
        )

    def make(self, model: PreTrainedModel, **extra: Any) -> Cache:
        """An empty cache for `model`; `extra` goes to a WSVDCache alone."""
        if self.kind == "WSVDCache":
            return WSVDCache(model, **self.fields, **extra)
        if self.kind == "QuantizedCache":
            return QuantizedCache(config=model.config, **self.fields)
        return DynamicCache(config=model.config)


REFERENCE = Setting("DynamicCache")
QUANTIZED = [
    *(Setting("QuantizedCache", {"backend": "hqq", "nbits": bits}) for bits in (8, 4, 2)),
    *(Setting("QuantizedCache", {"backend": "quanto", "nbits": bits}) for bits in (4, 2)),
    Setting("QuantizedCache", {"backend": "fp8"}),
]
# Every scheme at every number of bits.
SCHEMES = [
    Setting("WSVDCache", {"scheme": "bf16"}),
    Setting("WSVDCache", {"scheme": "fp16"}),
    Setting("WSVDCache", {"scheme": "fp8"}),
    *(Setting("WSVDCache", {"scheme": "minmax", "bits": bits}) for bits in (8, 4, 3, 2)),
    *(Setting("WSVDCache", {"scheme": "hadamard", "bits": bits}) for bits in (8, 4, 3, 2)),
    *(Setting("WSVDCache", {"scheme": "turboquant", "bits": bits}) for bits in (4, 3, 2)),
    *(Setting("WSVDCache", {"scheme": "kivi", "bits": bits}) for bits in (4, 2)),
]
# Where options may help: few bits.
VARIANTS = [
    *(Setting("WSVDCache", {"scheme": "minmax", "bits": bits, "group_size": 16}) for bits in (3, 2)),
    *(Setting("WSVDCache", {"scheme": "hadamard", "bits": bits, "group_size": 16}) for bits in (3, 2)),
    # The other of the two from what the cache takes by itself: symmetric for latents, asymmetric for dense heads.
    *(
        Setting("WSVDCache", {"scheme": "minmax", "bits": bits, "symmetric": symmetric})
        for bits in (4, 3, 2)
        for symmetric in (True, False)
    ),
    *(Setting("WSVDCache", {"scheme": name, "key_bits": 4, "value_bits": 2}) for name in ("minmax", "hadamard")),
    Setting("WSVDCache", {"scheme": "hadamard", "bits": 2, "sink_length": 4, "residual_length": 32}),
    Setting("WSVDCache", {"scheme": "kivi", "bits": 2, "residual_length": 32}),
]


def held_bytes(value: Any) -> int:
    """Bytes of every tensor storage that can be reached from `value`, each counted once.

    Unlike `hf_wsvd.cache_nbytes` this enters tensors that are built out of others (optimum-quanto's), and any object.
    """
    storages: dict[tuple[str, int], int] = {}
    seen: set[int] = set()

    def visit(entry: Any) -> None:
        if isinstance(entry, torch.nn.Module | type) or id(entry) in seen:
            return
        seen.add(id(entry))
        if isinstance(entry, Tensor):
            if hasattr(entry, "__tensor_flatten__"):
                for name in entry.__tensor_flatten__()[0]:
                    visit(getattr(entry, name))
            else:
                storage = entry.untyped_storage()
                storages[(str(entry.device), storage.data_ptr())] = storage.nbytes()
        elif isinstance(entry, dict):
            for item in entry.values():
                visit(item)
        elif isinstance(entry, list | tuple):
            for item in entry:
                visit(item)
        elif hasattr(entry, "__dict__"):
            visit(vars(entry))

    visit(value)
    return sum(storages.values())


def size_of(cache: Cache) -> int:
    """What the cache says of itself if it does, else what can be reached from its layers."""
    size = getattr(cache, "nbytes", None)
    return held_bytes(cache.layers) if size is None else size


def dense_elements(model: PreTrainedModel, tokens: int) -> int:
    """Numbers that a dense cache of `tokens` tokens (of all sequences together) holds."""
    text = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * width * tokens
