"""`generate` of a compressed model decodes from a cache of fixed size by itself, and says when and why it does not."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from tiny_models import prompt
from transformers import CompileConfig, GenerationConfig, LlamaForCausalLM, StoppingCriteria

import hf_wsvd
from hf_wsvd import cache_keeper, explain_generate, free_generate_cache, static_room
from hf_wsvd.cache_choice import GenerateCall, choose_cache
from hf_wsvd.compat import CACHE_ARGUMENT, COMPILED_STEP
from hf_wsvd.generation import keeper_of


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def call(settings=None, device=CUDA, **facts):
    settings = GenerationConfig(max_new_tokens=100) if settings is None else settings
    return GenerateCall(settings, **{"batch": 2, "prompt": 30, "device": device, **facts})


# The decision, on any machine


@pytest.mark.parametrize(
    ("settings", "prompt_tokens", "tokens"),
    [
        ({"max_new_tokens": 100}, 30, 1024),
        ({"max_new_tokens": 100}, 924, 1024),
        ({"max_new_tokens": 100}, 925, 2048),
        ({"max_length": 3000}, 30, 3072),
        ({"max_length": 3000, "max_new_tokens": 5}, 30, 1024),
        ({}, 1010, 2048),  # 20 new ones, as transformers has it
        ({"do_sample": True, "max_new_tokens": 1}, 1, 1024),
    ],
)
def test_the_length_is_rounded_up_to_whole_steps(settings, prompt_tokens, tokens):
    choice = choose_cache(call(GenerationConfig(**settings), prompt=prompt_tokens))
    assert (choice.cache, choice.batch, choice.tokens) == ("static", 2, tokens)


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({}, {"device": CPU}, "nothing is compiled on cpu"),
        ({}, {"devices": 2}, "2 devices"),
        ({}, {"cache_given": True}, "a cache is given"),
        ({}, {"assisted": True}, "assisted generation"),
        ({}, {"custom": True}, "custom_generate"),
        ({}, {"prompt": None}, "shows no prompt"),
        ({}, {"obstacle": "windows"}, "windows"),
        ({"cache_implementation": "dynamic"}, {}, "cache_implementation='dynamic'"),
        ({"cache_implementation": "static"}, {}, "cache_implementation='static'"),
        ({"use_cache": False}, {}, "use_cache=False"),
        ({"disable_compile": True}, {}, "disable_compile=True"),
        ({"num_beams": 2}, {}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, {}, "assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, {}, "contrastive search"),
        ({"return_dict_in_generate": True}, {}, "hands the cache out"),
        ({"prefill_chunk_size": 8}, {}, "prefill_chunk_size"),
    ],
)
def test_what_leads_to_the_cache_that_grows_is_named(settings, facts, reason):
    choice = choose_cache(call(GenerationConfig(max_new_tokens=9, **settings), **facts))
    assert choice.cache == "dynamic"
    assert reason in choice.reason


def test_other_threads_need_cuda_graphs_for_them(monkeypatch):
    for able, cache in ((True, "static"), (False, "dynamic")):
        monkeypatch.setattr("hf_wsvd.cache_choice.CUDA_GRAPHS_IN_ANY_THREAD", able)
        assert choose_cache(call(main_thread=False)).cache == cache


# The same, asked of a model

EVERYWHERE = CompileConfig(backend="eager", mode=None)
EVERYWHERE._compile_all_devices = True  # as if the CPU were a device for which transformers compiles


def test_a_user_can_ask(compressed, dense, monkeypatch):
    model, inputs = compressed("llama"), prompt("llama", 3)
    assert explain_generate(model, **inputs) == ("dynamic", "nothing is compiled on cpu", 0, 0)
    asked = explain_generate(model, **inputs, max_new_tokens=9, num_return_sequences=2, do_sample=True,
                             compile_config=EVERYWHERE)  # fmt: skip
    assert asked == ("static", "21 tokens at most, in steps of 1,024", 6, 1024)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not compressed"):
        explain_generate(dense("llama"), **inputs)
    monkeypatch.setattr(dense("llama"), "hf_quantizer", SimpleNamespace(quantization_config=None), raising=False)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not compressed"):
        explain_generate(dense("llama"), **inputs)  # but by others
    monkeypatch.setattr(type(model), "generate", lambda model, *args: None)
    asked = explain_generate(model, **inputs, compile_config=EVERYWHERE)
    assert asked == ("dynamic", "LlamaForCausalLM has a `generate` of its own", 0, 0)


@pytest.mark.parametrize(
    ("family", "cache", "reason"),
    [
        ("llama", {"scheme": "kivi", "bits": 2}, "windows in full precision"),
        ("llama", {"bits": 4, "residual_length": 4}, "windows in full precision"),
        ("llava", {"bits": 4, "text_bits": 16}, "tokens of images"),
    ],
)
def test_storage_that_cannot_have_a_fixed_size_is_named(family, cache, reason, dense):
    model = hf_wsvd.compress(copy.deepcopy(dense(family)), hf_wsvd.WSVDConfig(rank_ratio=None, cache=cache))
    choice = explain_generate(model, **prompt(family), compile_config=EVERYWHERE)
    assert choice.cache == "dynamic"
    assert reason in choice.reason


# The cache that is kept (steps are run as they are: tests/test_compile.py compiles them)


@pytest.fixture
def model(compressed, monkeypatch):
    """A model of one's own that decodes from caches of fixed size on the CPU, uncompiled."""
    monkeypatch.setattr(LlamaForCausalLM, "get_compiled_call", lambda model, compile_config: model.__call__)
    own = copy.deepcopy(compressed("llama"))
    own.generation_config.compile_config = EVERYWHERE
    return own


