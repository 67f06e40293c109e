"""Which kernel a decode step gets, and the reasons that are given."""

from __future__ import annotations

import copy

import pytest
import torch
from test_families import build as build_family
from tiny_models import calibration_batches
from torch import nn
from transformers import DynamicCache

import hf_wsvd
from hf_wsvd import WSVDCache, WSVDConfig
from hf_wsvd.decode_operands import norm_obstacle, rms_norm_kind
from hf_wsvd.kernels import (
    DecodePart,
    KeyNormWeights,
    Rotation,
    StoredTokens,
    choose,
    dispatch,
    explain,
    hopper_launch,
    hopper_operands,
    triton_support,
    use,
)
from hf_wsvd.kernels.dispatch import (
    DecodeStep,
    choose_for,
)


STEP = DecodeStep(torch.device("cuda"), torch.bfloat16, query_tokens=1, query_heads=32, heads=32, head_dim=128)
MHA = STEP._replace(rotated=True)
GQA = MHA._replace(heads=8)
INT8 = (64, "symmetric", 8, 1)


@pytest.fixture
def triton(monkeypatch):
    monkeypatch.setattr(triton_support, "_OBSTACLE", None)


@pytest.fixture
def hopper(triton, monkeypatch):
    """A GPU on which all kernels run, as far as a choice is concerned."""
    monkeypatch.setattr(hopper_operands, "hopper_obstacle", lambda device: None)
    monkeypatch.setattr(hopper_launch, "hopper_obstacle", lambda device: None)


@pytest.fixture
def on_cpu(triton, by_definition):
    """Kernels are chosen on the CPU, and stood in for."""


# Choices


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "tensors are on cpu"),
        ({"device": torch.device("meta")}, "tensors are on meta"),
        ({"gradients": True}, "gradients are needed"),
        ({"query_tokens": 40}, "query of 40 tokens: kernels take up to 16"),
        ({"dtype": torch.float64}, "query of float64"),
        ({"head_dim": 512}, "head_dim=512: kernels take up to 256"),
        ({"obstacle": "scheme kivi"}, "scheme kivi"),
    ],
)
def test_what_kernels_cannot_do_goes_the_torch_way(changes, reason, triton):
    assert choose_for(STEP) == ("general", "it takes any shape")
    assert choose_for(STEP._replace(**changes)) == ("torch", reason)


@pytest.mark.parametrize(
    ("installed", "reason"),
    [(None, "triton is not installed"), ("3.2.0", "triton 3.2.0 is older than 3.6"), ("3.6.0+git1", None)],
)
def test_without_a_triton_that_fits_there_is_the_torch_path(installed, reason, monkeypatch):
    monkeypatch.setattr(triton_support, "find_spec", lambda name: installed)
    monkeypatch.setattr(triton_support, "version", lambda name: installed)
    monkeypatch.setattr(triton_support, "_OBSTACLE", triton_support.version_obstacle())
    assert choose_for(STEP) == (("general", "it takes any shape") if reason is None else ("torch", reason))


@pytest.mark.parametrize(
    ("step", "kernel", "reason"),
    [
        (MHA, "position_query", "32 query heads over 32 heads"),
        (GQA, "tile_reconstruction", "32 query heads over 8 heads"),
        (STEP, "general", "position_query: keys are not rotated"),
        (MHA._replace(bias=True), "general", "position_query: keys have a bias"),
        (MHA._replace(norm=True), "general", "position_query: keys are normalised"),
        (GQA._replace(norm=True, bias=True), "tile_reconstruction", "32 query heads over 8 heads"),
        (MHA._replace(interleaved=True), "general", "position_query: rotation of pairs of neighbours"),
        (GQA._replace(softcap=True), "general", "tile_reconstruction: there is a softcap"),
        (MHA._replace(head_dim=96), "general", "position_query: head_dim=96, not one of (64, 128)"),
        (MHA._replace(dtype=torch.float32), "general", "position_query: query of float32, not of a 16-bit float"),
    ],
)
def test_fast_kernels_come_first_where_they_fit(step, kernel, reason, hopper):
    step = step._replace(forms=(INT8, INT8))
    assert choose_for(step) == (kernel, reason)
    with use("general"):
        assert choose_for(step).kernel == "general"
    with use("torch"):
        assert choose_for(step) == ("torch", "the torch path was asked for")


