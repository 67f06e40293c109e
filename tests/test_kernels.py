"""Attention over latents: the oracle against dense attention, the torch path against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from hf_wsvd.kernels import LatentHeads, Rotation, cached_key, latent_attention, latent_attention_oracle
from hf_wsvd.rope import half_rows


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and features of one attention call; the defaults are an MHA decode step with rotation."""

    batch: int = 2
    query_heads: int = 4
    heads: int = 4
    queries: int = 1
    tokens: int = 63
    head_dim: int = 16
    k_rank: int = 8
    v_rank: int = 8
    rotated: int = 16  # dimensions that turn; 0: no rotation
    interleaved: bool = False
    bias: bool = False
    mask: str | None = None  # "padding", "additive" or "by_head"
    softcap: float | None = None
    norm: str | None = None  # "before" or "after"
    peak: float = 1.0  # factor of the queries: large makes attention pick single tokens
    row_batch: int = 1

    def __str__(self) -> str:
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{name}={getattr(self, name)}" for name in changed) or "plain"


def random_heads(case: Case, rank: int) -> LatentHeads:
    """Latents of unit variance; at full rank without an up factor."""
    latent = torch.randn(case.batch, case.heads, case.tokens, rank)
    up = torch.linalg.qr(torch.randn(case.heads, case.head_dim, rank))[0] if rank < case.head_dim else None
    return LatentHeads(latent, up, torch.randn(case.heads, case.head_dim) if case.bias else None)


def random_mask(case: Case) -> Tensor | None:
    """Row i of the batch hides its first 3i tokens; some heads or queries hide more."""
    if case.mask is None:
        return None
    visible = torch.arange(case.tokens)[None] >= 3 * torch.arange(case.batch)[:, None]
    visible = visible[:, None, None].expand(-1, -1, case.queries, -1)
    visible = visible & torch.ones(case.queries, case.tokens).tril(case.tokens - case.queries).bool()
    if case.mask == "by_head":
        visible = visible & (torch.rand(case.batch, case.query_heads, case.queries, case.tokens) > 0.3)
        visible[..., -1] = True
    if case.mask == "additive":
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return visible


def random_rows(case: Case) -> Rotation | None:
    if not case.rotated:
        return None
    positions = torch.arange(case.tokens) + 5 * torch.arange(case.row_batch)[:, None]
    angles = positions[..., None] * 10000.0 ** -(torch.arange(0, case.rotated, 2) / case.rotated)
    return Rotation(angles.cos(), angles.sin(), case.interleaved)


def random_norm(case: Case) -> dict[str, Callable[[Tensor], Tensor]]:
    weight = 1 + torch.rand(case.head_dim)
    norm = lambda key: F.rms_norm(key, key.shape[-1:], weight.to(key.dtype), 1e-6)  # noqa: E731
    return {} if case.norm is None else {f"norm_{case.norm}": norm}


def operands(case: Case, dtype: torch.dtype = torch.float32) -> tuple[list, dict]:
    """Positional and keyword arguments of `latent_attention`, rounded to `dtype`."""
    query = torch.randn(case.batch, case.query_heads, case.queries, case.head_dim) * case.peak
    args = [query, random_heads(case, case.k_rank), random_heads(case, case.v_rank), random_rows(case)]
    rounded = [query.to(dtype)]
    for value in args[1:]:
        fields = value and [f.to(dtype) if isinstance(f, Tensor) else f for f in value]
        rounded.append(value and type(value)(*fields))
    keywords = {"scaling": case.head_dim**-0.5, "softcap": case.softcap, **random_norm(case)}
    return [*rounded, random_mask(case)], keywords


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


