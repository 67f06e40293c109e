"""The linear layers of a decoder layer, and the norms they read: where transforms of activations can be absorbed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..decoder import decoder_of


ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")  # over a head's output, which no rotation of the residual stream touches
PLAIN_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class UnknownStructure(ValueError):
    """A transform that the model's structure forbids; the message says which part is not understood."""


@dataclass(frozen=True)
class ResidualLayer:
    """A decoder layer.

    Attributes:
        name: module name within the model.
        module: the layer.
    """

    name: str
    module: nn.Module

    @property
    def attention(self) -> nn.Module | None:
        """The attention, where it has the four linear layers that most families have."""
        return _with_parts(self.module, "self_attn", ATTENTION_LINEARS)

    @property
    def mlp(self) -> nn.Module | None:
        """The MLP, where it is gated and of three linear layers: no experts."""
        return _with_parts(self.module, "mlp", MLP_LINEARS)

    def norms(self) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        """Each norm of the residual stream, and the linear layers that alone read it."""
        norm = getattr(self.module, "input_layernorm", None)
        if norm is not None and self.attention is not None:
            yield norm, [self.attention.q_proj, self.attention.k_proj, self.attention.v_proj]
        # Families with a norm after the attention as well call this one otherwise.
        norm = getattr(self.module, "pre_feedforward_layernorm", None)
        norm = getattr(self.module, "post_attention_layernorm", None) if norm is None else norm
        if norm is not None and self.mlp is not None:
            yield norm, [self.mlp.gate_proj, self.mlp.up_proj]

    def readers(self) -> list[nn.Module]:
        """Linear layers whose inputs are the residual stream, normed."""
        return [linear for _, linears in self.norms() for linear in linears]

    def writers(self) -> list[nn.Module]:
        """Linear layers whose outputs are added to the residual stream."""
        return [self.attention.o_proj, self.mlp.down_proj]

    def groups(self) -> list[dict[str, nn.Module]]:
        """Linear layers by their names within the model; those of a group share their inputs, groups run in order."""
        parts = (
            ("self_attn", self.attention, ("q_proj", "k_proj", "v_proj")),
            ("self_attn", self.attention, ("o_proj",)),
            ("mlp", self.mlp, ("gate_proj", "up_proj")),
            ("mlp", self.mlp, ("down_proj",)),
        )
        return [
            {f"{self.name}.{parent_name}.{part}": getattr(parent, part) for part in names}
            for parent_name, parent, names in parts
            if parent is not None
        ]


def residual_layers(model: PreTrainedModel) -> list[ResidualLayer]:
    """All layers of the text decoder. Needs no weights, and linear layers may be of any class.

    Raises:
        UnknownStructure: a decoder without a list of `layers`.
    """
    decoder = decoder_of(model)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnknownStructure(f"{type(decoder).__name__} has no list of `layers`")
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    names = [".".join(part for part in (prefix, f"layers.{number}") if part) for number in range(len(layers))]
    return [ResidualLayer(name, layer) for name, layer in zip(names, layers)]


def check_plain_residual(model: PreTrainedModel) -> None:
    """Raise UnknownStructure unless every layer is `x += attention(norm(x)); x += mlp(norm(x))` with RMS norms.

    What else there may be: norms after attention or MLP, experts and their routers, gates, streams that are mixed
    (hyper-connections), features that enter between layers (DeepStack). Norms on the meta device are not looked at.
    """
    decoder = decoder_of(model)
    if not isinstance(getattr(decoder, "norm", None), nn.Module):
        raise UnknownStructure(f"{type(decoder).__name__} has no `norm` after its layers")
    entering = [name for name in inspect.signature(decoder.forward).parameters if "deepstack" in name]
    if entering:
        raise UnknownStructure(f"{type(decoder).__name__} takes {entering[0]}, which enters between layers")
    for layer in residual_layers(model):
        _check_parts(layer.name, layer.module, PLAIN_PARTS)
        for name, parts in (("self_attn", ATTENTION_LINEARS), ("mlp", MLP_LINEARS)):
            if _with_parts(layer.module, name, parts) is None:
                raise UnknownStructure(f"{layer.name}.{name} is not made of {', '.join(parts)}")
        _check_parts(f"{layer.name}.self_attn", layer.attention, (*ATTENTION_LINEARS, *HEAD_NORMS))
        _check_parts(f"{layer.name}.mlp", layer.mlp, MLP_LINEARS)
        for norm, _ in layer.norms():
            if not norm.weight.is_meta and not is_rms_norm(norm):
                raise UnknownStructure(f"{layer.name} has a {type(norm).__name__}, which is no RMS norm")


