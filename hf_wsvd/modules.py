"""The projection that replaces `k_proj` and `v_proj`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .call import active_call
from .kernels import LatentHeads


class LatentProjection(nn.Module):
    """Per-head low-rank linear layer `y_h = U_h (D_h x) + b_h` that shows its latents to the cache.

    It returns the full heads, so that everything around it (norms, rotation, other caches, training) works as with
    the dense layer. `weight` is the *down* factor on purpose: it stands in the checkpoint under the dense weight's
    name with another shape, so that loading without hf_wsvd fails instead of leaving random weights.

    Some heads may keep their full rank: their latents are the heads themselves, as wide as `head_dim`, and those of
    the others are followed by zeros.

    Args:
        full_heads: sorted heads that are not cut.

    Attributes:
        weight: `[heads * rank, in_features]`, the stacked `D_h`; with full heads their rows `[full * head_dim,
            in_features]` first, then those of the other heads.
        up: `[heads, head_dim, rank]` of the heads that are cut, or None where none is: at `rank == head_dim`, or if
            all heads are full. Then the latent is the head itself.
        bias: `[heads * head_dim]` or None.
        width: of the latents.
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        head_dim: int,
        rank: int,
        bias: bool = False,
        *,
        full_heads: Sequence[int] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not 1 <= rank <= head_dim:
            raise ValueError(f"LatentProjection: rank={rank} is not allowed; allowed: 1 to head_dim = {head_dim}")
        self.in_features, self.heads, self.head_dim, self.rank = in_features, heads, head_dim, rank
        self.full_heads = tuple(full_heads)
        allowed = sorted(set(full_heads) & set(range(heads))) if rank < head_dim else []
        if list(full_heads) != allowed:
            raise ValueError(
                f"LatentProjection: full_heads={list(full_heads)} is not allowed; allowed: sorted heads from 0 to "
                f"{heads - 1}, and none where no head is cut (rank={rank}, head_dim={head_dim})"
            )
        self.width = head_dim if self.full_heads else rank
        full, cut = len(self.full_heads), heads - len(self.full_heads)
        kind = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(full * head_dim + cut * rank, in_features, **kind))
        self.up = nn.Parameter(torch.empty(cut, head_dim, rank, **kind)) if rank < head_dim and cut else None
        self.bias = nn.Parameter(torch.empty(heads * head_dim, **kind)) if bias else None

    @property
    def out_features(self) -> int:
        return self.heads * self.head_dim

    @property
    def cut_heads(self) -> list[int]:
        """Heads of rank `rank`."""
        return [head for head in range(self.heads) if head not in self.full_heads]

    @classmethod
    def from_linear(cls, linear: nn.Linear, down: Tensor, up: Tensor | None) -> LatentProjection:
        """Replace `linear` by its factors `down [heads, rank, in]` and `up [heads, head_dim, rank]` (or None)."""
        heads, rank, in_features = down.shape
        head_dim = linear.out_features // heads
        new = cls(in_features, heads, head_dim, rank, linear.bias is not None, device="meta")
        kind = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        grad = linear.weight.requires_grad
        new.weight = nn.Parameter(down.flatten(0, 1).to(**kind), requires_grad=grad)
        if up is not None:
            new.up = nn.Parameter(up.to(**kind), requires_grad=grad)
        new.bias = linear.bias
        return new

    def forward(self, x: Tensor) -> Tensor:
        """`[B, S, in_features]` to `[B, S, heads * head_dim]`."""
        latent = self.latents(x).transpose(-3, -2)
        bias = None if self.bias is None else self.bias.view(self.heads, self.head_dim)
        heads = LatentHeads(latent, self.expansion(), bias)
        call = active_call()
        if call is not None:
            call.record(self, heads)
        return heads.expand().transpose(-3, -2).flatten(-2)

    def latents(self, x: Tensor) -> Tensor:
        """`[B, S, in_features]` to `[B, S, heads, width]`."""
        latent = self.down(x)
        if not self.full_heads:
            return latent.unflatten(-1, (self.heads, self.rank))
        rows = len(self.full_heads) * self.head_dim
        padded = latent.new_zeros(*latent.shape[:-1], self.heads, self.width)
        padded[..., list(self.full_heads), :] = latent[..., :rows].unflatten(-1, (-1, self.head_dim))
        if self.up is not None:
            padded[..., self.cut_heads, : self.rank] = latent[..., rows:].unflatten(-1, (-1, self.rank))
        return padded

    def down(self, x: Tensor) -> Tensor:
        """`[..., in_features]` to the stacked latents of all heads, `[..., rows of the down factor]`."""
        return F.linear(x, self.weight)

    def expansion(self) -> Tensor | None:
        """What expands the latents, `[heads, head_dim, width]`: the identity for full heads. None: nothing does."""
        if not self.full_heads or self.up is None:
            return self.up
        up = self.up.new_zeros(self.heads, self.head_dim, self.width)
        up[self.cut_heads, :, : self.rank] = self.up
        up[list(self.full_heads)] = torch.eye(self.head_dim, device=up.device, dtype=up.dtype)
        return up

    def with_full_heads(self, heads: Sequence[int], weights: Tensor) -> LatentProjection:
        """The same with some heads uncut.

        Args:
            heads: sorted.
            weights: dense `[len(heads), head_dim, in_features]`.
        """
        bias = self.bias is not None
        new = type(self)(self.in_features, self.heads, self.head_dim, self.rank, bias, full_heads=heads, device="meta")
        down = self.weight.detach().unflatten(0, (self.heads, self.rank))[new.cut_heads].flatten(0, 1)
        rows = weights.to(down).flatten(0, 1)
        new.weight = nn.Parameter(torch.cat([rows, down]), requires_grad=self.weight.requires_grad)
        if new.up is not None:
            new.up = nn.Parameter(self.up.detach()[new.cut_heads], requires_grad=self.up.requires_grad)
        new.bias = self.bias
        return new

    def merged(self) -> nn.Linear:
        """The dense layer with weight `U_h D_h`, multiplied in fp32."""
        kind = {"device": self.weight.device, "dtype": self.weight.dtype}
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, **kind)
        weight = self.weight
        if self.up is not None:
            rows = len(self.full_heads) * self.head_dim
            full, down = self.weight[:rows], self.weight[rows:].unflatten(0, (-1, self.rank))
            weight = weight.new_empty(self.heads, self.head_dim, self.in_features, dtype=torch.float32)
            weight[self.cut_heads] = self.up.float() @ down.float()
            weight[list(self.full_heads)] = full.unflatten(0, (-1, self.head_dim)).float()
            weight = weight.flatten(0, 1)
        linear.weight = nn.Parameter(weight.detach().to(self.weight.dtype), requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            linear.bias = self.bias
        return linear

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, heads={self.heads}, head_dim={self.head_dim}, rank={self.rank}, "
            f"bias={self.bias is not None}" + (f", full_heads={list(self.full_heads)}" if self.full_heads else "")
        )