CASES = [
    Case(),
    *[Case(tokens=tokens, queries=queries) for tokens in (1, 7, 129) for queries in (1, 3, 16) if queries <= tokens],
    *[Case(tokens=tokens, query_heads=8, heads=2, queries=3) for tokens in (7, 129)],
    *[Case(k_rank=rank, v_rank=16 - rank + 5, bias=True) for rank in (5, 8, 16)],
    Case(k_rank=16, v_rank=16),
    Case(k_rank=1, v_rank=1),
    *[Case(head_dim=80, k_rank=rank, v_rank=8, rotated=rotated) for rank in (5, 80) for rotated in (0, 32, 80)],
    *[
        Case(rotated=rotated, interleaved=True, bias=True, query_heads=heads)
        for rotated in (8, 16)
        for heads in (4, 8)
    ],
    *[Case(rotated=rotated, bias=True, query_heads=8) for rotated in (0, 8, 16)],
    *[Case(rotated=rotated, bias=True) for rotated in (0, 8, 16)],
    *[Case(mask=mask, queries=n) for mask in ("padding", "additive", "by_head") for n in (1, 3)],
    *[Case(mask="padding", query_heads=8, row_batch=2, queries=n) for n in (1, 3)],
    Case(row_batch=2, mask="padding"),
    *[Case(softcap=2.0, peak=4.0, query_heads=heads, mask="padding") for heads in (4, 8)],
    *[Case(norm=norm, bias=bias, queries=n) for norm in ("before", "after") for bias in (False, True) for n in (1, 3)],
    *[Case(norm="before", query_heads=8, rotated=8, interleaved=True)],
    *[Case(peak=20.0, query_heads=heads, tokens=129) for heads in (4, 8)],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_path_matches_the_oracle_in_fp32(case):
    args, keywords = operands(case)
    wanted = latent_attention_oracle(*args, **keywords)
    found = latent_attention(*args, **keywords)
    assert found.shape == (case.batch, case.queries, case.query_heads, case.head_dim)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * case.peak)


def expanded_by_hand(heads: LatentHeads, head_dim: int) -> Tensor:
    up = torch.eye(head_dim).expand(heads.latent.shape[1], -1, -1) if heads.up is None else heads.up
    full = torch.einsum("bhsr,hdr->bhsd", heads.latent.double(), up.double())
    return full if heads.bias is None else full + heads.bias.double()[None, :, None]


@pytest.mark.parametrize("case", [case for case in CASES if not case.softcap and not case.interleaved], ids=str)
def test_oracle_is_dense_attention_on_expanded_heads(case):
    args, keywords = operands(case)
    query, key, value, rotation, mask = args
    full_key, full_value = expanded_by_hand(key, case.head_dim), expanded_by_hand(value, case.head_dim)
    if case.norm == "before":
        full_key = keywords["norm_before"](full_key)
    if rotation is not None:
        cos, sin = (torch.cat([rows, rows], -1).double() for rows in rotation[:2])
        turned, tail = full_key.split([case.rotated, case.head_dim - case.rotated], dim=-1)
        turned, _ = modeling_llama.apply_rotary_pos_emb(turned, turned, cos, sin)
        full_key = torch.cat([turned, tail], -1)
    if case.norm == "after":
        full_key = keywords["norm_after"](full_key)
    if mask is None:
        mask = torch.ones(case.queries, case.tokens).tril(case.tokens - case.queries).bool()
    mask = mask.double() if mask.is_floating_point() else mask
    wanted = F.scaled_dot_product_attention(query.double(), full_key, full_value, mask, enable_gqa=True)
    found = latent_attention_oracle(*args, **keywords)
    torch.testing.assert_close(found, wanted.transpose(1, 2).float(), rtol=0, atol=2e-6 * max(1, case.peak))


def test_oracle_softcap_bends_scores_before_the_mask():
    args, keywords = operands(Case(softcap=2.0, peak=5.0, rotated=0, k_rank=16, v_rank=16, mask="padding"))
    query, key, value, _, mask = args
    scores = 2.0 * torch.tanh(query @ key.latent.mT / 4.0 / 2.0)
    wanted = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value.latent
    torch.testing.assert_close(latent_attention_oracle(*args, **keywords), wanted.transpose(1, 2), rtol=0, atol=1e-5)


