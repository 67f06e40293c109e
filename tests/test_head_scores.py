"""Image and output sensitivity against gates that are really put in, and what the other measures are defined as."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from head_data import LENGTHS, Batch, padded, row, rows
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.decoder import decoder_attentions, decoder_of
from hf_wsvd.headguard import measure_heads
from hf_wsvd.headguard.observer import AttentionCall, observed
from hf_wsvd.headguard.positions import positions_of
from hf_wsvd.quantizer_config import HeadGuardConfig


VISION = ["llava", "qwen2_vl", "smolvlm"]
FAMILIES = ["llama", *VISION]
LAYERS, QUERY_HEADS, KV_HEADS = 3, 4, 2
IMAGE, OUTPUT, ANSWER = "image_gradient", "output_gradient", "answer_log_probability"


@dataclass
class Gates:
    """Explicit gates of every row, layer and query head, `[B, layers, heads]`, all 1 to begin with."""

    image_keys: Tensor
    image_queries: Tensor
    image: Tensor
    output: Tensor


_gates: Gates


def paper(options: dict | None = None) -> dict:
    """Fields of a `HeadGuardConfig` of the paper's selector."""
    return {"selector": "headguard", **(options or {})}


def gated_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
    """Attention as the definition has it: a map, the share of the image in its output, and both gates."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1)
    output = weights @ value
    from_image = (weights * _gates.image_keys[:, None, None, :]) @ value
    from_image = from_image * _gates.image_queries[:, None, :, None]
    gate_image, gate_output = (g[:, module.layer_idx, :, None, None] for g in (_gates.image, _gates.output))
    output = gate_output * (output + (gate_image - 1) * from_image)
    return output.transpose(1, 2), weights


AttentionInterface.register("gated_in_tests", gated_attention)
AttentionMaskInterface.register("gated_in_tests", eager_mask)


@contextmanager
def gated(model: PreTrainedModel, batch: Batch, queries: Tensor) -> Iterator[Gates]:
    global _gates
    image = (batch["input_ids"] == 127) & (batch["attention_mask"] != 0)
    ones = [torch.ones(len(image), LAYERS, QUERY_HEADS, dtype=model.dtype, requires_grad=True) for _ in range(2)]
    _gates = Gates(image.to(model.dtype), queries.to(model.dtype), *ones)
    decoder = decoder_of(model)
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation("gated_in_tests")
    yield _gates
    decoder.set_attn_implementation(before)


def exact(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).double()


def logits_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "evidence_mask")}
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return model(**inputs, use_cache=False).logits[:, :-1]


def answer_log_p(logits: Tensor, batch: Batch) -> Tensor:
    """Of each row's labels, `[B]`."""
    labels = batch["labels"][:, 1:]
    own = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return own.masked_fill(labels == -100, 0).sum(1)


def text_loss(logits: Tensor, batch: Batch, which: str = "prompt") -> Tensor:
    """Mean over each row's text, `[B]`."""
    ids, mask = batch["input_ids"], batch["attention_mask"] != 0
    counted = mask[:, 1:] & mask[:, :-1] & (ids[:, 1:] != 127)
    if which == "prompt":
        counted = counted & (batch["labels"][:, 1:] == -100)
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.masked_fill(~counted, 0).sum(1) / counted.sum(1)


def brute_force(
    model: PreTrainedModel,
    batch: Batch,
    queries: Tensor | None = None,
    which: str = "prompt",
    answer: Callable[[Tensor, Batch], Tensor] = answer_log_p,
) -> dict[str, Tensor]:
    """Gradients with respect to gates that are really there."""
    queries = batch["attention_mask"] != 0 if queries is None else queries
    with gated(model, batch, queries) as gates:
        logits = logits_of(model, batch)
        log_p = answer(logits, batch)
        (image,) = torch.autograd.grad(log_p.sum(), gates.image, retain_graph=True)
        (output,) = torch.autograd.grad(text_loss(logits, batch, which).sum(), gates.output)
    return {IMAGE: image, OUTPUT: output, ANSWER: log_p.detach()[:, None, None]}


def gradients(model: PreTrainedModel, batches: list[Batch], **options) -> dict[str, Tensor]:
    selector = options.pop("selector", "headguard" if "pixel_values" in batches[0] else "output_only")
    return measure_heads(model, batches, HeadGuardConfig(selector=selector, **options)).raw


