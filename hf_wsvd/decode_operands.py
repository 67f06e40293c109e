"""From a call and its cache layer to what `kernels.fused_attention` reads: packed runs, and what expands them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .call import DenseCall, LatentCall, key_norm_module
from .kernels import DecodePart, KeyNormWeights, LatentHeads
from .storage.runs import Run, paired


DIFFERENT_ORDERS = "rows of the batch have images in different places, and keys are kept in another order than values"
EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


class Folded(NamedTuple):
    """What expands the tokens of a run, and the rotation of its scheme that is folded in."""

    up: Tensor | None
    bias: Tensor | None
    rotation: Tensor | None


def decode_parts(call: LatentCall | DenseCall, query: Tensor) -> list[DecodePart] | str:
    """The tokens that the attention of an open call may see, as `fused_attention` takes them; or why it cannot.

    Args:
        query: `[B, Hq, N, D]`.
    """
    layer = call.layer
    obstacle = layer.obstacle()
    if obstacle is not None:
        return obstacle
    key_runs, value_runs = layer.runs(query.shape[2])
    pairs = paired(key_runs, value_runs)
    if pairs is None:
        return DIFFERENT_ORDERS
    every = sum(len(run.heads) for run in key_runs if run.order == key_runs[0].order)
    if layer.expansions is None:
        layer.expansions = {}
    parts = []
    for key, value in pairs:
        key_side = folded(layer.expansions, "key", call.key, key, query)
        value_side = folded(layer.expansions, "value", call.value, value, query)
        parts.append(
            DecodePart(
                key.stored,
                value.stored,
                key_side.up,
                value_side.up,
                key_side.bias,
                value_side.bias,
                heads=None if len(key.heads) == every else key.heads,
                places=key.places,
                first=key.stretches[0].position if key.places is None else 0,
            )
        )
    return parts


def folded(known: dict, side: str, heads: LatentHeads, run: Run, query: Tensor) -> Folded:
    """What expands a run's tokens: `up @ rotation` for its heads and its width; worked out once a cache.

    Args:
        known: of the cache layer, by side, heads and width.
        heads: with the expansion of all heads of the layer.
        query: whose dtype and device the result has.
    """
    name = (side, run.heads, run.stored.width)
    found = known.get(name)
    if found is None or found.rotation is not run.rotation:
        found = known[name] = fold(heads, run, query)
    return found


@torch.no_grad()
def fold(heads: LatentHeads, run: Run, query: Tensor) -> Folded:
    """See `folded`."""
    up, bias = (None if t is None else t.detach() for t in (heads.up, heads.bias))
    if up is not None and len(run.heads) < up.shape[0]:
        up = up[list(run.heads)]
    if bias is not None and len(run.heads) < bias.shape[0]:
        bias = bias[list(run.heads)]
    if up is not None:
        up = up[..., : run.stored.width]
    if run.rotation is not None:
        turned = run.rotation if up is None else up.float() @ run.rotation
        up = turned.to(query).expand(len(run.heads), -1, -1)
    return Folded(up, bias, run.rotation)


@torch.no_grad()
def hold_addresses(call: LatentCall | DenseCall) -> None:
    """Keep what expands the tokens of a cache of fixed size where the graphs of its steps expect it.

    What was computed is written over what was computed for the text before; weights stay where the model has them.
    """
    layer = call.layer
    weights = [tensor for heads in (call.key, call.value) for tensor in (heads.up, heads.bias)]
    own = {tensor.untyped_storage().data_ptr() for tensor in weights if tensor is not None}

    def held(new: Tensor | None, old: Tensor | None) -> Tensor | None:
        if new is None:
            return None
        alike = old is not None and (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        if alike and new.device == old.device and new.untyped_storage().data_ptr() not in own:
            new = old if new is old else old.copy_(new)
        torch._dynamo.mark_static_address(new)
        return new

    before = layer.held_expansions or {}
    for name, found in (layer.expansions or {}).items():
        old = before.get(name)
        if isinstance(found, Folded):
            old = old or Folded(None, None, None)
            layer.expansions[name] = found._replace(up=held(found.up, old.up), bias=held(found.bias, old.bias))
        else:
            layer.expansions[name] = held(found, old)
    layer.held_expansions = layer.expansions


def key_norm_weights(call: LatentCall | DenseCall, binding: object) -> KeyNormWeights | str | None:
    """The key norm of an open call as kernels take it; None for none; or why they cannot apply it.

    Args:
        binding: of the attention layer; remembers what kind of norm it has.
    """
    kind = "none" if isinstance(call, DenseCall) else call.layout.norm
    if kind == "none":
        return None
    norm = key_norm_module(call.attention)
    obstacle = norm_obstacle(kind, norm, binding)
    if obstacle is not None:
        return obstacle
    offset, epsilon = binding.norm_kind
    known = call.layer.expansions
    if known is None or "norm" not in known:
        known = call.layer.expansions = known or {}
        known["norm"] = (norm.weight.detach().float() + offset) if offset else norm.weight.detach()
    return KeyNormWeights(known["norm"], epsilon, kind == "before")


def norm_obstacle(kind: str, norm: nn.Module, binding: object) -> str | None:
    """Why kernels cannot apply a layer's key norm; None where they can. `binding.norm_kind` is settled then."""
    if kind == "before_by_token":
        return "norm of kind before_by_token"
    weight = getattr(norm, "weight", None)
    if weight is None or weight.device.type == "meta":
        return f"{type(norm).__name__} has no weight at hand"
    if binding.norm_kind is None:
        binding.norm_kind = rms_norm_kind(norm) or ()
    return None if binding.norm_kind else f"{type(norm).__name__} is no RMS norm of a head"


@torch.no_grad()
def rms_norm_kind(norm: nn.Module) -> tuple[float, float] | None:
    """`offset` and `epsilon` with which a norm computes `x / sqrt(mean(x^2) + epsilon) * (offset + weight)`.

    None for a module that computes anything else: it is asked, with numbers small enough for epsilon to show.
    """
    weight = norm.weight
    if weight.ndim != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([1e-4, 1e-3, 1e-2, 1.0, 30.0])[:, None]
    x = (torch.randn(len(size), len(weight), generator=generator) * size).to(weight)
    found = norm(x).float()
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    for epsilon in (getattr(norm, name, None) for name in EPSILON_NAMES):
        if not isinstance(epsilon, float):
            continue
        plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        for offset in (0.0, 1.0):
            wanted = plain * (weight.float() + offset)
            if found.shape == wanted.shape and bool(
                ((found - wanted).norm(dim=-1) <= tolerance * wanted.norm(dim=-1)).all()
            ):
                return offset, epsilon
    return None
