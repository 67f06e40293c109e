"""The exchange of a model's projections: at the fit, for a compressed checkpoint, and back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import bind, bind_packed, implementation_for, unbind
from .cache_hook import install_cache_hook, remove_cache_hook
from .calibration import Statistics, collect_statistics, default_calibration, given_statistics, is_statistics
from .calibration.batches import Batch
from .call import key_norm_module
from .decoder import decoder_attentions, decoder_of, decoder_shape
from .fit import Fit, fitted, keep_full_rank
from .guarding import (
    check_guards,
    chooses_heads,
    guard_heads,
    needs_guard_data,
    read_again,
    refuse_statistics,
)
from .image_tokens import unwatch_image_tokens
from .kernels.dispatch import kernels_can_run
from .low_precision.convert import (
    check_low_precision,
    check_rotations,
    dequantize_modules,
    lower_precision,
    quantize_modules,
)
from .modules import LatentProjection
from .prefill import install_prefill_hook, remove_prefill_hook
from .probe import probe_key_layouts
from .quantizer_config import CacheConfig, HeadGuardConfig, KeyLayout, WSVDConfig
from .self_check import SelfCheck, attach_self_check, measured_dense_side, recorded_dense_side
from .storage.narrow import narrowed
from .targets import Target, targets
from .trial import layers_that_need_keys


def fit_latents(
    model: PreTrainedModel,
    config: WSVDConfig,
    *,
    calibration: Iterable[dict[str, Tensor]] | Statistics | str | os.PathLike[str] | None = None,
    statistics: Statistics | str | os.PathLike[str] | None = None,
    processor: Any = None,
) -> None:
    """Calibrate (unless `statistics` are given, or a file of them), fit the factors, exchange the modules and bind.

    On success `config` holds what was done: ranks, key layouts, records of calibration and fit, decoder shape. After
    a failure the model is as it was, unless `lower_precision` was interrupted.
    """
    targets(model, config)  # before any long work
    check_guards(model, config)
    check_low_precision(model, config, calibration if statistics is None else statistics)
    if not config.compresses:
        pack_dense(model, config, calibration if statistics is None else statistics, processor)
        return
    if statistics is not None and not is_statistics(statistics):
        raise ValueError(
            f"statistics must be what collect_statistics returned or a file of it, got {type(statistics).__name__}; "
            "data to calibrate on go to calibration"
        )
    if statistics is not None and calibration is not None:
        raise ValueError("calibration and statistics are both given: statistics were measured on data of their own")
    refuse_statistics(config, calibration if statistics is None else statistics)
    statistics = given_statistics(calibration if statistics is None else statistics)
    if statistics is None:
        if calibration is None:
            calibration = default_calibration(model, processor)
        calibration = read_again(calibration) if needs_batches(config) else calibration
        statistics = collect_statistics(
            model,
            calibration,
            fisher=config.refinement == "fisher",
            keep_answers=config.refinement == "distillation",
        )
    dense = None
    if config.self_check != "none":
        dense = recorded_dense_side(statistics, config.self_check) or measured_dense_side(model)
    batches = calibration if needs_batches(config) else None
    if config.head_guard is not None and config.head_guard.scores_on == "dense":
        guard_heads(model, config, batches)
    with fitted(model, config, statistics) as fit:
        with unbound_on_failure(model):
            settle(model, config, fit, dense, statistics, batches)
        fit.keep()


@contextmanager
def unbound_on_failure(model: PreTrainedModel) -> Iterator[None]:
    """Undo what binds a model, and its self-check, if what happens inside fails."""
    decoder = decoder_of(model)
    implementation, cuts_prompts = decoder.config._attn_implementation, hasattr(decoder, "_wsvd_prefill")
    try:
        yield
    except BaseException:
        unbind_all(model)
        if not cuts_prompts:
            remove_prefill_hook(model)
        decoder.set_attn_implementation(implementation)
        vars(model).pop("_wsvd_self_check", None)
        raise


def needs_batches(config: WSVDConfig) -> bool:
    """Whether the model is run on calibration data after its statistics are known."""
    return needs_guard_data(config) or (config.low_precision is not None and config.low_precision.needs_data)


def refuse_unused_data(config: WSVDConfig, calibration: Any) -> None:
    """Raise ValueError for data or statistics that nothing is measured on."""
    unused = is_statistics(calibration) or not needs_batches(config)
    if calibration is not None and not config.compresses and unused:
        raise ValueError(
            "calibration data or statistics are given, but the WSVDConfig gives no rank to fit, and nothing else in "
            "it measures anything on them (low_precision of a method other than 'rtn' does, on data): leave them out"
        )


def pack_dense(model: PreTrainedModel, config: WSVDConfig, calibration: Any, processor: Any) -> None:
    """A config without ranks: packed caches over dense keys and values, guarded heads, weights of low precision.

    Raises:
        ValueError: data or statistics that nothing is measured on, and as `select_heads`.
    """
    refuse_statistics(config, calibration)
    refuse_unused_data(config, calibration)
    if calibration is None and needs_batches(config):
        calibration = default_calibration(model, processor)
    batches, fit, dense = read_again(calibration), Fit([], {}), None
    if config.low_precision is not None and config.self_check != "none":
        dense = measured_dense_side(model)
    guard_heads(model, config, batches)
    with unbound_on_failure(model):
        bind_all(model, [], {}, config.storage)
        if config.low_precision is not None:
            fit.info["low_precision"] = lower_precision(model, config, batches)
            attach_self_check(model, dense)
    record(config, fit, {}, decoder_shape(model), {})


def settle(
    model: PreTrainedModel,
    config: WSVDConfig,
    fit: Fit,
    dense: SelfCheck | None,
    statistics: Statistics,
    batches: Iterable[Batch] | None = None,
) -> None:
    """All that follows once the factors stand in the model: key layouts, trial, binding, guards, self-check, record.

    Args:
        dense: the dense model's side of the self-check; None for a model that goes without.
        statistics: what the factors were fitted on.
        batches: what guarded heads are measured on and low precision is prepared on, where the config asks for it.
    """
    attentions = [target.attention for target in fit.targets]
    layouts = probe_key_layouts(model, attentions)
    bind_all(model, fit.targets, layouts)
    latent = [a for a in attentions if layouts[a.layer] is not None]
    for layer in layers_that_need_keys(model, latent) if latent else ():
        layouts[layer] = None
    bind_all(model, fit.targets, layouts)
    guard_heads(model, config, batches)
    if config.keeps_full_rank:
        keep_full_rank(fit, config.guard_map)
    if config.low_precision is not None:
        bind_all(model, fit.targets, layouts, config.storage)  # what may fail does so before weights are rounded
        bind_all(model, fit.targets, layouts)
        fit.info["low_precision"] = lower_precision(model, config, batches, statistics)
    attach_self_check(model, dense)
    bind_all(model, fit.targets, layouts, config.storage)
    record(config, fit, layouts, decoder_shape(model), statistics.info)


def record(config: WSVDConfig, fit: Fit, layouts: dict[int, KeyLayout | None], shape: dict, info: dict) -> None:
    """Write into `config` what a load needs: final ranks by layer, layouts, the decoder's shape."""
    layers = shape["num_hidden_layers"]
    config.k_rank, config.v_rank = fit.ranks("k", layers), fit.ranks("v", layers)
    if any(target.q_rank is not None for target in fit.targets):
        config.q_rank = fit.ranks("q", layers)
    config.k_full_heads, config.v_full_heads = (full_heads(fit.targets, side, layers) for side in "kv")
    config.fit_info = fit.info
    config.key_layout = [str(layouts[i]) if layouts.get(i) is not None else None for i in range(layers)]
    config.decoder_shape = shape
    config.calibration_info = info
    config.calibration = None