def test_keys_and_values_may_differ(hopper):
    forms = ((48, "symmetric", 8, 1), (96, "asymmetric", 4, 1))
    assert choose_for(MHA._replace(forms=forms)).kernel == "position_query"
    assert choose_for(GQA._replace(forms=forms)).kernel == "tile_reconstruction"


@pytest.mark.parametrize(
    ("forms", "reason"),
    [
        (((64, "codebook", 4, 1),) * 2, "code 'codebook' of 4 bits"),
        (((64, "symmetric", 4, 2),) * 2, "code 'symmetric' of 4 bits in 2 groups"),
        (((40, "symmetric", 8, 1),) * 2, "rank 40 in 8 bits, not a multiple of 16 up to 128"),
        ((INT8, (48, "symmetric", 4, 1)), "rank 48 in 4 bits, not a multiple of 32 up to 128"),
        (((144, "float", 16, 0), INT8), "rank 144 in 16 bits, not a multiple of 16 up to 128"),
    ],
)
def test_the_general_kernel_says_why_no_faster_one_serves(forms, reason, hopper):
    assert choose_for(MHA._replace(forms=forms)) == ("general", f"position_query: {reason}")


@pytest.mark.parametrize(
    ("changes", "form", "reason"),
    [
        ({}, (48, "symmetric", 4, 1), "rank 48 in 4 bits, not a multiple of 32 up to 128"),
        ({"dtype": torch.float16}, INT8, "weights times scales can be too small for float16"),
        ({"heads": 1}, INT8, "32 query heads a head, not up to 16"),
    ],
    ids=["rank", "float16", "group"],
)
def test_what_is_said_of_groups_of_query_heads_is_what_runs(changes, form, reason, hopper, monkeypatch):
    """A model's step and the operands of a call have one answer."""
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    step = GQA._replace(forms=(form, form), **changes)
    assert choose_for(step) == ("general", f"tile_reconstruction: {reason}")
    width, code, bits, _ = form
    payload = torch.zeros(1, step.heads, 8, width * bits // 8, dtype=torch.uint8)
    stored = StoredTokens(payload, torch.zeros(1, step.heads, 8, 1).half(), width, code, bits)
    up = torch.zeros(step.heads, 128, width, dtype=step.dtype)
    rotation = Rotation(*torch.zeros(2, 1, 8, 64, dtype=step.dtype))
    query = torch.zeros(1, 32, 1, 128, dtype=step.dtype)
    assert choose(query, [DecodePart(stored, stored, up, up)], rotation) == choose_for(step)


def test_rows_of_both_kinds_must_have_the_query_s_dtype(hopper, monkeypatch):
    """A bulk copy of sines in fp32 would bring other bytes than the kernel waits for."""
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    rotation = Rotation(torch.zeros(1, 8, 64).bfloat16(), torch.zeros(1, 8, 64))
    found = explain(torch.zeros(1, 4, 1, 128).bfloat16(), [part_of()], rotation)
    assert found.kernel == "general"
    assert "rotary rows of torch.bfloat16 and torch.float32" in found.reason


def test_other_gpus_have_the_general_kernel(triton, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    hopper_operands.hopper_obstacle.cache_clear()
    choice = choose_for(MHA._replace(forms=(INT8, INT8)))
    hopper_operands.hopper_obstacle.cache_clear()
    assert choice == ("general", "position_query: it needs compute capability 9.0, the GPU has 8.0")


@pytest.mark.parametrize(
    ("capability", "kernel"), [((9, 0), "position_query"), ((8, 0), "general"), ((10, 0), "general")]
)
def test_a_gpu_that_is_not_there_can_be_asked_about(capability, kernel):
    step = MHA._replace(device=torch.device("cpu"), forms=(INT8, INT8), capability=capability)
    assert choose_for(step).kernel == kernel
    with use("torch"):
        assert choose_for(step) == ("torch", "the torch path was asked for")


def test_a_preference_ends_with_its_block_even_after_an_error(triton):
    def fail():
        with use("torch"):
            with use("general"):
                assert choose_for(STEP).kernel == "general"
            assert choose_for(STEP).kernel == "torch"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert choose_for(STEP).kernel == "general"


def test_an_unknown_preference_is_refused():
    with (
        pytest.raises(
            ValueError, match=r"kernel='fast' is not allowed; allowed: one of \('auto', 'general', 'torch'\)"
        ),
        use("fast"),
    ):
        pass


# Operands


def part_of(count=4, width=64, **fields):
    stored = StoredTokens(torch.zeros(1, count, 8, width).bfloat16(), None, width)
    up = torch.zeros(count, 128, width).bfloat16()
    return DecodePart(stored, stored, up, up, **fields)


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ({}, ("position_query", "4 query heads over 4 heads")),
        ({"parts": [part_of(2)]}, ("tile_reconstruction", "4 query heads over 2 heads")),
        (
            {"parts": [part_of(1, heads=(0,)), part_of(3, 32, heads=(1, 2, 3))]},
            ("position_query", "4 query heads over 4 heads"),
        ),
        (
            {"parts": [part_of(1, heads=(0,)), part_of(3, 40, heads=(1, 2, 3))]},
            ("position_query + general", None),
        ),
        ({"parts": [part_of(key_bias=torch.zeros(4, 128))]}, ("general", "position_query: keys have a bias")),
        ({"norm": KeyNormWeights(torch.ones(128), 1e-6)}, ("general", "position_query: keys are normalised")),
        ({"mask": torch.ones(1, 1, 1, 8).bool()}, ("position_query", "4 query heads over 4 heads")),
        ({"mask": torch.zeros(1, 1, 1, 8)}, ("general", "position_query: there is an additive mask")),
        ({"mask": torch.ones(1, 4, 1, 8).bool()}, ("general", "position_query: there is a mask for each head")),
        ({"parts": "the store is odd"}, ("torch", "the store is odd")),
        ({"query": torch.zeros(1, 4, 1, 128, requires_grad=True)}, ("torch", "gradients are needed")),
        ({"query": torch.zeros(1, 4, 2, 128).bfloat16()}, ("general", "position_query: 2 query tokens, not 1")),
    ],
    ids=[
        "own-heads",
        "grouped",
        "split-heads",
        "odd-rank",
        "bias",
        "norm",
        "mask",
        "additive-mask",
        "mask-by-head",
        "no-parts",
        "gradients",
        "two-tokens",
    ],
)
def test_operands_tell_what_they_are(operands, expected, hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    rotation = Rotation(*torch.zeros(2, 1, 8, 64).bfloat16())
    arguments = {"query": torch.zeros(1, 4, 1, 128).bfloat16(), "parts": [part_of()], "norm": None, **operands}
    keywords = {name: arguments.pop(name, None) for name in ("norm", "mask")}
    found = explain(*arguments.values(), rotation, **keywords)
    assert found == choose(*arguments.values(), rotation, **keywords)
    assert (found.kernel, found.reason if expected[1] else None) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tokens: tokens[:, :, 1:], "tokens do not lie at multiples of 16 bytes"),
        (lambda tokens: tokens.transpose(1, 2).contiguous().transpose(1, 2), "tokens do not follow each other"),
    ],
    ids=["offset", "token-first"],
)
def test_memory_that_bulk_copies_cannot_reach_has_the_general_kernel(change, reason, hopper, monkeypatch):
    """A width of 4 bytes shows it, which no cache has."""
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    monkeypatch.setattr(hopper_operands, "STEP", 4)
    part = part_of(width=4)
    stored = part.key._replace(payload=change(torch.zeros(1, 4, 9, 4).bfloat16()))
    rotation = Rotation(*torch.zeros(2, 1, 9, 64).bfloat16())
    found = explain(torch.zeros(1, 4, 1, 128).bfloat16(), [part._replace(key=stored, value=stored)], rotation)
    assert found.kernel == "general"
    assert reason in found.reason


