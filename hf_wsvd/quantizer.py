"""`quant_method: wsvd` of transformers: compress dense checkpoints at load, load and save compressed ones."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from .calibration import Statistics, given_statistics, is_statistics
from .card import base_model_on_hub
from .checkpoint import check_checkpoint
from .compat import restore_dtypes
from .guarding import check_guards, refuse_statistics
from .low_precision.convert import (
    check_low_precision,
    check_scales,
    install_rotations,
    quantized_modules,
    remove_rotations,
)
from .model_class import install_methods, remove_methods
from .quantizer_config import KeyLayout, WSVDConfig
from .self_check import set_self_check
from .self_check_file import load_self_check
from .streaming import Factorise, Streaming, refuse_offload
from .surgery import bind_all, fit_latents, insert_empty, merge_all, refuse_unused_data
from .targets import Target, targets
from .version import __version__


class WSVDHfQuantizer(HfQuantizer):
    """Hooks of `from_pretrained`, `save_pretrained` and `dequantize` for `WSVDConfig`.

    A dense checkpoint is loaded as usual and compressed afterwards, in process, on `WSVDConfig.calibration` or the
    built-in default set. Where `calibration` is statistics or their file, it is compressed while it loads, one weight
    after the other. A compressed one gets its modules before any weight is read.
    """

    requires_calibration = False
    quantization_config: WSVDConfig

    def __init__(self, quantization_config: WSVDConfig, **kwargs: Any):
        # The fit writes its results into the config; the caller's object stays reusable.
        super().__init__(copy.deepcopy(quantization_config), **kwargs)
        self._targets: list[Target] | None = None
        self._dtypes: dict[str, torch.dtype] | None = None
        self._fitted = False
        self._streaming: Streaming | None = None
        self.checkpoint_folder: str | None = None  # where the weights of a compressed checkpoint were read

    def fit(self, model: PreTrainedModel, **data: Any) -> None:
        """Compress a dense model; `data` as in `fit_latents`."""
        fit_latents(model, self.quantization_config, **data)
        self._record_base(model)

    def _record_base(self, model: PreTrainedModel) -> None:
        config, base_model = self.quantization_config, base_model_on_hub(model)
        if base_model is not None:  # a copy: the statistics may serve another fit
            config.calibration_info = {**config.calibration_info, "base_model": base_model}
        self._fitted = True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called with the device map that was asked for, and again with one that transformers made."""
        calibration = self.quantization_config.calibration
        if not self.pre_quantized and isinstance(device_map, dict) and is_statistics(calibration):
            refuse_offload(device_map.values())

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return self._streaming is not None and param_name in self._streaming.dense

    def get_quantize_ops(self) -> ConversionOps:
        return Factorise(self._streaming)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        share = 1.0 if self._streaming is None else self._streaming.share(param_name)
        return share * param.element_size()

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        refuse_distribution(model)
        if self.pre_quantized:
            self._targets = insert_empty(model, self.quantization_config)
            check_checkpoint(checkpoint_files, exchanged_modules(model, self._targets))
            self.checkpoint_folder = os.path.dirname(checkpoint_files[0]) if checkpoint_files else None
            self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        elif not self._fitted:
            config = self.quantization_config
            targets(model, config)  # ranks and guards that do not fit fail before anything is read
            check_guards(model, config)
            check_low_precision(model, config, config.calibration)
            refuse_statistics(config, config.calibration)
            refuse_unused_data(config, config.calibration)
            statistics = given_statistics(config.calibration)
            if statistics is not None:
                self._streaming = Streaming(model, config, statistics)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self.pre_quantized:
            layouts = {i: KeyLayout.parse(text) for i, text in enumerate(self.quantization_config.key_layout)}
            restore_dtypes(model, self._dtypes)
            check_scales(model)
            if self.quantization_config.low_precision is not None:
                install_rotations(model, self.quantization_config)
            bind_all(model, self._targets, layouts, self.quantization_config.storage)
            self._targets = self._dtypes = None
            load_self_check(model, self.checkpoint_folder)
        elif self._streaming is not None:
            streaming, self._streaming = self._streaming, None
            streaming.finish(model)
            self._record_base(model)
        elif not self._fitted:
            self.fit(model, calibration=self.quantization_config.calibration)
        install_methods(model)
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        # After save_pretrained, config.dtype is a string and transformers passes it on.
        remove_methods(model)
        set_self_check(model, None)
        merge_all(model, getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype)
        if self.quantization_config.low_precision is not None:
            remove_rotations(model, self.quantization_config)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        return None, {"hf_wsvd_version": __version__}

    def is_serializable(self, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def exchanged_modules(model: PreTrainedModel, chosen: list[Target]) -> dict[str, nn.Module]:
    """By name the modules that a compressed checkpoint holds in another form than a dense one."""
    latent = {target.attention.side_name(side): module for target in chosen for side, _, module in target.sides()}
    return latent | quantized_modules(model)


def refuse_distribution(model: PreTrainedModel) -> None:
    """Raise ValueError for a load that would split factors over processes."""
    plan = getattr(model.config, "distributed_config", None)
    sizes = {f"{kind}_size": getattr(plan, f"{kind}_size", 1) for kind in ("tp", "ep", "pp", "fsdp")}
    split = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 1}
    if split:
        raise ValueError(f"hf_wsvd does not support a model split over processes ({split}); use device_map instead")


def compress(
    model: PreTrainedModel,
    config: WSVDConfig | None = None,
    *,
    calibration: Iterable[dict[str, Tensor]] | Statistics | str | os.PathLike[str] | None = None,
    statistics: Statistics | str | os.PathLike[str] | None = None,
    processor: Any = None,
) -> PreTrainedModel:
    """Compress a loaded dense model in place, as `from_pretrained(..., quantization_config=config)` would.

    Args:
        model: any supported decoder or vision-language model, not quantized.
        config: ranks; the default keeps half of every head.
        calibration: model-input dicts to calibrate on, or statistics or their file, as `WSVDConfig.calibration`; None
            takes that, or the default set.
        statistics: what `collect_statistics` returned on the same dense model, or a file that `save_statistics` or
            `hf-wsvd calibrate` wrote; then no calibration is run. Useful to try several ratios.
        processor: for the default set, when it cannot be loaded from where the model came from.

    Returns:
        The model itself, ready for `generate`, `save_pretrained`, `push_to_hub` and `dequantize`.

    Raises:
        ValueError: the model is quantized already, or `config`, the data or the model do not fit; the model is then
            unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"compress: model must be a loaded transformers model, got {type(model).__name__}")
    if config is not None and not isinstance(config, WSVDConfig):
        raise ValueError(f"compress: config must be a WSVDConfig, got {type(config).__name__}")
    if getattr(model, "hf_quantizer", None) is not None:
        method = model.hf_quantizer.quantization_config.quant_method
        method = getattr(method, "value", method)
        hint = "; load it with quantization_config=GgufConfig(dequantize=True)" if method == "gguf" else ""
        raise ValueError(f"the model is quantized already (quant_method={method!r}){hint}")
    quantizer = WSVDHfQuantizer(WSVDConfig() if config is None else config, pre_quantized=False)
    given = quantizer.quantization_config.calibration
    for name, argument in (("calibration", calibration), ("statistics", statistics)):
        if given is not None and argument is not None and argument is not given:
            raise ValueError(f"WSVDConfig.calibration and {name}= are both given: leave one out")
    if calibration is None and statistics is None:
        calibration = given
    quantizer.fit(model, calibration=calibration, statistics=statistics, processor=processor)
    quantizer.preprocess_model(model)
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return model