def full_heads(chosen: list[Target], side: str, layers: int) -> list[list[int] | None] | None:
    """By decoder layer the heads of `side` that keep their full rank beside heads that are cut; None without any."""
    by_layer = {t.attention.layer: getattr(t.attention.module, f"{side}_proj").full_heads for t in chosen}
    return [list(by_layer.get(n) or ()) or None for n in range(layers)] if any(by_layer.values()) else None


def insert_empty(model: PreTrainedModel, config: WSVDConfig) -> list[Target]:
    """Exchange the modules of a model without weights (on the meta device) for a compressed checkpoint's."""
    check_shape(model, config)
    check_guards(model, config)
    if chooses_heads(config):
        raise ValueError(
            "the quantization_config of this checkpoint has a head_guard without a guard_map: it was not written by "
            "save_pretrained of a compressed model"
        )
    chosen = targets(model, config)
    check_norms(chosen, config)
    for target in chosen:
        for side, rank, linear in target.sides():
            heads, head_dim = target.attention.heads_of(side), target.attention.head_dim
            full = None if side == "q" else getattr(config, f"{side}_full_heads")
            projection = LatentProjection(
                linear.in_features,
                heads,
                head_dim,
                rank,
                linear.bias is not None,
                full_heads=(full[target.attention.layer] or ()) if full else (),
                device=linear.weight.device,
                dtype=linear.weight.dtype,
            )
            setattr(target.attention.module, f"{side}_proj", projection)
    if config.low_precision is not None:
        check_rotations(model, config)
        quantize_modules(model, config)
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
    for name in ("k_full_heads", "v_full_heads"):
        by_layer = getattr(config, name)
        if by_layer is not None and len(by_layer) != shape["num_hidden_layers"]:
            raise ValueError(
                f"WSVDConfig: {name} has {len(by_layer)} entries, the decoder has {shape['num_hidden_layers']} layers"
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


def bind_all(
    model: PreTrainedModel,
    chosen: list[Target],
    layouts: dict[int, KeyLayout | None],
    cache: CacheConfig | None = None,
) -> None:
    """Hook every compressed layer (anew, if it is hooked) and switch the decoder's attention function.

    Args:
        cache: storage of the caches that the model makes by itself, those of layers that stay dense included.

    Raises:
        ValueError: storage that the model's layers cannot have.
    """
    unbind_all(model)
    packed, cache = cache is not None, CacheConfig() if cache is None else cache
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for target in chosen:
        layer = target.attention.layer
        module, latent = target.attention.module, layouts[layer] is not None
        storage = cache.storage(layer, layers, latent)
        bind(module, layer, layouts[layer], narrowed(storage, module) if latent else storage)
    if packed:
        install_cache_hook(model, cache, {layer for layer, layout in layouts.items() if layout is not None})
    install_prefill_hook(model)
    if chosen:
        decoder_of(model).set_attn_implementation(implementation_for(model))
    decoder = decoder_of(model)
    if packed and hasattr(decoder, "_wsvd_cache") and kernels_can_run():
        if decoder.config._attn_implementation in ("sdpa", "eager"):
            decoder.set_attn_implementation(implementation_for(model))
        bind_packed(model)


def guard_compressed(
    model: PreTrainedModel, config: WSVDConfig, cache: CacheConfig, head_guard: HeadGuardConfig
) -> None:
    """Give a compressed and bound model another packed cache with other guarded heads, whose map is finished.

    Raises:
        ValueError: a map for another model, or storage that the layers cannot have; the model is then as it was.
    """
    before = config.cache, config.head_guard
    layouts = {i: KeyLayout.parse(text) for i, text in enumerate(config.key_layout)}
    chosen = targets(model, config)
    try:
        config.cache, config.head_guard = cache, head_guard
        config.post_init()
        check_guards(model, config)
        bind_all(model, chosen, layouts, config.storage)
    except BaseException:
        config.cache, config.head_guard = before
        bind_all(model, chosen, layouts, config.storage)
        raise


def unbind_all(model: PreTrainedModel) -> None:
    """Remove the hooks of the decoder and of every layer that has them."""
    remove_cache_hook(model)
    for attention in decoder_attentions(model):
        if hasattr(attention.module, "_wsvd"):
            unbind(attention.module)


def merge_all(model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Turn a compressed model into a plain dense one with the weights `U_h D_h`, and without integers."""
    dtype = model.dtype if dtype is None else dtype
    decoder = decoder_of(model)
    base = "eager" if decoder.config._attn_implementation == "wsvd_eager" else "sdpa"
    unbind_all(model)
    remove_prefill_hook(model)
    unwatch_image_tokens(model)
    dequantize_modules(model, dtype)
    for attention in decoder_attentions(model):
        for side in "qkv":
            projection = getattr(attention.module, f"{side}_proj", None)
            if isinstance(projection, LatentProjection):
                setattr(attention.module, f"{side}_proj", projection.merged().to(dtype))
    if decoder.config._attn_implementation in ("wsvd", "wsvd_eager"):
        decoder.set_attn_implementation(base)
