"""Decode calls as the Hopper kernels take them, run by the emulator of Gluon in a process of its own."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import torch
from kernel_cases import DecodeCase, random_mask, random_part, random_rows
from torch import Tensor

from hf_wsvd.kernels import hopper_launch
from hf_wsvd.kernels.decode_call import DecodeCall
from hf_wsvd.kernels.decode_oracle import decode_part_oracle
from hf_wsvd.kernels.stored_tokens import DecodePart, KeyNormWeights, StoredTokens


@dataclasses.dataclass(frozen=True)
class HopperCase(DecodeCase):
    """Defaults are an MHA step of fp16 latents, a tile and a part of one, with NaN where there is no token."""

    dtype: str = "float16"
    batch: int = 1
    tokens: int = 200
    head_dim: int = 64
    key_rank: int = 32
    value_rank: int = 32
    poison: bool = True
    value_code: tuple[str, int] | None = None  # code and bits; None: those of keys
    split_tokens: int = 256
    part: tuple[int, ...] | None = None  # the heads of the part, of `heads`
    first: int = 0  # place of the part's first token
    tile: tuple[tuple[str, int], ...] = ()  # fields of the tile that are not as the shipped table says

    @property
    def tolerance(self) -> float:
        """Of the relative error: roundings of one dtype between products, more where single tokens decide."""
        return {"float16": 2e-3, "bfloat16": 1.5e-2}[self.dtype] * max(1.0, self.peak / 2)


def operands(case: HopperCase) -> tuple[DecodeCall, DecodePart]:
    """The call and its only part, in buffers with room behind every head."""
    torch.manual_seed(0)
    dtype = case.torch_dtype
    query = (torch.randn(case.batch, case.heads * case.group, 1, case.head_dim) * case.peak).to(dtype)
    lengths, starts = (None if n is None else torch.tensor(n, dtype=torch.int32) for n in (case.lengths, case.starts))
    norm = None
    if case.norm is not None:
        norm = KeyNormWeights((1 + torch.rand(case.head_dim)).to(dtype), 1e-5, case.norm == "before")
    part = random_part(case, case.part, case.first, case.tokens - case.first, lengths, starts)
    if case.value_code is not None:
        code, bits = case.value_code
        valued = dataclasses.replace(case, code=code, bits=bits)
        values = random_part(valued, case.part, case.first, case.tokens - case.first, lengths, starts)
        part = part._replace(value=values.value)
    up = torch.randn(part.key.payload.shape[1], case.head_dim, case.key_rank) * case.key_rank**-0.5
    part = part._replace(key=roomy(part.key), value=roomy(part.value), key_up=up.to(dtype))
    rows, mask = random_rows(case), random_mask(case)
    scaling = case.head_dim**-0.5
    call = DecodeCall(
        query, case.heads, case.tokens, scaling, rows, mask, case.softcap, case.window, lengths, starts, norm
    )
    return call, part


def roomy(stored: StoredTokens) -> StoredTokens:
    """Views of buffers for a multiple of 16 tokens, in which what no token of the sequence has is NaN."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        batch, heads, tokens, width = tensor.shape
        nothing = 255 if tensor.dtype == torch.uint8 else math.nan
        buffer = tensor.new_full((batch, heads, tokens // 16 * 16 + 32, width), nothing)
        buffer[:, :, :tokens] = tensor
        return buffer[:, :, :tokens]

    return stored._replace(payload=moved(stored.payload), scales=moved(stored.scales))


def worst_error(case: HopperCase) -> tuple[float, float]:
    """Relative error of the outputs of splits and absolute one of their logarithmic sums, infinite where one is NaN.

    What a kernel writes for one split, a result of each group of warps, is merged first.
    """
    call, part = operands(case)
    with (
        mock.patch.object(hopper_launch, "hopper_obstacle", return_value=None),  # of the device
        mock.patch.object(hopper_launch, "balanced_split", return_value=case.split_tokens),
    ):
        plan = hopper_launch.plan_of(part, call)
        assert plan.obstacle is None, plan.obstacle
        tile = hopper_launch.choose_tile(plan.kernel, part, call)._replace(**dict(case.tile))
        partial, lse = hopper_launch.hopper_decode(part, call, tile)
    wanted, wanted_lse = decode_part_oracle(call, part, case.split_tokens)
    partial, lse = merged(partial, lse, wanted.shape[3])
    assert partial.shape == wanted.shape
    seen = wanted_lse != -math.inf
    assert torch.equal(seen, lse != -math.inf), "splits that see something"
    if not seen.any():
        return 0.0, 0.0
    errors = [(partial - wanted)[seen].norm() / wanted[seen].norm(), (lse - wanted_lse)[seen].abs().max()]
    return tuple(math.inf if error.isnan() else float(error) for error in errors)


def merged(partial: Tensor, lse: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """`partial [..., splits n, width]` and `lse [..., splits n]` of n groups of warps as one result a split, fp64."""
    partial, lse = partial.double().unflatten(3, (splits, -1)), lse.double().unflatten(3, (splits, -1))
    whole = torch.logsumexp(lse * math.log(2), dim=-1) / math.log(2)
    factor = torch.exp2(lse - whole[..., None]).nan_to_num(0)[..., None]
    return torch.where(factor > 0, partial * factor, 0).sum(4), whole
