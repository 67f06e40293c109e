"""Factors are the best ones for the measured inputs; the measurement is the plain second moment."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from model_facts import hooks
from torch import Tensor

import hf_wsvd
from hf_wsvd.calibration import Statistics
from hf_wsvd.decoder import decoder_attentions
from hf_wsvd.fit import factorise, fitted
from hf_wsvd.fit.methods import METHODS, SVD, SVDLLM, WSVD, Method


HEADS, HEAD_DIM, INPUTS = 2, 16, 48


def random_weight() -> Tensor:
    return torch.randn(HEADS * HEAD_DIM, INPUTS)


def random_gram(rank: int = INPUTS, spread: float = 2.0) -> Tensor:
    """Second moment of inputs whose energy falls by `10 ** spread` over `rank` directions."""
    directions = torch.linalg.qr(torch.randn(INPUTS, INPUTS, dtype=torch.float64))[0][:, :rank]
    return (directions * torch.logspace(0, -spread, rank, dtype=torch.float64)) @ directions.T


KEY = (0, "k")


def measured(weight: Tensor, gram: Tensor, gradient: Tensor | None = None) -> Statistics:
    """Statistics of one projection with this weight and these second moments of inputs and gradients."""
    heads = weight.double().unflatten(0, (HEADS, -1))
    gram = gram.double()
    gradient = torch.eye(HEAD_DIM).expand(HEADS, -1, -1) if gradient is None else gradient
    return Statistics(
        gram={0: gram},
        output={KEY: heads @ gram @ heads.mT},
        weight={KEY: heads @ heads.mT},
        gradient={KEY: gradient.double()},
    )


def whitened(weight: Tensor, rank: int, gram: Tensor, damping: float = 1e-4) -> tuple[Tensor, Tensor | None]:
    """Factors of the method that looks at the inputs alone."""
    return factorise(weight, rank, SVDLLM(damping).spectrum(KEY, measured(weight, gram)))


def error(weight: Tensor, approximation: Tensor, gram: Tensor) -> float:
    """`E |W x - W' x|^2` in fp64."""
    difference = weight.double() - approximation.double()
    return torch.einsum("oi,ij,oj->", difference, gram, difference).item()


def product(down: Tensor, up: Tensor) -> Tensor:
    return (up.double() @ down.double()).flatten(0, 1)


def textbook(weight: Tensor, rank: int, gram: Tensor) -> Tensor:
    """The whitened SVD as papers state it: factor `S = L L^T`, cut the SVD of `W_h L`, undo L."""
    factor = torch.linalg.cholesky(gram)
    heads = []
    for head in weight.double().split(HEAD_DIM):
        u, s, v = torch.linalg.svd(head @ factor, full_matrices=False)
        heads.append(
            torch.linalg.solve_triangular(factor, (u[:, :rank] * s[:rank]) @ v[:rank], upper=False, left=False)
        )
    return torch.cat(heads)


@pytest.mark.parametrize("rank", [1, 5, 8, 15])
def test_factors_are_as_good_as_the_textbook_whitened_svd(rank):
    weight, gram = random_weight(), random_gram()
    found = error(weight, product(*whitened(weight, rank, gram, damping=0)), gram)
    assert found == pytest.approx(error(weight, textbook(weight, rank, gram), gram), rel=1e-5)
    plain = error(weight, product(*factorise(weight, rank, SVD().spectrum(KEY, measured(weight, gram)))), gram)
    assert found < 0.95 * plain


@pytest.mark.parametrize("damping", [1e-4, 0.1])
def test_damping_gives_every_input_direction_its_share_of_the_mean_energy(damping):
    weight, gram = random_weight(), random_gram(rank=4)
    damped = gram + damping * gram.diagonal().mean() * torch.eye(INPUTS)
    found = error(weight, product(*whitened(weight, 8, gram, damping)), damped)
    assert found == pytest.approx(error(weight, textbook(weight, 8, damped), damped), rel=1e-5)


def test_a_gram_of_zeros_falls_back_to_the_plain_svd():
    weight, identity = random_weight(), torch.eye(INPUTS, dtype=torch.float64)
    found = error(weight, product(*whitened(weight, 8, torch.zeros(INPUTS, INPUTS))), identity)
    assert found == pytest.approx(error(weight, textbook(weight, 8, identity), identity), rel=1e-5)


@pytest.mark.parametrize("measured", [1, 3, 8])
@pytest.mark.parametrize("damping", [0, 1e-4])
def test_directions_no_more_than_the_rank_are_kept(measured, damping):
    weight, gram = random_weight(), random_gram(rank=measured)
    down, up = whitened(weight, 8, gram.float(), damping)  # fp32: eigenvalues of the noise may be negative
    assert error(weight, product(down, up), gram) < 1e-7 * error(weight, torch.zeros_like(weight), gram)
    assert torch.isfinite(down).all()


@pytest.mark.parametrize("gram", ["full", "singular", "zeros"])
def test_the_up_factor_has_orthonormal_columns_and_down_is_its_projection(gram):
    matrix = {"full": random_gram(), "singular": random_gram(2), "zeros": torch.zeros(INPUTS, INPUTS)}[gram]
    weight = random_weight()
    down, up = whitened(weight, 5, matrix)
    assert (down.shape, up.shape) == ((HEADS, 5, INPUTS), (HEADS, HEAD_DIM, 5))
    torch.testing.assert_close(up.mT @ up, torch.eye(5).expand(HEADS, -1, -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(down, up.mT @ weight.view(HEADS, HEAD_DIM, INPUTS), rtol=0, atol=1e-4)


def test_latent_directions_are_ordered_by_energy():
    gram = random_gram()
    down, _ = whitened(random_weight(), 8, gram)
    energy = torch.einsum("hri,ij,hrj->hr", down.double(), gram, down.double())
    assert (energy.diff(dim=1) <= 0).all()


def test_full_rank_is_the_weight_itself():
    weight = random_weight()
    down, up = whitened(weight.bfloat16(), HEAD_DIM, random_gram())
    assert up is None
    assert torch.equal(down.flatten(0, 1).bfloat16(), weight.bfloat16())


def test_a_weight_of_low_rank_is_reproduced():
    weight = torch.cat([torch.randn(HEAD_DIM, 3) @ torch.randn(3, INPUTS) for _ in range(HEADS)])
    approximation = product(*whitened(weight, 3, random_gram()))
    torch.testing.assert_close(approximation.float(), weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rank", [8, HEAD_DIM])
def test_a_weight_that_is_not_finite_is_refused(value, rank):
    weight, broken = random_weight(), random_weight()
    broken[3, 5] = value
    with pytest.raises(ValueError, match="NaN or infinity"):
        factorise(broken, rank, SVDLLM().spectrum(KEY, measured(weight, random_gram())))


def random_gradient() -> Tensor:
    """Second moment of gradients by a head's output that mind a few directions far more than the others."""
    directions = torch.linalg.qr(torch.randn(HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float64))[0]
    return (directions * torch.logspace(0, -3, HEAD_DIM, dtype=torch.float64)) @ directions.mT


