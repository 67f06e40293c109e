"""Selector "restoration": shares of the divergence that a packed cache causes, checked against the cache itself."""

from __future__ import annotations

import copy

import pytest
import tiny_models
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_wsvd import WSVDCache
from hf_wsvd.calibration.cached_run import part_of
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.headguard import measure_heads, restoration, select_heads
from hf_wsvd.headguard.restoration import Step, Walk, in_order_of_choice
from hf_wsvd.headguard.scoring import ScoringTask
from hf_wsvd.quantizer_config import CacheConfig, HeadGuardConfig


MINMAX = CacheConfig(scheme="minmax", bits=2)


def labelled(family: str, seed: int = 5, batch: int = 2, tokens: int = 14) -> dict[str, Tensor]:
    """A prompt whose last three tokens are the answer."""
    inputs = tiny_models.prompt(family, batch=batch, tokens=tokens, seed=seed)
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[:, -3:] = inputs["input_ids"][:, -3:]
    return {**inputs, "labels": labels}


def task_of(model: PreTrainedModel, batches: list[dict[str, Tensor]], cache: CacheConfig, **fields) -> ScoringTask:
    tokens = "image" if "pixel_values" in batches[0] else "all"
    config = HeadGuardConfig(selector="restoration", **{"tokens": tokens, **fields})
    return ScoringTask(model, batches, config, cache)


def nobody(walk: Walk) -> Tensor:
    """No head is guarded yet."""
    counts = walk.task.num_key_value_heads
    return torch.zeros(len(counts), max(counts), dtype=torch.bool)


@pytest.mark.parametrize("scheme", ["minmax", "hadamard", "kivi"])
@pytest.mark.parametrize(("family", "ratio"), [("llava", None), ("llava", 0.5), ("qwen2_vl", 0.5), ("smolvlm", None)])
def test_the_packed_end_is_the_real_cache(dense, compressed, family, ratio, scheme):
    """The logits over the packed prompt are those over a packed cache that the model filled itself."""
    model = dense(family) if ratio is None else compressed(family, ratio)
    window = {"group_size": 2, "residual_length": 2} if scheme == "kivi" else {}
    config = CacheConfig(scheme=scheme, bits=2, text_bits=16, **window)
    batch = labelled(family)
    walk = Walk(task_of(model, [batch], config))
    members, split = walk.groups[0]
    step = Step(walk, members[0], split)
    with torch.no_grad():
        found = model(**step.rest, **{CACHE_ARGUMENT: step.prompt.between(1.0, walk.weights(1.0, nobody(walk), "kv"))})
        cache = WSVDCache(model, cache_config=config)
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        model(**part_of(inputs, 0, split), use_cache=True, **{CACHE_ARGUMENT: cache})
        real = model(**part_of(inputs, split, 14), use_cache=True, **{CACHE_ARGUMENT: cache})
    torch.testing.assert_close(found.logits, real.logits, rtol=1e-4, atol=1e-4)
    exact = model(**inputs, use_cache=False).logits[:, split:]
    assert (exact - real.logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "ratio", "bits"),
    [("llava", None, 16), ("llava", 0.5, 16), ("llama", None, 16), ("mistral", None, 16), ("qwen2_vl", None, 8)],
)
def test_the_shares_of_all_heads_add_up_to_the_divergence(dense, compressed, monkeypatch, family, ratio, bits):
    """Integrated gradients are complete: with many steps their sum is the divergence at the packed end."""
    model = dense(family) if ratio is None else compressed(family, ratio)
    walk = Walk(task_of(model, [labelled(family)], CacheConfig(scheme="minmax", bits=3), bits=bits))
    monkeypatch.setattr(restoration, "STEPS", 64)
    saved = walk.saved(nobody(walk), "kv")
    step = Step(walk, walk.groups[0][0][0], walk.groups[0][1])
    end = step.divergence(1.0, walk.weights(1.0, nobody(walk), "kv"), walk.exact[0]) / len(walk.exact[0][0])
    assert end > 0.01
    assert float(saved["key"].sum() + saved["value"].sum()) == pytest.approx(end, rel=0.1)


def test_gradients_are_those_of_finite_differences(dense):
    walk = Walk(task_of(dense("llava"), [labelled("llava")], MINMAX))
    step = Step(walk, walk.groups[0][0][0], walk.groups[0][1])
    exact = step.exact_answers()
    weights = walk.weights(0.5, nobody(walk), "k")
    step.divergence(0.5, weights, exact)
    losses = []
    for shift in (-0.02, 0.02):
        moved = walk.weights(0.5, nobody(walk), "k")
        moved["key"][1].data[1] += shift
        losses.append(step.divergence(0.5, moved, exact))
    assert float(weights["key"][1].grad[1]) == pytest.approx((losses[1] - losses[0]) / 0.04, rel=0.02)


def test_batches_run_together_only_where_their_images_end_alike(dense):
    batches = [labelled("llava", seed) for seed in (1, 2)] + [{**labelled("llava", 3)}]
    batches[2]["input_ids"] = torch.roll(batches[2]["input_ids"], 2, dims=1)
    walk = Walk(task_of(dense("llava"), batches, MINMAX))
    assert [(len(members), split) for members, split in walk.groups] == [(2, 6), (1, 8)]


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


def test_batches_that_end_with_their_image_say_nothing(dense):
    inputs = tiny_models.prompt("llava", batch=2, tokens=14)
    short = {name: x[:, :6] if name in ("input_ids", "attention_mask") else x for name, x in inputs.items()}
    options = {"selector": "restoration", "fraction": 0.5}
    with_it = select_heads(dense("llava"), [labelled("llava"), short], options, cache=MINMAX)
    assert with_it.scores == select_heads(dense("llava"), [labelled("llava")], options, cache=MINMAX).scores
    with pytest.raises(ValueError, match="needs answers, or text, after the images"):
        select_heads(dense("llava"), [short], options, cache=MINMAX)


def test_data_without_images_are_refused(dense):
    with pytest.raises(ValueError, match="'restoration' needs images"):
        select_heads(dense("llava"), [labelled("llama")], {"selector": "restoration"}, cache=MINMAX)


def test_layers_that_write_their_state_in_place_are_refused():
    """Linear attention between layers with keys: no gradient can come through."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        **{**tiny_models.TEXT, "num_hidden_layers": 4},
        layer_types=["linear_attention", "full_attention"] * 2,
        **{f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")},
        **{f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")},
        **{"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
        shared_expert_intermediate_size=32,
    )
    model = transformers.Qwen3NextForCausalLM(config).eval()
    with pytest.raises(ValueError, match="'restoration' cannot differentiate through the cache of Qwen3Next"):
        select_heads(model, [labelled("llama")], {"selector": "restoration"}, cache=MINMAX)


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
