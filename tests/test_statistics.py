"""Every statistic equals a brute-force computation: one sequence at a time, plain autograd, no hooks that sum."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from model_facts import hooks, logits
from torch import Tensor
from transformers import PreTrainedModel

import hf_wsvd
from hf_wsvd.calibration import Statistics
from hf_wsvd.decoder import decoder_attentions


FAMILIES = ["llama", "llama_mha", "qwen2", "llava", "qwen2_vl"]
Batch = dict[str, Tensor]


def sequences(family: str, labelled: bool) -> list[Batch]:
    """Single sequences of three lengths; images where the family takes them. Labels: a few tokens at the end."""
    found = []
    for seed, tokens in ((11, 12), (12, 12), (13, 9)):
        batch = tiny_models.prompt(family, batch=1, tokens=tokens, seed=seed)
        if labelled:
            labels = batch["input_ids"].clone()
            labels[:, : 7 if seed == 11 else 6] = -100
            batch["labels"] = labels
        found.append(batch)
    return found


@contextmanager
def recorded(model: PreTrainedModel) -> Iterator[dict[tuple[int, str], tuple[Tensor, Tensor]]]:
    """(layer, side) -> input and output of each projection, the output with its gradient."""
    seen: dict = {}
    handles = []
    for attention in decoder_attentions(model):
        for side in "qkv":

            def keep(module, args, output, key=(attention.layer, side)):
                output.retain_grad()
                seen[key] = (args[0].detach(), output)

            handles.append(getattr(attention.module, f"{side}_proj").register_forward_hook(keep))
    yield seen
    for handle in handles:
        handle.remove()


def loss_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Summed negative log-likelihood of the answer, image tokens left out where there are no labels."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = batch.get("labels", batch["input_ids"])[:, 1:].clone()
    if "labels" not in batch:
        labels[labels == tiny_models.IMAGE_TOKEN] = -100
        if "attention_mask" in batch:
            labels[(batch["attention_mask"][:, 1:] == 0) | (batch["attention_mask"][:, :-1] == 0)] = -100
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")


def brute_force(model: PreTrainedModel, batches: list[Batch]) -> dict[str, dict]:
    """gram, output, gradient and Fisher by their definitions."""
    model = copy.deepcopy(model).double()
    inputs: dict = {}
    gradients: dict = {}
    weights: dict = {}
    for batch in batches:
        batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
        model.zero_grad()
        with recorded(model) as seen:
            loss_of(model, batch).backward()
        attended = batch["attention_mask"].bool()
        for key, (x, y) in seen.items():
            inputs.setdefault(key, []).append(x[attended])
            gradients.setdefault(key, []).append(y.grad[0])
        for attention in decoder_attentions(model):
            for side in "qkv":
                weight = getattr(attention.module, f"{side}_proj").weight
                weights.setdefault((attention.layer, side), []).append(weight.grad.clone())
    found: dict[str, dict] = {"gram": {}, "output": {}, "gradient": {}, "fisher": {}}
    for attention in decoder_attentions(model):
        for side in "qkv":
            key = (attention.layer, side)
            weight = getattr(attention.module, f"{side}_proj").weight.detach()
            x = torch.cat(inputs[key])
            y = (x @ weight.T).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
            found["gram"][attention.layer] = x.T @ x / len(x)
            found["output"][key] = y.mT @ y / len(x)
            moments, energies = [], []
            for gradient in gradients[key]:
                energies.append(gradient.square().sum())
                g = gradient.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
                moments.append(g.mT @ g / energies[-1])
            found["gradient"][key] = torch.stack(moments).mean(0) * torch.stack(energies).mean()
            found["fisher"][key] = torch.stack(weights[key]).square().mean(0)
    return found


def assert_alike(found: Statistics, expected: dict[str, dict] | Statistics, tolerance: float = 1e-4) -> None:
    for kind in ("gram", "output", "gradient", "fisher"):
        wanted = expected[kind] if isinstance(expected, dict) else getattr(expected, kind)
        held = getattr(found, kind)
        assert set(held) == set(wanted)
        for key, value in wanted.items():
            assert held[key].shape == value.shape
            error = (held[key].double() - value.double()).norm() / value.double().norm()
            assert error < tolerance, f"{kind} of {key} is off by {error:.1e}"


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_a_brute_force_computation(family, labelled, dense):
    batches = sequences(family, labelled)
    found = hf_wsvd.collect_statistics(dense(family), batches, fisher=True)
    assert_alike(found, brute_force(dense(family), batches))
    heads = {side: len(found.weight[0, side]) for side in "qkv"}
    assert heads == {"q": 4, "k": 4 if family == "llama_mha" else 2, "v": 4 if family == "llama_mha" else 2}
    assert (found.dtype, found.decoder_shape["head_dim"]) == ("float32", [16])
    assert all(value.dtype == torch.float64 for value in (*found.gram.values(), *found.gradient.values()))


def padded(side: str) -> tuple[Batch, list[Batch]]:
    """One padded batch of three rows, and its rows without their padding."""
    lengths, ids = (12, 9, 7), torch.randint(3, 120, (3, 12))
    columns = torch.arange(12)[None]
    length = torch.tensor(lengths)[:, None]
    mask = (columns < length if side == "right" else columns >= 12 - length).long()
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) <= 3), -100)
    rows = []
    for row in range(3):
        kept = mask[row].bool()
        single = {"input_ids": ids[row, kept][None], "labels": labels[row, kept][None]}
        rows.append({**single, "attention_mask": torch.ones_like(single["input_ids"])})
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, rows


@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_counts_for_nothing(side, labelled, dense):
    batch, rows = padded(side)
    if not labelled:
        for one in (batch, *rows):
            del one["labels"]
    together = hf_wsvd.collect_statistics(dense("qwen2"), batch, fisher=True)
    assert_alike(together, brute_force(dense("qwen2"), rows))
    apart = hf_wsvd.collect_statistics(dense("qwen2"), rows, fisher=True)
    assert_alike(together, apart)
    assert together.info["tokens"] == apart.info["tokens"] == 12 + 9 + 7


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_vl"])
def test_batches_of_several_rows_equal_single_rows(family, dense):
    whole = tiny_models.prompt(family, batch=3, tokens=10)
    rows = []
    for row in range(3):
        rows.append({n: v[row : row + 1] if len(v) == 3 else v.chunk(3)[row] for n, v in whole.items()})
    together = hf_wsvd.collect_statistics(dense(family), whole, fisher=True)
    apart = hf_wsvd.collect_statistics(dense(family), rows, fisher=True)
    assert_alike(apart, together)
    assert_alike(apart, brute_force(dense(family), rows))


def test_rows_without_an_answer_measure_inputs_alone(dense):
    batches = sequences("llama", labelled=True)
    unanswered = {**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}
    found = hf_wsvd.collect_statistics(dense("llama"), [*batches, unanswered], fisher=True)
    answered = hf_wsvd.collect_statistics(dense("llama"), batches, fisher=True)
    for key, value in answered.gradient.items():
        torch.testing.assert_close(found.gradient[key], value, rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(found.fisher[key], answered.fisher[key], rtol=1e-4, atol=1e-12)
    gram = brute_force(dense("llama"), [*batches, batches[0]])["gram"][1]
    torch.testing.assert_close(found.gram[1], gram, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_half_precision_measures_nearly_the_same(family, dtype, dense):
    batches = sequences(family, labelled=True)
    found = hf_wsvd.collect_statistics(copy.deepcopy(dense(family)).to(dtype), batches, fisher=True)
    assert found.dtype == str(dtype).removeprefix("torch.")
    for kind in ("gram", "output", "weight", "gradient", "fisher"):
        assert all(bool(torch.isfinite(value).all()) for value in getattr(found, kind).values())
    assert_alike(found, hf_wsvd.collect_statistics(dense(family), batches, fisher=True), tolerance=0.3)


def facts(model: PreTrainedModel) -> dict:
    return {
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "gradients": [name for name, p in model.named_parameters() if p.grad is not None],
        "training": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": hooks(model),
    }


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("family", ["llama", "llava"])
def test_the_model_is_as_it_was(family, fails, dense):
    model = copy.deepcopy(dense(family)).train()
    model.get_decoder().layers[1].eval()
    next(model.parameters()).requires_grad_(False)
    logits(model, family)  # at the first forward transformers hooks vision towers, for good
    before, weights = facts(model), copy.deepcopy(model.state_dict())
    batches = sequences(family, labelled=True)
    if fails:
        batches.append({"input_ids": torch.tensor([[999]])})
        with pytest.raises(ValueError, match="vocabulary"):
            hf_wsvd.collect_statistics(model, batches)
    else:
        hf_wsvd.collect_statistics(model, batches, fisher=True)
    assert facts(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("hf_wsvd.calibration.collector.logger.warning", found.append)
    return found


def test_singular_statistics_warn_with_their_numbers_and_fit(dense, warnings):
    model = copy.deepcopy(dense("llama"))
    ids = torch.tensor([[5, 6, 7]])
    config = hf_wsvd.WSVDConfig(rank_multiple=4, refinement_steps=2)
    hf_wsvd.compress(model, config, calibration=[{"input_ids": ids}])
    assert len(warnings) == 2
    assert "hold 3 tokens in 1 sequences with an answer, fewer than the 48 that" in warnings[0]
    assert "hold 2 answer tokens in 1 sequences with an answer, fewer than the 16 that" in warnings[1]
    assert torch.isfinite(model(ids).logits).all()


def test_enough_data_do_not_warn(dense, warnings):
    hf_wsvd.collect_statistics(dense("llama"), tiny_models.calibration_batches("llama"))
    assert warnings == []


def test_models_without_such_layers_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no attention with separate k_proj"):
        hf_wsvd.collect_statistics(model, [{"input_ids": torch.tensor([[1, 2]])}])
