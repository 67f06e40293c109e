"""Fisher-weighted refinement lowers its loss, never raises it, and finds what can be found."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_wsvd.fit import factorise, spectrum
from hf_wsvd.fit.fisher import fisher_loss, refine_adam, refine_alternating


HEADS, HEAD_DIM, INPUTS, RANK = 3, 16, 41, 5
REFINE = [refine_alternating, refine_adam]

Problem = tuple[Tensor, Tensor, Tensor, Tensor]


def problem(
    heads: int = HEADS, head_dim: int = HEAD_DIM, inputs: int = INPUTS, rank: int = RANK, spread: float = 2.0
) -> Problem:
    """Weight, Fisher information with a heavy tail, and the truncated SVD as the start."""
    weight = torch.randn(heads * head_dim, inputs) / inputs**0.5
    fisher = torch.exp(spread * torch.randn(heads * head_dim, inputs))
    per_head = weight.unflatten(0, (heads, head_dim))
    return weight, fisher, *factorise(weight, rank, spectrum(per_head @ per_head.mT))


def product(down: Tensor, up: Tensor) -> Tensor:
    return (up.double() @ down.double()).flatten(0, 1)


def loss(weight: Tensor, fisher: Tensor, down: Tensor, up: Tensor) -> float:
    """The objective as the paper writes it."""
    root = fisher.double().sqrt()
    return ((root * (product(down, up) - weight)).square().mean() / (root * weight).square().mean()).item()


def test_the_loss_is_the_papers():
    arguments = problem()
    assert fisher_loss(*arguments) == pytest.approx(loss(*arguments), rel=1e-6)
    weight, fisher, down, up = arguments
    assert fisher_loss(weight, fisher, torch.zeros_like(down), up) == pytest.approx(1)
    assert fisher_loss(weight, 1e-30 * fisher, down, up) == pytest.approx(fisher_loss(*arguments), rel=1e-6)
    assert fisher_loss(weight, torch.zeros_like(fisher), down, up) == 0


@pytest.mark.parametrize("refine", REFINE)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"rank": 1},
        {"heads": 1, "rank": 3},
        {"head_dim": 7, "rank": 6},
        {"inputs": 4, "rank": 2},
        {"inputs": 2, "rank": 1},
    ],
    ids=str,
)
def test_losses_never_rise_and_end_at_that_of_the_factors(refine, sizes):
    weight, fisher, down, up = problem(**sizes)
    found = refine(weight, fisher, down, up)
    assert (found.down.shape, found.up.shape) == (down.shape, up.shape)
    assert found.losses[0] == pytest.approx(fisher_loss(weight, fisher, down, up), rel=1e-5)
    assert found.losses[-1] == fisher_loss(weight, fisher, found.down, found.up)
    assert found.losses[-1] < found.losses[0]
    assert all(later <= earlier for earlier, later in zip(found.losses, found.losses[1:-1]))


@pytest.mark.parametrize("refine", REFINE)
def test_the_up_factor_has_orthonormal_columns_whatever_the_start(refine):
    weight, fisher, down, up = problem()
    mix = torch.randn(HEADS, RANK, RANK)
    found = refine(weight, fisher, torch.linalg.solve(mix, down), up @ mix)
    torch.testing.assert_close(found.up.mT @ found.up, torch.eye(RANK).expand(HEADS, -1, -1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("rank", [1, 5, 15])
def test_one_alternation_goes_below_a_hundred_steps_of_adam(spread, rank):
    arguments = problem(rank=rank, spread=spread)
    alternating = refine_alternating(*arguments, iterations=1).losses[-1]
    assert alternating < refine_adam(*arguments).losses[-1] < fisher_loss(*arguments)


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_of_a_head_of_two_rows_is_found(seed):
    torch.manual_seed(seed)
    weight, fisher, down, up = problem(heads=1, head_dim=2, inputs=6, rank=1, spread=1)
    found = refine_alternating(weight, fisher, down, up, iterations=500, tolerance=0)
    # Every direction of `up`, each with the best `down` for it.
    angles = torch.linspace(0, math.pi, 20001, dtype=torch.float64)
    ups = torch.stack([angles.cos(), angles.sin()], dim=1)[:, :, None]
    w, f = weight.double(), fisher.double()
    downs = (ups * f * w).sum(1) / (ups.square() * f).sum(1)
    best = (f * (ups * downs[:, None] - w).square()).sum((1, 2)).min() / (f * w.square()).sum()
    assert found.losses[-1] == pytest.approx(best.item(), rel=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_equal_fisher_everywhere_gives_the_truncated_svd(scale):
    weight, _, down, up = problem()
    singular = torch.linalg.svdvals(weight.double().view(HEADS, HEAD_DIM, INPUTS))
    optimum = (singular[:, RANK:].square().sum() / singular.square().sum()).item()
    fisher = torch.full_like(weight, scale)
    start = down + 0.1 * torch.randn_like(down), up + 0.1 * torch.randn_like(up)
    for factors in ((down, up), start):
        found = refine_alternating(weight, fisher, *factors, iterations=500, tolerance=0)
        assert found.losses[-1] == pytest.approx(optimum, rel=1e-4)


@pytest.mark.parametrize("refine", REFINE)
def test_a_fisher_of_zeros_keeps_the_start(refine):
    weight, fisher, down, up = problem()
    found = refine(weight, torch.zeros_like(fisher), down, up)
    torch.testing.assert_close(product(found.down, found.up), product(down, up), rtol=0, atol=1e-6)
    assert set(found.losses) == {0}


def test_inputs_without_fisher_keep_their_column_of_down():
    weight, fisher, *_ = problem()
    fisher[:, [0, 7, 40]] = 0
    # Only `down` moves where `up` is square: it can then fit every weighted entry.
    full = torch.eye(HEAD_DIM).expand(HEADS, -1, -1)
    start = torch.randn(HEADS, HEAD_DIM, INPUTS)
    found = product(*_factors(refine_alternating(weight, fisher, start, full)))
    for column in range(INPUTS):
        expected = start.flatten(0, 1) if column in (0, 7, 40) else weight
        torch.testing.assert_close(found[:, column].float(), expected[:, column], rtol=0, atol=1e-4)


def test_heads_rows_and_columns_without_fisher_leave_the_rest_as_good():
    weight, fisher, down, up = problem()
    fisher[:HEAD_DIM] = 0
    fisher[HEAD_DIM + 3] = 0
    fisher[:, 5:12] = 0
    fisher[torch.rand_like(fisher) < 0.5] = 0
    found = refine_alternating(weight, fisher, down, up)
    assert torch.isfinite(found.down).all()
    assert found.down.abs().max() < 100 * down.abs().max()
    assert found.losses[-1] < 0.1 * found.losses[0]
    torch.testing.assert_close(
        product(found.down, found.up)[:HEAD_DIM], product(down, up)[:HEAD_DIM], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("refine", REFINE)
def test_an_exact_fit_stays_exact(refine):
    down, up = torch.randn(HEADS, RANK, INPUTS), torch.randn(HEADS, HEAD_DIM, RANK)
    weight = product(down, up).float()
    found = refine(weight, torch.rand_like(weight), down, up)
    assert found.losses[-1] <= found.losses[0] < 1e-12


@pytest.mark.parametrize("refine", REFINE)
def test_factors_of_zeros_are_a_start_too(refine):
    weight, fisher, down, up = problem()
    found = refine(weight, fisher, torch.zeros_like(down), torch.zeros_like(up))
    assert torch.isfinite(found.down).all()
    assert found.losses[-1] <= found.losses[0] == pytest.approx(1)


@pytest.mark.parametrize("workspace", [1, 4096, 20_000])
def test_a_small_workspace_changes_nothing(workspace):
    arguments = problem()
    whole, parts = refine_alternating(*arguments), refine_alternating(*arguments, workspace=workspace)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    torch.testing.assert_close(product(*_factors(parts)), product(*_factors(whole)), rtol=0, atol=1e-4)


def test_heads_do_not_affect_each_other():
    weight, fisher, down, up = problem()
    together = refine_alternating(weight, fisher, down, up)
    rows = slice(HEAD_DIM, 2 * HEAD_DIM)
    alone = refine_alternating(weight[rows], fisher[rows], down[1:2], up[1:2])
    torch.testing.assert_close(alone.down[0], together.down[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("refine", REFINE)
def test_arguments_are_left_as_they_were_in_any_mode_and_dtype(refine):
    arguments = tuple(tensor.bfloat16() for tensor in problem())
    before = [tensor.clone() for tensor in arguments]
    with torch.inference_mode():
        found = refine(*arguments)
    assert all(torch.equal(tensor, old) for tensor, old in zip(arguments, before))
    assert found.down.dtype == found.up.dtype == torch.float32
    assert found.losses[-1] < found.losses[0]
    weight = torch.nn.Parameter(arguments[0])
    assert not refine(weight, *arguments[1:]).down.requires_grad


def test_no_iterations_and_an_early_stop():
    arguments = problem()
    for found in (refine_alternating(*arguments, iterations=0), refine_adam(*arguments, steps=0)):
        assert len(found.losses) == 1
        torch.testing.assert_close(product(*_factors(found)), product(*arguments[2:]), rtol=0, atol=1e-5)
    assert len(refine_alternating(*arguments, iterations=50, tolerance=0.05).losses) < 15


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight", lambda t: t[0], r"weight must be \[heads"),
        ("weight", lambda t: t.fill_(math.nan), "weight holds NaN"),
        ("fisher", lambda t: t[1:], "fisher must have the shape of weight"),
        ("fisher", lambda t: -t, "fisher is negative"),
        ("fisher", lambda t: t / 0, "fisher holds NaN or infinity"),
        ("fisher", lambda t: t * math.nan, "fisher holds NaN or infinity"),
        ("down", lambda t: t.flatten(0, 1), r"down must be \[heads"),
        ("down", lambda t: t[:, :, 1:], r"down must be \[heads"),
        ("down", lambda t: torch.cat([t, t[:2]]), r"down must be \[heads"),
        ("down", lambda t: t * math.inf, "down holds NaN"),
        ("up", lambda t: t.mT, r"up must be \[heads, head_dim, rank\], \[3, 16, 5\]"),
        ("up", lambda t: t * math.nan, "up holds NaN"),
    ],
)
@pytest.mark.parametrize("function", [fisher_loss, *REFINE])
def test_wrong_arguments_are_named(function, name, change, message):
    arguments = dict(zip(("weight", "fisher", "down", "up"), problem()))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_wrong_options_are_named():
    weight, fisher, down, up = problem()
    for option in ({"ridge": 0.0}, {"ridge": math.nan}, {"workspace": 0}):
        with pytest.raises(ValueError, match=next(iter(option))):
            refine_alternating(weight, fisher, down, up, **option)
    wide, tall = torch.zeros(HEADS, HEAD_DIM + 1, INPUTS), torch.zeros(HEADS, HEAD_DIM, HEAD_DIM + 1)
    with pytest.raises(ValueError, match="rank 17, more than the head_dim of 16"):
        fisher_loss(weight, fisher, wide, tall)


def _factors(found) -> tuple[Tensor, Tensor]:
    return found.down, found.up
