"""Methods by name. They differ in what an error in a head's output is measured by, and share the closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.statistics import Side, Statistics
from .factorise import Spectrum, spectrum


@dataclass(frozen=True)
class Method(ABC):
    """How the directions that a rank keeps are chosen.

    Attributes:
        uses_gradients: whether energies are estimates of the loss; ranks can be allocated by those alone.
    """

    uses_gradients = False

    @abstractmethod
    def spectrum(self, side: Side, statistics: Statistics, weight: Tensor) -> Spectrum:
        """Directions of each head of projection `side`.

        Args:
            weight: the dense weight `[heads * head_dim, in_features]`; methods other than ASVD do without it.
        """


@dataclass(frozen=True)
class SVD(Method):
    """Plain truncated SVD of each head's weight: all inputs alike."""

    def spectrum(self, side: Side, statistics: Statistics, weight: Tensor | None = None) -> Spectrum:
        return spectrum(statistics.weight[side])


@dataclass(frozen=True)
class ASVD(Method):
    """Input channels scaled by their activations' size to the power of `alpha` (ASVD, arXiv 2312.05821).

    The size is the root mean square over the calibration tokens, where ASVD takes the mean absolute value.
    """

    alpha: float = 0.5

    def spectrum(self, side: Side, statistics: Statistics, weight: Tensor) -> Spectrum:
        heads = len(statistics.weight[side])
        per_head = weight.detach().double().unflatten(0, (heads, -1))
        scale = statistics.gram[side[0]].diagonal().to(per_head).clamp_min(0) ** self.alpha  # size^2 to the alpha
        return spectrum(per_head * scale @ per_head.mT)


@dataclass(frozen=True)
class SVDLLM(Method):
    """Activation-whitened SVD (SVD-LLM, arXiv 2403.07378): least squared error of the head's output.

    Attributes:
        damping: share of the mean input energy added in every input direction.
    """

    damping: float = 1e-4

    def moment(self, side: Side, statistics: Statistics) -> Tensor:
        """`W_h (S + damping) W_h^T`, `[heads, head_dim, head_dim]` fp64."""
        energy = statistics.gram[side[0]].diagonal().mean().item()
        # Inputs that were always zero still leave the weight's own directions.
        share = self.damping * energy if energy > 0 else 1.0
        return statistics.output[side] + share * statistics.weight[side]

    def spectrum(self, side: Side, statistics: Statistics, weight: Tensor | None = None) -> Spectrum:
        return spectrum(self.moment(side, statistics))


@dataclass(frozen=True)
class WSVD(SVDLLM):
    """Whitened by the inputs and weighted by the loss's gradients on the output side.

    The product of both second moments is the Kronecker-factored form of the Fisher information that WSVD (arXiv
    2604.02570, section 3.2) takes element by element.

    Attributes:
        gradient_damping: share of the gradients' second moment that is spread evenly over a head's dimensions.
    """

    uses_gradients = True

    gradient_damping: float = 0.1

    def spectrum(self, side: Side, statistics: Statistics, weight: Tensor | None = None) -> Spectrum:
        return spectrum(self.moment(side, statistics), damped(statistics.gradient[side], self.gradient_damping))


METHODS: dict[str, type[Method]] = {"svd": SVD, "asvd": ASVD, "svd_llm": SVDLLM, "wsvd": WSVD}


def method_of(name: str, *, damping: float, gradient_damping: float) -> Method:
    """The method of this name with the settings that it knows."""
    settings = {"damping": damping, "gradient_damping": gradient_damping}
    known = METHODS[name].__dataclass_fields__
    return METHODS[name](**{key: value for key, value in settings.items() if key in known})


def damped(gradient: Tensor, damping: float) -> Tensor:
    """`gradient` `[heads, D, D]` with the share `damping` of its trace spread evenly; even where it is zero."""
    gradient = gradient.double()
    even = torch.eye(gradient.shape[-1], dtype=gradient.dtype, device=gradient.device)
    mean = gradient.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    # Never quite singular: the form is inverted.
    share = max(damping, 1e-6)
    return torch.where(mean > 0, (1 - share) * gradient + share * mean * even, even * torch.finfo(torch.float64).eps)
