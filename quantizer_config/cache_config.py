"""`CacheConfig`: in which form keys and values (or their latents) are kept, layer by layer."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from .guard_map import GuardMap
from .storage_spec import (
    ALL_BITS,
    GROUPED_SCHEMES,
    KIVI_GROUP_SIZE,
    KIVI_RESIDUAL_LENGTH,
    SCHEME_BITS,
    WHOLE_LAYER,
    LayerStorage,
    StorageSpec,
)


LAYER_FIELDS = ("scheme", "bits", "key_bits", "value_bits", "group_size", "symmetric")


@dataclass
class CacheConfig:
    """Storage of a `WSVDCache`.

    Args:
        scheme: "bf16", "fp16" (a cast), "fp8" (e4m3, one scale a head), "minmax" (integers, a scale a token and
            head), "hadamard" (the same after a rotation), "turboquant" (rotation and Lloyd-Max codebook) or "kivi"
            (keys per channel in groups of tokens, values per token). None: by `bits`, see there.
        bits: 16, 8, 4, 3 or 2; None with neither scheme nor bits keeps the model's dtype. Without a `scheme`: 16 keeps
            the model's dtype, 8 is "minmax", fewer are "minmax" for latents (whose channels are even) and "hadamard"
            for dense heads.
        key_bits, value_bits: the same for K or V alone; each takes precedence over `bits`.
        group_size: channels that share a scale ("minmax", "hadamard": a divisor of the head's width, None for the
            whole head; "kivi": tokens of a key group and channels of a value group, None for 32 or, where that does
            not divide the head's width, the next smaller number of channels that does).
        symmetric: zero in the middle of the range, one number a scale instead of two ("minmax", "hadamard"). None:
            true at 8 bits, else false.
        sink_length: first tokens kept in the model's dtype (layers of full attention).
        residual_length: newest tokens kept in the model's dtype; None: 128 for "kivi", else 0.
        skip_layers: decoder layers kept in the model's dtype; -1 is the last.
        skip_heads: decoder layer to the KV heads of it that are kept in the model's dtype.
        layers: decoder layer to fields of its own (scheme, bits, key_bits, value_bits, group_size, symmetric).
        text_bits: of tokens that are not of images or videos (16: the model's dtype), for a model that reads images;
            all other fields then say how tokens of images are kept, and windows are counted in tokens of their class.
            None: as image tokens; 16 with a `guard_map` over image tokens.
        guard_map: a `GuardMap` (or a dict of its fields, or the path of its JSON file): heads that keep more bits.
        prefill: what the first tokens of an empty cache attend to: "exact" keys and values, or "stored" ones as
            every later token reads them (then a prompt in pieces gives what it gives in one).

    Raises:
        ValueError: naming the field, the value given and what is allowed.
    """

    scheme: str | None = None
    bits: int | None = None
    key_bits: int | None = None
    value_bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    sink_length: int = 0
    residual_length: int | None = None
    skip_layers: list[int] | None = None
    skip_heads: dict[int, list[int]] | None = None
    layers: dict[int, dict[str, Any]] | None = None
    text_bits: int | None = None
    guard_map: GuardMap | dict[str, Any] | None = None
    prefill: str = "exact"

    def __post_init__(self):
        self._check_fields({name: getattr(self, name) for name in LAYER_FIELDS})
        self._count("sink_length", self.sink_length)
        if self.residual_length is not None:
            self._count("residual_length", self.residual_length)
        if self.text_bits is not None and (type(self.text_bits) is not int or self.text_bits not in ALL_BITS):
            self._fail("text_bits", self.text_bits, f"one of {ALL_BITS}, or None")
        self.guard_map = GuardMap.parse(self.guard_map)
        if self.prefill not in ("exact", "stored"):
            self._fail("prefill", self.prefill, "'exact' or 'stored'")
        if self.skip_layers is not None:
            if not isinstance(self.skip_layers, list | tuple):
                self._fail("skip_layers", self.skip_layers, "a list of decoder layer numbers")
            self.skip_layers = [self._layer("skip_layers", number) for number in self.skip_layers]
        self.skip_heads = self._by_layer("skip_heads", self.skip_heads, list | tuple, "a list of heads")
        for heads in (self.skip_heads or {}).values():
            for head in heads:
                self._count("skip_heads", head)
        self.layers = self._by_layer("layers", self.layers, dict, "a dict of fields")
        self._check_windows(self.scheme, self.group_size)
        self._check_use()
        self._check_guards()
        for number, fields in (self.layers or {}).items():
            unknown = set(fields) - set(LAYER_FIELDS)
            if unknown:
                self._fail(f"layers[{number}]", fields, f"a dict with keys of {LAYER_FIELDS}")
            try:
                fields = self._fields_of(number)
                self._check_fields(fields)
                self._check_windows(fields["scheme"], fields["group_size"])
            except ValueError as error:
                raise ValueError(str(error).replace("CacheConfig: ", f"CacheConfig: layers[{number}]: ", 1)) from None

    @classmethod
    def parse(cls, value: CacheConfig | dict[str, Any] | None) -> CacheConfig | None:
        """A config, or the dict form that JSON keeps of it. ValueError for anything else and for unknown keys."""
        if value is None or isinstance(value, CacheConfig):
            return value
        if not isinstance(value, dict):
            allowed = "a CacheConfig, a dict of its fields, or None"
            raise ValueError(f"CacheConfig: {value!r:.200} is not allowed; allowed: {allowed}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"CacheConfig: unknown field {name!r}{hint}; allowed: {known}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON has them (layer numbers are strings there)."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = {name: value for name, value in values.items() if value != getattr(CacheConfig, name)}
        fields = {
            name: {str(key): copy_of(entry) for key, entry in value.items()} if isinstance(value, dict) else value
            for name, value in changed.items()
        }
        return fields if self.guard_map is None else {**fields, "guard_map": self.guard_map.to_dict()}

    @property
    def by_class(self) -> bool:
        """Whether tokens of images are kept otherwise than those of text."""
        return self._text_bits() is not None

    def storage(self, layer: int, layers: int, latent: bool) -> LayerStorage:
        """Storage of decoder layer `layer` of `layers`.

        Args:
            latent: whether the layer holds latents.

        Raises:
            ValueError: layer numbers that the decoder does not have.
        """
        skipped = {self._within("skip_layers", number, layers) for number in self.skip_layers or ()}
        whole = {
            self._within("skip_heads", number, layers): heads for number, heads in (self.skip_heads or {}).items()
        }
        own = {self._within("layers", number, layers): number for number in self.layers or {}}
        for field, named, given in (("skip_heads", whole, self.skip_heads), ("layers", own, self.layers)):
            if len(named) < len(given or {}):
                self._fail(field, given, f"each of the {layers} decoder layers once")
        if self.guard_map is not None and len(self.guard_map.num_key_value_heads) != layers:
            allowed = f"a map of {layers} decoder layers"
            self._fail("guard_map", f"a map of {len(self.guard_map.num_key_value_heads)} decoder layers", allowed)
        if layer in skipped:
            return WHOLE_LAYER
        fields = self._fields_of(own.get(layer))
        heads = tuple(sorted(set(whole.get(layer, ()))))
        specs = (self._side_spec(fields, side, layer, latent, heads) for side in ("key", "value"))
        return LayerStorage(*specs, self.prefill)

    def _side_spec(
        self, fields: dict[str, Any], side: str, layer: int, latent: bool, whole_heads: tuple[int, ...]
    ) -> StorageSpec:
        """How one side of a layer is kept, guarded heads and text tokens included."""
        spec, text_bits = self._spec(fields, side, latent, whole_heads), self._text_bits()
        guards = () if self.guard_map is None else self.guard_map.groups(side, layer)

        def guarded(part: StorageSpec) -> StorageSpec:
            # A guarded head never has fewer bits than the others.
            specs = ((self._other_bits(fields, max(bits, part.bits), side, latent), heads) for bits, heads in guards)
            return part._replace(guards=() if part.scheme is None else tuple(specs))

        text = None if text_bits is None else self._other_bits(fields, text_bits, side, latent)
        if text is not None and self.guard_map is not None and self.guard_map.tokens == "all":
            text = guarded(text)
        spec = guarded(spec)
        if text == spec._replace(whole_heads=()):
            text = None
        # Heads that are to stay whole stay so for text too, where the rest of an image's tokens is whole anyway.
        return spec._replace(text=text, whole_heads=spec.whole_heads if text is None else whole_heads)

    def _text_bits(self) -> int | None:
        guarded = self.guard_map is not None and self.guard_map.tokens == "image"
        return 16 if self.text_bits is None and guarded else self.text_bits

    def _other_bits(self, fields: dict[str, Any], bits: int, side: str, latent: bool) -> StorageSpec:
        """A layer's storage at other bits: in its own scheme where that has them, without windows."""
        scheme = fields["scheme"]
        if scheme == "kivi" or bits not in SCHEME_BITS.get(scheme, ()):
            fields = {**fields, "scheme": None, "group_size": None}
        own = {"bits": bits, "key_bits": None, "value_bits": None, "symmetric": None}
        return self._spec({**fields, **own}, side, latent, ())._replace(sink_length=0, residual_length=0)

    def _spec(self, fields: dict[str, Any], side: str, latent: bool, whole_heads: tuple[int, ...]) -> StorageSpec:
        scheme, bits = fields["scheme"], fields[f"{side}_bits"] or fields["bits"]
        if bits == 16 and scheme not in ("bf16", "fp16"):
            scheme = None
        elif scheme is None and bits is not None:
            scheme = "minmax" if bits == 8 or latent else "hadamard"
        if scheme is None:
            return StorageSpec()
        if bits is None:
            bits = SCHEME_BITS[scheme][0]
        symmetric = fields["symmetric"]
        if symmetric is None:
            symmetric = scheme in ("minmax", "hadamard") and bits == 8
        residual = self.residual_length
        if residual is None:
            residual = KIVI_RESIDUAL_LENGTH if scheme == "kivi" else 0
        return StorageSpec(scheme, bits, fields["group_size"], symmetric, self.sink_length, residual, whole_heads)

    def _fields_of(self, number: int | None) -> dict[str, Any]:
        """The fields of LAYER_FIELDS for one layer. Its own bits go before the general bits of K and V."""
        own = (self.layers or {}).get(number, {})
        fields = {name: getattr(self, name) for name in LAYER_FIELDS}
        if own.get("bits") is not None:
            fields["key_bits"] = fields["value_bits"] = None
        return {**fields, **own}

    def _check_fields(self, fields: dict[str, Any]) -> None:
        scheme = fields["scheme"]
        if scheme is not None and (not isinstance(scheme, str) or scheme not in SCHEME_BITS):
            self._fail("scheme", scheme, f"one of {tuple(SCHEME_BITS)}, or None")
        allowed = ALL_BITS if scheme is None else tuple(sorted({16, *SCHEME_BITS[scheme]}, reverse=True))
        for name in ("bits", "key_bits", "value_bits"):
            bits = fields[name]
            if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int) or bits not in allowed):
                self._fail(name, bits, f"one of {allowed}" + (f" with scheme={scheme!r}" if scheme else ""))
        if scheme is not None and len(SCHEME_BITS[scheme]) > 1:
            given = fields["bits"] is not None or None not in (fields["key_bits"], fields["value_bits"])
            if not given:
                self._fail("bits", None, f"one of {SCHEME_BITS[scheme]} with scheme={scheme!r}")
        if fields["group_size"] is not None:
            self._count("group_size", fields["group_size"], 1)
            if scheme is not None and scheme not in GROUPED_SCHEMES:
                self._fail("group_size", fields["group_size"], f"None with scheme={scheme!r}")
        if fields["symmetric"] is not None and not isinstance(fields["symmetric"], bool):
            self._fail("symmetric", fields["symmetric"], "true, false or None")
        if fields["symmetric"] is not None and scheme not in (None, "minmax", "hadamard"):
            self._fail("symmetric", fields["symmetric"], f"None with scheme={scheme!r}")

    def _check_windows(self, scheme: str | None, group_size: int | None) -> None:
        """KIVI packs whole groups of keys out of its window."""
        if scheme == "kivi" and self.residual_length is not None:
            group_size = group_size or KIVI_GROUP_SIZE
            if self.residual_length < 1 or self.residual_length % group_size:
                allowed = f"a multiple of group_size = {group_size} with scheme='kivi'"
                self._fail("residual_length", self.residual_length, allowed)

    def _check_use(self) -> None:
        """Nothing is packed without bits or a scheme: options of packing would do nothing."""
        names = ("scheme", "bits", "key_bits", "value_bits", "layers")
        if all(getattr(self, name) is None for name in names):
            fields = ("group_size", "symmetric", "sink_length", "residual_length", "skip_layers", "skip_heads")
            for name in (*fields, "text_bits", "guard_map"):
                if getattr(self, name):
                    self._fail(name, getattr(self, name), "only together with bits or a scheme")

    def _check_guards(self) -> None:
        """Guards of no more bits than the other heads have would do nothing."""
        guards = list(self.guard_map or ())
        if guards and not self.layers and not any(guard.bits > self.side_bits(guard.side) for guard in guards):
            found = {guard.side: self.side_bits(guard.side) for guard in guards}
            self._fail("guard_map", f"guards of {max(guard.bits for guard in guards)} bits", f"more bits than {found}")

    def side_bits(self, side: str) -> int:
        """Bits of the "key" or "value" of layers without fields of their own."""
        spec = self._spec(self._fields_of(None), side, False, ())
        return spec.bits

    def _by_layer(self, field: str, value: Any, kind: Any, form: str) -> dict[int, Any] | None:
        """Integer keys, from JSON's strings too."""
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(entry, kind) for entry in value.values()):
            self._fail(field, value, f"a dict of decoder layer numbers to {form}")
        numbers = {self._layer(field, key): copy_of(entry) for key, entry in value.items()}
        if len(numbers) < len(value):
            self._fail(field, value, "each decoder layer number once")
        return numbers

    def _layer(self, field: str, number: Any) -> int:
        if isinstance(number, str) and number.removeprefix("-").isdecimal():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int):
            self._fail(field, number, "decoder layer numbers (negative ones count from the last)")
        return number

    def _within(self, field: str, number: int, layers: int) -> int:
        if not -layers <= number < layers:
            self._fail(field, number, f"decoder layer numbers from {-layers} to {layers - 1}")
        return number % layers

    def _count(self, field: str, value: Any, low: int = 0) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            self._fail(field, value, f"an integer of at least {low}")

    def _fail(self, field: str, value: Any, allowed: str):
        raise ValueError(f"CacheConfig: {field}={value!r:.200} is not allowed; allowed: {allowed}")


def copy_of(entry: dict | list | tuple) -> dict | list:
    """A copy that no caller holds."""
    return dict(entry) if isinstance(entry, dict) else list(entry)
