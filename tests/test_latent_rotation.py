"""Latents turned at the fit: even channels in the cache, and a model that answers as before."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from model_facts import logits
from tiny_models import CLOSED_FORM, calibration_batches
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_wsvd
from hf_wsvd import WSVDConfig
from hf_wsvd.calibration import Statistics
from hf_wsvd.decoder import decoder_attentions
from hf_wsvd.fit.factorise import orthonormal, spread
from hf_wsvd.modules import LatentProjection
from hf_wsvd.rotations import spreading_rotation


RANKS = [1, 5, 8, 12, 13]  # of heads of 16


def config(rotation: str = "hadamard", **options) -> WSVDConfig:
    return WSVDConfig(**{"latent_rotation": rotation, **CLOSED_FORM, **options})


def projections(model: PreTrainedModel, sides: str = "kv") -> dict[tuple[int, str], LatentProjection]:
    attentions = decoder_attentions(model)
    return {(a.layer, side): getattr(a.module, f"{side}_proj") for a in attentions for side in sides}


def factors(projection: LatentProjection) -> tuple[Tensor, Tensor]:
    return projection.weight.detach().unflatten(0, (projection.heads, -1)), projection.up.detach()


@pytest.fixture(scope="module")
def steep() -> tuple[PreTrainedModel, Statistics]:
    """A model whose heads have channels that fall steeply in size, as trained models' do, and its statistics."""
    model = tiny_models.build("llama")
    for attention in decoder_attentions(model):
        for projection in (attention.module.k_proj, attention.module.v_proj):
            projection.weight.data *= 2 * torch.logspace(0, -2, 16).repeat(2)[:, None]
    return model, hf_wsvd.collect_statistics(model, calibration_batches("llama"), fisher=True)


def unevenness(model: PreTrainedModel, statistics: Statistics) -> Tensor:
    """Largest over mean size of the latent channels of every head, on the calibration set; 1 at best."""
    found = []
    for (layer, _), projection in projections(model).items():
        down, _ = factors(projection)
        down = down.double()
        size = (down @ statistics.gram[layer].double() @ down.mT).diagonal(dim1=1, dim2=2).sqrt()
        found.append(size.amax(-1) / size.mean(-1))
    return torch.cat(found)


# What it brings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refinement", ["none", "fisher", "distillation"])
@pytest.mark.parametrize("rank", [5, 8, 12])
def test_latent_channels_are_even(refinement, rank, steep):
    model, statistics = steep
    found = {}
    for rotation in ("none", "hadamard"):
        options = {"k_rank": rank, "v_rank": rank, "refinement": refinement, "refinement_steps": 3}
        compressed = hf_wsvd.compress(copy.deepcopy(model), config(rotation, **options), statistics=statistics)
        found[rotation] = unevenness(compressed, statistics)
    print(found["none"].mean(), found["hadamard"].mean(), found["hadamard"].max(), found["none"].min())
    assert found["hadamard"].mean() < 1.25 < 1.6 < found["none"].mean()
    assert found["hadamard"].max() < 1.5


def test_four_bits_lose_less_of_a_latent(steep):
    model, statistics = steep
    values, vectors = torch.linalg.eigh(statistics.gram[0].double())
    inputs = torch.randn(512, len(values), dtype=torch.float64) * values.clamp_min(0).sqrt() @ vectors.T
    lost = {}
    for rotation in ("none", "hadamard"):
        compressed = hf_wsvd.compress(copy.deepcopy(model), config(rotation), statistics=statistics)
        latents = inputs @ factors(projections(compressed)[0, "k"])[0].double().mT
        scale = latents.abs().amax(-1, keepdim=True) / 7
        lost[rotation] = ((latents / scale).round() * scale - latents).square().sum() / latents.square().sum()
    assert lost["hadamard"] < 0.7 * lost["none"]


# What it leaves alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llava"])
@pytest.mark.parametrize("rank", RANKS)
def test_the_model_answers_as_without_it(family, rank, compressed):
    plain, rotated = (
        compressed(family, None, k_rank=rank, v_rank=rank, q_rank=rank, latent_rotation=rotation)
        for rotation in ("none", "hadamard")
    )
    torch.testing.assert_close(logits(rotated, family), logits(plain, family), rtol=0, atol=1e-4)
    for key, projection in projections(rotated).items():
        other = projections(plain)[key]
        assert not torch.equal(projection.weight, other.weight) or rank == 1
        torch.testing.assert_close(projection.merged().weight, other.merged().weight, rtol=0, atol=1e-5)
        _, up = factors(projection)
        torch.testing.assert_close(up.mT @ up, torch.eye(rank).expand(len(up), -1, -1), rtol=0, atol=1e-5)
    for key, projection in projections(rotated, "q").items():
        assert torch.equal(projection.weight, projections(plain, "q")[key].weight), "query latents are not cached"


def test_refinement_comes_to_the_same_product(dense, statistics):
    products = []
    for rotation in ("none", "hadamard"):
        options = config(rotation, refinement="distillation", refinement_steps=4, refinement_learning_rate=2e-3)
        model = hf_wsvd.compress(copy.deepcopy(dense("llama")), options, statistics=statistics("llama"))
        products.append(projections(model)[1, "k"].merged().weight)
    torch.testing.assert_close(*products, rtol=0, atol=1e-5)


def test_full_rank_is_the_dense_weight(compressed, dense):
    model = compressed("llama", None, k_rank=16, v_rank=8)
    for (layer, side), projection in projections(model).items():
        weight = getattr(dense("llama").model.layers[layer].self_attn, f"{side}_proj").weight
        assert (projection.up is None) is torch.equal(projection.weight, weight) is (side == "k")


# The same every time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refinement", ["none", "fisher", "distillation"])
def test_streaming_gives_the_factors_of_a_fit_in_process(refinement, steep, tmp_path):
    model, statistics = steep
    options = config(refinement=refinement, refinement_steps=3)
    model.save_pretrained(tmp_path)
    options.calibration = statistics
    streamed = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options)
    again = [hf_wsvd.compress(copy.deepcopy(model), options, statistics=statistics) for _ in range(2)]
    for name, tensor in streamed.state_dict().items():
        assert all(torch.equal(tensor, other.state_dict()[name]) for other in again), name


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12, 16, 17, 48, 80, 96])
def test_a_rotation_is_orthogonal_and_flat(size):
    rotation = spreading_rotation(size)
    identity = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.T, identity, rtol=0, atol=1e-12)
    assert rotation.abs().max() <= (2 / size) ** 0.5 + 1e-12
    assert size < 3 or not torch.equal(rotation, spreading_rotation(size, seed=1))


@pytest.mark.parametrize("rank", RANKS)
def test_spread_factors_have_the_same_product(rank):
    down, up = orthonormal(torch.randn(2, rank, 48), torch.randn(2, 16, rank))
    turned_down, turned_up = spread(down, up)
    assert turned_down.dtype == turned_up.dtype == torch.float32
    torch.testing.assert_close(turned_up @ turned_down, up @ down, rtol=0, atol=1e-4)
