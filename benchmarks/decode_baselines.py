"""Dense attention of one query token over bf16 keys and values, by everything that can run it.

A baseline takes `Dense` operands and gives a call; a library that is not installed or does not take the operands
raises. All compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


FLASHINFER_PAGE = 16
FLASHINFER_WORKSPACE = 128 << 20


class NotApplicable(ValueError):
    """A baseline that is another one's in this case."""


class Dense(NamedTuple):
    """`query [B, Hq, 1, D]`, `key` and `value [B, H, L, D]`, contiguous, and the factor of the scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.key.shape[1]


def random_dense(shape, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda") -> Dense:
    """Operands of the sizes of a `DecodeShape`."""
    sizes = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    key, value = (torch.randn(sizes, dtype=dtype, device=device) for _ in range(2))
    query = torch.randn(shape.batch, shape.query_heads, 1, shape.head_dim, dtype=dtype, device=device)
    return Dense(query, key, value, shape.head_dim**-0.5)


Call = Callable[[], Tensor]
Baseline = Callable[[Dense], Call]


def sdpa(backend: SDPBackend, folded: bool = False) -> Baseline:
    """A backend of torch's SDPA. `folded`: the query heads of a KV head as query tokens, which one token allows."""

    def prepare(dense: Dense) -> Call:
        query, grouped = dense.query, dense.group > 1
        if folded:
            if not grouped:
                raise NotApplicable("every query head has a KV head of its own")
            batch, heads = dense.key.shape[:2]
            query, grouped = query.view(batch, heads, dense.group, -1), False

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    query, dense.key, dense.value, scale=dense.scaling, enable_gqa=grouped
                ).view(dense.query.shape)

        return call

    return prepare


def flex_attention(dense: Dense) -> Call:
    """FlexAttention, compiled for these shapes."""
    from torch.nn.attention.flex_attention import flex_attention as eager

    torch._dynamo.config.recompile_limit = 64  # one compiled form a shape
    compiled = torch.compile(eager, dynamic=False, fullgraph=True)
    return lambda: compiled(dense.query, dense.key, dense.value, scale=dense.scaling, enable_gqa=dense.group > 1)


def flash_attention_2(dense: Dense) -> Call:
    """flash-attn 2, with its own split over tokens."""
    from flash_attn import flash_attn_with_kvcache

    query, key, value = (tensor.transpose(1, 2) for tensor in dense[:3])
    return lambda: flash_attn_with_kvcache(query, key, value, softmax_scale=dense.scaling).transpose(1, 2)


def flash_attention_3(dense: Dense) -> Call:
    """flash-attn 3 (Hopper)."""
    from flash_attn_interface import flash_attn_with_kvcache

    query, key, value = (tensor.transpose(1, 2) for tensor in dense[:3])
    return lambda: flash_attn_with_kvcache(query, key, value, softmax_scale=dense.scaling).transpose(1, 2)


def flash_attention_4(dense: Dense) -> Call:
    """flash-attn 4 (CuTe DSL)."""
    from flash_attn.cute import flash_attn_func

    query, key, value = (tensor.transpose(1, 2) for tensor in dense[:3])

    def call() -> Tensor:
        result = flash_attn_func(query, key, value, softmax_scale=dense.scaling, num_splits=0)  # 0: as it chooses
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    return call


def flashinfer(tensor_cores: bool) -> Baseline:
    """FlashInfer's batch decode over pages, planned beforehand, as it is used under CUDA graphs."""

    def prepare(dense: Dense) -> Call:
        import flashinfer as library

        query, key, value, scaling = dense
        batch, heads, tokens, head_dim = key.shape
        if tokens % FLASHINFER_PAGE:
            raise ValueError(f"{tokens} tokens do not fill pages of {FLASHINFER_PAGE}")
        pages = tokens // FLASHINFER_PAGE

        def paged(tensor: Tensor) -> Tensor:
            split = tensor.view(batch, heads, pages, FLASHINFER_PAGE, head_dim)
            return split.transpose(1, 2).reshape(batch * pages, heads, FLASHINFER_PAGE, head_dim)

        def integers(values: Tensor) -> Tensor:
            return values.to(torch.int32).to(query.device)

        first = integers(torch.arange(batch + 1) * pages)
        numbers = integers(torch.arange(batch * pages))
        last = integers(torch.full((batch,), FLASHINFER_PAGE))
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=first,
            paged_kv_indices_buffer=numbers,
            paged_kv_last_page_len_buffer=last,
        )
        wrapper.plan(
            *(first, numbers, last, query.shape[1], heads, head_dim, FLASHINFER_PAGE),
            q_data_type=query.dtype,
            kv_data_type=key.dtype,
            sm_scale=scaling,
        )
        cache, rows = (paged(key), paged(value)), query.squeeze(2)
        return lambda: wrapper.run(rows, cache).unsqueeze(2)

    return prepare


BASELINES: dict[str, Baseline] = {
    "cuDNN SDPA": sdpa(SDPBackend.CUDNN_ATTENTION),
    "cuDNN SDPA, folded": sdpa(SDPBackend.CUDNN_ATTENTION, folded=True),
    "flash SDPA": sdpa(SDPBackend.FLASH_ATTENTION),
    "flash SDPA, folded": sdpa(SDPBackend.FLASH_ATTENTION, folded=True),
    "memory-efficient SDPA": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "memory-efficient SDPA, folded": sdpa(SDPBackend.EFFICIENT_ATTENTION, folded=True),
    "FlexAttention": flex_attention,
    "FlashInfer": flashinfer(tensor_cores=False),
    "FlashInfer, tensor cores": flashinfer(tensor_cores=True),
    "FlashAttention 2": flash_attention_2,
    "FlashAttention 3": flash_attention_3,
    "FlashAttention 4": flash_attention_4,
}
# These compile for every shape: left out of rows that only show how time grows.
SLOW_TO_SET_UP = ("FlexAttention",)
