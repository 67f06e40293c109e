"""Estimates against real caches of the same length, byte for byte; and that nothing is allocated for them."""

from __future__ import annotations

import json
import pathlib

import pytest
import tiny_models
import torch
import transformers
from tiny_models import TEXT, VOCABULARY
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_wsvd
from hf_wsvd.cli.app import run
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.estimate import human_bytes
from hf_wsvd.meta_model import MetaModel


BATCH, TOKENS = 2, 45
SCHEMES = {
    "whole": {},
    "bf16": {"scheme": "bf16"},
    "fp8": {"scheme": "fp8"},
    "8 bit": {"bits": 8},
    "4 bit": {"bits": 4, "group_size": 8},
    "3 and 2 bit": {"key_bits": 3, "value_bits": 2},
    "turboquant": {"scheme": "turboquant", "bits": 3},
    "kivi": {"scheme": "kivi", "bits": 2, "group_size": 4, "residual_length": 16},
    "windows": {"bits": 4, "sink_length": 3, "residual_length": 10},
    "some": {"bits": 4, "skip_layers": [-1], "skip_heads": {0: [1]}, "layers": {1: {"bits": 8}}},
    "static": {"max_cache_len": 64},
    "static, packed": {"bits": 4, "max_cache_len": 64},
}
FEW = ["whole", "windows", "static, packed"]
NO_HEAD_DIM = {name: value for name, value in TEXT.items() if name != "head_dim"}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def gemma3() -> transformers.PretrainedConfig:
    """Sliding and full layers."""
    return transformers.Gemma3TextConfig(
        **TEXT, sliding_window=8, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    )


