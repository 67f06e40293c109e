"""Time of a prefill and of a decode step at a given context."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from ..calibration.chat import place
from ..compat import CACHE_ARGUMENT


@dataclass(frozen=True)
class Latency:
    """Medians, in seconds, for a batch of `batch_size` sequences."""

    prefill: float
    step: float
    context: int
    batch_size: int
    steps: int
    threads: int
    device: str

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of the whole batch."""
        return self.batch_size / self.step

    def to_dict(self) -> dict[str, float | int | str]:
        """JSON form, with the derived number."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def decode_latency(
    model: PreTrainedModel,
    context: int,
    *,
    batch_size: int = 1,
    steps: int = 16,
    warmup: int = 4,
    repeats: int = 3,
    cache_factory: Callable[[], Cache] | None = None,
) -> Latency:
    """Median time of one decode step after `context` tokens, over `repeats` prefills of `steps` steps each.

    The tokens are random text tokens: neither path's time depends on them. The first `warmup` steps of each repeat are
    not counted, nor is the first prefill where there are others. Steps run one by one, uncompiled.

    Args:
        cache_factory: an empty cache for each repeat; `DynamicCache` by default.
    Raises:
        ValueError: a count below 1.
    """
    if min(context, batch_size, steps, repeats) < 1 or warmup < 0:
        raise ValueError("context, batch_size, steps and repeats must be at least 1, warmup at least 0")
    tokens = text_tokens(model, (batch_size, context + 1))
    prompt, token = tokens[:, :-1], tokens[:, -1:]
    prefills, decodes = [], []
    for _ in range(repeats):
        cache = cache_factory() if cache_factory else DynamicCache(config=model.config)
        rest = {"use_cache": True, CACHE_ARGUMENT: cache}
        prefills.append(timed(model, {"input_ids": prompt, **rest}))
        times = [timed(model, {"input_ids": token, **rest}) for _ in range(warmup + steps)]
        decodes += times[warmup:]
    return Latency(
        prefill=statistics.median(prefills[1:] or prefills),
        step=statistics.median(decodes),
        context=context,
        batch_size=batch_size,
        steps=len(decodes),
        threads=torch.get_num_threads(),
        device=str(token.device),
    )


def text_tokens(model: PreTrainedModel, shape: tuple[int, int]) -> torch.Tensor:
    """Random token ids on the model's device, none that the config names: `image_token_id` would ask for an image."""
    named = {value for name, value in model.config.to_dict().items() if "token" in name and isinstance(value, int)}
    vocabulary = model.get_input_embeddings().num_embeddings
    allowed = torch.tensor([token for token in range(vocabulary) if token not in named])
    picks = torch.randint(len(allowed), shape, generator=torch.Generator().manual_seed(0))
    return place({"input_ids": allowed[picks]}, model)["input_ids"]


def timed(model: PreTrainedModel, inputs: dict) -> float:
    """Wall-clock seconds of one forward, with the device idle before and after."""
    accelerator = torch.accelerator if inputs["input_ids"].device.type != "cpu" else None
    if accelerator:
        accelerator.synchronize()
    begin = time.perf_counter()
    with torch.no_grad():
        model(**inputs, logits_to_keep=1)
    if accelerator:
        accelerator.synchronize()
    return time.perf_counter() - begin
