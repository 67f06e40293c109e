"""What happens to weights before they are rounded: transforms that change no answer, and local fine-tuning."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import tiny_models
import tiny_vision_families
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_wsvd
from hf_wsvd import LowPrecisionConfig, WSVDConfig
from hf_wsvd.low_precision import fake_quantized_weight
from hf_wsvd.low_precision.latent_reconstruction import cayley_step, reconstruct_latents
from hf_wsvd.low_precision.moments import InputMoments, regularised
from hf_wsvd.low_precision.prepare import prepare
from hf_wsvd.low_precision.reconstruction import reconstruct
from hf_wsvd.low_precision.spreading import Spreading
from hf_wsvd.modules import LatentProjection
from hf_wsvd.rotations import spreading_rotation


ROTATED = {"norms": "rotation", "mlp": "rotation", "values": "rotation"}
SMOOTHED = dict.fromkeys(ROTATED, "smoothing")
FEW_STEPS = {"qat_steps": 3}


def scaled_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Norms that scale every channel differently: at their start a weight that was forgotten would not show."""
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def prepared(model: PreTrainedModel, batch: dict[str, Tensor], **fields) -> tuple[PreTrainedModel, WSVDConfig, dict]:
    """A prepared copy of `model`, its config and the record."""
    config = WSVDConfig(low_precision=LowPrecisionConfig(**fields))
    model = copy.deepcopy(model)
    return model, config, prepare(model, config, [batch])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.no_grad()
