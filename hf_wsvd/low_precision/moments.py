"""Second moments of a linear layer's inputs, exact and as they are once everything before them is rounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


TOKENS_AT_ONCE = 4096
NOISE_SHARES = (1e-3, 1e-2, 1e-1, 1.0)
HELD_OUT = 4  # one token in so many, the last ones of each batch: whole sequences mostly


@dataclass
class InputMoments:
    """Of inputs x and rounded inputs x^, means over tokens, fp64 `[in, in]`.

    Attributes:
        exact: E[x x^T].
        cross: E[x x^T^], exact inputs along rows.
        rounded: E[x^ x^T^].
        tokens: how many these are means of.
    """

    exact: Tensor
    cross: Tensor
    rounded: Tensor
    tokens: int

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
        return cls(*(total / max(count, 1) for total in sums), count)

    def pooled(self, other: InputMoments) -> InputMoments:
        """Of the tokens of both."""
        tokens = self.tokens + other.tokens
        share = self.tokens / max(tokens, 1)
        pairs = ((self.exact, other.exact), (self.cross, other.cross), (self.rounded, other.rounded))
        return InputMoments(*(share * a + (1 - share) * b for a, b in pairs), tokens)

    def with_noise(self, share: float) -> InputMoments:
        """As if the same white noise were added to x and x^, of `share` of the rounded inputs' mean energy.

        It holds weights to the exact one where the data say little, and makes `rounded` positive definite.
        """
        diagonal = self.rounded.diagonal()
        added = (share * diagonal.mean()).clamp_min(torch.finfo(torch.float32).tiny)
        noise = torch.diag(added.expand_as(diagonal))
        return InputMoments(self.exact + noise, self.cross + noise, self.rounded + noise, self.tokens)

    def errors(self, weight: Tensor, rounded_weight: Tensor) -> Tensor:
        """E[(w x - w^ x^)^2] of every row of `weight [out, in]` and `rounded_weight`, fp64 `[out]`."""
        weight, other = weight.double(), rounded_weight.double()
        mixed = (other @ self.rounded * other).sum(1) - 2 * (weight @ self.cross * other).sum(1)
        return ((weight @ self.exact * weight).sum(1) + mixed).clamp_min(0)

    def energies(self, weight: Tensor) -> Tensor:
        """E[(w x)^2] of every row, fp64 `[out]`."""
        weight = weight.double()
        return (weight @ self.exact * weight).sum(1)

    def best_weight(self, weight: Tensor) -> Tensor:
        """Wiener's filter: the weight that, unrounded, errs least on rounded inputs, fp64 `[out, in]`.

        `W E[x x^T^] E[x^ x^T^]^-1`; `rounded` must be positive definite.
        """
        right = weight.double() @ self.cross
        return torch.cholesky_solve(right.T, torch.linalg.cholesky(self.rounded)).T


def regularised(weight: Tensor, fitted: InputMoments, held_out: InputMoments) -> InputMoments:
    """Moments of all tokens, with the noise whose best weight for the fitted ones errs least on those held out."""
    if held_out.tokens == 0:
        return fitted.with_noise(NOISE_SHARES[-1])

    def error(share: float) -> float:
        return float(held_out.errors(weight, fitted.with_noise(share).best_weight(weight)).sum())

    return fitted.pooled(held_out).with_noise(min(NOISE_SHARES, key=error))


def split(inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens `[N, in]` of each batch to fit to, and tokens to hold out."""
    sizes = [len(batch) - len(batch) // HELD_OUT for batch in inputs]
    return (
        [batch[:size] for batch, size in zip(inputs, sizes)],
        [batch[size:] for batch, size in zip(inputs, sizes)],
    )


def _product_form(x: Tensor) -> Tensor:
    # fp32 products obey global switches (TF32) on accelerators; a CPU has none, and its fp64 takes twice as long.
    return x.float() if x.device.type in ("cpu", "mps") else x.double()