def weighted_error(weight: Tensor, approximation: Tensor, gram: Tensor, gradient: Tensor) -> float:
    """Sum over heads of `tr(A (W - W') S (W - W')^T)`."""
    difference = (weight.double() - approximation.double()).unflatten(0, (HEADS, -1))
    return torch.einsum("hab,hai,ij,hbj->", gradient, difference, gram, difference).item()


def two_sided_textbook(weight: Tensor, rank: int, gram: Tensor, gradient: Tensor) -> Tensor:
    """Cut the SVD of `R W_h L` with `A = R^T R` and `S = L L^T`, then undo both factors."""
    left = torch.linalg.cholesky(gradient).mT
    right = torch.linalg.cholesky(gram)
    heads = []
    for root, head in zip(left, weight.double().split(HEAD_DIM)):
        u, s, v = torch.linalg.svd(root @ head @ right, full_matrices=False)
        cut = (u[:, :rank] * s[:rank]) @ v[:rank]
        cut = torch.linalg.solve_triangular(right, cut, upper=False, left=False)
        heads.append(torch.linalg.solve_triangular(root, cut, upper=True))
    return torch.cat(heads)


@pytest.mark.parametrize("rank", [1, 5, 8, 15])
def test_gradients_weigh_the_errors_of_a_heads_output(rank):
    weight, gram, gradient = random_weight(), random_gram(), random_gradient()
    parts = WSVD(damping=0, gradient_damping=0).spectrum(KEY, measured(weight, gram, gradient))
    found = weighted_error(weight, product(*factorise(weight, rank, parts)), gram, gradient)
    best = weighted_error(weight, two_sided_textbook(weight, rank, gram, gradient), gram, gradient)
    assert found == pytest.approx(best, rel=1e-4)
    plain = weighted_error(weight, product(*whitened(weight, rank, gram, damping=0)), gram, gradient)
    assert found < 0.9 * plain