def test_gradients_count_only_where_they_are_on(hopper, monkeypatch):
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: None)
    query = torch.zeros(1, 4, 1, 128, requires_grad=True)
    with torch.no_grad():
        assert choose(query, [part_of()]).kernel == "general"
    trained = part_of()._replace(value_up=torch.zeros(4, 128, 64, requires_grad=True))
    assert choose(query.detach(), [trained]) == ("torch", "gradients are needed")


# Models


def test_a_model_is_explained_by_groups_of_layers(compressed, dense, on_cpu):
    model = compressed("llama")
    assert explain(model) == "layers 0-2: general (tile_reconstruction: it needs a Hopper GPU, tensors are on cpu)"
    cache = WSVDCache(model, bits=4, layers={1: {"scheme": "kivi", "bits": 4}})
    kivi = "torch (scheme kivi: keys are coded over groups of tokens)"
    general = "general (tile_reconstruction: it needs a Hopper GPU, tensors are on cpu)"
    assert explain(model, cache).splitlines() == [f"layer 0: {general}", f"layer 1: {kivi}", f"layer 2: {general}"]
    assert explain(model, DynamicCache()) == explain(model)
    assert "the attention function is 'sdpa'" in explain(dense("llama"))


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 8}, "there is a softcap"),
        ("glm", {"attention_bias": False}, "rotation of pairs of neighbours"),
    ],
)
def test_softcaps_and_pairs_of_a_model_are_seen(family, options, reason, on_cpu, hopper):
    config = WSVDConfig(rank_ratio=0.5, self_check="none", refinement="none", rank_allocation="uniform")
    model = hf_wsvd.compress(build_family(family, options), config, calibration=calibration_batches("llama"))
    assert reason in explain(model)


