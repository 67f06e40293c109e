"""`WSVDConfig`: what is compressed, to which ranks, and what a checkpoint records about it."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .cache_config import CacheConfig
from .checks import (
    check_choice,
    check_heads_by_layer,
    check_int,
    check_names,
    check_number,
    check_ranks,
    check_ratio,
    fail,
)
from .guard_map import GuardMap
from .head_guard_config import HeadGuardConfig
from .layout import KeyLayout
from .low_precision_config import LowPrecisionConfig


FORMAT_VERSION = 5

METHODS = ("svd", "asvd", "svd_llm", "wsvd")
RANK_ALLOCATIONS = ("uniform", "gradient")
SELF_CHECKS = ("calibration", "probe", "none")
REFINEMENTS = ("none", "fisher", "distillation")
LATENT_ROTATIONS = ("none", "hadamard")

# Written by `to_dict` for readers of config.json, never read back.
INFORMATIVE_KEYS = {"quant_method", "hf_wsvd_version"}


class WSVDConfig(QuantizationConfigMixin):
    """Per-head low-rank latent KV cache (WSVD, arXiv 2604.02570).

    Every K and V head of the text decoder is cut to a rank: `k_h = U_h D_h x`, and the cache keeps the latent `D_h x`.

    Args:
        rank_ratio: Latent width as a fraction of `head_dim`, in (0, 1], for K and V; a list gives one value a decoder
            layer. The rank is rounded down to a multiple of `rank_multiple`, so the cache never exceeds the ratio.
            `None`: nothing is cut except where `k_rank`/`v_rank` say so.
        k_rank_ratio, v_rank_ratio: The same for K or V alone; each takes precedence over `rank_ratio`.
        k_rank, v_rank: Explicit ranks, one number or a list with one entry a decoder layer (`None` in the list keeps
            that layer's projection whole); each takes precedence over the ratios.
        rank_multiple: Ranks given by ratio are rounded down to a multiple of this (ratios below one multiple are
            rounded down to a whole rank, at least 1); allocated ranks are multiples of it, or of a quarter of
            `head_dim` where that is smaller, or finer where a low ratio allows no multiple.
        method: What decides which directions of a head are kept: `"wsvd"` (activations and gradients), or for
            comparison `"svd_llm"` (activations), `"asvd"` (sizes of input channels), `"svd"` (the weight alone).
        rank_allocation: `"gradient"` spends the bytes that a ratio allows where gradients predict the least loss, over
            layers, and over K and V where both follow `rank_ratio`; `"uniform"` gives every layer the same rank.
            Ratios by layer and explicit ranks stay as they are. `None`: `"gradient"` for method `"wsvd"`, which alone
            has gradients, else `"uniform"`.
        rank_floor: Smallest allocated rank, rounded up to a multiple; `None`: one multiple (halved until the ratio
            allows it).
        q_rank_ratio: Cut the query projections too, to this share of their *parameters* (WSVD, section 3.1). It saves
            weights, not cache, and costs accuracy; `None` leaves them whole.
        q_rank: Explicit ranks of the query heads, as `k_rank`.
        layers_to_not_convert: Decoder layer numbers left untouched.
        modules_to_not_convert: Module names left untouched: a full name or its dotted end (`"layers.3.self_attn"`,
            `"v_proj"`).
        damping: Share of the mean activation energy that every input direction is given besides the measured one,
            so that directions the calibration set never showed keep some weight. At least 0.
        gradient_damping: Share of the gradients' second moment that is spread evenly over a head's dimensions. From 0
            (the gradients as they were) to 1 (gradients play no part).
        refinement: What happens to the factors after the closed form: `"distillation"` (they learn the dense model's
            answers on the calibration set), `"fisher"` (WSVD's element-wise Fisher-weighted fit of the weights) or
            `"none"`. `None`: `"distillation"` for method `"wsvd"`, else `"none"`.
        refinement_steps, refinement_learning_rate: Of `"distillation"`.
        latent_rotation: `"hadamard"` turns the latents of each head so that its channels are of even size, as few bits
            with one scale a token want them; it lies in the factors and costs nothing at run time. `"none"` leaves
            them ordered by size. `None`: `"hadamard"`, and for a checkpoint of a version before 3 `"none"`.
        seed: Of the order in which distillation sees the calibration set.
        self_check: Inputs that a checkpoint records with the answers to them, for `verify`: `"calibration"` (up to
            four calibration samples, which are saved and pushed with the weights), `"probe"` (arbitrary tokens) or
            `"none"`.
        cache: A `CacheConfig` (or a dict of its fields): the form in which the caches that the model makes by itself
            keep latents, and keys and values of layers that stay dense. `None` keeps the model's dtype. May be given
            anew when a checkpoint is loaded.
        head_guard: A `HeadGuardConfig` (or a dict of its fields): some KV heads keep more bits than `cache` gives
            (HeadGuard, arXiv 2609.35800). The fit chooses them, on `calibration`, and writes its `guard_map`; with
            one, it may be given anew when a checkpoint is loaded, together with `cache`.
        low_precision: A `LowPrecisionConfig` (or a dict of its fields): the decoder's weights, and the activations
            that they are multiplied with, in 8 or 4 bits. `None` keeps the model's dtype. With or without ranks.
        k_full_heads, v_full_heads: Per decoder layer, the KV heads that keep their full rank beside heads that are
            cut, for `head_guard` with rank "full"; written by the fit.
        calibration: Model-input dicts (or one dict, or any iterable of them) to calibrate on when a dense checkpoint
            is loaded, which is compressed once it is in memory; `None` takes the built-in default set. Or what
            `collect_statistics` returned, or the path of its file: then the checkpoint is compressed while it loads,
            one weight after the other, and no dense model is ever in memory. Never serialized.
        calibration_info: What the ranks were fitted on; written by the fit.
        fit_info: What the fit measured and predicted; written by the fit.
        key_layout: Per decoder layer, which norm and rotation lie between the latent and the cached key, found by
            experiment (`None`: not compressed or nothing matched, the dense cache is kept); written by the fit.
        decoder_shape: The decoder this checkpoint was made for; written by the fit and checked on load.
        version: Format version of this configuration.

    Raises:
        ValueError: naming the field, the value given and what is allowed.
    """

    quant_method = "wsvd"

    def __init__(
        self,
        rank_ratio: float | list[float] | None = 0.5,
        *,
        k_rank_ratio: float | list[float] | None = None,
        v_rank_ratio: float | list[float] | None = None,
        k_rank: int | list[int | None] | None = None,
        v_rank: int | list[int | None] | None = None,
        q_rank_ratio: float | list[float] | None = None,
        q_rank: int | list[int | None] | None = None,
        rank_multiple: int = 16,
        rank_allocation: str | None = None,
        rank_floor: int | None = None,
        method: str = "wsvd",
        layers_to_not_convert: list[int] | None = None,
        modules_to_not_convert: list[str] | None = None,
        damping: float = 1e-4,
        gradient_damping: float = 0.1,
        refinement: str | None = None,
        refinement_steps: int = 60,
        refinement_learning_rate: float = 5e-4,
        latent_rotation: str | None = None,
        seed: int = 0,
        self_check: str = "calibration",
        cache: CacheConfig | dict[str, Any] | None = None,
        head_guard: HeadGuardConfig | dict[str, Any] | None = None,
        low_precision: LowPrecisionConfig | dict[str, Any] | None = None,
        calibration: Any = None,
        calibration_info: dict[str, Any] | None = None,
        fit_info: dict[str, Any] | None = None,
        key_layout: list[str | None] | None = None,
        decoder_shape: dict[str, Any] | None = None,
        k_full_heads: list[list[int] | None] | None = None,
        v_full_heads: list[list[int] | None] | None = None,
        version: int = FORMAT_VERSION,
        **unknown: Any,
    ):
        self.version = version
        self.quant_method = "wsvd"
        self.rank_ratio = rank_ratio
        self.k_rank_ratio = k_rank_ratio
        self.v_rank_ratio = v_rank_ratio
        self.k_rank = k_rank
        self.v_rank = v_rank
        self.q_rank_ratio = q_rank_ratio
        self.q_rank = q_rank
        self.rank_multiple = rank_multiple
        self.rank_allocation = rank_allocation
        self.rank_floor = rank_floor
        self.method = method
        self.layers_to_not_convert = layers_to_not_convert
        self.modules_to_not_convert = modules_to_not_convert
        self.damping = damping
        self.gradient_damping = gradient_damping
        self.refinement = refinement
        self.refinement_steps = refinement_steps
        self.refinement_learning_rate = refinement_learning_rate
        self.latent_rotation = latent_rotation
        self.seed = seed
        self.self_check = self_check
        self.cache = cache
        self.head_guard = head_guard
        self.low_precision = low_precision
        self.calibration = calibration
        self.calibration_info = calibration_info
        self.fit_info = fit_info
        self.key_layout = key_layout
        self.decoder_shape = decoder_shape
        self.k_full_heads = k_full_heads
        self.v_full_heads = v_full_heads
        self._check_unknown({k: v for k, v in unknown.items() if k not in INFORMATIVE_KEYS})
        if unknown.get("quant_method", "wsvd") != "wsvd":
            fail("quant_method", unknown["quant_method"], "'wsvd'")
        self.post_init()

    def _check_unknown(self, unknown: dict[str, Any]) -> None:
        if isinstance(self.version, int) and not isinstance(self.version, bool) and self.version > FORMAT_VERSION:
            raise ValueError(
                f"WSVDConfig: version={self.version} was written by a newer hf_wsvd; this one reads up to "
                f"{FORMAT_VERSION}. Upgrade with `pip install -U hf_wsvd`."
                + (f" Unknown here: {sorted(unknown)}." if unknown else "")
            )
        if unknown:
            known = [k for k in self.__dict__ if k != "calibration"]
            hints = {k: difflib.get_close_matches(k, known, n=1) for k in unknown}
            text = ", ".join(f"{k!r}" + (f" (did you mean {h[0]!r}?)" if h else "") for k, h in hints.items())
            raise ValueError(f"WSVDConfig: unknown field(s) {text}; allowed: {sorted(known)}")

    def post_init(self) -> None:
        """Check every field that can be checked without the model, and settle the defaults that depend on the method.

        Tuples become lists, as JSON has them.
        """
        check_int("version", self.version, 1, FORMAT_VERSION)
        check_int("rank_multiple", self.rank_multiple, 1, 256)
        for name in ("rank_ratio", "k_rank_ratio", "v_rank_ratio", "q_rank_ratio"):
            check_ratio(name, getattr(self, name))
        for name in ("k_rank", "v_rank", "q_rank"):
            check_ranks(name, getattr(self, name))
        check_number("damping", self.damping, 0, 1e6)
        check_number("gradient_damping", self.gradient_damping, 0, 1)
        check_number("refinement_learning_rate", self.refinement_learning_rate, 1e-9, 1)
        check_int("refinement_steps", self.refinement_steps, 1, None)
        check_int("seed", self.seed, 0, 2**63 - 1)
        if self.rank_floor is not None:
            check_int("rank_floor", self.rank_floor, 1, None)
        self._settle_method()
        if self.cache is not None and not isinstance(self.cache, CacheConfig | dict):
            fail("cache", self.cache, "a CacheConfig, a dict of its fields, or None")
        self._refuse_paths()
        self.cache = CacheConfig.parse(self.cache)
        self._settle_head_guard()
        if self.low_precision is not None and not isinstance(self.low_precision, LowPrecisionConfig | dict):
            fail("low_precision", self.low_precision, "a LowPrecisionConfig, a dict of its fields, or None")
        self.low_precision = LowPrecisionConfig.parse(self.low_precision)
        check_names("modules_to_not_convert", self.modules_to_not_convert)
        layers = self.layers_to_not_convert
        if layers is not None:
            if not isinstance(layers, list | tuple):
                fail("layers_to_not_convert", layers, "a list of decoder layer numbers")
            for layer in layers:
                check_int("layers_to_not_convert", layer, 0, None)
        if self.key_layout is not None:
            if not isinstance(self.key_layout, list | tuple):
                fail("key_layout", self.key_layout, "a list with one entry a decoder layer")
            for entry in self.key_layout:
                KeyLayout.parse(entry)
        for name in ("k_full_heads", "v_full_heads"):
            check_heads_by_layer(name, getattr(self, name))
        for name in ("calibration_info", "fit_info", "decoder_shape"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                fail(name, value, "a dict or None")
        for name, value in vars(self).items():
            if isinstance(value, tuple) and name != "calibration":
                setattr(self, name, list(value))

    def _refuse_paths(self) -> None:
        """A dict is what a checkpoint's config.json holds, and that must not name files to read."""
        for name in ("cache", "head_guard"):
            given = getattr(self, name)
            guard_map = given.get("guard_map") if isinstance(given, dict) else None
            if guard_map is not None and not isinstance(guard_map, GuardMap | dict):
                fail(f"{name}['guard_map']", guard_map, "a GuardMap or a dict of its fields")

    def _settle_head_guard(self) -> None:
        if self.head_guard is not None and not isinstance(self.head_guard, HeadGuardConfig | GuardMap | dict):
            fail("head_guard", self.head_guard, "a HeadGuardConfig, a GuardMap, a dict of fields, or None")
        self.head_guard = HeadGuardConfig.parse(self.head_guard)
        if self.head_guard is None:
            return
        if self.cache is None:
            fail(
                "head_guard",
                self.head_guard,
                "only together with a cache of fewer than 16 bits, cache=CacheConfig(...)",
            )
        if self.cache.guard_map is not None:
            fail("head_guard", self.head_guard, "None where cache has a guard_map of its own")
        sides = ("key", "value") if self.head_guard.protect == "kv" else ("key",)
        least = min(self.cache.side_bits(side) for side in sides)
        if self.head_guard.guard_map is None and not self.cache.layers and self.head_guard.bits <= least:
            named = " and ".join(f"{side}s" for side in sides)
            if least == 16:
                raise ValueError(
                    f"WSVDConfig: head_guard guards {named} of a packed cache, and cache={self.cache.to_dict()} keeps "
                    "them in the model's dtype: give it fewer bits"
                )
            fail("head_guard.bits", self.head_guard.bits, f"more than the {least} bits of all other {named} in cache")
        if self.keeps_full_rank and not self.compresses:
            fail("head_guard.rank", "full", "'latent' where nothing is cut: every head has its full rank")

    def _settle_method(self) -> None:
        check_choice("method", self.method, METHODS)
        gradients = self.method == "wsvd"
        if self.rank_allocation is None:
            self.rank_allocation = "gradient" if gradients else "uniform"
        if self.refinement is None:
            self.refinement = "distillation" if gradients else "none"
        check_choice("rank_allocation", self.rank_allocation, RANK_ALLOCATIONS)
        if self.latent_rotation is None:
            self.latent_rotation = "hadamard" if self.version >= 3 else "none"
        check_choice("refinement", self.refinement, REFINEMENTS)
        check_choice("latent_rotation", self.latent_rotation, LATENT_ROTATIONS)
        check_choice("self_check", self.self_check, SELF_CHECKS)
        if self.rank_allocation == "uniform" and self.rank_floor is not None:
            fail("rank_floor", self.rank_floor, "None with rank_allocation='uniform', whose ranks the ratio gives")
        if self.rank_allocation == "gradient" and not gradients:
            fail("rank_allocation", "gradient", f"'uniform' with method={self.method!r}, which has no gradients")

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields; the calibration data stay in memory."""
        fields = copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "calibration"})
        for name in ("cache", "head_guard", "low_precision"):
            fields[name] = None if fields[name] is None else fields[name].to_dict()
        return fields

    @property
    def guard_map(self) -> GuardMap | None:
        """The guarded heads, by whichever field they were given."""
        return None if self.storage is None else self.storage.guard_map

    @property
    def keeps_full_rank(self) -> bool:
        """Whether guarded heads are not cut."""
        return self.head_guard is not None and self.head_guard.rank == "full"

    @property
    def storage(self) -> CacheConfig | None:
        """`cache` with the guarded heads of `head_guard`, once they are known and unless it packs nothing."""
        if self.cache is None or self.head_guard is None or self.head_guard.guard_map is None:
            return self.cache
        if not self.cache.layers and {self.cache.side_bits(side) for side in ("key", "value")} == {16}:
            return self.cache
        return dataclasses.replace(self.cache, guard_map=self.head_guard.guard_map)

    @property
    def compresses(self) -> bool:
        """Whether any rank or ratio is given; if none is, `cache` and `low_precision` alone apply, to whole heads."""
        names = ("rank_ratio", "k_rank_ratio", "v_rank_ratio", "k_rank", "v_rank", "q_rank_ratio", "q_rank")
        values = [getattr(self, name) for name in names]
        return any(entry is not None for value in values for entry in (value if isinstance(value, list) else [value]))

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a load may change of a compressed checkpoint; ValueError for one that is to be calibrated again."""
        if self.calibration is not None:
            raise ValueError(
                "WSVDConfig: calibration is given, but this checkpoint is compressed already: load it without "
                "quantization_config, or compress the dense checkpoint"
            )
        if self.low_precision is not None and self.decoder_shape is None:
            fail(
                "low_precision",
                self.low_precision.to_dict(),
                "None for a compressed checkpoint, whose weights stay as they are; compress the dense one",
            )
        if self.cache is None:
            return {}
        if self.keeps_full_rank and self.decoder_shape is None:
            fail("head_guard.rank", "full", "'latent' for a compressed checkpoint, whose weights stay as they are")
        if self.head_guard is not None and self.head_guard.guard_map is None:
            raise ValueError(
                "WSVDConfig: head_guard has no guard_map, and a compressed checkpoint is loaded without calibration "
                "data: choose the heads with `hf-wsvd headguard`, or give head_guard=HeadGuardConfig(guard_map=...)"
            )
        if self.head_guard is not None or self.cache.guard_map is not None:
            return {"cache": self.cache, "head_guard": self.head_guard}
        return {"cache": self.cache}  # the checkpoint's guarded heads stay guarded

    def __iter__(self):
        yield from self.to_dict().items()

    def __deepcopy__(self, memo: dict) -> WSVDConfig:
        # transformers deep-copies model configurations; calibration data may be large or an iterator.
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            new.__dict__[key] = value if key == "calibration" else copy.deepcopy(value, memo)
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WSVDConfig) and self.to_dict() == other.to_dict()

    __hash__ = None
