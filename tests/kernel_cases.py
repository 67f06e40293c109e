"""Decode calls over packed caches of every kind, for tests of kernels; run in a process where Triton interprets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hf_wsvd.kernels.latent_heads import Rotation
from hf_wsvd.kernels.packing import pack
from hf_wsvd.kernels.stored_tokens import DecodePart, KeyNormWeights, StoredTokens


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """Sizes and features of one call; the defaults are an MHA step over fp32 latents with rotation."""

    dtype: str = "float32"
    batch: int = 2
    heads: int = 2
    group: int = 1
    queries: int = 1
    tokens: int = 70
    head_dim: int = 16
    key_rank: int = 8
    value_rank: int = 8
    code: str = "float"
    bits: int = 0  # of a code; 0 for those of the dtype
    groups: int = 1
    rotated: int | None = None  # channels that turn; None: all, 0: no rotation
    interleaved: bool = False
    row_batch: int = 1
    bias: bool = False
    norm: str | None = None  # "before" or "after"
    softcap: float | None = None
    window: int | None = None
    mask: str | None = (
        None  # "bool", "by_head", "additive", "lowest" or "blind": lowest and, for sequence 0, everywhere
    )
    lengths: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    places: bool = False  # tokens in a random order, with slots that hold none
    guarded: bool = False  # head 0 in a float part of its own
    segments: bool = False  # the last third of the tokens in a part of its own, the first of its places hidden
    peak: float = 1.0  # factor of the queries: large makes attention pick single tokens
    poison: bool = False  # NaN wherever there is no token of the sequence
    strided: bool = False  # views of buffers with room to grow

    def __str__(self) -> str:
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{name}={getattr(self, name)}" for name in changed) or "plain"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def operands(case: DecodeCase) -> tuple[list, dict]:
    """Positional and keyword arguments of `fused_attention`."""
    torch.manual_seed(0)
    dtype = case.torch_dtype
    query_heads = case.heads * case.group
    query = (torch.randn(case.batch, query_heads, case.queries, case.head_dim) * case.peak).to(dtype)
    lengths, starts = (None if n is None else torch.tensor(n, dtype=torch.int32) for n in (case.lengths, case.starts))
    norm = None
    if case.norm is not None:
        norm = KeyNormWeights((1 + torch.rand(case.head_dim)).to(dtype), 1e-5, case.norm == "before")
    args = [query, list(random_parts(case, lengths, starts)), random_rows(case), random_mask(case)]
    keywords = {"scaling": case.head_dim**-0.5, "softcap": case.softcap, "window": case.window}
    return args, {**keywords, "lengths": lengths, "starts": starts, "norm": norm}


def random_parts(case: DecodeCase, lengths: Tensor | None, starts: Tensor | None) -> Iterator[DecodePart]:
    runs = [(0, case.tokens)]
    if case.segments:
        cut = case.tokens - case.tokens // 3
        runs = [(0, cut), (cut, case.tokens)]
    for first, stop in runs:
        if case.guarded:
            plain = dataclasses.replace(case, code="float", bits=0, key_rank=case.head_dim, value_rank=case.head_dim)
            yield random_part(plain, (0,), first, stop - first, lengths, starts)
            yield random_part(case, tuple(range(1, case.heads)), first, stop - first, lengths, starts)
        else:
            yield random_part(case, None, first, stop - first, lengths, starts)


def random_part(
    case: DecodeCase,
    heads: tuple[int, ...] | None,
    first: int,
    tokens: int,
    lengths: Tensor | None,
    starts: Tensor | None,
) -> DecodePart:
    count = case.heads if heads is None else len(heads)
    own = first + torch.arange(tokens).expand(case.batch, -1)
    places = None
    if case.places:
        spare = torch.full((case.batch, 5), -1)
        shuffled = torch.cat([own, spare], dim=1)[:, torch.randperm(tokens + 5)]
        places = own = shuffled.int()
    nobody = own < 0
    if lengths is not None:
        nobody = nobody | (own >= lengths[:, None])
    if starts is not None:
        nobody = nobody | (own < starts[:, None])
    shape = (case.batch, count, own.shape[1])
    key, value = (
        random_stored(case, rank, shape, nobody if case.poison else None) for rank in (case.key_rank, case.value_rank)
    )
    ups, biases = [], []
    for rank in (case.key_rank, case.value_rank):
        up = torch.randn(count, case.head_dim, rank) * rank**-0.5
        ups.append(None if rank == case.head_dim else up.to(case.torch_dtype))
        biases.append(torch.randn(count, case.head_dim).to(case.torch_dtype) if case.bias else None)
    return DecodePart(key, value, *ups, *biases, heads, places, 0 if case.places else first)


def random_stored(case: DecodeCase, width: int, shape: tuple[int, int, int], nobody: Tensor | None) -> StoredTokens:
    """Codes of about unit variance; NaN where `nobody [B, S]` says."""
    if nobody is not None:
        nobody = nobody[:, None, :, None]
    if case.code == "float":
        payload = torch.randn(*shape, width).to(case.torch_dtype)
        if nobody is not None:
            payload = payload.masked_fill(nobody, float("nan"))
        return StoredTokens(roomy(payload, case), None, width, bits=payload.element_size() * 8)
    if case.code == "fp8":
        payload = (torch.randn(*shape, width) * 50).to(torch.float8_e4m3fn).view(torch.uint8)
        if nobody is not None:
            payload = payload.masked_fill(nobody, 0x7F)
        return StoredTokens(roomy(payload, case), None, width, "fp8", 8, torch.rand(shape[1]) * 0.01 + 0.01)
    top = 2**case.bits - 1
    codes = torch.randint(1 if (case.code, case.bits) == ("symmetric", 4) else 0, top + 1, (*shape, width))
    if (case.code, case.bits) == ("symmetric", 8):
        codes = codes.clamp(min=1)  # -127 to 127
        codes = (codes - 128).to(torch.int8).view(torch.uint8)
    scales = (torch.rand(*shape, case.groups) + 0.5) * 3 / top
    if case.code == "asymmetric":
        scales = torch.cat([scales, -1.5 + torch.randn(*shape, case.groups) / 2], dim=-1)
    if nobody is not None:
        scales = scales.masked_fill(nobody, float("nan"))
    levels = torch.randn(top + 1).sort().values if case.code == "codebook" else None
    payload = pack(codes.to(torch.uint8), case.bits)
    payload, scales = (roomy(t, case) for t in (payload, scales.half()))
    return StoredTokens(payload, scales, width, case.code, case.bits, levels=levels)


def roomy(tensor: Tensor, case: DecodeCase) -> Tensor:
    """The same, as a view of a buffer with 9 tokens more; what is there is NaN."""
    if not case.strided:
        return tensor
    spare = tensor.new_full((*tensor.shape[:2], 9, tensor.shape[3]), 0xFF if tensor.dtype == torch.uint8 else np.nan)
    return torch.cat([spare, tensor, spare], dim=2)[:, :, 9:-9]


def random_rows(case: DecodeCase) -> Rotation | None:
    rotated = case.head_dim if case.rotated is None else case.rotated
    if not rotated:
        return None
    positions = torch.arange(case.tokens) + 5 * torch.arange(case.row_batch)[:, None]
    angles = positions[..., None] * 10000.0 ** -(torch.arange(0, rotated, 2) / rotated)
    factor = 1.25  # as scaled rotations have: no norm is the same before and after one
    return Rotation(
        (factor * angles.cos()).to(case.torch_dtype), (factor * angles.sin()).to(case.torch_dtype), case.interleaved
    )


def random_mask(case: DecodeCase) -> Tensor | None:
    """Causal, with a third of the rest hidden at random; `by_head`: otherwise for each head."""
    if case.mask is None:
        return None
    heads = case.heads * case.group if case.mask == "by_head" else 1
    visible = torch.rand(case.batch, heads, case.queries, case.tokens) > 0.3
    visible &= torch.ones(case.queries, case.tokens).tril(case.tokens - case.queries).bool()
    if case.mask == "additive":
        return torch.randn(visible.shape).masked_fill(~visible, float("-inf")).to(case.torch_dtype)
    if case.mask == "blind":
        visible[0] = False
    if case.mask in ("lowest", "blind"):
        return torch.zeros(visible.shape, dtype=case.torch_dtype).masked_fill(
            ~visible, torch.finfo(case.torch_dtype).min
        )
    return visible


def found_and_wanted(case: DecodeCase) -> tuple[np.ndarray, np.ndarray]:
    """What the kernels and what the oracle give, fp64."""
    from hf_wsvd.kernels.decode_oracle import fused_attention_oracle
    from hf_wsvd.kernels.fused_attention import fused_attention

    args, keywords = operands(case)
    found = fused_attention(*args, **keywords)
    assert found.dtype == case.torch_dtype
    return found.double().numpy(), fused_attention_oracle(*args, **keywords).numpy()


def split_and_merged(case: DecodeCase, split_tokens: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What both stages give and what they should, for a case of one part; unseen splits' `partial` as 0."""
    from hf_wsvd.kernels.combine import combine, combine_oracle
    from hf_wsvd.kernels.decode_call import DecodeCall, layer_heads
    from hf_wsvd.kernels.decode_oracle import decode_part_oracle
    from hf_wsvd.kernels.general_launch import choose_tile, general_decode

    (query, (part,), rotation, mask), keywords = operands(case)
    call = DecodeCall(query, layer_heads([part]), case.tokens, rotation=rotation, mask=mask, **keywords)
    tile = choose_tile(part, call)._replace(split_tokens=split_tokens, block_tokens=16)
    partial, lse = general_decode(part, call, tile)
    wanted_partial, wanted_lse = decode_part_oracle(call, part, split_tokens)
    partial = torch.where(lse[..., None] == -torch.inf, float("nan"), partial)  # unspecified
    out = torch.full((case.batch, case.queries, case.heads * case.group, case.head_dim), float("nan"))
    merged = out.new_empty(case.batch, case.heads * case.group, case.queries)
    combine(partial, lse, out, merged, part.value_up, part.value_bias, None, case.group)
    wanted_out, wanted_merged = combine_oracle(partial, lse, part.value_up, part.value_bias)
    pairs = {
        "partial": (partial.nan_to_num(0), wanted_partial),
        "lse": (lse, wanted_lse),
        "out": (out, wanted_out),
        "merged lse": (merged, wanted_merged),
    }
    return {name: (found.double().numpy(), wanted.numpy()) for name, (found, wanted) in pairs.items()}


def check_operator(case: DecodeCase) -> None:
    """The operator's schema, fake tensors and dispatch, by the checks of torch itself."""
    from hf_wsvd.kernels.ops import flatten, fused_attention_op

    (query, parts, rotation, mask), keywords = operands(case)
    rows = (None, None, False) if rotation is None else rotation
    norm = (None, 0.0, True) if keywords["norm"] is None else keywords["norm"]
    named = [keywords[name] for name in ("scaling", "softcap", "window", "lengths", "starts")]
    args = (query, *flatten(parts), *rows, mask, *named, *norm)
    torch.library.opcheck(fused_attention_op, args, test_utils=("test_schema", "test_faketensor"))


def compiled_and_eager(case: DecodeCase) -> tuple[np.ndarray, np.ndarray]:
    """`fused_attention` traced into one graph, and not traced."""
    from hf_wsvd.kernels.fused_attention import fused_attention

    args, keywords = operands(case)
    compiled = torch.compile(fused_attention, fullgraph=True, backend="aot_eager")
    return compiled(*args, **keywords).numpy(), fused_attention(*args, **keywords).numpy()