@pytest.mark.parametrize("rank", [0, 1, 7, HEAD_DIM])
def test_the_tail_of_a_spectrum_is_half_the_weighted_error_of_its_rank(rank):
    weight, gram, gradient = random_weight(), random_gram(), random_gradient()
    parts = WSVD(damping=0, gradient_damping=0).spectrum(KEY, measured(weight, gram, gradient))
    approximation = torch.zeros_like(weight)
    if rank == HEAD_DIM:
        approximation = weight
    elif rank:
        approximation = product(*factorise(weight, rank, parts))
    expected = weighted_error(weight, approximation, gram, gradient) / 2
    scale = weighted_error(weight, torch.zeros_like(weight), gram, gradient)
    assert parts.tails()[rank].item() == pytest.approx(expected, rel=1e-4, abs=1e-9 * scale)


def test_gradients_that_play_no_part_leave_the_whitened_factors():
    weight, gram = random_weight(), random_gram()
    parts = WSVD(gradient_damping=1.0).spectrum(KEY, measured(weight, gram, random_gradient()))
    torch.testing.assert_close(product(*factorise(weight, 5, parts)), product(*whitened(weight, 5, gram)))


@pytest.mark.parametrize("measured_directions", [0, 1, 3])
def test_gradients_that_miss_directions_still_give_factors(measured_directions):
    weight, gram, gradient = random_weight(), random_gram(), random_gradient()
    values = torch.zeros(HEAD_DIM, dtype=torch.float64)
    values[:measured_directions] = 1.0
    gradient = gradient @ torch.diag(values) @ gradient.mT
    down, up = factorise(weight, 5, WSVD(gradient_damping=0).spectrum(KEY, measured(weight, gram, gradient)))
    assert torch.isfinite(down).all()
    torch.testing.assert_close(up.mT @ up, torch.eye(5).expand(HEADS, -1, -1), rtol=0, atol=1e-5)


def test_asvd_scales_input_channels_by_their_size():
    """Scaling by the square root of the root mean square is whitening with the square root of the gram's diagonal."""
    weight, gram = random_weight(), random_gram()
    found = factorise(weight, 5, METHODS["asvd"]().spectrum(KEY, measured(weight, gram), weight))
    expected = whitened(weight, 5, torch.diag(gram.diagonal().sqrt()), damping=0)
    torch.testing.assert_close(product(*found), product(*expected))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_choice_of_the_config_and_compresses_a_model(name, dense, statistics):
    config = hf_wsvd.WSVDConfig(method=name)
    assert config.rank_allocation == ("gradient" if METHODS[name].uses_gradients else "uniform")
    assert issubclass(METHODS[name], Method)
    with fitted(dense("llama"), hf_wsvd.WSVDConfig(method=name, refinement="none"), statistics("llama")) as fit:
        assert sum(fit.k_rank + fit.v_rank) == 3 * HEAD_DIM
        assert (fit.predicted_loss is not None) is METHODS[name].uses_gradients
    assert all(isinstance(a.module.k_proj, torch.nn.Linear) for a in decoder_attentions(dense("llama")))


