"""A cache as a file: it goes on as if it had never been one, and files of others or damaged ones are refused."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from pathlib import Path

import pytest
import tiny_models
import torch
from crossed import crossed
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

import hf_wsvd
from hf_wsvd import WSVDCache
from hf_wsvd.cache_file import KEY
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.fingerprint import fingerprint


SCHEMES = {
    "whole": {},
    "bf16": {"scheme": "bf16"},
    "fp16": {"scheme": "fp16", "sink_length": 3},
    "fp8": {"scheme": "fp8"},
    "minmax": {"scheme": "minmax", "key_bits": 8, "value_bits": 3, "group_size": 4, "symmetric": False},
    "hadamard": {"scheme": "hadamard", "bits": 4, "skip_layers": [0]},
    "turboquant": {"scheme": "turboquant", "bits": 3, "skip_heads": {1: [0]}},
    "kivi": {"scheme": "kivi", "bits": 2, "group_size": 4, "residual_length": 8},
    "windows": {"bits": 2, "sink_length": 2, "residual_length": 5, "skip_heads": {0: [1]}, "prefill": "stored"},
}
MODELS = ["llama", "mistral", "qwen3", "llama-half", "mistral-half", "qwen3-half"]


@pytest.fixture
def model_of(dense, compressed):
    """`model_of("llama")` is dense, `model_of("llama-half")` compressed to half the rank."""
    return lambda name: compressed(name[:-5], 0.5) if name.endswith("-half") else dense(name)


def tokens(batch=2, length=20, seed=3):
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(model, ids, cache, **kwargs):
    return model(input_ids=ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **kwargs).logits


def fill(model, cache, length=21) -> WSVDCache:
    """Put a prompt and two single tokens in a cache."""
    for ids in tokens(2, length).split([length - 2, 1, 1], dim=1):
        forward(model, ids, cache)
    return cache


def filled(model, length=21, **fields) -> WSVDCache:
    """A cache with a prompt in it."""
    return fill(model, WSVDCache(model, **fields), length)


def assert_goes_on_alike(model, cache, loaded, steps=10):
    batch = cache.layers[0].key_store.batch
    for step in range(steps):  # beyond the slack of the buffers, the windows and a block of KIVI's
        ids = tokens(batch, 3 if step == 4 else 1, seed=step)
        assert torch.equal(forward(model, ids, cache), forward(model, ids, loaded)), step
    assert cache.get_seq_length() == loaded.get_seq_length()


# Round trips --------------------------------------------------------------------------------------------------------


@crossed(3, name=MODELS, scheme=list(SCHEMES))
def test_a_loaded_cache_goes_on_bit_for_bit(name, scheme, model_of, tmp_path):
    model = model_of(name)
    cache = filled(model, **SCHEMES[scheme])
    cache.save(tmp_path / "prompt.safetensors")
    loaded = WSVDCache.load(tmp_path / "prompt.safetensors", model)
    (tmp_path / "prompt.safetensors").write_bytes(b"")  # nothing is read from the file any more
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert loaded.cache_config == cache.cache_config
    for one, other in zip(cache.layers, loaded.layers):
        for before, after in zip(one.stores(), other.stores()):
            assert torch.equal(before.read(), after.read())
            assert sum(p.used for p in before.pieces()) == sum(p.used for p in after.pieces())
    assert loaded.nbytes <= cache.nbytes
    assert_goes_on_alike(model, cache, loaded)


def crop(model, cache):
    cache.crop(-3)


def crop_and_go_on(model, cache):
    cache.crop(-6)
    forward(model, tokens(2, 2, seed=8), cache)


def crop_to_nothing(model, cache):
    cache.crop(-cache.get_seq_length())


def record_past(model, cache):
    cache.activate_past_recording()
    forward(model, tokens(2, 4, seed=8), cache)
    cache.crop(-2)


def beams(model, cache):
    cache.batch_repeat_interleave(3)
    forward(model, tokens(6, 2, seed=8), cache)
    cache.reorder_cache(torch.tensor([1, 1, 0, 5, 3, 3]))


def one_of_them(model, cache):
    cache.batch_select_indices(torch.tensor([1]))


def rows_of_their_own(model, cache):
    """Other positions in each sequence: rotary rows for each."""
    forward(model, tokens(2, 2, seed=8), cache, position_ids=torch.tensor([[40, 41], [60, 61]]))


def many_steps(model, cache):
    for step in range(30):
        forward(model, tokens(2, 1, seed=step), cache)


HISTORIES = [crop, crop_and_go_on, record_past, beams, one_of_them, rows_of_their_own, many_steps]


@crossed(
    2, name=["llama", "mistral-half"], history={h.__name__: h for h in HISTORIES}, scheme=["fp8", "kivi", "windows"]
)
def test_after_any_history(name, history, scheme, model_of, tmp_path):
    model, short = model_of(name), history in (crop, crop_and_go_on)
    cache = filled(model, 7 if short and name == "mistral-half" else 25, **SCHEMES[scheme])
    history(model, cache)
    cache.save(tmp_path / "a")
    loaded = WSVDCache.load(tmp_path / "a", model)
    if history is record_past:
        for each in (cache, loaded):
            each.crop(-1)
    assert_goes_on_alike(model, cache, loaded, steps=4)


@pytest.mark.parametrize("name", ["llama", "llama-half"])
def test_empty_caches_are_saved_too(name, model_of, tmp_path):
    model = model_of(name)
    cropped = filled(model, bits=4)
    crop_to_nothing(model, cropped)
    for cache in (WSVDCache(model, bits=4), cropped):
        cache.save(tmp_path / "empty")
        loaded = WSVDCache.load(tmp_path / "empty", model)
        assert loaded.get_seq_length() == 0
        assert_goes_on_alike(model, filled(model, bits=4), fill(model, loaded), steps=2)


@pytest.mark.parametrize("name", ["llama", "mistral", "mistral-half", "qwen3-half"])
def test_generate_on_a_saved_prompt_equals_generate_without(name, model_of, tmp_path):
    """Two turns: the prompt is saved after the first, the second runs on the loaded cache."""
    model, first, second = model_of(name), tokens(1, 14), tokens(1, 5, seed=4)
    options = {"max_new_tokens": 6, "do_sample": False}
    kept = WSVDCache(model, bits=4)
    answer = model.generate(first, **options, **{CACHE_ARGUMENT: kept})
    kept.save(tmp_path / "turn", input_ids=answer)
    loaded = WSVDCache.load(tmp_path / "turn", model)
    assert torch.equal(loaded.input_ids, answer)
    outputs = [
        model.generate(torch.cat([answer, second], dim=1), **options, **{CACHE_ARGUMENT: cache})
        for cache in (kept, loaded)
    ]
    assert torch.equal(*outputs)
    beams = {**options, "num_beams": 3}
    caches = [WSVDCache.load(tmp_path / "turn", model) for _ in range(2)]
    for each in caches:
        each.batch_repeat_interleave(3)
    outputs = [model.generate(torch.cat([answer, second], 1), **beams, **{CACHE_ARGUMENT: each}) for each in caches]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("compress", [False, True], ids=["dense", "compressed"])
def test_a_reloaded_checkpoint_takes_the_file_in_either_dtype(compress, model_of, tmp_path):
    model = model_of("llama-half" if compress else "llama")
    model.save_pretrained(tmp_path / "model")
    cache = filled(model, bits=8, sink_length=4)
    cache.save(tmp_path / "a")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert_goes_on_alike(model, cache, WSVDCache.load(tmp_path / "a", again), steps=2)
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    before, loaded = WSVDCache.load(tmp_path / "a", model), WSVDCache.load(tmp_path / "a", half)
    for one, other in zip(before.layers, loaded.layers):
        assert other.keys.dtype == other.values.dtype == torch.bfloat16
        torch.testing.assert_close(other.keys, one.keys.bfloat16(), atol=0.02, rtol=0.02)
    forward(half, tokens(2, 1), loaded)
    filled(half, bits=8).save(tmp_path / "b")
    assert WSVDCache.load(tmp_path / "b", model).layers[0].keys.dtype == torch.float32


def test_a_nan_token_is_kept(dense, tmp_path):
    model = dense("llama")
    for fields in SCHEMES.values():
        cache = filled(model, **fields)
        broken = torch.full((2, 2, 1, 16), torch.nan)
        for layer in cache.layers:
            layer.update(broken, broken)
        cache.save(tmp_path / "nan")
        loaded = WSVDCache.load(tmp_path / "nan", model)
        assert torch.equal(loaded.layers[0].values.isnan(), cache.layers[0].values.isnan())


def test_rows_follow_the_devices_of_the_layers(compressed, tmp_path):
    """A file of a model over two devices has its rotary rows twice; on one device they are shared again."""
    model = compressed("llama", 0.5)
    cache = filled(model)
    cache.save(tmp_path / "a")
    change(tmp_path / "a", tmp_path / "b", split_rows)
    assert_goes_on_alike(model, cache, WSVDCache.load(tmp_path / "b", model), steps=3)


def split_rows(header, held):
    header["rows"], header["layers"][2]["rows"] = 2, 1
    for name in ("cos", "sin"):
        held[f"rows.1.{name}"] = held[f"rows.0.{name}"].clone()


# The file -----------------------------------------------------------------------------------------------------------


def change(source: Path, target: Path, *changes) -> None:
    """A copy of a file with changes to its header and tensors."""
    with safe_open(source, "pt") as opened:
        header = json.loads(opened.metadata()[KEY])
    held = load_file(source)
    for each in changes:
        each(header, held)
    save_file({name: value.contiguous() for name, value in held.items()}, target, {KEY: json.dumps(header)})


def test_tensors_have_names_that_tell(compressed, tmp_path):
    filled(compressed("qwen3", 0.5), bits=4, residual_length=4).save(tmp_path / "a", input_ids=tokens(2, 21))
    names = set(load_file(tmp_path / "a"))
    assert {"layers.2.key.middle.payload", "layers.2.value.middle.scales", "layers.0.key.recent.tokens"} <= names
    assert {"rows.0.cos", "rows.0.sin", "input_ids.tokens"} <= names


def test_the_file_is_as_large_as_the_tokens(dense, tmp_path):
    cache = filled(dense("llama"), 300, bits=4)
    cache.save(tmp_path / "a")
    used = sum(
        piece.used
        for layer in cache.layers
        for s in layer.stores()
        for piece in s.pieces()
        if piece.kind != "constants"
    )
    assert used <= (tmp_path / "a").stat().st_size <= used + 16_000


def test_copies_of_a_cache_can_be_saved(dense, tmp_path):
    cache = copy.deepcopy(filled(dense("llama")))
    cache.save(tmp_path / "a")
    assert_goes_on_alike(dense("llama"), cache, WSVDCache.load(tmp_path / "a", dense("llama")), steps=1)
    with pytest.raises(ValueError, match="is gone"):
        pickle.loads(pickle.dumps(cache)).save(tmp_path / "b")


def test_a_failed_save_leaves_the_old_file(dense, tmp_path, monkeypatch):
    cache = filled(dense("llama"), bits=4)
    cache.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    forward(dense("llama"), tokens(2, 4), cache)
    monkeypatch.setattr("hf_wsvd.files.os.fsync", lambda handle: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_saved_is_named(dense, compressed, tmp_path):
    model = dense("llama")
    with pytest.raises(ValueError, match="layer 0 is a PackedStaticLayer"):
        WSVDCache(model, bits=4, max_cache_len=32).save(tmp_path / "a")
    with pytest.raises(ValueError, match="layer 0 is a LatentStaticLayer"):
        WSVDCache(compressed("llama", 0.5), max_cache_len=32).save(tmp_path / "a")
    foreign = filled(model)
    foreign.layers[1] = DynamicCache(config=model.config).layers[1]
    with pytest.raises(ValueError, match="layer 1 is a DynamicLayer"):
        foreign.save(tmp_path / "a")
    uneven = filled(model)
    uneven.layers[2].crop(-1)
    with pytest.raises(ValueError, match="layer 2 has seen 20 tokens, not 21"):
        uneven.save(tmp_path / "a")
    for ids in (tokens(2, 20), tokens(1, 21), tokens(2, 21) * 100, tokens(2, 21) - 200, tokens(2, 21).float()):
        with pytest.raises(ValueError, match="input_ids"):
            filled(model).save(tmp_path / "a", input_ids=ids)
    other = copy.deepcopy(model)
    orphan = filled(other)
    del other
    gc.collect()
    with pytest.raises(ValueError, match="is gone"):
        orphan.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# Other models -------------------------------------------------------------------------------------------------------


def trained(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1.01


def theta(model):
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 500.0}


def epsilon(model):
    model.config.rms_norm_eps = 1e-3


def adapter(model):
    model.model.layers[1].self_attn.q_proj.lora_A = torch.nn.Linear(48, 2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (trained, r"weights \['layers.1.mlp.up_proj.weight'\] are others"),
        (theta, "rope_parameters is .*10000.* there, .*500.0.* here"),
        (epsilon, "rms_norm_eps is 1e-06 there, 0.001 here"),
        (adapter, "adds the parameters .*lora_A"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_changed_model_is_refused(edit, message, dense, tmp_path):
    filled(dense("llama"), bits=4).save(tmp_path / "a")
    model = copy.deepcopy(dense("llama"))
    WSVDCache.load(tmp_path / "a", model)
    edit(model)
    with pytest.raises(ValueError, match=f"/a: it was made by another model: .*{message}"):
        WSVDCache.load(tmp_path / "a", model)


def test_another_model_is_refused(dense, compressed, tmp_path):
    llama, half = dense("llama"), compressed("llama", 0.5)
    filled(llama).save(tmp_path / "dense")
    filled(half).save(tmp_path / "half")
    cases = [
        ("dense", dense("llama_mha"), r"decoder_shape is .*\[2\].* there, .*\[4\].* here"),
        ("dense", dense("qwen3"), "class is LlamaModel there, Qwen3Model here"),
        ("dense", tiny_models.build("llama", seed=1), "are others"),
        ("dense", half, "compression of layer 0 is .*None.* there, .*'k_rank': 8"),
        ("half", llama, "compression of layer 0 is .*'k_rank': 8.* there, .*None.* here"),
        ("half", compressed("llama", 0.75), "compression of layer 0 is .*'k_rank': 8.* there, .*12.* here"),
        ("half", compressed("llama", 0.5, method="svd"), "weights .*self_attn.* are others"),
    ]
    for name, model, message in cases:
        with pytest.raises(ValueError, match=f"{name}: it was made by another model: .*{message}"):
            WSVDCache.load(tmp_path / name, model)
    layout = copy.deepcopy(half)
    binding = layout.model.layers[1].self_attn._wsvd
    binding.layout = hf_wsvd.quantizer_config.KeyLayout("none", "interleaved")
    with pytest.raises(ValueError, match=r"compression of layer 1 is .*none:halves.* there, .*none:interleaved"):
        WSVDCache.load(tmp_path / "half", layout)


def test_offloaded_weights_are_not_compared(dense, tmp_path):
    filled(dense("llama")).save(tmp_path / "a")
    model = copy.deepcopy(dense("llama"))
    model.model.layers[1].mlp.up_proj.to("meta")
    WSVDCache.load(tmp_path / "a", model)
    assert fingerprint(model)["weights"]["layers.1.mlp.up_proj.weight"] is None
    model.model.to("meta")
    with pytest.raises(ValueError, match="no weight can be compared"):
        WSVDCache.load(tmp_path / "a", model, device="cpu")


# Damaged files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(dense, compressed, tmp_path_factory) -> dict[str, Path]:
    """One file of each kind, with input ids."""
    folder = tmp_path_factory.mktemp("caches")
    made = {
        "kivi": (dense("llama"), SCHEMES["kivi"]),
        "windows": (compressed("llama", 0.5), SCHEMES["windows"]),
        "sliding": (compressed("mistral", 0.5), {"scheme": "fp8"}),
    }
    for name, (model, fields) in made.items():
        filled(model, **fields).save(folder / name, input_ids=tokens(2, 21))
    return {name: folder / name for name in made}


@pytest.fixture
def of_file(dense, compressed):
    models = {"kivi": dense("llama"), "windows": compressed("llama", 0.5), "sliding": compressed("mistral", 0.5)}
    return models.get


def put(path: str, value):
    """A change of one entry of the header."""

    def edit(header, held):
        *parents, last = path.split("/")
        for name in parents:
            header = header[int(name) if isinstance(header, list) else name]
        header[int(last) if isinstance(header, list) else last] = value

    return edit


def tensor(name: str, edit):
    """A change of one tensor; None drops it."""

    def change_one(header, held):
        value = edit(held.pop(name, None))
        if value is not None:
            held[name] = value

    return change_one


def spoil(value):
    value = value.clone()
    value.view(-1)[0] = torch.nan
    return value


def drop(value):
    return None


NUMBERS = [-1, 2**70, 10**9, 1.5, True, None, "3", [1], 0]
DAMAGE = [
    *(("windows", put(name, value), "") for name in ("length", "batch") for value in NUMBERS),
    *(("windows", put("rows", value), "rows") for value in NUMBERS),
    *(("windows", put("layers/1/rows", value), "layer 1 has rotary rows") for value in NUMBERS if value != 0),
    *(("windows", put("layers/1/key/heads", value), "key of layer 1 has") for value in NUMBERS),
    *(("windows", put("layers/1/value/width", value), "value of layer 1 has") for value in NUMBERS),
    *(("kivi", put("layers/1/key/dtype", value), "dtype=") for value in (*NUMBERS, "int8", "float99")),
    ("windows", put("layers/1/value/dtype", "bfloat16"), "value"),
    *(("sliding", put("layers/0/window", value), "window of layer 0") for value in NUMBERS),
    *(("sliding", put("layers/0/record_past", value), "record_past") for value in (None, 1, "yes")),
    ("windows", put("layers/0/record_past", True), "record_past"),
    *(("windows", put("layers/0/kind", value), "layer 0 is") for value in ("full", "sliding", [], None, "latent_x")),
    *(("windows", put("layers/0", value), "layer 0 has no record") for value in ([], None, "x")),
    *(("windows", put("layers/0/key", value), "has no record") for value in ([], None, "x")),
    *(("windows", put("layers", value), "number of layers") for value in ([], {}, None, [1])),
    *(("windows", put("version", value), "format version") for value in (2, None, "1")),
    *(("windows", put("model", value), "no record of its model") for value in ({}, None, [], "x")),
    *(("windows", put("model/weights", value), "") for value in ({}, None, {"a": 1})),
    *(("windows", put("cache_config", value), "") for value in (None, [], {"bits": 5}, {"surprise": 1}, {"bits": 4})),
    *(("windows", put("cache_config/sink_length", value), "") for value in (-1, 1, "x")),
    ("windows", put("cache_config/guard_map", "/etc/hostname"), "guard_map='/etc/hostname'"),
    *(
        ("windows", put("cache_config/layers", value), "")
        for value in ({"9": {}}, {"x" * 9: {}}, {"1" * 9999: {}}, [])
    ),
    ("windows", tensor("surprise", lambda _: torch.zeros(1)), "unknown tensors: surprise"),
    ("windows", tensor("layers.7.key.tokens", lambda _: torch.zeros(1)), "unknown tensors: layers.7"),
    ("windows", tensor("layers.1.key.surprise", lambda _: torch.zeros(1)), "layers.1.key: tensor surprise"),
    ("windows", tensor("layers.1.key.middle.payload", drop), "layers.1.key: tensors"),
    ("windows", tensor("layers.1.key.middle.scales", drop), "layers.1.key: tensors"),
    ("windows", tensor("layers.1.key.recent.tokens", drop), "layer 1 has seen 16 tokens, not 21"),
    ("windows", tensor("layers.1.key.middle.payload", lambda t: t[..., :-1]), "wanted"),
    ("windows", tensor("layers.1.key.middle.payload", lambda t: t[:, :1]), "wanted"),
    ("windows", tensor("layers.1.key.middle.payload", lambda t: t[0]), "wanted"),
    ("windows", tensor("layers.1.key.middle.payload", lambda t: t[:, :, 1:]), "differ in batch or length"),
    ("windows", tensor("layers.1.key.middle.payload", lambda t: t.view(torch.int8)), "wanted"),
    ("windows", tensor("layers.1.key.middle.scales", lambda t: t.float()), "wanted"),
    ("windows", tensor("layers.1.key.sink.tokens", lambda t: t.half()), "wanted"),
    ("windows", tensor("layers.1.key.sink.tokens", lambda t: t.repeat(1, 1, 2, 1)), "windows hold"),
    ("windows", tensor("layers.1.key.recent.tokens", lambda t: t[:1]), "differ in batch"),
    ("windows", tensor("layers.0.key.whole.sink.tokens", lambda t: torch.zeros(1)), "layers.0.key"),
    ("windows", tensor("rows.0.cos", drop), "lacks rows.0.cos"),
    ("windows", tensor("rows.0.sin", lambda t: t[:, :, 1:]), "rows.0.sin is"),
    ("windows", tensor("rows.0.sin", spoil), "rows.0.sin is"),
    ("windows", tensor("rows.0.cos", lambda t: t.int()), "rows.0.cos is"),
    ("windows", tensor("rows.1.cos", lambda _: torch.zeros(1)), "unknown tensors: rows.1.cos"),
    ("windows", split_rows, "differ"),
    ("kivi", tensor("layers.0.key.hidden", lambda t: t + 4), "hidden"),
    ("kivi", tensor("layers.0.key.hidden", lambda t: t - 1), "hidden"),
    ("kivi", tensor("layers.0.key.hidden", lambda t: t.int()), "hidden"),
    ("kivi", tensor("layers.0.key.hidden", drop), "layers.0.key: tensors"),
    ("kivi", tensor("layers.0.key.scales", spoil), "scales are not finite"),
    ("kivi", tensor("layers.0.key.scales", lambda t: t[:, :, 1:]), "do not fit"),
    ("kivi", tensor("layers.0.key.recent", lambda t: t[:1]), "does not fit"),
    ("kivi", tensor("layers.0.key.recent", lambda t: t.repeat(1, 1, 2, 1)), "does not fit"),
    ("sliding", tensor("layers.0.key.scale", spoil), "scale is not finite"),
    ("sliding", tensor("layers.0.key.scale", lambda t: t[:, :1]), "scale is"),
    ("sliding", tensor("layers.0.key.scale", drop), "layers.0.key: tensors"),
    ("sliding", tensor("layers.0.key.payload", lambda t: t[:, :, 1:]), "layer 0 holds"),
    ("sliding", tensor("input_ids.tokens", lambda t: t - 1000), "input_ids"),
    ("sliding", tensor("input_ids.tokens", lambda t: t + 1000), "input_ids"),
    ("sliding", tensor("input_ids.tokens", lambda t: t[:, 1:]), "input_ids"),
    ("sliding", tensor("input_ids.tokens", lambda t: t.float()), "input_ids"),
]


def turn_rows(header, held):
    held["rows.1.cos"] = -held["rows.1.cos"]


@pytest.mark.parametrize(("kind", "edit", "message"), DAMAGE, ids=range(len(DAMAGE)))
def test_damaged_contents_are_named(kind, edit, message, files, of_file, tmp_path):
    edits = (edit, turn_rows) if edit is split_rows else (edit,)
    change(files[kind], tmp_path / "bad", *edits)
    with pytest.raises(ValueError, match=rf"/bad: .*{message}"):
        WSVDCache.load(tmp_path / "bad", of_file(kind))


@pytest.mark.parametrize("share", [0, 1e-4, 0.01, 0.5, 0.999])
def test_truncated_files_are_refused(share, files, of_file, tmp_path):
    whole = files["kivi"].read_bytes()
    (tmp_path / "cut").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=r"/cut is not a readable key value cache file \(truncated"):
        WSVDCache.load(tmp_path / "cut", of_file("kivi"))


def test_files_that_are_none(dense, tmp_path):
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        WSVDCache.load(tmp_path / "none", dense("llama"))
    with pytest.raises(ValueError, match="not a readable"):
        WSVDCache.load(tmp_path, dense("llama"))
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="it holds no key value cache"):
        WSVDCache.load(tmp_path / "foreign", dense("llama"))