# Both paths of the scores (one query token a head, several), with every feature that adds roundings.
HALF = {"head_dim": 64, "k_rank": 32, "v_rank": 32, "tokens": 129, "rotated": 64, "mask": "padding"}
HALF_CASES = [Case(**HALF, query_heads=n, bias=bias, peak=peak) for n in (4, 8) for bias in (0, 1) for peak in (1, 8)]
HALF_CASES += [Case(**HALF, norm="before", queries=3, peak=8), Case(**{**HALF, "k_rank": 64, "v_rank": 64})]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.005), (torch.float16, 0.0008)])
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_half_precision_is_as_near_to_the_oracle_as_dense_attention_is(case, dtype, limit):
    args, keywords = operands(case, dtype)
    norm = {name: function for name, function in keywords.items() if name.startswith("norm")}
    query, key, value, rotation, mask = args
    found = latent_attention(*args, **keywords)
    dense = F.scaled_dot_product_attention(
        query, cached_key(key, rotation, **norm), value.expand(), mask, enable_gqa=True
    ).transpose(1, 2)
    exact = latent_attention_oracle(query.double(), *args[1:], **keywords)
    assert found.dtype == dtype
    assert relative_rms(found, exact) <= 1.5 * relative_rms(dense, exact)
    assert case.peak > 1 or relative_rms(found, exact) <= limit


@pytest.mark.parametrize("attention", [latent_attention, latent_attention_oracle])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [4, 8])
def test_a_query_that_sees_nothing_gives_finite_numbers_and_leaves_the_others_alone(attention, dtype, heads):
    args, keywords = operands(Case(query_heads=heads, queries=3, tokens=7, mask="padding"), dtype)
    want = attention(*args, **keywords)
    args[-1] = args[-1].clone()
    args[-1][0, :, 1] = False
    found = attention(*args, **keywords)
    assert torch.isfinite(found).all()
    changed = torch.zeros(found.shape[:2], dtype=torch.bool)
    changed[0, 1] = True
    assert torch.equal(found[~changed], want[~changed])


@pytest.mark.parametrize("attention", [latent_attention, latent_attention_oracle])
def test_a_mask_wider_or_taller_than_the_call_counts_from_the_last_query_and_the_first_token(attention):
    args, keywords = operands(Case(queries=3, tokens=7, mask="padding"))
    wide = F.pad(args[-1], (0, 5, 2, 0), value=True)
    assert torch.equal(attention(*args[:-1], wide, **keywords), attention(*args, **keywords))


MODELS = {
    "halves": (modeling_llama, lambda rows: torch.cat([rows, rows], -1)),
    "interleaved": (modeling_cohere, lambda rows: rows.repeat_interleave(2, -1)),
    "interleaved_halves": (modeling_glm, lambda rows: torch.cat([rows, rows], -1)),
}


@pytest.mark.parametrize("style", MODELS)
@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("row_batch", [1, 2])
def test_rotation_is_the_one_of_the_models(style, rotated, row_batch):
    modeling, spread = MODELS[style]
    rotation = random_rows(Case(rotated=rotated, interleaved=style != "halves", row_batch=row_batch))
    cos, sin = spread(rotation.cos), spread(rotation.sin)
    assert torch.equal(half_rows(cos, style), rotation.cos)
    x = torch.randn(2, 4, 63, 16)
    turned, _ = modeling.apply_rotary_pos_emb(x[..., :rotated], x[..., :rotated], cos, sin)
    torch.testing.assert_close(rotation.apply(x), torch.cat([turned, x[..., rotated:]], -1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 16])
def test_split_and_apply_agree_on_the_pairs(interleaved, rotated):
    rotation = random_rows(Case(rotated=rotated, interleaved=interleaved))
    x = torch.randn(2, 4, 63, 16)
    (a, b, tail), (c, d, same) = rotation.split(x), rotation.split(rotation.apply(x))
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    torch.testing.assert_close(c, a * cos - b * sin)
    torch.testing.assert_close(d, b * cos + a * sin)
    assert torch.equal(tail, same)


def test_cached_key_normalises_before_or_after_it_rotates():
    key, rotation = random_heads(Case(bias=True), 8), random_rows(Case())
    norm = random_norm(Case(norm="before"))["norm_before"]
    full = key.expand()
    assert torch.equal(cached_key(key, rotation, norm_before=norm), rotation.apply(norm(full)))
    assert torch.equal(cached_key(key, rotation, norm_after=norm), norm(rotation.apply(full)))
    assert torch.equal(cached_key(key, None), full)
