"""Forms of the Hopper kernels: what a tile comes to in shared memory, and plans that are remembered."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hf_wsvd.kernels import DecodePart, Rotation, StoredTokens, hopper_launch
from hf_wsvd.kernels.decode_call import DecodeCall
from hf_wsvd.kernels.hopper_form import PADDED_RANKS, SHARED_MEMORY, Form, Side, tile_constants
from hf_wsvd.kernels.tiles import PositionQueryTile, TileReconstructionTile


SIDES = [Side(rank, *code) for rank, code in product((16, 48, 64, 96, 128), ((16, 0), (8, 1), (8, 2), (4, 1), (4, 2)))]


@pytest.mark.parametrize(("width", "padded"), [(16, 32), (32, 32), (48, 64), (64, 64), (80, 128), (128, 128)])
def test_ranks_are_padded_to_few(width, padded):
    assert Side(width, 16, 0).padded() == padded
    form = Form(128, Side(width, 16, 0), Side(width, 16, 0))
    assert form.ranks("position_query") == (padded, padded)
    assert form.ranks("tile_reconstruction") == (padded, max(padded, 64))
    assert padded in PADDED_RANKS


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("key", "value"), list(zip(SIDES, SIDES)) + list(zip(SIDES, SIDES[7:])), ids=str)
def test_a_large_tile_is_cut_to_what_fits(key, value, head_dim):
    form = Form(head_dim, key, value, group=16, bias=True, norm=1)
    plain = tile_constants("position_query", form, PositionQueryTile(8, heads=2), heads=6)
    widest = head_dim == 128 and all(side.padded() == 128 and side.bits == 16 for side in (key, value))
    assert plain["HEADS"] == (1 if widest else 2)
    assert plain["STAGES"] >= 2
    for groups, heads in product((2, 3, 4), (1, 2, 4)):
        tile = TileReconstructionTile(8, heads, 256, groups, 64)
        found = tile_constants("tile_reconstruction", form._replace(group=4), tile, heads=8)
        assert found["GROUPS"] <= groups
        assert found["GROUPS"] % found["HEADS"] == 0
        # A group of warps has the same stages in every turn: else it could take one phase of a barrier for another.
        assert found["STAGES"] % found["GROUPS"] == 0 < found["STAGES"]
        assert found["ROW_STAGES"] % (found["GROUPS"] // found["HEADS"]) == 0 < found["ROW_STAGES"]
        assert stage_bytes(form, found) < SHARED_MEMORY


def stage_bytes(form: Form, found: dict[str, int]) -> int:
    numbers = sum(
        rank * side.bits // 8 for rank, side in zip(form.ranks("tile_reconstruction"), (form.key, form.value))
    )
    return 64 * (found["STAGES"] * numbers + found["ROW_STAGES"] * 2 * form.head_dim)


def test_heads_that_cannot_be_divided_are_taken_one_by_one():
    side = Side(64, 16, 0)
    for heads, together in ((3, 1), (6, 2), (8, 4)):
        tile = TileReconstructionTile(8, 4, 256, 4, 32)
        assert tile_constants("tile_reconstruction", Form(128, side, side, 4), tile, heads)["HEADS"] == together


def test_a_tile_that_nothing_could_hold_is_refused(monkeypatch):
    monkeypatch.setattr("hf_wsvd.kernels.hopper_form.SHARED_MEMORY", 64 << 10)
    side = Side(128, 16, 0)
    with pytest.raises(ValueError, match=r"heads=2, groups=2 of tile_reconstruction is not allowed for .*; allowed:"):
        tile_constants("tile_reconstruction", Form(128, side, side, 7), TileReconstructionTile(8, 2), 2)


@pytest.fixture
def plans(monkeypatch) -> dict:
    """Where plans are remembered, empty; on a GPU that has the kernels, as far as they are concerned."""
    found = {}
    monkeypatch.setattr(hopper_launch, "_plans", found)
    monkeypatch.setattr(hopper_launch, "hopper_obstacle", lambda device: None)
    return found


def operands(width: int = 64, tokens: int = 8) -> tuple[DecodePart, DecodeCall]:
    stored = StoredTokens(torch.zeros(1, 4, tokens, width).bfloat16(), None, width)
    up = torch.zeros(4, 128, width).bfloat16()
    rotation = Rotation(*torch.zeros(2, 1, tokens, 64).bfloat16())
    call = DecodeCall(torch.zeros(1, 4, 1, 128).bfloat16(), 4, tokens, 1.0, rotation)
    return DecodePart(stored, stored, up, up), call


def test_operands_that_are_alike_share_a_plan_wherever_they_lie(plans):
    first = hopper_launch.plan_of(*operands())
    assert first.obstacle is None
    assert hopper_launch.plan_of(*operands()) is first
    assert hopper_launch.plan_of(*operands(tokens=9)) is not first
    assert len(plans) == 2


def test_a_plan_is_not_taken_for_operands_that_differ(plans):
    part, call = operands()
    hopper_launch.plan_of(part, call)
    moved = part.key.payload.new_zeros(4 * 8 * 64 + 1)[1:].view(1, 4, 8, 64)
    for other, changed, reason in (
        (part._replace(key=part.key._replace(payload=moved)), call, "multiples of 16 bytes"),
        (part, call._replace(window=4), "there is a window"),
        (part, call._replace(mask=torch.zeros(1, 1, 1, 8)), "additive mask"),
        (part._replace(key_bias=torch.zeros(4, 128)), call, "keys have a bias"),
        (part, call._replace(query=call.query.half()), "rotary rows"),
    ):
        assert reason in hopper_launch.plan_of(other, changed).obstacle
    assert hopper_launch.plan_of(part, call).obstacle is None


def test_plans_do_not_pile_up(plans, monkeypatch):
    monkeypatch.setattr(hopper_launch, "MOST_PLANS", 3)
    for tokens in range(8, 20):
        hopper_launch.plan_of(*operands(tokens=tokens))
    assert len(plans) <= 3
