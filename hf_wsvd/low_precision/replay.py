"""Decoder layers run again one by one, on calibration inputs as the model itself called them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibration.batches import BESIDE_INPUTS, Batch
from ..calibration.chat import place
from ..calibration.data import validate_batches
from ..decoder import evaluation_mode


@dataclass
class LayerCall:
    """How the model called a layer, besides the hidden states.

    Attributes:
        args, kwargs: without the hidden states.
        entering: `[B, S, hidden]` that the model adds between the layer before and this one (DeepStack); None mostly.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entering: Tensor | None = None

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The layer's output `[B, S, hidden]` for the output of the layer before."""
        if self.entering is not None:
            hidden = hidden + self.entering.to(hidden.dtype)
        return hidden_of(layer(hidden, *_as(self.args, hidden.dtype), **_as(self.kwargs, hidden.dtype)))


@dataclass
class RecordedBatch:
    """One batch on its way through the decoder.

    Attributes:
        hidden: `[B, S, hidden]`, the first layer's input.
        calls: of each layer.
        mask: bool `[B, S]`, False for padding; None if all tokens count.
    """

    hidden: Tensor
    mask: Tensor | None
    calls: list[LayerCall] = field(default_factory=list)

    def counted(self, x: Tensor) -> Tensor:
        """The tokens `[N, features]` of `x [B, S, features]` that are no padding."""
        return x.flatten(0, 1) if self.mask is None else x[self.mask]


@torch.no_grad()
def recorded(
    model: PreTrainedModel, layers: list[nn.Module], batches: Iterable[Batch], most_tokens: int
) -> list[RecordedBatch]:
    """Run `batches` through the model, until `most_tokens` are recorded (at least one batch).

    Held are the hidden states before the first layer, and the layers' other arguments, which the layers of a batch
    mostly share.

    Raises:
        ValueError: as `validate_batches`, and for layers that are not called one after the other.
    """
    found: list[RecordedBatch] = []
    tokens = 0
    with evaluation_mode(model), ExitStack() as stack:
        recorder = _Recorder(len(layers))
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(recorder.before(number), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(recorder.after).remove)
        for batch in validate_batches(batches, model, description="Recording"):
            recorder.start(batch.get("attention_mask"))
            inputs = {name: value for name, value in batch.items() if name not in BESIDE_INPUTS}
            model(**place(inputs, model), use_cache=False)
            found.append(recorder.finished())
            tokens += found[-1].hidden.shape[:2].numel()
            if tokens >= most_tokens:
                break
    return found


def hidden_of(output: Any) -> Tensor:
    """The hidden states in what a layer returns."""
    return output[0] if isinstance(output, tuple | list) else output


class _Recorder:
    def __init__(self, layers: int):
        self.layers = layers
        self.batch: RecordedBatch | None = None
        self.mask: Tensor | None = None
        self.last: Tensor | None = None

    def start(self, mask: Tensor | None) -> None:
        self.batch, self.mask, self.last = None, mask, None

    def before(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kwargs = dict(kwargs)
            hidden = args[0] if args else kwargs.pop("hidden_states")
            if self.batch is None:
                self.batch = RecordedBatch(hidden, self._mask_of(hidden))
            if number != len(self.batch.calls):
                raise ValueError("low_precision: the decoder's layers do not run one after the other")
            call = LayerCall(args[1:], kwargs)
            if self.last is not None and self.last is not hidden and not torch.equal(self.last, hidden):
                call.entering = hidden - self.last.to(hidden.device)
            self.batch.calls.append(call)

        return hook

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.last = hidden_of(output)

    def finished(self) -> RecordedBatch:
        if self.batch is None or len(self.batch.calls) != self.layers:
            raise ValueError("low_precision: the model does not run every layer of its decoder")
        self.last = None
        return self.batch

    def _mask_of(self, hidden: Tensor) -> Tensor | None:
        # Some models drop or merge tokens before the decoder; there a mask of another length says nothing.
        fits = self.mask is not None and self.mask.shape == hidden.shape[:2]
        mask = self.mask.to(hidden.device).bool() if fits else None
        return None if mask is None or bool(mask.all()) else mask


def _as(value: Any, dtype: torch.dtype) -> Any:
    """Arguments with their floating-point tensors (rotary rows, additive masks) in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_as(part, dtype) for part in value)
    return {name: _as(part, dtype) for name, part in value.items()} if isinstance(value, dict) else value
