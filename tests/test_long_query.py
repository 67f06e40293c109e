"""Long queries over a filled cache read a few heads at a time, and give what one reading of all heads gives."""

from __future__ import annotations

import copy

import kernel_models
import pytest
import torch
from crossed import crossed
from kernel_models import Counted
from test_families import WITH_LATENTS, build
from tiny_models import CLOSED_FORM, calibration_batches
from torch.utils._python_dispatch import TorchDispatchMode

import hf_wsvd
from hf_wsvd import WSVDCache, attention, long_query
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.kernels import LatentHeads, Rotation, latent_attention_oracle
from hf_wsvd.kernels.long_query import attention_by_blocks, causal_tokens, dense_attention


TOKENS = 44
# A head of tokens of the tests takes some 46 kB for two rows in fp32.
PORTIONS = {"a head": 100_000, "a head of a row": 50_000, "tokens": 12_000}
STORAGE = {
    "whole": {},
    "8-bit": {"bits": 8},
    "fp8": {"scheme": "fp8"},
    "windows": {"bits": 4, "sink_length": 2, "residual_length": 5},
    "kivi": {"scheme": "kivi", "bits": 2, "residual_length": 32},
    "skipped head": {"bits": 4, "skip_heads": {1: [1]}},
}


@torch.no_grad()
def turns(model, cache, pads: int = 0) -> torch.Tensor:
    """Logits of a prompt of 20 tokens, another turn of 20 and one of 4, the first row padded on the left."""
    ids = torch.randint(3, 120, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    logits, position = [], 0
    for piece in ids.split([20, 20, 4], dim=1):
        position += piece.shape[1]
        options = {"attention_mask": mask[:, :position], "use_cache": True, CACHE_ARGUMENT: cache}
        logits.append(model(input_ids=piece, **options).logits)
    return torch.cat(logits, dim=1)[:, pads:]


@pytest.fixture
def in_portions(monkeypatch):
    """`in_portions(workspace, function, *args)`: the result under a small workspace, which was needed."""

    def run(workspace, function, *args):
        reading = Counted(long_query.attend_in_portions)
        with monkeypatch.context() as changed:
            changed.setattr(long_query, "WORKSPACE_BYTES", workspace)
            changed.setattr(attention, "attend_in_portions", reading)
            found = function(*args)
        assert reading.calls
        return found

    return run


@pytest.fixture(scope="module")
def wide(compressed):
    """In fp64: other sums must not round to other codes."""
    return copy.deepcopy(compressed("llama")).double()


@crossed(9, portion=PORTIONS, storage=STORAGE, pads=[0, 3])
def test_latents(portion, storage, pads, wide, in_portions):
    wanted = turns(wide, WSVDCache(wide, **storage), pads)
    found = in_portions(portion, turns, wide, WSVDCache(wide, **storage), pads)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "workspace"),
    [
        ("llama_mha", 30_000),
        ("qwen2", 6_000),
        ("qwen3", 30_000),
        ("mistral", 6_000),
        *(pytest.param(name, 6_000, marks=pytest.mark.slow) for name in ("llama_mha", "qwen3")),
        *(pytest.param(name, 30_000, marks=pytest.mark.slow) for name in ("qwen2", "mistral")),
    ],
)
def test_heads_biases_norms_and_windows(family, workspace, compressed, in_portions):
    model = compressed(family)
    wanted = turns(model, WSVDCache(model), 3)
    torch.testing.assert_close(in_portions(workspace, turns, model, WSVDCache(model), 3), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "model_type",
    ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cohere", "glm", "hunyuan_v1_dense", "opt"))],
)
def test_softcaps_and_layouts_of_other_families(model_type, in_portions):
    config = hf_wsvd.WSVDConfig(rank_ratio=0.5, self_check="none", **CLOSED_FORM)
    model = build(model_type, WITH_LATENTS[model_type][0])
    model = hf_wsvd.compress(model, config, calibration=calibration_batches("llama"))
    wanted = turns(model, WSVDCache(model))
    torch.testing.assert_close(in_portions(50_000, turns, model, WSVDCache(model)), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("storage", ["whole", "8-bit"])
@pytest.mark.parametrize("pads", [0, 3])
def test_a_cache_of_fixed_size(storage, pads, compressed, in_portions):
    """Its columns for tokens that may still come are not read."""
    model = compressed("llama")
    wanted = turns(model, WSVDCache(model, **STORAGE[storage]), pads)
    cache = WSVDCache(model, max_cache_len=64, **STORAGE[storage])
    torch.testing.assert_close(in_portions(50_000, turns, model, cache, pads), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": 4, "prefill": "stored"}, STORAGE["kivi"]], ids=str)
def test_packed_keys_and_values(options, by_definition, in_portions):
    model = kernel_models.dense("llama").double()
    wanted = turns(model, WSVDCache(model, **options), 3)
    found = in_portions(100_000, turns, model, WSVDCache(model, **options), 3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_prompt_that_reads_what_is_stored(wide, in_portions):
    options = {"bits": 4, "prefill": "stored"}
    wanted = turns(wide, WSVDCache(wide, **options), 3)
    found = in_portions(50_000, turns, wide, WSVDCache(wide, **options), 3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_gradients_read_all_heads_at_once(compressed, monkeypatch):
    model = compressed("llama")
    monkeypatch.setattr(long_query, "WORKSPACE_BYTES", 1)
    cache, ids = WSVDCache(model), torch.randint(3, 120, (1, 20))
    for _ in range(2):
        loss = model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}).logits.sum()
    loss.backward()
    assert model.model.layers[0].self_attn.k_proj.up.grad.abs().sum() > 0
    model.zero_grad()


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes inside."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        sizes = [value.untyped_storage().nbytes() for value in made if isinstance(value, torch.Tensor)]
        self.nbytes = max(self.nbytes, *sizes, 0)
        return out


def test_no_tensor_is_larger_than_the_workspace(monkeypatch):
    """Of a layer with 16 heads and 1,024 tokens, whose keys take 2 MiB."""
    query = torch.randn(1, 16, 32, 32)
    tokens, workspace = 1024, 2**20

    class Layer:
        def visible_tokens(self, length):
            return tokens

        def visible_heads(self, heads, length):
            count = heads.stop - heads.start
            return torch.randn(1, count, tokens, 8), torch.randn(1, count, tokens, 8)

    class Call:
        batch, heads, head_dim, value_dim, element_size, layer = 1, 16, 32, 32, 4, Layer()
        layer_was_empty = False

        def read_heads(self, heads, length):
            up = torch.randn(heads.stop - heads.start, 32, 8)
            return tuple(LatentHeads(latent, up) for latent in self.layer.visible_heads(heads, length))

        def rotation(self):
            return Rotation(*torch.randn(2, 1, tokens, 16))

        def key_norms(self):
            return {}

        def norm_needs_all_heads(self):
            return False

    monkeypatch.setattr(long_query, "WORKSPACE_BYTES", workspace)
    with Largest() as largest:
        long_query.attend_in_portions(Call(), query, None, 0.2, None)
    assert largest.nbytes <= workspace // long_query.COPIES_OF_A_HEAD


MASKS = {
    "none": lambda n, s: None,
    "bool": lambda n, s: torch.rand(2, 1, n, s) < 0.7,
    "by head": lambda n, s: torch.rand(2, 4, n, s) < 0.7,
    "additive": lambda n, s: torch.randn(2, 1, n, s),
    "additive with -inf": lambda n, s: torch.where(torch.rand(2, 1, n, s) < 0.7, 0.0, -torch.inf),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_both_ways_are_the_definition(mask, softcap):
    query, (key, value) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 2, 23, 8)
    mask = mask(5, 23)
    wanted = latent_attention_oracle(
        query, LatentHeads(key), LatentHeads(value), None, mask, scaling=0.4, softcap=softcap
    )
    for block in (1, 7, 23):
        found = attention_by_blocks(
            query,
            lambda start, stop: (key[:, :, start:stop], value[:, :, start:stop]),
            23,
            mask,
            scaling=0.4,
            softcap=softcap,
            block=block,
        )
        torch.testing.assert_close(found.transpose(1, 2), wanted)
    if softcap is None:
        found = dense_attention(query, key, value, mask, scaling=0.4)
        torch.testing.assert_close(found.transpose(1, 2), wanted)


def test_masks_that_only_say_what_comes_later():
    causal = torch.ones(5, 12, dtype=torch.bool).tril(12 - 5).expand(2, 1, 5, 12)
    assert causal_tokens(causal) == 12
    assert causal_tokens(torch.nn.functional.pad(causal, (0, 8))) == 12, "columns without a token yet"
    padded = causal.clone()
    padded[0, :, :, 0] = False
    window = causal & ~torch.ones(5, 12, dtype=torch.bool).tril(2)
    for other in (padded, window, causal.float(), torch.ones(1, 1, 5, 3, dtype=torch.bool)):
        assert causal_tokens(other) is None
    own = causal.clone()
    assert causal_tokens(own) == 12
    own[..., 3] = False
    assert causal_tokens(own) is None, "a caller may write to its mask and use it again"