def padded_batches() -> list[dict[str, Tensor]]:
    """Two batches; in each, row i starts with 2i padding tokens of arbitrary id."""
    batches = [tiny_models.prompt("llama", batch=3, tokens=10, seed=seed) for seed in (5, 6)]
    for batch in batches:
        batch["attention_mask"] = (torch.arange(10)[None] >= 2 * torch.arange(3)[:, None]).long()
    return batches


def test_statistics_are_the_second_moment_of_attended_inputs(dense):
    model = dense("llama")
    seen: dict[int, list[Tensor]] = {a.layer: [] for a in decoder_attentions(model)}
    handles = [
        a.module.v_proj.register_forward_pre_hook(lambda _, args, kept=seen[a.layer]: kept.append(args[0].double()))
        for a in decoder_attentions(model)
    ]
    for batch in padded_batches():
        with torch.no_grad():
            model(**batch)
        for kept in seen.values():
            kept[-1] = kept[-1][batch["attention_mask"].bool()]
    for handle in handles:
        handle.remove()
    found = hf_wsvd.collect_statistics(model, padded_batches())
    assert set(found.gram) == {0, 1, 2}
    assert (found.info["samples"], found.info["tokens"]) == (6, 2 * (10 + 8 + 6))
    for layer, gram in found.gram.items():
        inputs = torch.cat(seen[layer])
        assert len(inputs) == found.info["tokens"]
        torch.testing.assert_close(gram, inputs.T @ inputs / len(inputs), rtol=1e-5, atol=1e-5)


def test_statistics_do_not_depend_on_the_batching(dense):
    whole = padded_batches()
    single = [{name: value[i : i + 1] for name, value in batch.items()} for batch in whole for i in range(3)]
    together = hf_wsvd.collect_statistics(dense("llama"), whole)
    apart = hf_wsvd.collect_statistics(dense("llama"), (batch for batch in single))
    for layer, gram in together.gram.items():
        torch.testing.assert_close(apart.gram[layer], gram, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", tiny_models.VISION_FAMILIES, ids=lambda f: f.__name__)
def test_image_tokens_count_like_any_other(family, dense):
    batch = tiny_models.prompt(family.__name__, batch=2)
    other = {**batch, "pixel_values": -batch["pixel_values"]}
    first, second = (hf_wsvd.collect_statistics(dense(family.__name__), [b]) for b in (batch, other))
    assert first.info["tokens"] == batch["input_ids"].numel()
    assert (first.gram[0] - second.gram[0]).norm() > 1e-3 * first.gram[0].norm()


def test_inputs_embeds_calibrate_as_their_ids_do(dense):
    model, batch = dense("llama"), tiny_models.prompt("llama")
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    by_id, by_embedding = (hf_wsvd.collect_statistics(model, b) for b in (batch, {"inputs_embeds": embeds}))
    assert all(torch.equal(by_id.gram[layer], by_embedding.gram[layer]) for layer in by_id.gram)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_its_mode_without_hooks(dense, training):
    model = copy.deepcopy(dense("llama")).train(training)
    model.lm_head.train(not training)
    before = hooks(model)
    hf_wsvd.collect_statistics(model, padded_batches())
    assert model.lm_head.training is not training
    assert all(module.training is training for module in model.model.modules())
    assert hooks(model) == before


def test_a_failing_calibration_names_the_module_and_leaves_mode_and_hooks(dense):
    model = copy.deepcopy(dense("llama")).train()
    model.model.layers[1].input_layernorm.weight.data[3] = float("inf")
    before = hooks(model)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_proj are not finite"):
        hf_wsvd.collect_statistics(model, padded_batches())
    with pytest.raises(ValueError, match="vocabulary"):
        hf_wsvd.collect_statistics(model, [*padded_batches(), {"input_ids": torch.tensor([[999]])}])
    assert model.training
    assert hooks(model) == before


# What a review found -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0, 0.1])
def test_a_single_answer_token_gives_finite_factors(damping, dense):
    """Its gradients span one direction of each head; noise of the sums must not be inverted."""
    model = copy.deepcopy(dense("llama"))
    batch = tiny_models.prompt("llama", tokens=10)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, -1] = 7
    config = hf_wsvd.WSVDConfig(gradient_damping=damping, refinement="none")
    hf_wsvd.compress(model, config, calibration=[{**batch, "labels": labels}])
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_left_padding_with_labels_counts_no_prediction_from_padding(dense):
    model = copy.deepcopy(dense("llama"))
    model.set_attn_implementation("eager")  # which lets a padded position attend to others
    rows = [tiny_models.prompt("llama", tokens=tokens, seed=tokens) for tokens in (12, 6)]
    alone = hf_wsvd.collect_statistics(model, [{**row, "labels": row["input_ids"]} for row in rows], fisher=True)
    ids, mask = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)
    for number, row in enumerate(rows):
        length = row["input_ids"].shape[1]
        ids[number, -length:], mask[number, -length:] = row["input_ids"][0], 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    padded = hf_wsvd.collect_statistics(model, [{**batch, "labels": ids.masked_fill(mask == 0, -100)}], fisher=True)
    for side, moment in alone.gradient.items():
        torch.testing.assert_close(padded.gradient[side], moment, rtol=1e-3, atol=1e-3 * moment.abs().max().item())
        fisher = alone.fisher[side]
        torch.testing.assert_close(padded.fisher[side], fisher, rtol=1e-3, atol=1e-3 * fisher.max().item())