def answers(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits


def in_quick_tests(values: list[str], *quick: str) -> list:
    """Parameters of a test, all but `quick` ones of them marked as slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize(
    "family", in_quick_tests(["llama", "qwen2", "qwen3", "mistral", "llava", "smolvlm", "qwen2_vl"], "qwen2", "llava")
)
def test_rotations_change_no_answer(family):
    model, batch = scaled_norms(tiny_models.build(family)), tiny_models.prompt(family)
    turned, config, record = prepared(model, batch, method="quarot")
    assert (record["transforms"], record["refused"]) == (ROTATED, {})
    assert (config.low_precision.residual_rotation, config.low_precision.mlp_rotation) == (0, 64)
    assert relative(answers(turned, batch), answers(model, batch)) < 1e-4
    states = [m(**batch, output_hidden_states=True).hidden_states[1] for m in (model, turned)]
    assert relative(states[1], states[0]) > 0.5  # it is another basis


@pytest.mark.parametrize("family", in_quick_tests(["llama", "qwen2"], "llama"))
def test_smoothing_changes_no_answer_and_evens_the_inputs(family):
    model, batch = scaled_norms(tiny_models.build(family)), tiny_models.prompt(family)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] *= 50
    smooth, _, record = prepared(model, batch, method="smoothquant")
    assert (record["transforms"], record["refused"]) == (SMOOTHED, {})
    assert relative(answers(smooth, batch), answers(model, batch)) < 1e-4

    def largest_share(model: PreTrainedModel) -> float:
        seen = []
        hook = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        answers(model, batch)
        hook.remove()
        channels = seen[0].abs().amax((0, 1))
        return float(channels.max() / channels.median())

    assert largest_share(smooth) < 0.5 * largest_share(model)


@pytest.mark.slow
def test_tied_embeddings_stay_tied_and_as_they_were():
    config = transformers.LlamaConfig(**{**tiny_models.TEXT, "tie_word_embeddings": True})
    model, batch = scaled_norms(transformers.LlamaForCausalLM(config).eval()), tiny_models.prompt("llama")
    turned, *_ = prepared(model, batch, method="quarot")
    assert turned.lm_head.weight is turned.model.embed_tokens.weight
    assert torch.equal(turned.lm_head.weight, model.lm_head.weight)
    assert relative(answers(turned, batch), answers(model, batch)) < 1e-4


@pytest.mark.parametrize(
    ("family", "reason"), [("gemma3", "feedforward_layernorm"), ("qwen3_vl", "deepstack_visual_embeds")]
)
def test_inputs_that_no_rotation_reaches_are_smoothed(family, reason):
    model, batch = tiny_vision_families.build(family), tiny_vision_families.prompt(family)
    scaled_norms(model.get_decoder())
    turned, config, record = prepared(model, batch, method="quarot")
    assert record["transforms"]["norms"] == "smoothing"
    assert list(record["refused"]) == ["rotation of norms"]
    assert reason in record["refused"]["rotation of norms"]
    assert config.low_precision.residual_rotation is None
    assert relative(answers(turned, batch), answers(model, batch)) < 1e-4


def test_a_transform_that_would_change_answers_is_refused_by_experiment():
    """Attention whose values pass a nonlinearity looks like any other from outside."""
    model, batch = tiny_models.build("llama"), tiny_models.prompt("llama")
    model.model.layers[2].self_attn.v_proj.register_forward_hook(lambda module, args, output: output.tanh())
    turned, _, record = prepared(model, batch, method="quarot")
    assert "model.layers.2 does not compute the same" in record["refused"]["rotation of values"]
    assert "values" not in record["transforms"]  # smoothing cannot pass it either
    assert relative(answers(turned, batch), answers(model, batch)) < 1e-4


@pytest.mark.parametrize("method", in_quick_tests(["quarot", "wsvd_qat"], "wsvd_qat"))
def test_dequantize_turns_weights_back(method):
    """The model is a plain one again: no module of ours, and nothing but rounding has changed."""
    dense = scaled_norms(tiny_models.build("qwen2"))
    fields = FEW_STEPS if method == "wsvd_qat" else {}
    config = WSVDConfig(rank_ratio=None, low_precision=LowPrecisionConfig(method=method, **fields))
    model = hf_wsvd.compress(copy.deepcopy(dense), config, calibration=tiny_models.calibration_batches("qwen2"))
    batch = tiny_models.prompt("qwen2")
    rounded = answers(model, batch)
    assert relative(rounded, answers(dense, batch)) < 0.1
    plain = copy.deepcopy(model).dequantize()
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in dense.named_modules()]
    assert relative(answers(plain, batch), answers(dense, batch)) < 0.1
    state = plain(**batch, output_hidden_states=True).hidden_states[1]
    assert relative(state, dense(**batch, output_hidden_states=True).hidden_states[1]) < 0.1


@pytest.mark.slow
def test_a_rotated_checkpoint_comes_back_to_the_last_bit(tmp_path):
    config = WSVDConfig(
        rank_ratio=0.5, **tiny_models.CLOSED_FORM, low_precision=LowPrecisionConfig(activation_bits=4, **FEW_STEPS)
    )
    model = hf_wsvd.compress(tiny_models.build("llama"), config, calibration=tiny_models.calibration_batches("llama"))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    batch = tiny_models.prompt("llama")
    assert torch.equal(answers(loaded, batch), answers(model, batch))
    record = loaded.config.quantization_config.fit_info["low_precision"]
    assert record["transforms"] == ROTATED
    assert all(share["error"] <= share["nearest"] for share in record["lost"].values())
    assert len(record["lost"]) == 7 * 3


@pytest.mark.slow
def test_fine_tuning_beats_every_other_method_where_few_bits_hurt():
    """Of 4-bit activations, by the error of the answers on inputs that calibration has not seen."""
    model, batch = scaled_norms(tiny_models.build("llama")), tiny_models.prompt("llama", batch=4, tokens=24, seed=9)
    expected, errors = answers(model, batch), {}
    for method, fields in {"rtn": {}, "smoothquant": {}, "quarot": {}, "wsvd_qat": {"qat_steps": 20}}.items():
        low = LowPrecisionConfig(activation_bits=4, method=method, **fields)
        calibration = [tiny_models.prompt("llama", batch=16, tokens=24, seed=seed) for seed in range(101, 105)]
        config = WSVDConfig(rank_ratio=None, self_check="none", low_precision=low)
        data = None if method == "rtn" else calibration
        rounded = hf_wsvd.compress(copy.deepcopy(model), config, calibration=data)
        errors[method] = relative(answers(rounded, batch), expected)
    assert min(errors, key=errors.get) == "wsvd_qat"


@pytest.mark.slow
def test_fine_tuning_is_deterministic():
    batch = tiny_models.prompt("qwen2", batch=4, tokens=16)
    first, second = (prepared(tiny_models.build("qwen2"), batch, method="wsvd_qat", **FEW_STEPS) for _ in range(2))
    assert first[2] == second[2]
    assert all(torch.equal(a, b) for a, b in zip(first[0].state_dict().values(), second[0].state_dict().values()))


def correlated_inputs(tokens: int = 512, width: int = 32) -> Tensor:
    return torch.randn(tokens, width) @ torch.randn(width, width) * torch.logspace(0, -1.5, width)


@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, None), (4, 16)])
def test_a_reconstructed_weight_errs_less_than_the_nearest_and_rounds_to_itself(bits, group_size):
    x, weight = correlated_inputs(), torch.randn(24, 32)
    found = reconstruct(weight, InputMoments.of([x], [x]).with_noise(1e-6), bits, group_size, 30, 1e-3)
    nearest = fake_quantized_weight(weight, bits, group_size)
    measured = [
        float((x @ (w - weight).T).square().sum() / (x @ weight.T).square().sum()) for w in (found.weight, nearest)
    ]
    assert measured == pytest.approx([found.error, found.nearest], rel=1e-2)
    assert found.error < 0.7 * found.nearest
    assert torch.equal(fake_quantized_weight(found.weight, bits, scales=found.scales), found.weight)


def test_weights_make_good_what_rounded_inputs_lose():
    x, weight = correlated_inputs(), torch.randn(24, 32)
    rounded = (x / 3).round() * 3
    found = reconstruct(weight, InputMoments.of([x], [rounded]).with_noise(1e-6), 8, None, 1, 1e-3)
    assert found.error < 0.9 * found.nearest


def test_inputs_that_say_little_hold_weights_to_the_exact_one():
    """Twice as many tokens as channels, and inputs rounded at random: the fitted weight would follow the noise."""
    weight, inputs = torch.randn(24, 32), [torch.randn(count, 32) for count in (64, 64, 4096)]
    fitted, held_out, unseen = (InputMoments.of([x], [x + 0.3 * torch.randn_like(x)]) for x in inputs)
    chosen = regularised(weight, fitted, held_out).best_weight(weight)
    greedy = fitted.pooled(held_out).with_noise(1e-6).best_weight(weight)
    assert unseen.errors(weight, chosen).sum() < 0.9 * unseen.errors(weight, greedy).sum()
    assert unseen.errors(weight, chosen).sum() < unseen.errors(weight, weight).sum()


@pytest.mark.parametrize("weighted", [False, True])
def test_low_rank_factors_err_less_than_the_nearest_in_the_metric_of_the_gradient(weighted):
    x, projection = correlated_inputs(), LatentProjection(32, heads=2, head_dim=16, rank=8)
    for parameter in projection.parameters():
        nn.init.normal_(parameter)
    directions = torch.randn(2, 16, 4)
    fisher = directions @ directions.mT if weighted else None
    found = reconstruct_latents(
        projection, InputMoments.of([x], [x]).with_noise(1e-6), 4, None, 30, 1e-3, fisher=fisher
    )
    assert found.error < 0.7 * found.nearest
    expected = x @ (projection.up @ projection.weight.view(2, 8, 32)).mT
    difference = x @ (found.up @ found.weight.view(2, 8, 32)).mT - expected
    if not weighted:
        assert float(difference.square().sum() / expected.square().sum()) == pytest.approx(found.error, rel=1e-2)


def test_a_cayley_step_stays_orthogonal_and_goes_downhill():
    target = spreading_rotation(8, seed=1).expand(3, 8, 8)
    skew = torch.randn(3, 8, 8, dtype=torch.float64).triu(1)
    rotation = target @ torch.linalg.matrix_exp(skew - skew.mT)
    distances = []
    for _ in range(20):
        distances.append((rotation - target).square().sum((1, 2)))
        rotation = cayley_step(rotation, 2 * (rotation - target), 0.05)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(8).double().expand(3, 8, 8))
    assert all(bool((b < a).all()) for a, b in pairwise(distances))


@pytest.mark.parametrize(("width", "size"), [(48, 48), (64, 16), (36, 36)])
def test_spreading_is_the_rotation_and_its_inverse_and_survives_a_cast(width, size):
    x = torch.randn(2, 5, width)
    turned = Spreading(width, size, seed=3).to(torch.bfloat16)(x)
    expected = x.double().unflatten(-1, (-1, size)) @ spreading_rotation(size, seed=3)
    torch.testing.assert_close(turned.double(), expected.flatten(-2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(Spreading(width, size, seed=3, back=True)(turned), x, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["smoothquant", "quarot", "wsvd_qat"])
def test_a_layer_of_zeros_and_one_of_a_constant_are_no_obstacle(method):
    model, batch = tiny_models.build("llama"), tiny_models.prompt("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
        model.model.layers[1].self_attn.v_proj.weight.fill_(0.1)
    fields = FEW_STEPS if method == "wsvd_qat" else {}
    changed, *_ = prepared(model, batch, method=method, **fields)
    assert all(torch.isfinite(parameter).all() for parameter in changed.parameters())
    assert relative(answers(changed, batch), answers(model, batch)) < 0.1


def test_bad_weights_and_data_are_named_before_anything_is_changed():
    model, batch = tiny_models.build("llama"), tiny_models.prompt("llama")
    with pytest.raises(ValueError, match="needs calibration data, and none are given"):
        prepare(model, WSVDConfig(low_precision=LowPrecisionConfig(method="quarot")), None)
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[0, 0] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate_proj"):
        prepare(model, WSVDConfig(low_precision=LowPrecisionConfig()), [batch])
    after = model.state_dict()
    assert all(torch.equal(after[name].nan_to_num(), value.nan_to_num()) for name, value in before.items())


def test_rotations_of_an_earlier_fit_are_forgotten():
    """16-bit activations are not rotated by "wsvd_qat", whatever a config says that was written by another fit."""
    settings = LowPrecisionConfig(activation_bits=16, residual_rotation=3, mlp_rotation=64, **FEW_STEPS)
    config = WSVDConfig(rank_ratio=None, self_check="none", low_precision=settings)
    model, batch = tiny_models.build("llama"), tiny_models.prompt("llama")
    fitted = hf_wsvd.compress(copy.deepcopy(model), config, calibration=[batch])
    written = fitted.config.quantization_config.low_precision
    assert (written.residual_rotation, written.mlp_rotation) == (None, None)
    assert relative(answers(fitted, batch), answers(model, batch)) < 0.1


def test_data_come_in_every_form_that_a_fit_takes():
    batch = tiny_models.prompt("llama")
    row = {name: column[0] for name, column in batch.items()} | {"caption": "no argument of the model"}
    models = []
    for data in (batch, [batch], [row]):
        config = WSVDConfig(rank_ratio=None, self_check="none", low_precision=LowPrecisionConfig(method="smoothquant"))
        models.append(hf_wsvd.compress(tiny_models.build("llama"), config, calibration=data))
    first, *others = (answers(model, batch) for model in models)
    assert all(torch.equal(first, other) for other in others)
    for data, message in ((5, "an iterable of them, got int"), ([{"mask": batch["input_ids"]}], "needs a column")):
        with pytest.raises(ValueError, match=message):
            hf_wsvd.compress(tiny_models.build("llama"), config, calibration=data)