def assert_near(found: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    """Each within a share of the largest."""
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert wanted.abs().max() > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_explicit_gates(dense, family, side):
    model = exact(dense(family))
    batch = padded(rows(family), side)
    found, wanted = gradients(model, [batch]), brute_force(model, batch)
    if family == "llama":
        assert set(found) == {OUTPUT}
    for name in found:
        assert_near(found[name], wanted[name])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", VISION)
def test_a_batch_is_its_rows(dense, family, implementation):
    model = copy.deepcopy(dense(family))
    decoder_of(model).set_attn_implementation(implementation)
    members = rows(family)
    alone = [gradients(model, [member]) for member in members]
    for batches in ([padded(members, "left")], members):  # `members` run joined
        together = gradients(model, batches)
        for name, value in together.items():
            assert_near(value, torch.cat([part[name] for part in alone]).double(), 1e-3)


def test_a_gate_moves_the_probability_as_its_gradient_says(dense):
    model, batch = exact(dense("llava")), row("llava")
    found = gradients(model, [batch])[IMAGE][0]
    layer, head = divmod(int(found.abs().argmax()), QUERY_HEADS)
    moved = []
    for change in (1e-2, -1e-2):
        with torch.no_grad(), gated(model, batch, batch["attention_mask"]) as gates:
            gates.image[:, layer, head] += change
            moved.append(answer_log_p(logits_of(model, batch), batch).item())
    assert (moved[0] - moved[1]) / 2e-2 == pytest.approx(found[layer, head].item(), rel=1e-2)


@pytest.mark.parametrize("queries", ["all", "text", "answer"])
def test_the_image_gate_acts_on_the_queries_that_are_asked_for(dense, queries):
    model, batch = exact(dense("llava")), padded(rows("llava"), "left")
    attended = batch["attention_mask"] != 0
    predicts = F.pad(batch["labels"][:, 1:] != -100, (0, 1))
    mask = {"all": attended, "text": attended & (batch["input_ids"] != 127), "answer": predicts}[queries]
    assert_near(gradients(model, [batch], image_queries=queries)[IMAGE], brute_force(model, batch, mask)[IMAGE])


@pytest.mark.parametrize("which", ["prompt", "all"])
def test_the_text_loss_is_of_the_tokens_that_are_asked_for(dense, which):
    model, batch = exact(dense("llava")), padded(rows("llava"), "right")
    found = gradients(model, [batch], text_loss=which, selector="output_only")
    assert set(found) == {OUTPUT}
    assert_near(found[OUTPUT], brute_force(model, batch, which=which)[OUTPUT])


def test_text_that_is_labelled_throughout_counts_as_a_prompt(dense):
    model, batch = exact(dense("llama")), row("llama")
    whole = {**batch, "labels": batch["input_ids"].clone()}
    found = gradients(model, [whole])[OUTPUT]
    assert_near(found, brute_force(model, batch, which="all")[OUTPUT])


def test_candidates_are_the_tokens_at_the_same_place_of_any_answer(dense):
    model, members = exact(dense("llava")), rows("llava")
    batch = padded(members, "left")
    answers = torch.stack([member["input_ids"][0, -3:] for member in members])

    def among_candidates(logits: Tensor, batch: Batch) -> Tensor:
        total = 0
        for place in range(3):  # padded on the left: all answers stand at the end
            scores = logits[:, -3 + place]
            own = scores.gather(1, answers[:, place, None])[:, 0]
            total = total + own - scores[:, answers[:, place].unique()].logsumexp(-1)
        return total

    found = gradients(model, members, answer="candidate_probability")
    wanted = brute_force(model, batch, answer=among_candidates)
    for name in (IMAGE, ANSWER):
        assert_near(found[name], wanted[name])


def test_rows_without_an_image_or_an_answer_count_for_the_output_alone(dense):
    model = exact(dense("llava"))
    seen, unanswered = row("llava"), row("llava", seed=2)
    unanswered["labels"] = torch.full_like(unanswered["labels"], -100)
    batches = [seen, unanswered, row("llama", seed=3)]
    found = gradients(model, batches)
    assert not found[IMAGE][0].isnan().any()
    assert found[IMAGE][1:].isnan().all()
    assert_near(found[OUTPUT], torch.cat([brute_force(model, batch)[OUTPUT] for batch in batches]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_first_token_of_a_row_is_no_answer_to_its_padding(dense, side):
    members = [
        {**member, "labels": member["input_ids"].masked_fill(member["input_ids"] == 127, -100)}
        for member in rows("llava")
    ]
    alone = torch.cat([gradients(dense("llava"), [member])[ANSWER] for member in members])
    assert_near(gradients(dense("llava"), [padded(members, side)])[ANSWER], alone.double(), 1e-4)


def test_padding_that_looks_like_an_image_is_none(dense):
    batch = {"input_ids": torch.tensor([[127, 127, 5, 6]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    positions = positions_of(batch, dense("llava"))
    assert positions.image.tolist() == [[False, True, False, False]]
    assert positions.text.tolist() == [[False, False, True, True]]


def expected_scores(options: dict, raw: dict[str, Tensor]) -> Tensor:
    """The definition, option by option."""
    image = raw[IMAGE] if options.get("answer") == "log_probability" else raw[IMAGE] * raw[ANSWER].exp()
    total = torch.zeros(LAYERS, KV_HEADS, dtype=torch.float64)
    for sign, gradient in ((1, image), (-1, raw[OUTPUT])):
        samples = list(gradient.double())
        kind = options.get("sensitivity", "absolute")
        if kind == "absolute":
            by_head = sum(s.abs() for s in samples) / len(samples)
        elif kind == "squared":
            by_head = sum(s**2 for s in samples) / len(samples)
        else:
            by_head = sign * sum(samples) / len(samples)
            by_head = by_head.abs() if kind == "absolute_mean" else by_head
        physical = torch.stack([(by_head[:, 0] + by_head[:, 1]) / 2, (by_head[:, 2] + by_head[:, 3]) / 2], 1)
        if options.get("normalization") == "layer":
            total += (physical - physical.mean(1, keepdim=True)) / physical.std(1, keepdim=True, correction=0)
        else:
            total += (physical - physical.mean()) / physical.std(correction=0)
    return total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sensitivity": "squared"},
        {"sensitivity": "signed"},
        {"sensitivity": "absolute_mean"},
        {"normalization": "layer"},
        {"answer": "log_probability"},
    ],
    ids=str,
)
def test_scores_are_sums_of_standardised_sensitivities(dense, options):
    members = rows("llava")
    measures = measure_heads(dense("llava"), members, paper(options))
    wanted = expected_scores(options, measures.raw)
    torch.testing.assert_close(measures.scores.key.double(), wanted, rtol=1e-4, atol=1e-4)
    assert measures.scores.value is measures.scores.key
    # What was measured by other options gives the same, where it can be had from the same gradients.
    again = measure_heads(dense("llava"), members, paper()).guard_map(HeadGuardConfig(**paper(options)))
    assert again.scores == measures.guard_map().scores


@pytest.mark.parametrize("name", ["image", "output"])
def test_one_half_of_the_score_alone(dense, name):
    both = measure_heads(dense("llava"), rows("llava"), paper())
    half = measure_heads(dense("llava"), rows("llava"), {"selector": f"{name}_only"})
    assert f"{name}_gradient" in half.raw
    assert len([n for n in half.raw if n.endswith("gradient")]) == 1
    assert both.guard_map(HeadGuardConfig(selector=f"{name}_only")) == half.guard_map()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_like_full_precision(dense, dtype):
    full = gradients(dense("llava"), rows("llava"))
    half = gradients(copy.deepcopy(dense("llava")).to(dtype), rows("llava"))
    for name in (IMAGE, OUTPUT):
        assert_near(half[name], full[name].double(), 0.1)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_a_compressed_model_has_its_own_scores(compressed, merged, family):
    """Those of the plain model with its low-rank weights, by the attention function that it runs with."""
    assert decoder_of(compressed(family)).config._attn_implementation == "wsvd"
    found, wanted = gradients(compressed(family), rows(family)), gradients(merged(family), rows(family))
    for name, value in wanted.items():
        assert_near(found[name], value.double(), 1e-3)
    record = measure_heads(compressed(family), rows(family), paper()).guard_map().info
    assert record["scores_on"] == "compressed"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", VISION)
def test_attention_mass_is_that_of_the_maps(dense, family, implementation):
    model, batch = copy.deepcopy(dense(family)), padded(rows(family), "left")
    decoder_of(model).set_attn_implementation(implementation)
    found = measure_heads(model, [batch], {"selector": "attention_mass"}).raw["image_attention_mass"]
    text = (batch["attention_mask"] != 0) & (batch["input_ids"] != 127)
    for layer, weights in enumerate(maps(dense(family), batch)):
        mass = (weights * (batch["input_ids"] == 127)[:, None, None]).sum(-1)
        wanted = (mass * text[:, None]).sum(-1) / text.sum(1)[:, None]
        torch.testing.assert_close(found[:, layer], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("form", ["padded", "apart"])
@pytest.mark.parametrize("family", VISION)
def test_hits_are_those_of_the_maps(dense, family, form, implementation):
    model, batch = copy.deepcopy(dense(family)), padded(rows(family), "right")
    decoder_of(model).set_attn_implementation(implementation)
    # One row alone needs no mask but the causal one, which sdpa is given as none at all.
    sets = [[batch]] if form == "padded" else [[member] for member in rows(family)]
    found = torch.cat([measure_heads(model, one, {"selector": "retrieval"}).raw["evidence_hits"] for one in sets])
    assert found.max() > 0
    for layer, weights in enumerate(maps(dense(family), batch)):
        first = weights.argmax(-1)  # [B, heads, N]
        for number, length in enumerate(LENGTHS):
            predicts = slice(length - 4, length - 1)  # the three tokens of the answer
            hits = batch["evidence_mask"][number][first[number, :, predicts]].sum(-1) / 2
            torch.testing.assert_close(found[number, layer], hits.float())


def maps(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """Attention weights of every layer, `[B, heads, N, S]`."""
    model = copy.deepcopy(model)
    decoder_of(model).set_attn_implementation("eager")
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "evidence_mask")}
    found = {}
    hooks = [
        a.module.register_forward_hook(lambda m, args, out: found.__setitem__(m.layer_idx, out[1].detach()))
        for a in decoder_attentions(model)
    ]
    with torch.no_grad():
        model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [found[layer] for layer in range(LAYERS)]


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_key_range_is_of_what_the_cache_keeps(dense, compressed, family, kind):
    model = dense(family) if kind == "dense" else compressed(family)
    batch = padded(rows(family), "left")
    raw = measure_heads(model, [batch], {"selector": "key_range"}).raw
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "evidence_mask")}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        model(**inputs, use_cache=True, **{CACHE_ARGUMENT: cache})
    for attention in decoder_attentions(model):
        keys = cache.layers[attention.layer].keys
        assert keys.shape[-1] == (16 if kind == "dense" else 8)
        for number in range(len(LENGTHS)):
            kept = keys[number][:, batch["input_ids"][number] == 127]
            largest = (kept.amax(1) - kept.amin(1)).amax(-1)
            torch.testing.assert_close(
                raw["key_channel_range"][number, attention.layer], largest, rtol=1e-4, atol=1e-4
            )
        bias = attention.module.k_proj.bias
        norms = torch.zeros(2) if bias is None or kind == "latent" else bias.detach().view(2, 16).norm(dim=1)
        torch.testing.assert_close(raw["key_bias_norm"][0, attention.layer], norms)


def state(model: PreTrainedModel) -> tuple:
    attentions = [
        module.config._attn_implementation for module in model.modules() if isinstance(module, PreTrainedModel)
    ]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    held = [sorted(vars(m)) for m in model.modules()]
    modes = [(m.training, getattr(m, "rope_deltas", None)) for m in model.modules()]
    return attentions, hooks, held, modes, [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("selector", ["headguard", "attention_mass", "key_range", "retrieval"])
def test_the_model_is_left_as_it_was(dense, compressed, selector, kind, monkeypatch):
    model = copy.deepcopy(dense("qwen2_vl") if kind == "dense" else compressed("qwen2_vl"))
    model.train()
    model.model.visual.eval()
    model.lm_head.weight.requires_grad_(False)
    before, random = state(model), torch.random.get_rng_state()
    measure_heads(model, rows("qwen2_vl"), {"selector": selector})
    assert state(model) == before
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())

    def failing(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(decoder_attentions(model)[1].module), "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_heads(model, rows("qwen2_vl"), {"selector": selector})
    monkeypatch.undo()
    assert state(model) == before


def test_observing_changes_no_answer_and_misses_no_layer(dense, compressed):
    for model in (dense("llava"), compressed("llava")):
        batch = row("llava")
        plain, calls = logits_of_fp32(model, batch), []
        with observed(model, calls.append):
            assert torch.equal(logits_of_fp32(model, batch), plain)
        assert [call.layer for call in calls] == [0, 1, 2]
        for call in calls:
            assert isinstance(call, AttentionCall)
            assert call.output.shape == (1, 12, QUERY_HEADS, 16)
            assert call.key.shape == call.value.shape == (1, KV_HEADS, 12, 16)
            torch.testing.assert_close(call.attend(call.value), call.output.detach())


def test_a_decoder_that_calls_no_attention_function_is_refused(dense, monkeypatch):
    model = copy.deepcopy(dense("llava"))
    attention = type(decoder_attentions(model)[0].module)

    def own(self, hidden_states, *args, **kwargs):
        return self.o_proj(self.q_proj(hidden_states)), None

    monkeypatch.setattr(attention, "forward", own)
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\].*attention interface"):
        measure_heads(model, rows("llava"), {"selector": "attention_mass"})


def test_gradients_that_are_not_finite_are_an_error(dense):
    model = copy.deepcopy(dense("llava"))
    model.lm_head.weight.data[5] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        measure_heads(model, rows("llava"), paper())


def test_inference_mode_and_equal_answers_are_errors(dense):
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        measure_heads(dense("llava"), rows("llava"), paper())
    members = rows("llava")
    for member in members:
        member["labels"][:, -3:] = torch.tensor([7, 8, 9])
    with pytest.raises(ValueError, match="candidate_probability"):
        measure_heads(dense("llava"), members, paper({"answer": "candidate_probability"}))


def logits_of_fp32(model: PreTrainedModel, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "evidence_mask")}
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits
