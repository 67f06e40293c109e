"""The projection that replaces `k_proj` and `v_proj`."""

from __future__ import annotations

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

    Attributes:
        weight: `[heads * rank, in_features]`, the stacked `D_h`.
        up: `[heads, head_dim, rank]`, or None at `rank == head_dim`, where the latent is the head itself.
        bias: `[heads * head_dim]` or None.
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        head_dim: int,
        rank: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not 1 <= rank <= head_dim:
            raise ValueError(f"LatentProjection: rank={rank} is not allowed; allowed: 1 to head_dim = {head_dim}")
        self.in_features, self.heads, self.head_dim, self.rank = in_features, heads, head_dim, rank
        kind = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(heads * rank, in_features, **kind))
        self.up = nn.Parameter(torch.empty(heads, head_dim, rank, **kind)) if rank < head_dim else None
        self.bias = nn.Parameter(torch.empty(heads * head_dim, **kind)) if bias else None

    @property
    def out_features(self) -> int:
        return self.heads * self.head_dim

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
        latent = F.linear(x, self.weight).unflatten(-1, (self.heads, self.rank)).transpose(-3, -2)
        bias = None if self.bias is None else self.bias.view(self.heads, self.head_dim)
        heads = LatentHeads(latent, self.up, bias)
        call = active_call()
        if call is not None:
            call.record(self, heads)
        return heads.expand().transpose(-3, -2).flatten(-2)

    def merged(self) -> nn.Linear:
        """The dense layer with weight `U_h D_h`, multiplied in fp32."""
        kind = {"device": self.weight.device, "dtype": self.weight.dtype}
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, **kind)
        weight = self.weight
        if self.up is not None:
            down = self.weight.unflatten(0, (self.heads, self.rank)).float()
            weight = (self.up.float() @ down).flatten(0, 1)
        linear.weight = nn.Parameter(weight.detach().to(self.weight.dtype), requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            linear.bias = self.bias
        return linear

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, heads={self.heads}, head_dim={self.head_dim}, rank={self.rank}, "
            f"bias={self.bias is not None}"
        )
