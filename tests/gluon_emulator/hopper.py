"""What `gluon.language.nvidia.hopper` has of barriers, bulk copies and products of a group of warps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton.language as tl

from .clocks import Access, By, check, remember
from .errors import require
from .program import Barrier, program
from .shared import View, fence_async_shared
from .values import OF_TORCH, STORED, Tensor, computed


__all__ = ["fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"]


class MBarrierLayout(NamedTuple):
    """The layout of a barrier."""

    cga_layout: tuple = ()


def _barrier(view: View) -> Barrier:
    found = program().barriers.get((id(view.memory), view.box))
    require(found is not None, f"{view} is used as a barrier without mbarrier.init")
    return found


def init(view: View, count: int) -> None:
    require(view.dtype == tl.int64 and math.prod(view.shape) == 1, f"{view} is no barrier")
    own = program()
    own.barriers[id(view.memory), view.box] = Barrier(str(view), int(count))
    own.running.tick()


def wait(view: View, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if bool(pred):
        parity = int(phase)
        require(parity in (0, 1), f"phase {parity} of {view}, not 0 or 1")
        program().wait(_barrier(view), parity)


def arrive(view: View, *, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        own = program().running
        own.tick()
        _barrier(view).arrive(int(count), own.clock)


def expect(view: View, bytes_per_cta: Any, pred: Any = True) -> None:
    """Announce bytes and arrive."""
    if bool(pred):
        own = program().running
        own.tick()
        barrier = _barrier(view)
        barrier.bytes += int(bytes_per_cta)
        barrier.arrive(1, own.clock)


mbarrier = SimpleNamespace(
    MBarrierLayout=MBarrierLayout, init=init, wait=wait, arrive=arrive, expect=expect, invalidate=lambda view: None
)


class BlockType(NamedTuple):
    """Shape and dtype of what a descriptor copies at a time."""

    shape: tuple[int, ...]
    element_ty: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element_ty.primitive_bitwidth // 8


class Descriptor:
    """A descriptor of the host, of which bulk copies read boxes."""

    def __init__(self, name: str, descriptor: Any) -> None:
        base = descriptor.base
        self.name, self.dtype, self.layout = name, OF_TORCH[base.dtype], descriptor.layout
        self.block_type = BlockType(tuple(descriptor.block_shape), self.dtype)
        self.block_shape = self.block_type.shape
        size = base.element_size()
        require(base.data_ptr() % 16 == 0, f"{name} does not start at a multiple of 16 bytes")
        require(
            all(stride * size % 16 == 0 for stride in descriptor.strides[:-1]),
            f"strides of {name} {descriptor.strides} are no multiples of 16 bytes",
        )
        require(max(self.block_shape) <= 256, f"a box of {name} has a side of more than 256: {self.block_shape}")
        require(self.block_shape[-1] * size % 16 == 0, f"rows of a box of {name} are no multiples of 16 bytes")
        numbers = base.as_strided(tuple(descriptor.shape), tuple(descriptor.strides))
        self.numbers = numbers.view(STORED[self.dtype])

    def box(self, start: list[int]) -> torch.Tensor:
        """Numbers from `start` on, 0 outside of the tensor along every axis."""
        out = torch.zeros(self.block_shape, dtype=self.numbers.dtype)
        inner, outer = [], []
        for begin, size, whole in zip(start, self.block_shape, self.numbers.shape):
            low, high = max(begin, 0), max(min(begin + size, whole), max(begin, 0))
            if low - begin > size or high == low:
                return out
            inner.append(slice(low - begin, high - begin))
            outer.append(slice(low, high))
        out[tuple(inner)] = self.numbers[tuple(outer)]
        return out


def async_load(
    tensor_desc: Descriptor, coord: list, barrier: View, result: View, pred: Any = True, multicast: bool = False
) -> None:
    """A bulk copy. It is under way from here until the barrier's phase is over; its bytes are those of a whole box."""
    if not bool(pred):
        return
    start = [int(c) for c in coord]
    name, size = tensor_desc.name, tensor_desc.dtype.primitive_bitwidth // 8
    require(start[-1] * size % 16 == 0, f"{name}{start} does not start at a multiple of 16 bytes")
    require(result.shape == tensor_desc.block_shape, f"a box {tensor_desc.block_shape} of {name} copied to {result}")
    require(result.dtype == tensor_desc.dtype, f"{tensor_desc.dtype} of {name} copied to {result.dtype}")
    require(result.layout == tensor_desc.layout, f"{name} and {result} differ in their layout")
    own, target = program().running, _barrier(barrier)
    own.tick()
    access = Access(result.box, True, target.copies, target.phases + 1, 0)
    check(result.memory.name, result.memory.accesses, access, By(own.clock, asynchronous=True))
    remember(result.memory.accesses, access)
    result.put(tensor_desc.box(start))
    target.copied(tensor_desc.block_type.nbytes)


