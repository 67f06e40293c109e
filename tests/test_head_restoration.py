"""Selector "restoration": shares of the divergence that a packed cache causes, checked against the cache itself."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_wsvd import WSVDCache
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.headguard import measure_heads, restoration, select_heads
from hf_wsvd.headguard.observer import observed
from hf_wsvd.headguard.positions import positions_of
from hf_wsvd.headguard.restoration import Step, Walk, in_order_of_choice
from hf_wsvd.headguard.scoring import ScoringTask
from hf_wsvd.headguard.stored_heads import StoredHeads
from hf_wsvd.image_tokens import ImageTokens
from hf_wsvd.quantizer_config import CacheConfig, HeadGuardConfig


MINMAX = CacheConfig(scheme="minmax", bits=2)


def labelled(family: str, seed: int = 5, batch: int = 2, tokens: int = 14) -> dict[str, Tensor]:
    """A prompt whose last three tokens are the answer."""
    inputs = tiny_models.prompt(family, batch=batch, tokens=tokens, seed=seed)
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, -3:] = inputs["input_ids"][:, -3:]
    return {**inputs, "labels": labels}


def task_of(model: PreTrainedModel, batch: dict[str, Tensor], cache: CacheConfig, **fields) -> ScoringTask:
    tokens = "image" if "pixel_values" in batch else "all"
    config = HeadGuardConfig(selector="restoration", **{"tokens": tokens, **fields})
    return ScoringTask(model, [batch], config, cache)


@pytest.mark.parametrize("scheme", ["minmax", "hadamard", "turboquant"])
@pytest.mark.parametrize(("family", "ratio"), [("llava", None), ("llava", 0.5), ("qwen2_vl", 0.5), ("smolvlm", None)])
def test_differences_are_those_of_the_real_cache(dense, compressed, family, ratio, scheme):
    """What a filled cache gives attention, minus what attention computes without one, in every layer."""
    model = dense(family) if ratio is None else compressed(family, ratio)
    batch, config = labelled(family), CacheConfig(scheme=scheme, bits=2, text_bits=16)
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    stored = StoredHeads(task_of(model, batch, config))
    found, exact = {}, {}

    def see(call):
        found[call.layer] = stored.differences(call, ImageTokens(batch["input_ids"] == tiny_models.IMAGE_TOKEN))
        exact[call.layer] = (call.key, call.value)

    with torch.no_grad(), stored.watching(), observed(model, see):
        model(**inputs, use_cache=False)
    # The cache is read back by the first call whose tokens attend to it: with prefill="stored" the very first.
    read = {}
    with torch.no_grad(), observed(model, lambda call: read.update({call.layer: (call.key, call.value)})):
        cache = WSVDCache(model, cache_config=CacheConfig(**{**vars(config), "prefill": "stored"}))
        model(**inputs, use_cache=True, **{CACHE_ARGUMENT: cache})
    for number, side in enumerate(("key", "value")):
        guarding, rest = found[0][side]  # of layer 0, whose inputs are the same in both runs
        assert guarding is None
        torch.testing.assert_close(exact[0][number] + rest, read[0][number], rtol=1e-4, atol=1e-5)
        assert rest.abs().max() > 0.05


@pytest.mark.parametrize(
    ("family", "ratio", "bits"), [("llava", None, 16), ("llava", 0.5, 16), ("llama", None, 16), ("qwen2_vl", None, 8)]
)
def test_the_shares_of_all_heads_add_up_to_the_divergence(dense, compressed, monkeypatch, family, ratio, bits):
    """Integrated gradients are complete: with many steps their sum is KL(packed) - KL(all guarded)."""
    model = dense(family) if ratio is None else compressed(family, ratio)
    batch = labelled(family)
    task = task_of(model, batch, CacheConfig(scheme="minmax", bits=3), bits=bits)
    walk = Walk(task, StoredHeads(task))
    monkeypatch.setattr(restoration, "STEPS", 64)
    nobody = torch.zeros(3, 4, dtype=torch.bool)[:, : max(task.num_key_value_heads)]
    with restoration.gradients(task):
        saved = walk.saved(nobody, "kv")
        total = float(saved["key"].sum() + saved["value"].sum())
        end = divergence_at(walk, batch, nobody)
    assert end > 0.01
    assert total == pytest.approx(end, rel=0.15 if bits == 8 else 0.05)


def divergence_at(walk: Walk, batch: dict[str, Tensor], guarded: Tensor) -> float:
    """KL at the packed end of the way, nats a position."""
    step = Step(walk, positions_of(batch, walk.task.model), guarded, "kv")
    losses = []
    original = restoration.divergences
    try:
        restoration.divergences = lambda *pair: losses.append(original(*pair)) or losses[-1]
        step.gradients(1.0, walk.exact[0])
    finally:
        restoration.divergences = original
    return float(losses[0].mean())


def test_gradients_are_those_of_finite_differences(dense):
    model = copy.deepcopy(dense("llava")).double()
    batch = labelled("llava")
    batch["pixel_values"] = batch["pixel_values"].double()
    task = task_of(model, batch, MINMAX)
    walk = Walk(task, StoredHeads(task))
    step = Step(walk, positions_of(batch, model), torch.zeros(3, 2, dtype=torch.bool), "k")
    walk.exact.append(step.exact_answers())
    with restoration.gradients(task):
        gradients = step.gradients(0.5, walk.exact[0])["key"][1]
    losses = [loss_with_weight(step, walk.exact[0], 1, 1, 0.5 + shift) for shift in (-0.02, 0.02)]
    assert float(gradients[1]) == pytest.approx((losses[1] - losses[0]) / 0.04, rel=0.02)


def loss_with_weight(step: Step, exact: tuple[Tensor, Tensor], layer: int, head: int, weight: float) -> float:
    """The divergence with one head's weight moved."""
    weights = {side: dict(by_layer) for side, by_layer in step.weights.items()}
    moved = weights["key"][layer].detach().clone()
    moved[head] = weight
    step.weights["key"][layer], step.held = moved, {}
    with torch.no_grad(), step.walk.stored.watching(), observed(step.walk.task.model, step._see):
        rows = step._counted_logits()
    step.weights = weights
    return float(restoration.divergences(exact[1], restoration.log_probabilities_of(rows, exact[0])).sum())


