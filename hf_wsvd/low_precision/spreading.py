"""A module that turns activations by `spreading_rotation`, as two small products."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..rotations import hadamard, hartley, spreading_signs


UNIT = 2.0**-24


class Spreading(nn.Module):
    """`x @ R`, or `x @ R.T`, of blocks of channels; R is `spreading_rotation(size, seed)`.

    R is a Kronecker product of a left and a right factor of about `sqrt(size)` each, so that a token of 4,096 channels
    is turned with 128 products a channel instead of 4,096. Computed in fp32 whatever the inputs' dtype; constants are
    integers, in units of 2^-24, as `model.to(dtype)` rounds floating-point buffers. Nothing is stored in checkpoints.

    Args:
        width: channels of the inputs, a multiple of `size`.
        size: of a block.
        seed: of the signs.
        back: turn back.

    Attributes:
        hook: handle of the forward pre-hook that calls this module, for who installed it.
    """

    hook: RemovableHandle

    def __init__(
        self, width: int, size: int, seed: int = 0, *, back: bool = False, device: torch.device | None = None
    ):
        super().__init__()
        if size < 1 or width % size:
            raise ValueError(f"Spreading: size={size} is not allowed; allowed: a divisor of width = {width}")
        self.width, self.size, self.seed, self.back = width, size, seed, back
        if device is not None and device.type == "meta":
            device = None  # of a layer that is offloaded: the constants stay, and nothing would give them values
        power = size & -size
        left = 2 ** ((power.bit_length() - 1) // 2)
        # The Hadamard matrix of a power of two is the Kronecker product of those of its halves.
        factors = {"left": hadamard(left), "right": torch.kron(hadamard(power // left), hartley(size // power))}
        for name, factor in factors.items():
            steps = (factor / UNIT).round().to(device, torch.int32)
            self.register_buffer(name, steps, persistent=False)
        signs = spreading_signs(size, seed).to(device, torch.int32)
        self.register_buffer("signs", signs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        # Inputs may come from another device: layers that are offloaded or spread move them after this.
        left, right, signs = (constant.to(x.device) for constant in (self.left, self.right, self.signs))
        left, right = left.float() * UNIT, right.float() * UNIT  # both are symmetric
        blocks = x.float().unflatten(-1, (-1, self.size))
        blocks = blocks if self.back else blocks * signs
        blocks = blocks.unflatten(-1, (len(left), len(right)))
        blocks = ((left @ blocks) @ right).flatten(-2)
        return (blocks * signs if self.back else blocks).flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, size={self.size}, seed={self.seed}, back={self.back}"
