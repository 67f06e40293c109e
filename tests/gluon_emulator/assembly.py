"""Inline assembly on 32-bit registers: the few PTX instructions by which kernels move bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from .errors import require
from .values import STORED, Tensor, computed, stored


WORD = 0xFFFFFFFF


def permuted_bytes(low: torch.Tensor, high: torch.Tensor, selector: torch.Tensor) -> torch.Tensor:
    """`prmt.b32`: each digit of the selector names one of eight bytes, or (from 8 on) its sign in all bits."""
    out = torch.zeros_like(low + high + selector)
    for place in range(4):
        digit = selector >> 4 * place & 0xF
        byte = torch.where(digit & 7 < 4, low, high) >> 8 * (digit & 3) & 0xFF
        out |= torch.where(digit >= 8, (byte >> 7) * 0xFF, byte) << 8 * place
    return out


INSTRUCTIONS = {
    "mov": lambda a: a,
    "not": lambda a: ~a,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "add": torch.add,
    "sub": torch.sub,
    "shl": lambda a, b: torch.where(b < 32, a << b.clamp(max=31), 0),
    "shr": lambda a, b: torch.where(b < 32, a >> b.clamp(max=31), 0),
    "prmt": permuted_bytes,
}
KINDS = ("b32", "u32")


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Tensor], dtype: Any, is_pure: bool, pack: int
) -> Tensor | tuple[Tensor, ...]:
    """Run the instructions on `pack` neighbours at a time, which lie in 32-bit registers side by side."""
    dtypes = dtype if isinstance(dtype, (tuple, list)) else (dtype,)
    sources = [registers(arg, pack) for arg in args]
    counts = [words(kind, pack) for kind in dtypes]
    outputs = sum(constraint.startswith("=") for constraint in constraints.split(","))
    inputs = len(constraints.split(",")) - outputs
    require(outputs == sum(counts), f"{outputs} registers for {sum(counts)} words of results")
    require(inputs == sum(map(len, sources)), f"{inputs} registers for {sum(map(len, sources))} words of arguments")
    file: dict[str, torch.Tensor] = {f"${outputs + n}": word for n, word in enumerate(chain(*sources))}
    for line in asm.replace("{", "").replace("}", "").split(";"):
        if line.strip():
            run(line.strip(), file)
    results, first = [], 0
    for kind, count in zip(dtypes, counts):
        results.append(joined([file[f"${n}"] for n in range(first, first + count)], kind, args[0]))
        first += count
    return tuple(results) if isinstance(dtype, (tuple, list)) else results[0]


def run(line: str, file: dict[str, torch.Tensor]) -> None:
    """One instruction."""
    name, _, operands = line.partition(" ")
    if name == ".reg":
        return
    base, _, kind = name.partition(".")
    require(base in INSTRUCTIONS and kind in KINDS, f"the emulator does not know the instruction {name}")
    target, *sources = (operand.strip() for operand in operands.split(","))
    numbers = [file[s] if s in file else torch.tensor(int(s, 0)) for s in sources]
    file[target] = INSTRUCTIONS[base](*numbers) & WORD


def words(dtype: Any, pack: int) -> int:
    """Registers that `pack` numbers fill."""
    bits = pack * dtype.primitive_bitwidth
    require(bits % 32 == 0, f"{pack} of {dtype} do not fill registers")
    return bits // 32


def registers(tensor: Tensor, pack: int) -> list[torch.Tensor]:
    count = words(tensor.dtype, pack)
    numbers = stored(tensor).contiguous().flatten().view(torch.int32).reshape(-1, count).to(torch.int64) & WORD
    return list(numbers.unbind(1))


def joined(numbers: list[torch.Tensor], dtype: Any, like: Tensor) -> Tensor:
    flat = torch.stack(torch.broadcast_tensors(*numbers), dim=1).to(torch.int32).flatten().view(STORED[dtype])
    require(flat.numel() == math.prod(like.shape), f"{flat.numel()} results for {list(like.shape)}")
    return Tensor(computed(flat.reshape(like.shape), dtype), dtype, like._layout)