tma = SimpleNamespace(async_load=async_load)


class Pending(Tensor):
    """The sum of a product: nothing to be read, but by products behind it. `finished` is what its wait returns."""

    def __init__(self, shape: tuple[int, ...], layout: Any) -> None:
        super().__init__(None, tl.float32, layout)
        self.sizes, self.finished = shape, None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes


class Product(NamedTuple):
    """A product under way."""

    left: Tensor | View
    right: View
    addend: Tensor | None
    result: Pending
    reads: list[Access]

    def finish(self) -> None:
        left, right = (
            operand.data if isinstance(operand, Tensor) else computed(operand.numbers(), operand.dtype)
            for operand in (self.left, self.right)
        )
        total = left.to(torch.float32) @ right.to(torch.float32)
        if self.addend is not None:
            total += (self.addend.finished if isinstance(self.addend, Pending) else self.addend).data
        self.result.finished = Tensor(total, tl.float32, self.result._layout)
        for access in self.reads:
            access.time = program().running.tick()


def warpgroup_mma(
    a: Tensor | View, b: View, acc: Tensor, *, use_acc: Any = True, precision: Any = None, is_async: bool = False
) -> Tensor:
    """`a @ b + acc` in fp32; computed when it is waited for."""
    require(isinstance(b, View), "the right operand of a product is not in shared memory")
    require(a.dtype == b.dtype and b.dtype in (tl.float16, tl.bfloat16), f"a product of {a.dtype} and {b.dtype}")
    (rows, depth), (other, columns) = a.shape, b.shape
    require(
        depth == other and rows % 64 == 0 and depth % 16 == 0 and columns % 8 == 0 and 8 <= columns <= 256,
        f"a product of {list(a.shape)} and {list(b.shape)}",
    )
    require(
        acc.dtype == tl.float32 and acc.shape == (rows, columns),
        f"a product {[rows, columns]} added to {acc.dtype} {list(acc.shape)}",
    )
    own = program().running
    require(
        not isinstance(acc, Pending) or acc.finished is None,
        "a product is added to the name of a sum from before warpgroup_mma_wait",
    )
    reads = [operand.access(writes=False, asynchronous=True) for operand in (a, b) if isinstance(operand, View)]
    for access in reads:
        access.time = None
    result = Pending((rows, columns), acc._layout)
    own.products.append(Product(a, b, acc if bool(use_acc) else None, result, reads))
    return result if is_async else warpgroup_mma_wait(0, deps=[result, a])[0]


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    """Finish all products but the last few. What `deps` names must be used by the names that this returns."""
    require(bool(deps), "warpgroup_mma_wait without deps")
    own = program().running
    count = max(len(own.products) - num_outstanding, 0)
    for product in own.products[:count]:
        kept = isinstance(product.left, View) or any(dep is product.left for dep in deps)
        require(kept, "the left operand of a product is in registers and not among the deps of its wait")
        product.finish()
    own.products = own.products[count:]
    found = [dep.finished if isinstance(dep, Pending) and dep.finished is not None else dep for dep in deps]
    return tuple(found) if len(found) > 1 else found[0]
