"""Decode steps of tiny models by kernels and by the torch path, for comparison."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import tiny_models
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_wsvd
from hf_wsvd import WSVDCache, attention
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.kernels import decode_checks, use
from hf_wsvd.kernels.decode_call import DecodeCall, layer_heads, sequence_tokens
from hf_wsvd.kernels.decode_checks import check_call, check_parts, check_query
from hf_wsvd.kernels.decode_oracle import fused_attention_oracle


def checked_definition(query, parts, rotation, mask=None, *, scaling, **options):
    """`fused_attention` by its definition: same checks, no launch."""
    with mock.patch.object(decode_checks, "runs_on", return_value=True):
        check_query(query)
    check_parts(parts, query)
    tokens = sequence_tokens(parts, rotation, mask, options.get("lengths"))
    check_call(DecodeCall(query, layer_heads(parts), tokens, scaling, rotation, mask, **options))
    return fused_attention_oracle(query, parts, rotation, mask, scaling=scaling, **options).to(query.dtype)


class Counted:
    """A function that counts its calls and keeps the arguments of the last."""

    def __init__(self, function: Any):
        self.function, self.calls, self.last = function, 0, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls, self.last = self.calls + 1, args
        return self.function(*args, **kwargs)


def dense(family: str) -> PreTrainedModel:
    """A dense model whose packed caches kernels may read."""
    model = tiny_models.build(family)
    model.set_attn_implementation("wsvd")
    return model


def latent(family: str) -> PreTrainedModel:
    config = hf_wsvd.WSVDConfig(rank_ratio=0.5, self_check="none", **tiny_models.CLOSED_FORM)
    model = tiny_models.build(family)
    return hf_wsvd.compress(model, config, calibration=tiny_models.calibration_batches(family))


@torch.no_grad()
def decode(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, counts: tuple[int, ...]) -> Tensor:
    """Logits of the steps after a prompt, `[B, sum(counts), vocabulary]`; step i has `counts[i]` tokens."""
    batch, mask = inputs["input_ids"].shape[0], inputs["attention_mask"]
    generator = torch.Generator().manual_seed(7)
    model(**inputs, use_cache=True, **{CACHE_ARGUMENT: cache})
    found = []
    for count in counts:
        tokens = torch.randint(3, 120, (batch, count), generator=generator)
        mask = torch.cat([mask, mask.new_ones(batch, count)], dim=1)
        padding = {} if mask.all() else {"attention_mask": mask}
        out = model(input_ids=tokens, **padding, use_cache=True, **{CACHE_ARGUMENT: cache})
        found.append(out.logits)
    return torch.cat(found, dim=1)


def both_ways(
    model: PreTrainedModel, inputs: dict[str, Tensor], options: dict[str, Any], counts: tuple[int, ...] = (1, 3, 1)
) -> tuple[float, Counted]:
    """Relative difference of the logits by kernels and by the torch path, and the calls of the former."""
    twin = copy.deepcopy(model)
    with use("torch"):
        wanted = decode(twin, inputs, WSVDCache(twin, **options), counts)
    kernel = attention.fused_attention
    attention.fused_attention = counted = Counted(kernel)
    try:
        found = decode(model, inputs, WSVDCache(model, **options), counts)
    finally:
        attention.fused_attention = kernel
    return ((found - wanted).norm() / wanted.norm()).item(), counted


def interpreted(kind: str, family: str, options: dict[str, Any]) -> tuple[float, int]:
    """`both_ways` with the real kernels, for a process in which Triton interprets."""
    torch.manual_seed(0)
    model = {"dense": dense, "latent": latent}[kind](family)
    difference, counted = both_ways(model, tiny_models.prompt(family, tokens=8), options, counts=(2,))
    return difference, counted.calls
