"""Second moments of a linear layer's inputs, exact and as they are once everything before them is rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


TOKENS_AT_ONCE = 4096


@dataclass
class InputMoments:
    """Of inputs x and rounded inputs x^, means over tokens, fp64 `[in, in]`.

    Attributes:
        exact: E[x x^T].
        cross: E[x x^T^], exact inputs along rows.
        rounded: E[x^ x^T^].
    """

    exact: Tensor
    cross: Tensor
    rounded: Tensor

    @classmethod
    def of(cls, exact: list[Tensor], rounded: list[Tensor]) -> InputMoments:
        """Of inputs `[N, in]` of several batches; both lists hold the same tokens."""
        width, device = exact[0].shape[1], exact[0].device
        sums = [torch.zeros(width, width, dtype=torch.float64, device=device) for _ in range(3)]
        count = sum(len(batch) for batch in exact)
        for x, y in zip(exact, rounded):
            for a, b in zip(x.split(TOKENS_AT_ONCE), y.to(device).split(TOKENS_AT_ONCE)):
                a, b = _product_form(a), _product_form(b)
                for total, (left, right) in zip(sums, ((a, a), (a, b), (b, b))):
                    total += left.T @ right
        return cls(*(total / max(count, 1) for total in sums))

    @classmethod
    def unrounded(cls, exact: list[Tensor]) -> InputMoments:
        """Where inputs count as exact."""
        moment = cls.of(exact, exact).exact
        return cls(moment, moment, moment)

    def errors(self, weight: Tensor, rounded_weight: Tensor) -> Tensor:
        """E[(w x - w^ x^)^2] of every row of `weight [out, in]` and `rounded_weight`, fp64 `[out]`."""
        weight, other = weight.double(), rounded_weight.double()
        mixed = (other @ self.rounded * other).sum(1) - 2 * (weight @ self.cross * other).sum(1)
        return ((weight @ self.exact * weight).sum(1) + mixed).clamp_min(0)

    def energies(self, weight: Tensor) -> Tensor:
        """E[(w x)^2] of every row, fp64 `[out]`."""
        weight = weight.double()
        return (weight @ self.exact * weight).sum(1)

    def damped(self, share: float) -> Tensor:
        """`rounded` with `share` of its mean diagonal added to the diagonal: positive definite."""
        diagonal = self.rounded.diagonal()
        added = (share * diagonal.mean()).clamp_min(torch.finfo(torch.float32).tiny)
        return self.rounded + torch.diag(added.expand_as(diagonal))

    def best_weight(self, weight: Tensor, ridge: float) -> Tensor:
        """The weight that, unrounded, gives least error on rounded inputs, fp64 `[out, in]`.

        Wiener's filter: `W E[x x^T^] E[x^ x^T^]^-1`, with a ridge towards `weight`.
        """
        weight, system = weight.double(), self.damped(ridge)
        right = weight @ (self.cross + system - self.rounded)
        return torch.linalg.solve(system, right.T).T


def _product_form(x: Tensor) -> Tensor:
    # fp32 products obey global switches (TF32) on accelerators; a CPU has none, and its fp64 takes twice as long.
    return x.float() if x.device.type in ("cpu", "mps") else x.double()
