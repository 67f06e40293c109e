"""KIVI keys (arXiv 2402.02750): per channel in groups of tokens, the newest tokens in full precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..kernels.packing import pack, packed_width, padded_width, unpack, unpack_into
from .modes import unaffected
from .store import Piece, Store, check_like, check_names
from .token_buffer import TokenBuffer
from .whole import WholeStore


ALL_HEADS = slice(None)


class KiviKeyStore(Store):
    """Keys whose channels are coded over `group_size` consecutive tokens, asymmetric, with a scale and a zero each.

    As published: the newest tokens are kept as they are, and once there are `residual_length` of them, all of those
    are packed at once; a prompt of T tokens keeps `T mod residual_length`.

    A crop into a packed group puts what remains of the group back among the newest tokens, as it read before. A
    non-finite number does not touch the range of its group: it reads back as the group's low end (NaN, -inf) or high
    end (inf).

    Args:
        bits: of the codes.
        group_size: tokens of a group.
        residual_length: tokens of a block, a multiple of `group_size`.
    """

    def __init__(self, bits: int, group_size: int, residual_length: int, heads: int, width: int, dtype: torch.dtype):
        self.bits, self.group_size, self.residual_length = bits, group_size, residual_length
        self.heads, self.width, self.dtype = heads, width, dtype
        self.recent = WholeStore(heads, width, dtype, "window")
        self.reset()

    def __len__(self) -> int:
        return len(self.payload) - self.hidden + len(self.recent)

    @property
    def batch(self) -> int:
        return self.payload.data.shape[0] if len(self.payload) else self.recent.batch

    def append(self, tokens: Tensor) -> None:
        self.dtype = tokens.dtype
        if len(self.recent) + tokens.shape[2] < self.residual_length:
            self.recent.append(tokens)
            return
        if len(self.recent):
            tokens = torch.cat([self.recent.read(), tokens], dim=2)
        packed = tokens.shape[2] - tokens.shape[2] % self.residual_length
        self._pack(tokens[:, :, :packed])
        self.recent.reset()
        if packed < tokens.shape[2]:
            self.recent.append(tokens[:, :, packed:])

    def obstacle(self) -> str:
        return "scheme kivi: keys are coded over groups of tokens"

    @unaffected
    def _pack(self, tokens: Tensor) -> None:
        groups = tokens.unflatten(2, (-1, self.group_size)).float()  # [B, H, G, g, width]
        finite = groups.isfinite()
        low = groups.masked_fill(~finite, torch.inf).amin(3).nan_to_num(posinf=0.0)
        high = groups.masked_fill(~finite, -torch.inf).amax(3).nan_to_num(neginf=0.0)
        top = 2**self.bits - 1
        limit = torch.finfo(torch.float16).max
        scale = ((high - low) / top).clamp(max=limit).half()
        zero = low.clamp(-limit, limit).half()
        # Codes follow the numbers that decoding uses: the rounded ones.
        steps = (groups - zero.float()[:, :, :, None]) / scale.float().clamp_min(torch.finfo(torch.float32).tiny)[
            :, :, :, None
        ]
        codes = steps.round().nan_to_num(0.0).clamp(0, top).to(torch.uint8).flatten(2, 3)
        self.payload.append(pack(codes, self.bits))
        self.scales.append(torch.cat([scale, zero], dim=-1))

    @unaffected
    def _unpack(self, first: int, last: int, out: Tensor, heads: slice = ALL_HEADS) -> None:
        """Write the tokens of groups `first` to `last` into `out [B, H, n, width]`."""
        payload = self.payload.view[:, heads, first * self.group_size : last * self.group_size]
        if padded_width(self.width, self.bits) == self.width:
            unpack_into(payload, out, self.bits)
        else:
            out.copy_(unpack(payload, self.width, self.bits))
        scale, zero = self.scales.view[:, heads, first:last, None].to(self.dtype).chunk(2, dim=-1)
        out.unflatten(2, (-1, self.group_size)).mul_(scale).add_(zero)

    def _empty(self, tokens: int, heads: slice = ALL_HEADS) -> Tensor:
        count = len(range(self.heads)[heads])
        return self.scales.data.new_empty((self.batch, count, tokens, self.width), dtype=self.dtype)

    def read(self) -> Tensor:
        return self.read_heads(ALL_HEADS)

    def read_heads(self, heads: slice) -> Tensor:
        if not len(self.payload):
            return self.recent.read_heads(heads)
        packed, recent = len(self.payload), len(self.recent)
        gradients = self.recent.requires_grad
        # The newest tokens have their place behind the packed ones: a concatenation would copy all once more.
        out = self._empty(packed if gradients else packed + recent, heads)
        self._unpack(0, len(self.scales), out[:, :, :packed], heads)
        if gradients:
            out = torch.cat([out, self.recent.read_heads(heads)], dim=2)
        elif recent:
            out[:, :, packed:] = self.recent.read_heads(heads)
        return out[:, :, self.hidden :]

    def packed(self) -> dict[str, Tensor]:
        if not len(self.payload):
            return {"recent": self.recent.read()} if len(self.recent) else {}
        views = {"payload": self.payload.view, "scales": self.scales.view}
        return {**views, "recent": self.recent.read()} if len(self.recent) else views

    def crop(self, count: int) -> None:
        taken = min(count, len(self.recent))
        self.recent.crop(taken)
        count -= taken
        if count >= len(self.payload) - self.hidden:
            if count:
                self.reset()
        elif count:
            end = len(self.payload) - count
            kept = end - end % self.group_size
            start = max(kept, self.hidden)
            again = self._empty(self.group_size)
            self._unpack(kept // self.group_size, kept // self.group_size + 1, again)
            again = again[:, :, start - kept : end - kept]
            self.payload.crop(len(self.payload) - kept)
            self.scales.crop(len(self.scales) - kept // self.group_size)
            if kept <= self.hidden:
                self.reset()
            if again.shape[2]:
                self.recent.reset()
                self.recent.append(again)

    def keep_last(self, count: int) -> None:
        drop = max(len(self) - count, 0)
        hidden = self.hidden + drop
        if hidden >= len(self.payload):
            self.recent.keep_last(count)
            self.payload, self.scales, self.hidden = TokenBuffer(), TokenBuffer(), 0
            return
        groups = hidden // self.group_size
        self.payload.keep_last(len(self.payload) - groups * self.group_size)
        self.scales.keep_last(len(self.scales) - groups)
        self.hidden = hidden - groups * self.group_size

    def select_batch(self, index: Tensor | list[int] | slice) -> None:
        for part in (self.payload, self.scales, self.recent):
            part.select_batch(index)

    def repeat_batch(self, repeats: int) -> None:
        for part in (self.payload, self.scales, self.recent):
            part.repeat_batch(repeats)

    def to(self, device: torch.device) -> None:
        for part in (self.payload, self.scales, self.recent):
            part.to(device)

    def reset(self) -> None:
        self.payload, self.scales = TokenBuffer(), TokenBuffer()
        self.hidden = 0  # packed tokens of the first group that `keep_last` has dropped
        self.recent.reset()

    def pieces(self) -> Iterator[Piece]:
        for kind, buffer in (("payload", self.payload), ("scales", self.scales)):
            if buffer.data is not None:
                yield Piece(kind, buffer.data, buffer.used)
        yield from self.recent.pieces()

    def state(self) -> dict[str, Tensor]:
        tensors = self.packed()
        return {**tensors, "hidden": torch.tensor([self.hidden])} if len(self.payload) else tensors

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.reset()
        recent = {"tokens": state["recent"]} if "recent" in state else {}
        packed = {name: value for name, value in state.items() if name != "recent"}
        hidden = self._check_packed(packed) if packed else 0
        self.recent.load_state(recent)
        batches = {value.shape[0] for name, value in state.items() if name != "hidden"}
        if len(self.recent) >= self.residual_length or len(batches) > 1:
            raise ValueError(f"recent is {list(state['recent'].shape)}, which does not fit the rest")
        if packed:
            self.payload.append(packed["payload"])
            self.scales.append(packed["scales"])
            self.hidden = hidden

    def _check_packed(self, packed: dict[str, Tensor]) -> int:
        """The number of hidden tokens; ValueError unless the tensors are those of whole groups."""
        width = packed_width(self.width, self.bits)
        like = {
            "payload": torch.empty(1, self.heads, 1, width, device="meta", dtype=torch.uint8),
            "scales": torch.empty(1, self.heads, 1, 2 * self.width, device="meta", dtype=torch.float16),
        }
        check_names(packed, {**like, "hidden": None})
        for name in like:
            check_like(name, packed[name], like[name])
        if packed["hidden"].shape != (1,) or packed["hidden"].dtype != torch.int64:
            raise ValueError(f"hidden is {list(packed['hidden'].shape)} {packed['hidden'].dtype}, wanted [1] int64")
        hidden, tokens, groups = int(packed["hidden"]), packed["payload"].shape[2], packed["scales"].shape[2]
        if groups * self.group_size != tokens or not 0 <= hidden < min(self.group_size, tokens):
            raise ValueError(
                f"{tokens} packed tokens, {hidden} of them hidden, do not fit {groups} groups of {self.group_size}"
            )
        if not bool(packed["scales"].isfinite().all()):  # NaN tokens leave no trace in them
            raise ValueError("scales are not finite")
        return hidden
