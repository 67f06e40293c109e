"""Ranks are the best for their bytes, never dearer than the ratio allows, and equal over a layer's heads."""

from __future__ import annotations

import itertools

import pytest
import torch

import hf_wsvd
from hf_wsvd.fit import fitted
from hf_wsvd.fit.allocation import allocate


def random_tails(count: int, head_dim: int = 8) -> dict[int, torch.Tensor]:
    """Convex curves of loss by rank, of very different sizes."""
    curves = {}
    for number in range(count):
        energy = (torch.rand(head_dim, dtype=torch.float64) * 10 ** (3 * torch.rand(()))).sort(descending=True).values
        curves[number] = torch.cat([energy.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.float64)])
    return curves


@pytest.mark.parametrize("ratio", [0.25, 0.4, 0.5, 0.8, 1.0])
def test_no_other_ranks_of_the_same_bytes_have_a_smaller_predicted_loss(ratio):
    tails = random_tails(4)
    budget = int(ratio * 4 * 8)
    found = allocate(tails, dict.fromkeys(tails, 1), budget, step=1, floor=1)
    best = min(
        sum(tails[number][rank].item() for number, rank in enumerate(ranks))
        for ranks in itertools.product(range(1, 9), repeat=4)
        if sum(ranks) <= budget
    )
    assert sum(found.values()) == budget
    assert sum(tails[number][rank].item() for number, rank in found.items()) == pytest.approx(best)


@pytest.mark.parametrize("step", [1, 2, 4, 3])
@pytest.mark.parametrize("floor", [1, 3, 4])
def test_ranks_are_steps_above_the_floor_or_the_whole_head(step, floor):
    tails = random_tails(6)
    found = allocate(tails, dict.fromkeys(tails, 2), budget=2 * 6 * 5, step=step, floor=floor)
    assert all(rank == 8 or (rank >= floor and (rank - floor) % step == 0) for rank in found.values())
    assert 2 * sum(found.values()) <= 2 * 6 * 5


def test_a_projection_with_more_heads_must_save_more_for_a_rank():
    curve = random_tails(1)[0]
    found = allocate({"few": curve, "many": curve}, {"few": 1, "many": 8}, budget=9 * 3, step=1, floor=1)
    assert found["few"] == 8 > found["many"]


def test_floors_that_exceed_the_budget_are_an_error():
    with pytest.raises(ValueError, match="a rank of 4 everywhere takes 16 numbers a token, the ratio allows 10"):
        allocate(random_tails(4), dict.fromkeys(range(4), 1), budget=10, step=1, floor=4)


def ranks_of(model, statistics, **options) -> tuple[list, list]:
    config = hf_wsvd.WSVDConfig(refinement="none", **options)
    with fitted(model, config, statistics) as fit:
        return fit.k_rank, fit.v_rank


@pytest.mark.parametrize("family", ["llama", "llama_mha", "llava"])
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.75])
def test_a_models_ranks_keep_to_the_ratio(family, ratio, dense, statistics):
    k_rank, v_rank = ranks_of(dense(family), statistics(family), rank_ratio=ratio)
    spent = sum(k_rank + v_rank) / (6 * 16)
    assert ratio - 4 / (6 * 16) < spent <= ratio, "at most one step of a quarter of a head is left over"
    assert all(rank % 4 == 0 for rank in k_rank + v_rank)
    assert len(set(k_rank + v_rank)) > 1, "layers and sides of different importance get different ranks"


def test_keys_and_values_have_budgets_of_their_own_where_their_ratios_are(dense, statistics):
    k_rank, v_rank = ranks_of(dense("llama"), statistics("llama"), k_rank_ratio=0.25, v_rank_ratio=0.75)
    assert (sum(k_rank), sum(v_rank)) == (12, 36)


def test_given_ranks_and_skipped_projections_are_not_touched(dense, statistics):
    k_rank, v_rank = ranks_of(dense("llama"), statistics("llama"), k_rank=[3, None, 5])
    assert k_rank == [3, 16, 5]
    assert sum(v_rank) <= 24
    k_rank, v_rank = ranks_of(
        dense("llama"),
        statistics("llama"),
        layers_to_not_convert=[1],
        modules_to_not_convert=["layers.0.self_attn.k_proj"],
    )
    assert (k_rank[0], k_rank[1], v_rank[1]) == (16, None, None)
    assert k_rank[2] + v_rank[0] + v_rank[2] <= 24


def test_the_floor_holds_everywhere(dense, statistics):
    k_rank, v_rank = ranks_of(dense("llama"), statistics("llama"), rank_floor=6)
    assert min(k_rank + v_rank) == 8, "rounded up to a multiple"
    with pytest.raises(ValueError, match=r"rank_ratio=0.3 is too low to allocate.*lower rank_floor"):
        ranks_of(dense("llama"), statistics("llama"), rank_ratio=0.3, rank_floor=6)


@pytest.mark.parametrize(("ratio", "step"), [(0.2, 2), (0.1, 1)])
def test_a_low_ratio_takes_finer_steps(ratio, step, dense, statistics):
    k_rank, v_rank = ranks_of(dense("llama"), statistics("llama"), rank_ratio=ratio)
    assert sum(k_rank + v_rank) <= ratio * 6 * 16
    assert min(k_rank + v_rank) == step


def test_allocated_ranks_predict_less_loss_than_uniform_ones_of_the_same_bytes(dense, statistics):
    losses = {}
    for allocation in ("gradient", "uniform"):
        config = hf_wsvd.WSVDConfig(0.5, rank_allocation=allocation, refinement="none")
        with fitted(dense("llama"), config, statistics("llama")) as fit:
            losses[allocation] = fit.predicted_loss
    assert losses["gradient"] < 0.8 * losses["uniform"]


def test_a_saved_model_has_its_allocated_ranks_and_loads_with_them(dense, statistics, tmp_path):
    import copy

    model = copy.deepcopy(dense("llama"))
    hf_wsvd.compress(model, hf_wsvd.WSVDConfig(0.5, refinement="none"), statistics=statistics("llama"))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    config = loaded.config.quantization_config
    assert len(set(config.k_rank + config.v_rank)) > 1
    assert [layer.self_attn.k_proj.rank for layer in loaded.model.layers] == config.k_rank
    assert config.fit_info["rank_allocation"] == "gradient"
