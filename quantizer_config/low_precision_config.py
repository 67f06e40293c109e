"""`LowPrecisionConfig`: how many bits the decoder's weights and activations keep, and by which method."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, NoReturn


WEIGHT_BITS = (8, 4)
ACTIVATION_BITS = (16, 8, 4)
LOW_PRECISION_METHODS = ("rtn", "smoothquant", "quarot", "wsvd_qat")
# Fields that not every method knows, and those that do.
METHODS_WITH = {
    "smoothing": ("smoothquant", "quarot", "wsvd_qat"),
    "qat_steps": ("wsvd_qat",),
    "qat_learning_rate": ("wsvd_qat",),
    "activation_ranges": ("wsvd_qat",),
    "residual_rotation": ("quarot", "wsvd_qat"),
    "mlp_rotation": ("quarot", "wsvd_qat"),
}


@dataclass
class LowPrecisionConfig:
    """Weights of the decoder's linear layers as integers, and their inputs rounded too (WSVD, section 3.3).

    Weights are symmetric integers with fp32 scales, packed in the checkpoint and in memory; activations get one scale
    a token when they are computed. 16 bits leave the activations in the model's dtype.

    Args:
        weight_bits: 8 or 4.
        activation_bits: 16, 8 or 4; with integers on both sides the products are integer products.
        group_size: input channels that share a weight scale. None: a whole row at 8 bits; at 4 bits 128 or, where that
            does not divide the inputs, 64 or 32, else a whole row. A size that does not divide the inputs of a layer
            is an error.
        method: what is done to the weights before they are rounded: "rtn" (nothing), "smoothquant" (outliers of the
            input channels move into the weights), "quarot" (Hadamard rotations) or "wsvd_qat" (rotations, learned in
            the latents, and quantization-aware fine-tuning, layer by layer). All but "rtn" need calibration data.
        modules_to_not_convert: names of layers that keep the model's dtype: a full name or its dotted end
            (`"layers.3.mlp"`, `"down_proj"`), besides those of `WSVDConfig.modules_to_not_convert`.
        smoothing: share of the outliers of input channels that is moved into the weights where channels are scaled,
            from 0 to 1.
        qat_steps, qat_learning_rate: of the fine-tuning of "wsvd_qat".
        activation_ranges: whether the fine-tuning sees rounded activations; False: rounded weights alone.
        residual_rotation: seed of the rotation of the residual stream, None without one; written by the fit.
        mlp_rotation: channels of a block in which the inputs of every MLP's last layer are turned when they are
            computed, a power of two; None: they are not. Written by the fit.

    Raises:
        ValueError: naming the field, the value given and what is allowed.
    """

    weight_bits: int = 8
    activation_bits: int = 8
    group_size: int | None = None
    method: str = "wsvd_qat"
    modules_to_not_convert: list[str] | None = None
    smoothing: float = 0.5
    qat_steps: int = 200
    qat_learning_rate: float = 1e-3
    activation_ranges: bool = True
    residual_rotation: int | None = None
    mlp_rotation: int | None = None

    def __post_init__(self):
        for name, choices in (
            ("weight_bits", WEIGHT_BITS),
            ("activation_bits", ACTIVATION_BITS),
            ("method", LOW_PRECISION_METHODS),
        ):
            value = getattr(self, name)
            if type(value) not in (int, str) or value not in choices:
                fail(name, value, f"one of {choices}")
        if self.group_size is not None and (type(self.group_size) is not int or self.group_size < 1):
            fail("group_size", self.group_size, "a number of input channels of at least 1, or None")
        if type(self.qat_steps) is not int or self.qat_steps < 1:
            fail("qat_steps", self.qat_steps, "an integer of at least 1")
        for name, low, high in (("smoothing", 0, 1), ("qat_learning_rate", 1e-9, 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                fail(name, value, f"a number from {low:g} to {high:g}")
        if not isinstance(self.activation_ranges, bool):
            fail("activation_ranges", self.activation_ranges, "True or False")
        seed = self.residual_rotation
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            fail("residual_rotation", seed, "an integer from 0 to 2**63 - 1, or None")
        block = self.mlp_rotation
        if block is not None and (type(block) is not int or not 2 <= block <= 2**16 or block & (block - 1)):
            fail("mlp_rotation", block, "a power of two from 2 to 65536, or None")
        for name, methods in METHODS_WITH.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default and self.method not in methods:
                fail(name, getattr(self, name), f"{default!r} with method={self.method!r}, which does not use it")
        names = self.modules_to_not_convert
        if names is not None:
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
                fail("modules_to_not_convert", names, "a list of module names, or None")
            self.modules_to_not_convert = list(names)

    @property
    def needs_data(self) -> bool:
        """Whether the method looks at calibration data."""
        return self.method != "rtn"

    def summary(self) -> str:
        """What a reader of a model card wants to know, in one line."""
        groups = f"groups of {self.group_size}" if self.group_size else "rows" if self.weight_bits == 8 else "groups"
        inputs = (
            "activations in the model's dtype"
            if self.activation_bits == 16
            else f"activations of {self.activation_bits} bits with a scale a token"
        )
        return f"weights of {self.weight_bits} bits with scales of {groups}, {inputs}, method {self.method}"

    @classmethod
    def parse(cls, value: LowPrecisionConfig | dict[str, Any] | None) -> LowPrecisionConfig | None:
        """A config, or the dict form that JSON keeps of it. ValueError for anything else and for unknown keys."""
        if value is None or isinstance(value, LowPrecisionConfig):
            return value
        if not isinstance(value, dict):
            allowed = "a LowPrecisionConfig, a dict of its fields, or None"
            raise ValueError(f"LowPrecisionConfig: {value!r:.200} is not allowed; allowed: {allowed}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"LowPrecisionConfig: unknown field {name!r}{hint}; allowed: {known}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-safe: a checkpoint says what it is even if defaults change."""
        return dataclasses.asdict(self)


def fail(field_name: str, value: Any, allowed: str) -> NoReturn:
    """The form of this file's errors."""
    raise ValueError(f"LowPrecisionConfig: {field_name}={value!r:.200} is not allowed; allowed: {allowed}")
