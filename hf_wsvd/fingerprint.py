"""What tells one model from another, so that a saved cache is not read by a model that did not make it."""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .decoder import decoder_attentions, decoder_of, decoder_shape
from .modules import LatentProjection
from .tensor_file import expect


SAMPLED = 16  # elements of each parameter
# Fields of a text config that do not change what a decoder computes of given tokens, or that other facts cover.
UNRELATED = {
    *("architectures", "attn_implementation", "bos_token_id", "cache_implementation", "dtype", "eos_token_id"),
    *("experts_implementation", "id2label", "initializer_range", "label2id", "name_or_path", "output_attentions"),
    *("output_hidden_states", "pad_token_id", "problem_type", "quantization_config", "return_dict", "torch_dtype"),
    *("transformers_version", "use_cache"),
}


class ModelReference:
    """The model that a cache is for, held weakly: copies of the cache share it, a pickled one forgets it."""

    def __init__(self, model: PreTrainedModel | None = None):
        self._model = None if model is None else weakref.ref(model)

    def __call__(self) -> PreTrainedModel | None:
        return None if self._model is None else self._model()

    def __deepcopy__(self, memo: dict) -> ModelReference:
        return self

    def __reduce__(self) -> tuple:
        return ModelReference, ()


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """JSON-safe facts of a model: decoder class and shape, text config, ranks and key layouts, digests of weights.

    Loads of one checkpoint in fp32 and in bf16 agree. Takes milliseconds, for no parameter is read as a whole: see
    `weight_digests`.
    """
    decoder = decoder_of(model)
    config = model.config.get_text_config(decoder=True).to_dict()
    related = {name: value for name, value in config.items() if name not in UNRELATED and not name.startswith("_")}
    facts = {
        "class": type(decoder).__name__,
        "decoder_shape": decoder_shape(model),
        "config": related,
        "compression": {str(a.layer): compression(a.module) for a in decoder_attentions(model)},
        "weights": weight_digests(decoder),
    }
    return json.loads(json.dumps(facts, default=str))


def compression(attention: nn.Module) -> dict[str, Any]:
    """Ranks (None: dense) and key layout (None: the cache holds dense heads) of an attention layer."""
    sides = {"k_rank": attention.k_proj, "v_rank": attention.v_proj}
    ranks = {name: side.rank if isinstance(side, LatentProjection) else None for name, side in sides.items()}
    layout = getattr(getattr(attention, "_wsvd", None), "layout", None)
    return {**ranks, "key_layout": None if layout is None else str(layout)}


@torch.no_grad()
def weight_digests(module: nn.Module) -> dict[str, str | None]:
    """By parameter name the start of the sha256 of 16 evenly spaced elements in bf16; None where it is not at hand.

    An update of any training changes some of the thousands of elements by enough to show, but a change of a few
    numbers alone need not. Offloaded and sharded parameters are not at hand.
    """
    digests: dict[str, str | None] = {}
    sampled: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, parameter in module.named_parameters():
        digests[name] = None
        if parameter.device.type != "meta" and parameter.numel() and not hasattr(parameter, "full_tensor"):
            sampled.setdefault(parameter.device, []).append((name, sample_of(parameter.detach())))
    for entries in sampled.values():  # one transfer a device
        rows = torch.stack([values for _, values in entries]).cpu().contiguous().view(torch.uint8)
        for (name, _), row in zip(entries, rows):
            digests[name] = hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]
    return digests


def sample_of(parameter: Tensor) -> Tensor:
    """`[16]` bf16: the first element, the last, and those evenly between (small tensors repeat some)."""
    if parameter.element_size() == 1:  # few operations take 8-bit floats
        parameter = parameter.view(torch.uint8)
    last = parameter.numel() - 1
    index = torch.tensor([last * number // (SAMPLED - 1) for number in range(SAMPLED)], device=parameter.device)
    return torch.take(parameter, index).to(torch.bfloat16)


def check_same(saved: Any, model: PreTrainedModel) -> None:
    """Raise ValueError that names the difference unless `saved`, not trusted, is the fingerprint of `model`.

    Config fields that only one side has are not compared: they come and go with versions of transformers.
    """
    present = fingerprint(model)
    parts = isinstance(saved, dict) and all(type(saved.get(name)) is type(value) for name, value in present.items())
    expect(parts, "it has no record of its model")
    for name in ("class", "decoder_shape"):
        expect(saved[name] == present[name], another(name, saved[name], present[name]))
    for name in ("compression", "config"):
        for key in sorted(saved[name].keys() | present[name].keys()):
            compared = name == "compression" or (key in saved[name] and key in present[name])
            old, new = saved[name].get(key), present[name].get(key)
            label = f"compression of layer {key}" if name == "compression" else key
            expect(not compared or old == new, another(label, old, new))
    check_weights(saved["weights"], present["weights"])


def check_weights(saved: dict[str, Any], present: dict[str, str | None]) -> None:
    """Raise ValueError unless the parameters have the same names, and digests where both sides know them."""
    for names, where in ((saved.keys() - present.keys(), "lacks"), (present.keys() - saved.keys(), "adds")):
        expect(not names, f"it was made by another model: this one {where} the parameters {sorted(names)[:3]}")
    known = [name for name in present if None not in (saved[name], present[name])]
    changed = [name for name in known if saved[name] != present[name]]
    expect(
        not changed,
        f"it was made by another model: the weights {changed[:3]} are others ({len(changed)} of {len(known)}; "
        "fine-tuned, compressed anew, or loaded in another dtype than float32 and bfloat16?)",
    )
    expect(bool(known), "no weight can be compared: all are offloaded, now or when the cache was saved")


def another(name: str, saved: Any, present: Any) -> str:
    """An error for a fact that differs."""
    return f"it was made by another model: {name} is {str(saved)[:200]} there, {str(present)[:200]} here"
