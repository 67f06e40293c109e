"""`WSVDConfig`: what is compressed, to which ranks, and what a checkpoint records about it."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .checks import check_int, check_names, check_ranks, check_ratio, fail
from .layout import KeyLayout


FORMAT_VERSION = 1

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
            rounded down to a whole rank, at least 1).
        layers_to_not_convert: Decoder layer numbers left untouched.
        modules_to_not_convert: Module names left untouched: a full name or its dotted end (`"layers.3.self_attn"`,
            `"v_proj"`).
        damping: Share of the mean activation energy that every input direction is given besides the measured one,
            so that directions the calibration set never showed keep some weight. At least 0.
        calibration: Model-input dicts (or one dict, or any iterable of them) to calibrate on when a dense checkpoint
            is compressed while it is loaded; `None` takes the built-in default set. Never serialized.
        calibration_info: What the ranks were fitted on; written by the fit.
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
        rank_multiple: int = 8,
        layers_to_not_convert: list[int] | None = None,
        modules_to_not_convert: list[str] | None = None,
        damping: float = 1e-4,
        calibration: Any = None,
        calibration_info: dict[str, Any] | None = None,
        key_layout: list[str | None] | None = None,
        decoder_shape: dict[str, Any] | None = None,
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
        self.rank_multiple = rank_multiple
        self.layers_to_not_convert = layers_to_not_convert
        self.modules_to_not_convert = modules_to_not_convert
        self.damping = damping
        self.calibration = calibration
        self.calibration_info = calibration_info
        self.key_layout = key_layout
        self.decoder_shape = decoder_shape
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
        """Check every field that can be checked without the model; tuples become lists, as JSON has them."""
        check_int("version", self.version, 1, FORMAT_VERSION)
        check_int("rank_multiple", self.rank_multiple, 1, 256)
        for name in ("rank_ratio", "k_rank_ratio", "v_rank_ratio"):
            check_ratio(name, getattr(self, name))
        for name in ("k_rank", "v_rank"):
            check_ranks(name, getattr(self, name))
        if isinstance(self.damping, bool) or not isinstance(self.damping, int | float) or not 0 <= self.damping < 1e6:
            fail("damping", self.damping, "a finite number, at least 0")
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
        for name in ("calibration_info", "decoder_shape"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                fail(name, value, "a dict or None")
        for name, value in vars(self).items():
            if isinstance(value, tuple) and name != "calibration":
                setattr(self, name, list(value))

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields; the calibration data stay in memory."""
        return copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "calibration"})

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