def phi3() -> transformers.PretrainedConfig:
    """Rotation whose frequencies follow the length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    return transformers.Phi3Config(**NO_HEAD_DIM, original_max_position_embeddings=64, rope_parameters=rope)


def neox() -> transformers.PretrainedConfig:
    """One projection for queries, keys and values: nothing to compress."""
    return transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )


def deepseek() -> transformers.PretrainedConfig:
    """Multi-head latent attention: keys wider than values; routed experts."""
    attention = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
    return transformers.DeepseekV3Config(**{**NO_HEAD_DIM, "num_key_value_heads": 4}, **attention, **experts)


def qwen3_next() -> transformers.PretrainedConfig:
    """Layers of linear attention between those with keys and values."""
    heads = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")}
    widths = {f"linear_{name}": 16 for name in ("key_head_dim", "value_head_dim")}
    types = ["linear_attention", "full_attention", "linear_attention"]
    return transformers.Qwen3NextConfig(
        **TEXT, **heads, **widths, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32, layer_types=types
    )


def gemma3n() -> transformers.PretrainedConfig:
    """The last two layers read the keys and values of earlier ones."""
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    small = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4}
    shared = {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 5, "num_hidden_layers": 5}
    return transformers.Gemma3nTextConfig(**{**TEXT, **shared}, **small, sliding_window=8, layer_types=types)


FAMILIES = [gemma3, gemma3n, phi3, neox, deepseek, qwen3_next]


def real_bytes(model: PreTrainedModel, cache: transformers.Cache, new_tokens: int = 1) -> int:
    """Bytes of `cache` after `generate` brought it to `TOKENS`."""
    ids = torch.randint(3, 120, (BATCH, TOKENS - new_tokens + 1))
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options, **{CACHE_ARGUMENT: cache})
    assert int(cache.get_seq_length(1 if type(model).__name__.startswith("Qwen3Next") else 0)) == TOKENS
    return hf_wsvd.cache_nbytes(cache)


def check(model: PreTrainedModel, options: dict, states: tuple[int, ...] = (2,)) -> hf_wsvd.MemoryEstimate:
    """After a prompt (1), and after one and a token more (2)."""
    for new_tokens in states:
        estimate = hf_wsvd.estimate_memory(model, TOKENS, BATCH, decoding=new_tokens == 2, **options)
        cache = hf_wsvd.WSVDCache(model, **options)
        assert estimate.cache_bytes == real_bytes(model, cache, new_tokens)
        assert estimate.report == cache.memory_report()
    return estimate


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_every_scheme_to_the_byte(kind, scheme, request):
    check(request.getfixturevalue(kind)("llama"), SCHEMES[scheme], states=(1, 2))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llava", "qwen2_vl"])
@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_families_to_the_byte(kind, family, request):
    model = request.getfixturevalue(kind)(family)
    for scheme in FEW:
        check(model, SCHEMES[scheme])
    estimate = hf_wsvd.estimate_memory(model, TOKENS, BATCH)
    text = model.config.get_text_config(decoder=True)
    dense = request.getfixturevalue("dense")(family)
    assert estimate.dense_cache_bytes == real_bytes(dense, DynamicCache(config=text))
    assert estimate.weights_bytes == bytes_of(model)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_other_attention_to_the_byte(family):
    model = AutoModelForCausalLM.from_config(family(), dtype=torch.bfloat16).eval()
    for scheme in ("8 bit", "static, packed"):
        estimate = check(model, SCHEMES[scheme])
    assert estimate.dtype == "bfloat16"
    assert estimate.weights_bytes == bytes_of(model)


def bytes_of(model: PreTrainedModel) -> int:
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "llava"])
def test_what_if_a_dense_model_were_compressed(family, dense, compressed):
    asked = hf_wsvd.estimate_memory(dense(family).config, TOKENS, BATCH, 4, rank_ratio=0.5, dtype="float32")
    model = compressed(family, rank_multiple=8)
    assert asked.cache_bytes == hf_wsvd.estimate_memory(model, TOKENS, BATCH, 4).cache_bytes
    assert asked.weights_bytes == bytes_of(model)


def test_nothing_is_allocated():
    config = transformers.LlamaConfig(
        hidden_size=8192, num_hidden_layers=4, num_key_value_heads=8, num_attention_heads=64
    )
    meta = MetaModel(config, rank_ratio=0.5)
    assert {tensor.device.type for tensor in (*meta.model.parameters(), *meta.model.buffers())} == {"meta"}
    before = peak_memory()
    estimate = hf_wsvd.estimate_memory(config, 10**6, 64, 4)
    assert peak_memory() - before < 2**28
    assert estimate.dtype == "bfloat16"
    assert estimate.dense_cache_bytes == 4 * 2 * 8 * 128 * 2 * 64 * 10**6
    assert 4 < estimate.bits_per_element < 4.5


def peak_memory() -> int:
    """Bytes that this process has had in memory at most."""
    status = pathlib.Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def test_a_checkpoint_keeps_its_own_storage(compressed, tmp_path, no_weights):
    compressed("llama", cache=None).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["cache"] = {"bits": 4}
    path.write_text(json.dumps(config))
    estimate = hf_wsvd.estimate_memory(tmp_path, TOKENS, BATCH)
    assert estimate == hf_wsvd.estimate_memory(tmp_path, TOKENS, BATCH, 4)
    assert estimate.cache_bytes < hf_wsvd.estimate_memory(tmp_path, TOKENS, BATCH, 16).cache_bytes
    assert estimate.to_dict()["total"] == estimate.total == estimate.weights_bytes + estimate.cache_bytes
    assert f"2 x 45 tokens in float32: cache {human_bytes(estimate.cache_bytes)}" in str(estimate)


def test_other_quantized_checkpoints_have_unknown_weights():
    config = transformers.LlamaConfig(**TEXT, quantization_config={"quant_method": "gptq", "bits": 4})
    estimate = hf_wsvd.estimate_memory(config, TOKENS)
    assert (estimate.weights_bytes, estimate.total) == (None, None)
    assert "weights unknown" in str(estimate)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens=0 is not allowed"),
        ({"batch": True}, "batch=True is not allowed"),
        ({"tokens": 1, "decoding": True}, "tokens=1 is not allowed; allowed: at least 2"),
        ({"max_cache_len": 8}, "at most max_cache_len=8"),
        ({"dtype": "int8"}, "dtype='int8' is not allowed"),
        ({"bits": 5}, "bits=5 is not allowed"),
        ({"rank_ratio": 1.5}, "rank_ratio=1.5"),
        ({"model": neox(), "rank_ratio": 0.5}, "no layer to convert"),
        ({"model": transformers.T5Config()}, "encoder-decoder"),
        ({"model": transformers.ViTConfig()}, "neither a causal language model"),
        ({"model": 5}, "model must be"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    defaults = {"model": transformers.LlamaConfig(**TEXT), "tokens": TOKENS}
    with pytest.raises(ValueError, match=message):
        hf_wsvd.estimate_memory(**{**defaults, **arguments})


@pytest.fixture(scope="module")
def folders(tmp_path_factory, compressed):
    """Configs without weights: a dense model's, a compressed one's, one that cannot be compressed, another kind."""
    root = tmp_path_factory.mktemp("models")
    tiny_models.build("llama").config.save_pretrained(root / "dense")
    compressed("llama").config.save_pretrained(root / "compressed")
    neox().save_pretrained(root / "neox")
    transformers.T5Config().save_pretrained(root / "t5")
    return root


def output_of(capsys, *arguments) -> tuple[str, str]:
    capsys.readouterr()
    assert run(["estimate", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def names_of(table: str) -> list[str]:
    return [line.split("  ")[0] for line in table.splitlines()[4:]]


def test_command_shows_the_usual_storages(folders, capsys):
    out, error = output_of(capsys, folders / "dense", "--tokens", 64, "--batch", 2)
    assert names_of(out) == [
        "DynamicCache",
        "keys and values, bfloat16",
        *(f"keys and values, {bits} bit" for bits in (8, 4, 2)),
        "latents of rank ratio 0.5, bfloat16",
        *(f"latents of rank ratio 0.5, {bits} bit" for bits in (8, 4)),
    ]
    assert error == ""
    out, error = output_of(capsys, folders / "compressed", "--tokens", 513, "--dtype", "bfloat16")
    assert names_of(out) == ["DynamicCache", "latents, bfloat16", *(f"latents, {bits} bit" for bits in (8, 4, 2))]
    assert error == "warning: 513 tokens are more than the 512 positions that the model was made for\n"
    assert len(names_of(output_of(capsys, folders / "neox")[0])) == 5


def test_command_shows_one_setting(folders, capsys, no_weights):
    arguments = ["--tokens", 64, "--key-bits", 4, "--value-bits", 2, "--rank-ratio", 0.5, "--dtype", "float16"]
    out, _ = output_of(capsys, folders / "dense", *arguments)
    assert names_of(out) == ["DynamicCache", "latents of rank ratio 0.5, key bits 4, value bits 2"]
    shown = json.loads(output_of(capsys, folders / "dense", *arguments, "--json", "--decoding")[0])
    fields = {"key_bits": 4, "value_bits": 2, "rank_ratio": 0.5, "dtype": "float16", "decoding": True}
    expected = hf_wsvd.estimate_memory(folders / "dense", 64, **fields)
    assert shown["settings"] == [{"setting": names_of(out)[1], **expected.to_dict()}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}/nothing"], "nothing"),
        (["{root}/t5"], "encoder-decoder"),
        (["{root}/dense", "--tokens", "0"], "tokens=0"),
        (["{root}/dense", "--batch", "-1"], "batch=-1"),
        (["{root}/dense", "--bits", "5"], "bits=5"),
        (["{root}/dense", "--scheme", "zip"], "scheme='zip'"),
        (["{root}/dense", "--dtype", "int8"], "--dtype must be one of"),
        (["{root}/dense", "--bits", "4", "--group-size", "7"], "group_size=7"),
        (["{root}/compressed", "--rank-ratio", "0.5"], "quantized already"),
    ],
)
def test_command_errors_are_one_line(folders, capsys, arguments, message):
    capsys.readouterr()
    assert run(["estimate", *(argument.format(root=folders) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hf-wsvd: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