def test_a_model_is_explained_for_a_gpu_that_is_not_there(compressed):
    model = compressed("llama")
    reason = "head_dim=16, not one of (64, 128)"
    assert explain(model, capability=(9, 0)) == f"layers 0-2: general (tile_reconstruction: {reason})"
    assert "it needs compute capability 9.0, the GPU has 8.9" in explain(model, capability=(8, 9))
    with pytest.raises(ValueError, match="capability='sm_90' is not allowed"):
        explain(model, capability="sm_90")


def test_on_a_cpu_the_device_is_the_reason(compressed):
    assert explain(compressed("llama")) == "layers 0-2: torch (tensors are on cpu)"


def test_dense_models_are_explained_for_packed_caches(dense, on_cpu):
    model = copy.deepcopy(dense("llama"))
    model.set_attn_implementation("wsvd")
    assert "keys and values are neither latents nor packed" in explain(model)
    assert (
        explain(model, WSVDCache(model, bits=8))
        == "layers 0-2: general (tile_reconstruction: it needs a Hopper GPU, tensors are on cpu)"
    )


def test_a_foreign_attention_function_is_named(compressed, on_cpu):
    model = copy.deepcopy(compressed("llama"))
    model.set_attn_implementation("eager")
    assert explain(model) == "layers 0-2: torch (the attention function is 'eager')"


@pytest.mark.parametrize("wrong", [3, None, "llama"])
def test_only_queries_and_models_are_explained(wrong):
    with pytest.raises(ValueError, match="allowed: a query tensor or a transformers model"):
        explain(wrong)


def test_another_object_than_a_cache_is_refused(compressed):
    with pytest.raises(ValueError, match="cache=dict is not allowed; allowed: a Cache or None"):
        explain(compressed("llama"), {})


# Key norms


class Unit(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)`, as Gemma has it."""

    def __init__(self, weight, eps=1e-6, power=2):
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(weight), eps, power

    def forward(self, x):
        return x * (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


def test_a_norm_is_known_by_what_it_computes():
    weight = torch.randn(16)
    plain = nn.RMSNorm(16, eps=1e-5)
    plain.weight.data = weight
    assert rms_norm_kind(plain) == (0.0, 1e-5)
    assert rms_norm_kind(plain.bfloat16()) == (0.0, 1e-5)
    assert rms_norm_kind(Unit(weight)) == (1.0, 1e-6)
    assert rms_norm_kind(Unit(weight, power=3)) is None
    assert rms_norm_kind(nn.LayerNorm(16)) is None
    assert rms_norm_kind(nn.LayerNorm((2, 16))) is None


class Binding:
    norm_kind = None


@pytest.mark.parametrize(
    ("kind", "norm", "reason"),
    [
        ("before", Unit(torch.randn(16)), None),
        ("after", Unit(torch.randn(16)), None),
        ("before_by_token", Unit(torch.randn(16)), "norm of kind before_by_token"),
        ("before", nn.LayerNorm(16), "LayerNorm is no RMS norm of a head"),
        ("before", nn.Identity(), "Identity has no weight at hand"),
        ("before", nn.RMSNorm(16, device="meta"), "RMSNorm has no weight at hand"),
    ],
)
def test_other_norms_are_no_kernel_s(kind, norm, reason):
    assert norm_obstacle(kind, norm, Binding()) == reason


def test_a_norm_over_all_heads_goes_the_torch_way(on_cpu):
    model = build_family("olmo2", {})
    config = WSVDConfig(rank_ratio=0.5, self_check="none", refinement="none", rank_allocation="uniform")
    model = hf_wsvd.compress(model, config, calibration=calibration_batches("llama"))
    assert explain(model).startswith("layers 0-2: torch (")
