"""The static cache compiles: `generate` traces one decode step as a whole graph and reuses it."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import CLOSED_FORM, prompt
from transformers import CompileConfig

import hf_wsvd
from hf_wsvd.quantizer_config import GuardMap


GUARDS = GuardMap(key={0: {1: 16}}, value={1: {0: 8}}, num_key_value_heads=[2, 2, 2], tokens="all")
PACKED = {
    "int8": {"bits": 8},
    "int4-grouped": {"scheme": "minmax", "bits": 4, "group_size": 4},
    "int3": {"scheme": "minmax", "bits": 3},
    "hadamard": {"scheme": "hadamard", "bits": 4},
    "turboquant": {"scheme": "turboquant", "bits": 3},
    "fp8": {"scheme": "fp8"},
    "fp16": {"scheme": "fp16"},
    "other-values": {"key_bits": 8, "value_bits": 4},
    "skipped-head": {"bits": 4, "skip_heads": {0: [0], 1: [1]}},
    "guards": {"bits": 4, "guard_map": GUARDS},
    "as-stored": {"bits": 4, "prefill": "stored"},
}
SLOW_CASES = {
    f"{family}-{kind}-{name}": (family, ratio, cache)
    for family in ("llama", "mistral")
    for kind, ratio in (("latent", 0.5), ("dense", None))
    for name, cache in PACKED.items()
} | {
    f"{family}-{kind}": (family, ratio, cache)
    for family in ("llama_mha", "qwen2", "qwen3", "mistral", "llava", "qwen2_vl", "smolvlm")
    for kind, ratio, cache in (("latent", 0.5, None), ("dense-int8", None, {"bits": 8}))
}
CASES = [
    pytest.param("llama", 0.5, None, id="llama-latent"),
    *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW_CASES.items()),
]


def padded(inputs, count):
    """Row 0 with `count` padding tokens on the left."""
    rows = {name: value for name, value in inputs.items() if value.shape == inputs["input_ids"].shape}
    pads = {name: torch.cat([value[:, :1].expand(-1, count), value], 1).clone() for name, value in rows.items()}
    pads["attention_mask"][0, :count] = 0
    if "mm_token_type_ids" in pads:
        pads["mm_token_type_ids"][:, :count] = 0
    return {**inputs, **pads}


@pytest.mark.parametrize(("family", "rank_ratio", "cache"), CASES)
def test_default_decoding_is_one_graph_for_prompts_of_all_lengths(family, rank_ratio, cache, dense, statistics):
    config = hf_wsvd.WSVDConfig(rank_ratio=rank_ratio, cache=cache, **CLOSED_FORM)
    given = {} if rank_ratio is None else {"statistics": statistics(family)}
    model = hf_wsvd.compress(copy.deepcopy(dense(family)), config, **given)
    everywhere = CompileConfig(fullgraph=True, backend="eager", mode=None)
    everywhere._compile_all_devices = True  # transformers compiles on the CPU only when told to
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"max_new_tokens": 7, "do_sample": False}
    for tokens, padding in ((12, 0), (12, 3), (25, 0), (7, 2)):
        inputs = padded(prompt(family, batch=2, tokens=tokens, seed=tokens), padding)
        found = model.generate(**inputs, **options, compile_config=everywhere)
        assert torch.equal(found, model.generate(**inputs, **options))
    stats = torch._dynamo.utils.counters
    assert stats["stats"]["unique_graphs"] == 1
    assert not stats["graph_break"]
