"""What tests of the append and dequantize kernels run in a process of its own, in which Triton interprets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from hf_wsvd.kernels import append, dequantize, use
from hf_wsvd.kernels.append_checks import Slots
from hf_wsvd.quantizer_config import StorageSpec
from hf_wsvd.storage import append_both
from hf_wsvd.storage.build import codec_for
from hf_wsvd.storage.codec import Codec, Packed
from hf_wsvd.storage.packed import PackedStore
from hf_wsvd.storage.static import StaticStore


@dataclass(frozen=True)
class Case:
    """Tokens of some scheme and where they go."""

    spec: StorageSpec
    width: int = 64
    count: int = 3
    dtype: torch.dtype = torch.float32
    batch: int = 2
    heads: int = 2
    position: int = 5
    capacity: int = 24

    def __str__(self) -> str:
        spec = self.spec
        sides = "-symmetric" if spec.symmetric else ""
        groups = f"-groups of {spec.group_size}" if spec.group_size else ""
        return f"{spec.scheme}-{spec.bits}{sides}{groups}-{self.width}-{self.count}-{self.dtype}".replace("torch.", "")


def name(spec: StorageSpec) -> str | None:
    """Of a test."""
    return str(Case(spec)).split("-64-")[0] if isinstance(spec, StorageSpec) else None


def tokens_of(case: Case, seed: int = 0) -> Tensor:
    """Tokens as a projection gives them (heads after tokens in memory): among them some that are zero, huge, or not
    finite in a number."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(case.batch, case.count, case.heads, case.width, generator=generator).transpose(1, 2)
    odd = [
        lambda t: t.zero_(),
        lambda t: t[..., -1:].fill_(math.nan),
        lambda t: t.mul_(3e4),
        lambda t: t[..., :1].fill_(-math.inf),
    ]
    for number, change in enumerate(odd):
        change(tokens[number % case.batch, number // 2 % case.heads, -1])
    return tokens.to(case.dtype)


def codec_of(case: Case, first: Tensor) -> Codec:
    """A codec that has seen other tokens before, of which fp8 takes its scale."""
    codec = codec_for(case.spec, case.width)
    codec.to(torch.device("cpu"))
    codec.observe(first)
    return codec


def empty_slots(case: Case, codec: Codec, **where) -> Slots:
    """Buffers full of a pattern."""
    encoding = codec.encoding()
    payload = torch.full((case.batch, case.heads, case.capacity, encoding.payload_width), 0xA5, dtype=torch.uint8)
    scales = torch.full((case.batch, case.heads, case.capacity, encoding.scales_width), 7.0, dtype=torch.float16)
    return Slots(payload, scales if encoding.scales_width else None, **where)


def unequal(found: Tensor, wanted: Tensor) -> int:
    """How many numbers differ; NaN equals NaN."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    return int((~((found == wanted) | (found.isnan() & wanted.isnan()))).sum())


def codes_unequal(packed: tuple[Tensor, Tensor], wanted: Packed, code: str) -> list[int]:
    payload, expected = packed[0], wanted.payload
    if code == "fp8":  # NaN has a sign
        payload, expected = (part.view(torch.float8_e4m3fn).float() for part in (payload, expected))
    return [unequal(payload, expected), unequal(packed[1], wanted.scales)]


def written(slots: Slots, first: int, count: int) -> tuple[Packed, bool]:
    """What lies in some slots, and whether all others have their pattern."""
    none = slots.payload[..., :0].to(torch.float16)
    parts = slots.payload, none if slots.scales is None else slots.scales
    others = torch.ones(slots.payload.shape[2], dtype=torch.bool)
    others[first : first + count] = False
    untouched = all(bool((part[:, :, others] == pattern).all()) for part, pattern in zip(parts, (0xA5, 7)))
    return Packed(*(part[:, :, first : first + count] for part in parts)), untouched


def appended(case: Case) -> tuple[list[int], bool]:
    """Codes and scales that differ from the codec's, and whether nothing else was written."""
    tokens = tokens_of(case)
    codec = codec_of(case, tokens)
    slots = empty_slots(case, codec, position=case.position)
    append.append_tokens([tokens], [codec.encoding()], [slots])
    found, untouched = written(slots, case.position, case.count)
    return codes_unequal(found, codec.encode(tokens), codec.encoding().code), untouched


def appended_both(case: Case, other: Case) -> tuple[int, list[list[int]], bool]:
    """The same for two sides at different positions; and how many launches that took."""
    sides = []
    for number, one in enumerate((case, other)):
        tokens = tokens_of(one, seed=number) * (number + 1)
        codec = codec_of(one, tokens)
        sides.append((tokens, codec, empty_slots(one, codec, position=one.position)))
    operator = torch.ops.hf_wsvd.append_tokens
    with mock.patch.object(torch.ops.hf_wsvd, "append_tokens", side_effect=operator) as calls:
        append.append_tokens([s[0] for s in sides], [s[1].encoding() for s in sides], [s[2] for s in sides])
    found = [written(slots, one.position, one.count) for (_, _, slots), one in zip(sides, (case, other))]
    differ = [
        codes_unequal(packed, codec.encode(tokens), codec.encoding().code)
        for (tokens, codec, _), (packed, _) in zip(sides, found)
    ]
    return calls.call_count, differ, all(untouched for _, untouched in found)


def appended_at(case: Case, start: int) -> tuple[list[int], bool]:
    """Appended at a position that only the device knows; slots past the end are left out."""
    tokens = tokens_of(case)
    codec = codec_of(case, tokens)
    slots = empty_slots(case, codec, start=torch.tensor(start))
    append.append_tokens([tokens], [codec.encoding()], [slots])
    kept = max(min(case.capacity - start, case.count), 0) if start >= 0 else 0
    found, untouched = written(slots, max(start, 0), kept)
    wanted = Packed(*(part[:, :, :kept] for part in codec.encode(tokens)))
    return codes_unequal(found, wanted, codec.encoding().code), untouched


def projected(case: Case, in_features: int) -> tuple[float, list[int], bool, bool]:
    """Error of latents; codes that are not those of the latents; whether a token alone gives the same."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(case.batch, case.count, in_features, generator=generator).to(case.dtype)
    down = torch.randn(case.heads, case.width, in_features, generator=generator).to(case.dtype) / in_features**0.5
    codec = codec_of(case, tokens_of(case).nan_to_num(0))
    slots = empty_slots(case, codec, position=case.position)
    latents = append.project_append(inputs, down, codec.encoding(), slots)
    exact = append.project_append_oracle(inputs, down, codec.encoding(), empty_slots(case, codec))
    found, untouched = written(slots, case.position, case.count)
    alone = append.project_append(
        inputs[-1:, -1:],
        down,
        codec.encoding(),
        empty_slots(Case(case.spec, case.width, 1, case.dtype, 1, case.heads), codec),
    )
    return (
        float((latents - exact).abs().max()),
        codes_unequal(found, codec.encode(latents), codec.encoding().code),
        untouched,
        torch.equal(alone, latents[-1:, :, -1:]),
    )


def read_back(case: Case) -> tuple[float, float, bool]:
    """Errors of tokens read by the kernel into a part of a tensor, against the oracle and against the codec; and
    whether the rest of the tensor was left alone."""
    tokens = tokens_of(case)
    codec = codec_of(case, tokens)
    packed = Packed(*(part[:, :, 1:] for part in codec.encode(torch.cat([tokens, tokens], dim=2))))
    stored, rotation = codec.stored(packed), codec.constants.get("rotation")
    count = packed.payload.shape[2]
    whole = torch.full((case.batch, case.heads + 1, count + 2, case.width + 3), 7.0, dtype=case.dtype)
    out = whole[:, 1:, 2:, : case.width]
    dequantize.dequantize(stored, None, rotation, out)
    read = out.clone()
    out.fill_(7.0)
    errors = []
    for wanted in (dequantize.dequantize_oracle(stored, case.dtype, rotation), codec.decode(packed, case.dtype)):
        assert torch.equal(read.isnan(), wanted.isnan())
        close = (read - wanted).nan_to_num(0).float().abs()
        errors.append(float((close / (wanted.nan_to_num(0).float().abs().amax(-1, keepdim=True) + 1)).max()))
    return *errors, bool((whole == 7).all())


def stores_unequal(spec: StorageSpec, kind: str, both: bool) -> dict[str, list[int]]:
    """Differences between stores filled by kernels and by torch, over appends, a crop, and a change from one to the
    other: of what they keep, and of what they read beyond rounding."""
    width, heads = 16, 2

    def store() -> PackedStore | StaticStore:
        codec = codec_for(spec, width)
        if kind == "growing":
            return PackedStore(codec, heads, torch.float32)
        layer = StaticLayer(12) if kind == "static" else StaticSlidingWindowLayer(32, 6)
        return StaticStore(codec, layer, heads, torch.float32)

    ours, theirs = [store(), store()], [store(), store()]
    found: dict[str, list[int]] = {}
    generator = torch.Generator().manual_seed(0)
    for step, count in enumerate((3, 1, 2, 1)):
        tokens = [torch.randn(1, heads, count, width, generator=generator) for _ in range(2)]
        for stores, on in ((ours, step != 2), (theirs, False)):
            with use("auto" if on else "torch"):
                if both:
                    append_both(*stores, *tokens)
                else:
                    for one, own in zip(stores, tokens):
                        one.append(own)
        differ = []
        for one, other in zip(ours, theirs):
            kept, wanted = one.packed(), other.packed()
            wanted = {name: part for name, part in wanted.items() if part.numel()}
            differ += [unequal(kept[name], part) for name, part in wanted.items()]
            with use("torch"):
                read = other.read()
            differ.append(int(((one.read() - read).abs() > 1e-5).sum()))
            differ.append(int(len(one) != len(other)))
        found[f"step {step}"] = differ
        if step == 1 and kind != "window":
            for one in (*ours, *theirs):
                one.crop(1)
    return found


def compiled_unequal(spec: StorageSpec) -> tuple[int, int]:
    """Graphs of static appends and reads of several steps, and what these read otherwise than eager ones."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    def stores() -> list[StaticStore]:
        return [StaticStore(codec_for(spec, 16), StaticLayer(12), 2, torch.float32) for _ in range(2)]

    def step(pair: list[StaticStore], tokens: Tensor) -> Tensor:
        append_both(*pair, tokens, tokens * 2)
        return torch.cat([store.read() for store in pair], dim=1)

    ours, theirs = stores(), stores()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randn(2, 2, 4, 16, generator=generator)
    differ = unequal(step(ours, prompt), step(theirs, prompt))
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        tokens = torch.randn(2, 2, 1, 16, generator=generator)
        differ += unequal(traced(ours, tokens), step(theirs, tokens))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], differ


def check_operators(spec: StorageSpec) -> None:
    """Schemas, fake tensors and traces, by the checks of torch itself."""
    case = Case(spec, 16)
    tokens = tokens_of(case).nan_to_num(0).contiguous()
    codec = codec_of(case, tokens)
    encoding, slots = codec.encoding(), empty_slots(case, codec)
    constants = append._constants(encoding)
    scales = [] if slots.scales is None else [slots.scales]
    head_scales = [] if encoding.head_scales is None else [encoding.head_scales]
    start = torch.tensor(2)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.hf_wsvd.append_tokens,
        ([tokens], [slots.payload], scales, [start], head_scales, constants, [0], *encoding[:4]),
        test_utils=tests,
    )
    inputs, down = torch.randn(2, 3, 32), torch.randn(2, 16, 32)
    torch.library.opcheck(
        torch.ops.hf_wsvd.project_append,
        (inputs, down, slots.payload, slots.scales, start, encoding.head_scales, constants, 0, *encoding[:4]),
        test_utils=tests,
    )
    payload, scales, width, code, bits, head_scales, levels = codec.stored(codec.encode(tokens))
    rotation, out = codec.constants.get("rotation"), torch.empty(tokens.shape)
    torch.library.opcheck(
        torch.ops.hf_wsvd.dequantize,
        (payload, scales, head_scales, levels, rotation, out, width, code, bits),
        test_utils=tests,
    )


def in_inference_mode(spec: StorageSpec) -> int:
    """A store filled in inference mode and then outside of it, against one filled by torch."""
    stores = [PackedStore(codec_for(spec, 16), 2, torch.float32) for _ in range(2)]
    tokens = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    for store, on in zip(stores, (True, False)):
        with use("auto" if on else "torch"):
            with torch.inference_mode():
                store.append(tokens[:, :, :2])
                store.append(tokens[:, :, 2:3])
            store.append(tokens[:, :, 3:])
    return sum(unequal(part, stores[1].packed()[name]) for name, part in stores[0].packed().items())
