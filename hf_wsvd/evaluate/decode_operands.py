"""Random operands of a decode step over a cache, packed as the stores pack them: for timing and checking kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.encoding import level_range
from ..kernels.latent_heads import Rotation
from ..kernels.packing import packed_width
from ..kernels.stored_tokens import DecodePart, StoredTokens


ROPE_BASE = 10_000.0
BITS_OF_A_CODE = {
    "float": (16, 32),
    "fp8": (8,),
    "symmetric": (8, 4, 3, 2),
    "asymmetric": (8, 4, 3, 2),
    "codebook": (4, 3, 2),
}


class DecodeShape(NamedTuple):
    """Sizes of a decode step.

    Attributes:
        batch: sequences.
        tokens: in the cache, of each.
        query_heads, kv_heads: Hq and H.
        head_dim: D.
        key_rank, value_rank: numbers that the cache keeps of a key and of a value head; D: no up factor.
        queries: query tokens.
    """

    batch: int = 1
    tokens: int = 4096
    query_heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    key_rank: int = 64
    value_rank: int = 64
    queries: int = 1


class Operands(NamedTuple):
    """Arguments of `fused_attention`.

    Attributes:
        query: `[B, Hq, N, D]`.
        part: all tokens of all heads.
        rotation: rotary rows of all tokens, or None.
        scaling: factor of the scores.
    """

    query: Tensor
    part: DecodePart
    rotation: Rotation | None
    scaling: float

    def cache_bytes(self) -> int:
        """Bytes of payloads and scales: what a step must read at least."""
        sides = (self.part.key, self.part.value)
        return sum(tensor.nbytes for side in sides for tensor in (side.payload, side.scales) if tensor is not None)

    def of_sequence(self, index: int) -> Operands:
        """One sequence of the batch, as a batch of one."""

        def one(stored: StoredTokens) -> StoredTokens:
            scales = None if stored.scales is None else stored.scales[index : index + 1]
            return stored._replace(payload=stored.payload[index : index + 1], scales=scales)

        part = self.part._replace(key=one(self.part.key), value=one(self.part.value))
        return self._replace(query=self.query[index : index + 1], part=part)


def random_operands(
    shape: DecodeShape,
    code: str = "float",
    bits: int = 16,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    groups: int = 1,
    rotated: bool = True,
    peak: float = 1.0,
) -> Operands:
    """Operands of a step with unit normal queries and keys of unit variance.

    Args:
        shape: sizes.
        code, bits: of the cached numbers, see `StoredTokens`.
        dtype: of the query, the factors, the rotary rows, and of cached numbers of code "float".
        device: of all tensors.
        groups: scales of a token and head.
        rotated: whether keys are rotated.
        peak: factor of the queries: at 10 a few tokens take all the attention.

    Raises:
        ValueError: a code, or bits that it does not have.
    """
    batch, heads, tokens = shape.batch, shape.kv_heads, shape.tokens
    key = random_tokens((batch, heads, tokens), shape.key_rank, code, bits, dtype, device, groups)
    value = random_tokens((batch, heads, tokens), shape.value_rank, code, bits, dtype, device, groups)
    ups = [
        None
        if rank == shape.head_dim
        else torch.randn(heads, shape.head_dim, rank, device=device).div_(rank**0.5).to(dtype)
        for rank in (shape.key_rank, shape.value_rank)
    ]
    query = peak * torch.randn(batch, shape.query_heads, shape.queries, shape.head_dim, device=device)
    rotation = rotary_rows(tokens, shape.head_dim, dtype, device) if rotated else None
    return Operands(query.to(dtype), DecodePart(key, value, *ups), rotation, shape.head_dim**-0.5)


def random_tokens(
    rows: tuple[int, int, int],
    width: int,
    code: str,
    bits: int,
    dtype: torch.dtype,
    device: torch.device | str,
    groups: int = 1,
) -> StoredTokens:
    """Tokens `[B, H, S, width]` of about unit variance, every code as likely as every other."""
    if bits not in BITS_OF_A_CODE.get(code, ()):
        allowed = "; ".join(f"{name}: {', '.join(map(str, some))}" for name, some in BITS_OF_A_CODE.items())
        raise ValueError(f"code and bits must be one of {allowed}, got {code}: {bits}")
    if code == "float":
        return StoredTokens(torch.randn(*rows, width, dtype=dtype, device=device), None, width, bits=bits)
    if code == "fp8":
        levels = torch.empty(*rows, width, dtype=torch.float8_e4m3fn, device=device)
        for sequence in levels:  # one at a time: copies in 16 bits would double the memory
            sequence.copy_(torch.randn(sequence.shape, dtype=torch.float16, device=device))
        scales = torch.ones(rows[1], device=device)
        return StoredTokens(levels.view(torch.uint8), None, width, code, bits, head_scales=scales)
    payload = torch.randint(256, (*rows, packed_width(width, bits)), dtype=torch.uint8, device=device)
    step = level_range(code, bits)[2] if code == "symmetric" else 1
    spread = (torch.rand(*rows, groups, device=device) + 0.5).half()  # standard deviation of a group's numbers
    if code == "codebook":
        return StoredTokens(
            payload, spread, width, code, bits, levels=torch.linspace(-1.7, 1.7, 2**bits, device=device)
        )
    scale = spread / (step * 2**bits / 12**0.5)
    if code == "symmetric":
        return StoredTokens(payload, scale, width, code, bits)
    return StoredTokens(payload, torch.cat([scale, -scale * (2**bits - 1) / 2], dim=-1), width, code, bits)


def rotary_rows(tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> Rotation:
    """Rows of the usual frequencies for places 0 to `tokens - 1`."""
    frequencies = ROPE_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * frequencies
    return Rotation(angles.cos().to(dtype)[None], angles.sin().to(dtype)[None])