def _with_parts(layer: nn.Module, name: str, parts: tuple[str, ...]) -> nn.Module | None:
    module = getattr(layer, name, None)
    linears = [getattr(module, part, None) for part in parts]
    return module if all(hasattr(linear, "in_features") for linear in linears) else None


def _check_parts(name: str, module: nn.Module, known: tuple[str, ...]) -> None:
    """Raise UnknownStructure if weights lie anywhere but in the known parts."""
    if any(True for _ in module.parameters(recurse=False)):
        raise UnknownStructure(f"{name} has parameters of its own")
    for part, child in module.named_children():
        if part not in known and any(True for _ in child.parameters()):
            raise UnknownStructure(f"{name} has a part `{part}` that is not understood")


def neutral_weight(norm: nn.Module) -> float | None:
    """The weight with which a norm scales nothing: 1, or 0 for families that scale by `1 + weight`.

    Found by experiment, so that no family need be named. None for what is no RMS norm and no LayerNorm.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    if isinstance(norm, nn.LayerNorm):
        return 1.0
    generator = torch.Generator().manual_seed(0)
    probe = 1 + torch.randn(1, 8, len(weight), generator=generator).to(weight)  # a mean that is subtracted must show
    with torch.no_grad():
        found = norm(probe).float()
    unit = probe.float() * probe.float().square().mean(-1, keepdim=True).rsqrt()
    tolerance = 1e-3 if weight.dtype == torch.float32 else 4 * torch.finfo(weight.dtype).eps
    for neutral in (1.0, 0.0):
        expected = unit * (weight.detach().float() + 1 - neutral)
        if float((found - expected).norm()) <= tolerance * float(expected.norm()):
            return neutral
    return None


def is_rms_norm(norm: nn.Module) -> bool:
    """Whether a norm divides by the root of the mean square and scales each channel, and does nothing else."""
    plain = not isinstance(norm, nn.LayerNorm) and len(list(norm.parameters())) == 1
    return plain and neutral_weight(norm) is not None


@torch.no_grad()
def scale_norm(norm: nn.Module, gain: Tensor) -> None:
    """Multiply a norm's outputs by `gain [hidden]`.

    Raises:
        UnknownStructure: a norm whose weight's meaning is not known.
    """
    neutral = neutral_weight(norm)
    if neutral is None:
        raise UnknownStructure(f"{type(norm).__name__} is no RMS norm and no LayerNorm")
    gain = gain.to(norm.weight.device, torch.float64)
    norm.weight.copy_((norm.weight.double() + 1 - neutral) * gain - 1 + neutral)
    if getattr(norm, "bias", None) is not None:
        norm.bias.copy_(norm.bias.double() * gain)


def norm_gain(norm: nn.Module) -> Tensor:
    """What an RMS norm multiplies each channel by, `[hidden]` fp64."""
    return norm.weight.detach().double() + 1 - neutral_weight(norm)


@torch.no_grad()
def neutralise(norm: nn.Module) -> None:
    """Let an RMS norm scale nothing."""
    norm.weight.fill_(neutral_weight(norm))


@torch.no_grad()
def scale_inputs(linear: nn.Module, gain: Tensor) -> None:
    """Multiply the columns of `linear.weight [out, in]` by `gain [in]`."""
    linear.weight.copy_(linear.weight.double() * gain.to(linear.weight.device, torch.float64))


@torch.no_grad()
def scale_outputs(linear: nn.Module, gain: Tensor) -> None:
    """Multiply the outputs of a linear layer by `gain [out]`."""
    gain = gain.to(linear.weight.device, torch.float64)
    linear.weight.copy_(linear.weight.double() * gain[:, None])
    if linear.bias is not None:
        linear.bias.copy_(linear.bias.double() * gain)