def test_int32_ids_and_labels_are_those_of_int64(dense):
    ids = tiny_models.prompt("llama")["input_ids"]
    wide, narrow = (
        hf_wsvd.collect_statistics(dense("llama"), [{"input_ids": x, "labels": x}]) for x in (ids, ids.int())
    )
    assert all(torch.equal(wide.gradient[side], narrow.gradient[side]) for side in wide.gradient)


def test_statistics_of_permuted_inputs_are_refused(dense, statistics):
    model = copy.deepcopy(dense("llama"))
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data = layer.self_attn.k_proj.weight.data.flip(1)  # the norms stay
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj: its weights are others"):
        hf_wsvd.compress(model, statistics=statistics("llama"))


def test_a_low_rank_model_is_not_calibrated(compressed):
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_proj is low-rank already"):
        hf_wsvd.collect_statistics(compressed("llama"), tiny_models.calibration_batches("llama"))


def test_layers_that_scale_their_weight_are_left_alone(dense):
    class Scaled(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = copy.deepcopy(dense("llama"))
    projection = model.model.layers[1].self_attn.k_proj
    scaled = Scaled(projection.in_features, projection.out_features, bias=False)
    scaled.weight = projection.weight
    model.model.layers[1].self_attn.k_proj = scaled
    assert [attention.layer for attention in decoder_attentions(model)] == [0, 2]


def test_statistics_and_data_are_told_apart(dense, statistics):
    batches = tiny_models.calibration_batches("llama")
    with pytest.raises(ValueError, match="statistics must be what collect_statistics returned"):
        hf_wsvd.compress(copy.deepcopy(dense("llama")), statistics=batches)
    with pytest.raises(ValueError, match="calibration and statistics are both given"):
        hf_wsvd.compress(copy.deepcopy(dense("llama")), calibration=batches, statistics=statistics("llama"))


def test_inference_mode_is_refused(dense):
    with torch.inference_mode(), pytest.raises(ValueError, match=r"cannot run inside torch\.inference_mode"):
        hf_wsvd.collect_statistics(dense("llama"), tiny_models.calibration_batches("llama"))
