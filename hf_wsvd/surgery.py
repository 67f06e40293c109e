"""Which projections of a model become latent, with what ranks, and the exchange of the modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .attention import bind, implementation_for, unbind
from .calibration import Statistics, collect_statistics, default_calibration
from .call import key_norm_module
from .decoder import DecoderAttention, decoder_attentions, decoder_shape, matches
from .fit import factorise
from .modules import LatentProjection
from .probe import probe_key_layouts
from .quantizer_config import KeyLayout, WSVDConfig, resolve_ranks
from .self_check import attach_self_check, dense_answers
from .trial import layers_that_need_keys


@dataclass(frozen=True)
class Target:
    """One attention layer to compress and the ranks of its heads."""

    attention: DecoderAttention
    k_rank: int
    v_rank: int

    def sides(self) -> Iterator[tuple[str, int, nn.Module]]:
        """("k" or "v", rank, present projection)."""
        yield "k", self.k_rank, self.attention.module.k_proj
        yield "v", self.v_rank, self.attention.module.v_proj


def targets(model: PreTrainedModel, config: WSVDConfig) -> list[Target]:
    """The layers that `config` compresses in `model`.

    A projection that the config leaves alone beside a compressed one takes rank `head_dim`: its latent is the dense
    head itself, and nothing is lost. A layer with both left alone is no target.

    Raises:
        ValueError: nothing to convert, or ranks and layer numbers that do not fit the model.
    """
    attentions = decoder_attentions(model)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    head_dims: list[int | None] = [None] * layers
    for attention in attentions:
        head_dims[attention.layer] = attention.head_dim
    ranks = {side: resolve_ranks(config, side, head_dims) for side in "kv"}
    found = []
    for attention in attentions:
        pair = []
        for side in "kv":
            skipped = matches(attention.side_name(side), config.modules_to_not_convert)
            pair.append(None if skipped else ranks[side][attention.layer])
        if pair != [None, None]:
            found.append(Target(attention, *(attention.head_dim if rank is None else rank for rank in pair)))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer to convert: "
            + (
                "its decoder has no attention with separate `k_proj` and `v_proj` linear layers"
                if not attentions
                else "the ranks, layers_to_not_convert and modules_to_not_convert of the WSVDConfig leave out all of "
                f"its {len(attentions)} attention layers"
            )
        )
    return found


def fit_latents(
    model: PreTrainedModel,
    config: WSVDConfig,
    *,
    calibration: Iterable[dict[str, Tensor]] | None = None,
    statistics: Statistics | None = None,
    processor: Any = None,
) -> None:
    """Calibrate (unless `statistics` are given), factorise layer by layer, exchange the modules and bind.

    On success `config` holds what was done: ranks, key layouts, calibration record, decoder shape. A failure before
    the exchange leaves the model as it was.
    """
    chosen = targets(model, config)
    shape = decoder_shape(model)
    if statistics is None:
        if calibration is None:
            calibration = default_calibration(model, processor)
        statistics = collect_statistics(model, calibration)
    attentions = [target.attention for target in chosen]
    implementation = model.get_decoder().config._attn_implementation
    factors = []
    for target in logging.tqdm(chosen, desc="Factorising", unit="layer"):
        factors += factor_layer(target, statistics, config.damping)
    originals = [(module, name, getattr(module, name)) for module, name, _ in factors]
    dense = dense_answers(model, statistics.samples)
    try:
        for module, name, projection in factors:
            setattr(module, name, projection)
        layouts = probe_key_layouts(model, attentions)
        bind_all(model, chosen, layouts)
        latent = [a for a in attentions if layouts[a.layer] is not None]
        for layer in layers_that_need_keys(model, latent) if latent else ():
            layouts[layer] = None
        bind_all(model, chosen, layouts)
        attach_self_check(model, dense)
    except BaseException:
        unbind_all(model)
        model.get_decoder().set_attn_implementation(implementation)
        for module, name, linear in originals:
            setattr(module, name, linear)
        raise
    record(config, chosen, layouts, shape, statistics.info)


def factor_layer(
    target: Target, statistics: Statistics, damping: float
) -> list[tuple[nn.Module, str, LatentProjection]]:
    """(attention module, projection name, its replacement) for the K and V of one layer."""
    attention = target.attention
    gram = statistics.gram.get(attention.layer)
    replacements = []
    for side, rank, linear in target.sides():
        name = attention.side_name(side)
        if gram is None or gram.shape[0] != linear.in_features:
            held = "no such layer" if gram is None else f"{gram.shape[0]} inputs"
            raise ValueError(
                f"the statistics do not fit {name} ({linear.in_features} inputs): they hold {held}; "
                "were they collected on another model?"
            )
        try:
            down, up = factorise(linear.weight, attention.heads, rank, gram, damping)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        replacements.append((attention.module, f"{side}_proj", LatentProjection.from_linear(linear, down, up)))
    return replacements


def record(
    config: WSVDConfig, chosen: list[Target], layouts: dict[int, KeyLayout | None], shape: dict, info: dict
) -> None:
    """Write into `config` what a load needs: final ranks by layer, layouts, the decoder's shape."""
    layers = shape["num_hidden_layers"]
    by_layer = {t.attention.layer: t for t in chosen}
    config.k_rank = [by_layer[i].k_rank if i in by_layer else None for i in range(layers)]
    config.v_rank = [by_layer[i].v_rank if i in by_layer else None for i in range(layers)]
    config.key_layout = [str(layouts[i]) if layouts.get(i) is not None else None for i in range(layers)]
    config.decoder_shape = shape
    config.calibration_info = info
    config.calibration = None


