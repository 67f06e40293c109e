"""Which cache `generate` of a compressed model makes by itself, and why: decided before anything is allocated."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation import GenerationMode

from .cache import WSVDCache, model_cache_config
from .compat import CACHE_ARGUMENTS, CUDA_GRAPHS_IN_ANY_THREAD
from .quantizer_config import WSVDConfig


# Tokens that a cache of fixed size is a multiple of: prompts of many lengths then share one cache and its graphs.
LENGTH_STEP = 1024
# What transformers generates where nothing says how much.
DEFAULT_NEW_TOKENS = 20
SINGLE_STEP_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class CacheChoice(NamedTuple):
    """What a call of `generate` decodes with.

    Attributes:
        cache: "static" (fixed size, steps compiled) or "dynamic" (what transformers makes, as it was asked).
        reason: why, in words.
        batch, tokens: sequences of the cache and tokens of each; 0 for "dynamic".
    """

    cache: str
    reason: str
    batch: int = 0
    tokens: int = 0


class GenerateCall(NamedTuple):
    """What a choice depends on.

    Attributes:
        settings: the generation config that is in force.
        batch: sequences, returned ones counted.
        prompt: tokens of the prompt, padding included; None where the call does not show them.
        device: of the model.
        devices: that its layers lie on, offloaded ones included.
        main_thread: whether it is Python's main thread that generates.
        cache_given, assisted, custom: whether the caller brings a cache, another model or a loop of its own.
        obstacle: why the model's cache cannot have a fixed size; None where it can.
    """

    settings: GenerationConfig
    batch: int
    prompt: int | None
    device: torch.device
    devices: int = 1
    main_thread: bool = True
    cache_given: bool = False
    assisted: bool = False
    custom: bool = False
    obstacle: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the longest sequence, prompt included."""
        if self.settings.max_new_tokens is not None:
            return self.prompt + self.settings.max_new_tokens
        if self.settings.max_length is not None:
            return max(self.settings.max_length, self.prompt + 1)
        return self.prompt + DEFAULT_NEW_TOKENS


def explain_generate(
    model: PreTrainedModel, *args: Any, generation_config: GenerationConfig | None = None, **kwargs: Any
) -> CacheChoice:
    """Which cache `model.generate` of the same arguments would make by itself, and why. Allocates nothing.

    Raises:
        ValueError: a model without `generate`, or no compressed one.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ValueError(
            f"explain_generate: model={type(model).__name__} is not allowed; allowed: one with `generate`"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(getattr(quantizer, "quantization_config", None), WSVDConfig):
        raise ValueError(f"explain_generate: {type(model).__name__} is not compressed by hf_wsvd")
    if inspect.unwrap(type(model).generate) is not inspect.unwrap(GenerationMixin.generate):
        return CacheChoice("dynamic", f"{type(model).__name__} has a `generate` of its own")
    return choose_cache(call_of(model, *args, generation_config=generation_config, **kwargs))


def choose_cache(call: GenerateCall) -> CacheChoice:
    """The cache of a call."""
    obstacle = (
        request_obstacle(call)
        or place_obstacle(call)
        or call.obstacle
        or (None if call.prompt is not None else "the call shows no prompt")
    )
    if obstacle is not None:
        return CacheChoice("dynamic", obstacle)
    tokens = -(-call.tokens // LENGTH_STEP) * LENGTH_STEP
    return CacheChoice("static", f"{call.tokens:,} tokens at most, in steps of {LENGTH_STEP:,}", call.batch, tokens)


def request_obstacle(call: GenerateCall) -> str | None:
    """What of the caller's wishes stands against a cache of ours of fixed size."""
    settings = call.settings
    if call.cache_given:
        return "a cache is given"
    if settings.cache_implementation not in (None, "hybrid"):  # "hybrid" stands in old checkpoints, and means nothing
        return f"cache_implementation={settings.cache_implementation!r} is asked for"
    if settings.use_cache is False:
        return "use_cache=False is asked for"
    if settings.disable_compile:
        return "disable_compile=True is asked for"
    if call.custom:
        return "a custom_generate loop is given"
    mode = settings.get_generation_mode()
    if call.assisted or mode not in SINGLE_STEP_MODES:
        mode = GenerationMode.ASSISTED_GENERATION if call.assisted else mode
        return f"{mode.value.replace('_', ' ')} changes the size of its cache or of its steps"
    if settings.return_dict_in_generate:
        return "return_dict_in_generate=True hands the cache out, where it may have to grow"
    if settings.prefill_chunk_size is not None:
        return "prefill_chunk_size compiles prompts too, anew for every last chunk"
    return None