def tokens_of(model, batch=2, tokens=12, **options):
    return model.generate(**prompt("llama", batch, tokens), max_new_tokens=4, do_sample=False, **options)


def test_calls_of_one_size_share_a_cache(model, compressed):
    caches = []
    for tokens in (12, 30, 4):
        assert torch.equal(tokens_of(model, tokens=tokens), tokens_of(compressed("llama"), tokens=tokens))
        caches.append(keeper_of(model).cache)
    assert caches[0] is caches[1] is caches[2]
    assert torch.equal(tokens_of(model, batch=3), tokens_of(compressed("llama"), batch=3))
    assert keeper_of(model).cache is not caches[0]
    free_generate_cache(model)
    assert keeper_of(model).cache is None


def test_padded_rows_decode_as_in_a_cache_that_grows(model, compressed):
    inputs = prompt("llama", 2)
    inputs["attention_mask"][0, :5] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **options), compressed("llama").generate(**inputs, **options))
    assert keeper_of(model).cache is not None


def test_a_prompt_has_no_mask_over_empty_slots(model, monkeypatch):
    """With one, no flash kernel would take it, and a long prompt's would not fit."""
    masks = []
    attention = model.get_decoder().layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    tokens_of(model)
    assert masks[0] is None
    assert {tuple(mask.shape) for mask in masks[1:]} == {(2, 1, 1, 1024)}


def test_asking_for_the_dynamic_cache_gets_it(model):
    wanted = tokens_of(model, cache_implementation="dynamic")
    assert keeper_of(model).cache is None
    assert torch.equal(tokens_of(model), wanted)
    tokens_of(model, num_beams=2)  # and whatever is served by one leaves what is kept alone
    out = tokens_of(model, return_dict_in_generate=True)
    assert type(out[CACHE_ARGUMENT]).__name__ == "DynamicCache"


class Interrupting(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 13:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_an_interrupted_generation_leaves_the_model_usable(model):
    wanted = tokens_of(model)
    with pytest.raises(KeyboardInterrupt):
        tokens_of(model, stopping_criteria=[Interrupting()])
    assert keeper_of(model).cache is None
    assert torch.equal(tokens_of(model), wanted)


class Nested(StoppingCriteria):
    """Generates with the same model in another thread while it generates."""

    def __init__(self, model):
        self.model, self.found = model, []

    def __call__(self, input_ids, scores, **kwargs):
        if not self.found:
            thread = threading.Thread(target=lambda: self.found.append(tokens_of(self.model, tokens=9)))
            thread.start()
            thread.join()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_two_generations_at_a_time_do_not_share_a_cache(model):
    wanted, other = tokens_of(model), tokens_of(model, tokens=9)
    nested = Nested(model)
    assert torch.equal(tokens_of(model, stopping_criteria=[nested]), wanted)
    assert torch.equal(nested.found[0], other)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_neither_the_cache_nor_the_compiled_step(duplicate, compressed):
    model = copy.deepcopy(compressed("llama"))
    model.get_compiled_call(None)  # which would run the weights of this model
    keeper_of(model)
    twin = duplicate(model)
    assert not vars(twin).keys() & {*COMPILED_STEP, "_wsvd_cache_keeper"}
    assert torch.equal(tokens_of(twin), tokens_of(model))


def test_nothing_of_it_is_saved_and_dequantize_takes_it_away(model, tmp_path):
    tokens_of(model)
    model.generation_config.compile_config = None
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "generation_config.json").read_text() + (tmp_path / "config.json").read_text()
    assert "cache_implementation" not in saved
    assert "compile" not in saved
    model.dequantize()
    assert type(model).generate is LlamaForCausalLM.generate
    assert not vars(model).keys() & {*COMPILED_STEP, "_wsvd_cache_keeper"}


# Bad input


@pytest.mark.parametrize("options", [{"max_new_tokens": 501}, {"max_length": 513}])
def test_more_tokens_than_positions_are_refused_at_once(options, compressed):
    with pytest.raises(ValueError, match="allowed: max_new_tokens up to 500"):
        compressed("llama").generate(**prompt("llama"), **options)


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens"])
def test_a_length_of_the_models_own_config_is_no_request(name, compressed):
    model = copy.deepcopy(compressed("llama"))
    setattr(model.generation_config, name, 4096)
    model.generation_config.max_time = 0.0  # so that it ends after a token
    assert model.generate(**prompt("llama")).shape == (1, 13)
    with pytest.raises(ValueError, match="a prompt of 512 tokens and what is to follow are 513 tokens"):
        model.generate(**prompt("llama", tokens=512))


def test_a_cache_without_room_is_refused_with_its_estimate(model, monkeypatch):
    monkeypatch.setattr(static_room, "free_bytes", lambda device: 100_000)
    with pytest.raises(ValueError, match=r"2 x 1,024 tokens in float32: cache 896\.\d+ KiB.*97\.66 KiB free"):
        tokens_of(model)
    assert keeper_of(model).cache is None
    monkeypatch.setattr(static_room, "free_bytes", lambda device: 950_000)
    tokens_of(model)
    assert keeper_of(model).cache.nbytes <= 950_000


def test_memory_is_asked_for_new_caches_alone(model, monkeypatch):
    asked = []
    monkeypatch.setattr(cache_keeper, "check_room", lambda model, choice: asked.append(choice))
    for tokens in (12, 20):
        tokens_of(model, tokens=tokens)
    assert len(asked) == 1