def test_the_head_that_packing_ruins_is_chosen(dense):
    """A constant in the slowest channel of one head: attention hardly sees it, two bits see little else."""
    model = copy.deepcopy(dense("qwen2_vl"))
    with torch.no_grad():
        model.get_decoder().layers[1].self_attn.k_proj.bias.view(2, 16)[1, 15] += 20
    config = {"selector": "restoration", "fraction": 1 / 6}
    assert select_heads(model, [labelled("qwen2_vl")], config, cache=MINMAX).key == {1: {1: 16}}
    assert select_heads(dense("qwen2_vl"), [labelled("qwen2_vl")], config, cache=MINMAX).key != {1: {1: 16}}


def test_smaller_fractions_are_parts_of_larger_ones(dense):
    config = HeadGuardConfig(selector="restoration", fraction=1.0, protect="kv")
    measures = measure_heads(dense("llava"), [labelled("llava")], config, cache=MINMAX)
    held: set = set()
    for fraction in (1 / 6, 1 / 3, 0.5, 1.0):
        guards = {
            (g.layer, g.head, g.side)
            for g in measures.guard_map(HeadGuardConfig(**{**vars(config), "fraction": fraction}))
        }
        assert held < guards
        held = guards


def test_heads_of_earlier_rounds_lie_above_those_of_later_ones():
    first, second = (torch.tensor([[index == at for index in range(4)]]) for at in (2, 0))
    scores = in_order_of_choice(
        [(first, torch.tensor([[5.0, 1.0, 3.0, 0.5]])), (second, torch.tensor([[0.2, 0.1, 9.0, 0.4]]))]
    )
    assert scores.argsort(descending=True).tolist()[0][:2] == [2, 0]
    assert scores[0, 0] > scores[0, 3] > scores[0, 1]


def test_a_text_model_is_measured_over_all_tokens(dense):
    found = select_heads(
        dense("llama"), [labelled("llama")], {"selector": "restoration", "fraction": 0.5}, cache=MINMAX
    )
    assert found.tokens == "all"
    assert len(found) == 3


def test_rows_without_labels_count_all_text(dense):
    batch = labelled("llava")
    del batch["labels"]
    assert len(select_heads(dense("llava"), [batch], {"selector": "restoration"}, cache=MINMAX)) == 1


def test_a_cache_that_packs_nothing_is_refused(dense):
    with pytest.raises(ValueError, match=r"'restoration' needs the packed storage.*fewer than 16 bits"):
        select_heads(dense("llava"), [labelled("llava")], {"selector": "restoration"})


def test_data_without_images_are_refused(dense):
    with pytest.raises(ValueError, match="'restoration' needs images"):
        select_heads(dense("llava"), [labelled("llama")], {"selector": "restoration"}, cache=MINMAX)


def test_the_model_is_left_as_it_was(dense, compressed):
    for model in (copy.deepcopy(dense("llava")), copy.deepcopy(compressed("llava", 0.5))):
        model.zero_grad()  # other tests train the shared ones
        implementation = model.get_decoder().config._attn_implementation
        inputs = tiny_models.prompt("llava")
        before = model(**inputs).logits
        select_heads(model, [labelled("llava")], {"selector": "restoration"}, cache=MINMAX)
        assert model.get_decoder().config._attn_implementation == implementation
        assert all(parameter.grad is None for parameter in model.parameters())
        torch.testing.assert_close(model(**inputs).logits, before, rtol=0, atol=0)