def place_obstacle(call: GenerateCall) -> str | None:
    """What of the model's devices stands against compiled steps."""
    compile_config = call.settings.compile_config
    everywhere = compile_config is not None and bool(compile_config._compile_all_devices)
    if call.devices > 1:
        return f"the model lies on {call.devices} devices"
    if call.device.type != "cuda" and not everywhere:
        return f"nothing is compiled on {call.device.type}"
    if call.device.type == "cuda" and not (call.main_thread or CUDA_GRAPHS_IN_ANY_THREAD):
        return "this version of torch runs CUDA graphs in the main thread alone"
    return None


def call_of(
    model: PreTrainedModel, *args: Any, generation_config: GenerationConfig | None = None, **kwargs: Any
) -> GenerateCall:
    """What a choice depends on of the arguments of `generate`."""
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    given = {**dict(zip(names, args)), **kwargs}
    if generation_config is not None:
        given["generation_config"] = generation_config
    settings = settled_config(model, given.pop("generation_config", None), given)
    batch, prompt = prompt_size(given)
    copies = max(settings.num_beams or 1, settings.num_return_sequences or 1)
    call = GenerateCall(
        settings=settings,
        batch=batch * copies,
        prompt=prompt,
        device=model.device,
        devices=len(set((getattr(model, "hf_device_map", None) or {"": None}).values())),
        main_thread=threading.current_thread() is threading.main_thread(),
        cache_given=any(given.get(name) is not None for name in CACHE_ARGUMENTS),
        assisted=given.get("assistant_model") is not None,
        custom=given.get("custom_generate") is not None,
    )
    if request_obstacle(call) or place_obstacle(call):
        return call
    return call._replace(obstacle=fixed_size_obstacle(model))


def settled_config(
    model: PreTrainedModel, generation_config: GenerationConfig | None, options: Mapping[str, Any]
) -> GenerationConfig:
    """The generation config in force: options over what is given over the model's own, as `generate` has it."""
    settings = GenerationConfig() if generation_config is None else copy.deepcopy(generation_config)
    own = model.generation_config.to_dict()
    settings.update(**own, defaults_only=True, allow_custom_entries=True)
    settings.update(**{name: value for name, value in options.items() if hasattr(settings, name)})
    return settings


def prompt_size(given: Mapping[str, Any]) -> tuple[int, int | None]:
    """Rows of the prompt, and tokens of a row (None: not to be seen)."""
    for name in ("inputs_embeds", "input_ids", "inputs"):
        value = given.get(name)
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[0], value.shape[1]
    return 1, None


def fixed_size_obstacle(model: PreTrainedModel) -> str | None:
    """Why a model's own cache cannot have a fixed size; None where it can."""
    config = model_cache_config(model)
    if config is not None and config.by_class:
        return "tokens of images are kept otherwise than those of text: every prompt would share out its slots anew"
    stock = StaticCache(model.config.get_text_config(decoder=True), max_cache_len=LENGTH_STEP)
    kinds = sorted({type(layer).__name__ for layer in stock.layers if not isinstance(layer, StaticLayer)})
    if kinds:
        return f"{', '.join(kinds)} keeps no keys and values of fixed size"
    try:
        cache = WSVDCache(model, max_cache_len=LENGTH_STEP)
    except ValueError as error:
        return str(error)
    return None if cache.is_compileable else "a layer of the cache cannot be compiled"