def insert_empty(model: PreTrainedModel, config: WSVDConfig) -> list[Target]:
    """Exchange the modules of a model without weights (on the meta device) for a compressed checkpoint's."""
    check_shape(model, config)
    chosen = targets(model, config)
    check_norms(chosen, config)
    for target in chosen:
        for side, rank, linear in target.sides():
            heads, head_dim = target.attention.heads, target.attention.head_dim
            projection = LatentProjection(
                linear.in_features,
                heads,
                head_dim,
                rank,
                linear.bias is not None,
                device=linear.weight.device,
                dtype=linear.weight.dtype,
            )
            setattr(target.attention.module, f"{side}_proj", projection)
    return chosen


def check_shape(model: PreTrainedModel, config: WSVDConfig) -> None:
    """Raise ValueError if the compressed checkpoint was made for another decoder."""
    if config.decoder_shape is None or config.key_layout is None:
        raise ValueError(
            "the quantization_config of this checkpoint lacks `decoder_shape` or `key_layout`: it was not written by "
            "save_pretrained of a compressed model. To compress a dense checkpoint pass the WSVDConfig to "
            "from_pretrained instead of writing it into config.json"
        )
    shape = decoder_shape(model)
    # A checkpoint may be loaded as the causal model or as its base, whose configurations name different types.
    different = [k for k, v in shape.items() if k != "model_type" and config.decoder_shape.get(k) != v]
    if different:
        text = ", ".join(f"{k}={config.decoder_shape.get(k)} (this model: {shape[k]})" for k in different)
        raise ValueError(
            f"the WSVDConfig was made for another architecture ({config.decoder_shape.get('model_type')}): {text}"
        )
    if len(config.key_layout) != shape["num_hidden_layers"]:
        raise ValueError(
            f"WSVDConfig: key_layout has {len(config.key_layout)} entries, the decoder has "
            f"{shape['num_hidden_layers']} layers"
        )


def check_norms(chosen: list[Target], config: WSVDConfig) -> None:
    """Raise ValueError if a stored layout has a key norm where the model has none, or none where it has one."""
    for target in chosen:
        layer = target.attention.layer
        layout = KeyLayout.parse(config.key_layout[layer])
        has_norm = key_norm_module(target.attention.module) is not None
        if layout is not None and (layout.norm != "none") != has_norm:
            raise ValueError(
                f"WSVDConfig: key_layout={str(layout)!r} does not fit {target.attention.name}, which has "
                f"{'a' if has_norm else 'no'} key norm"
            )


def bind_all(model: PreTrainedModel, chosen: list[Target], layouts: dict[int, KeyLayout | None]) -> None:
    """Hook every compressed layer (anew, if it is hooked) and switch the decoder's attention function."""
    unbind_all(model)
    for target in chosen:
        bind(target.attention.module, target.attention.layer, layouts[target.attention.layer])
    model.get_decoder().set_attn_implementation(implementation_for(model))


def unbind_all(model: PreTrainedModel) -> None:
    """Remove the hooks of every layer that has them."""
    for attention in decoder_attentions(model):
        if hasattr(attention.module, "_wsvd"):
            unbind(attention.module)


def merge_all(model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Turn a compressed model into a plain dense one with the weights `U_h D_h`."""
    decoder = model.get_decoder()
    base = "eager" if decoder.config._attn_implementation == "wsvd_eager" else "sdpa"
    unbind_all(model)
    for attention in decoder_attentions(model):
        if not isinstance(attention.module.k_proj, LatentProjection):
            continue
        for side in "kv":
            merged = getattr(attention.module, f"{side}_proj").merged()
            setattr(attention.module, f"{side}_proj", merged if dtype is None else merged.to(dtype))
    if decoder.config._attn_implementation in ("wsvd", "wsvd_eager"):
        decoder.set_attn_implementation(base)
