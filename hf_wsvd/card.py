"""The model card of a compressed model: what was done to it, what that costs, and how to load it."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData, constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel
from transformers.utils import logging

from .attention import bound_layers
from .cache import model_cache_config
from .decoder import decoder_attentions
from .estimate import estimate_memory
from .headguard.summary import guard_summary
from .low_precision.convert import quantized_modules
from .quantizer_config import CacheConfig, WSVDConfig
from .self_check import self_check_of
from .version import __version__


logger = logging.get_logger(__name__)

PACKED_TOKENS = 4096
TAGS = ["hf_wsvd", "wsvd", "low-rank", "kv-cache"]
BLOCK_START, BLOCK_END = "<!-- hf_wsvd:start -->", "<!-- hf_wsvd:end -->"
GENERATED_BLOCK = re.compile(re.escape(BLOCK_START) + ".*?" + re.escape(BLOCK_END), re.DOTALL)


@dataclass(frozen=True)
class Measurement:
    """One score of the compressed model, beside the dense model's.

    Attributes:
        dataset: Its readable name.
        metric: Its name, such as `"accuracy"`.
        compressed, dense: The scores, in the same unit.
        dataset_id: The data set's name on the Hub.
        split: Which part of the data set.
        samples: How many examples were scored.
        higher_is_better: False for perplexity and other losses.
    """

    dataset: str
    metric: str
    compressed: float
    dense: float | None = None
    dataset_id: str | None = None
    split: str | None = None
    samples: int | None = None
    higher_is_better: bool = True

    @property
    def recovery(self) -> float | None:
        """Percent of the dense score that is kept; above 100 where the compressed model is better."""
        better, worse = (self.compressed, self.dense) if self.higher_is_better else (self.dense, self.compressed)
        return None if self.dense is None or worse == 0 else 100 * better / worse

    def to_eval_result(self, task: str) -> EvalResult:
        """The entry of the card's `model-index`; `task` is the pipeline tag."""
        return EvalResult(
            task_type=task,
            dataset_type=self.dataset_id or self.dataset,
            dataset_name=self.dataset,
            dataset_split=self.split,
            metric_type=self.metric.lower().replace(" ", "_"),
            metric_name=self.metric,
            metric_value=self.compressed,
        )


def measurements(rows: Iterable[Measurement | Mapping[str, Any]] | None) -> list[Measurement]:
    """The rows as `Measurement`; TypeError for a mapping with an unknown or a missing field."""
    return [row if isinstance(row, Measurement) else Measurement(**row) for row in rows or ()]


def model_card(
    model: PreTrainedModel,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    metrics: Iterable[Measurement | Mapping[str, Any]] | None = None,
    kv_bytes: Mapping[str, float] | None = None,
    dataset: str | list[str] | None = None,
    license: str | None = None,
    with_processor: bool = False,
    tags: Iterable[str] = (),
) -> ModelCard:
    """The card of a model compressed with WSVD.

    Args:
        model: The compressed model.
        repo_id: Where it is going to live; the snippet loads it from there.
        base_model: The dense model's name on the Hub; by default what the fit recorded. The path of a local folder is
            left out, with a warning.
        metrics: Scores as `Measurement`, or as mappings with its fields.
        kv_bytes: Bytes per token, under the keys `"dense"` and `"compressed"`; by default `kv_bytes_per_token`.
        dataset: Names on the Hub of the data the ranks were fitted on.
        license: Its identifier on the Hub, such as `"apache-2.0"`.
        with_processor: Whether the repository holds the processor or tokenizer; if not, the snippet loads the base
            model's.
        tags: More tags.

    Raises:
        ValueError: the model is not compressed.
        TypeError: a measurement with an unknown or a missing field.
        KeyError: `kv_bytes` without one of its keys.
    """
    check_compressed(model)
    config = model.config.quantization_config
    rows = measurements(metrics)
    info = dict(config.calibration_info or {})
    recorded = info.pop("base_model", None)
    base_model = hub_name(base_model) if base_model else recorded
    if base_model is None and repo_id is not None:
        logger.warning(
            f"The card of {repo_id} names no base model: none is known to be on the Hub; pass base_model=..."
        )
    multimodal = _is_image_text_to_text(model)
    task = "image-text-to-text" if multimodal else "text-generation"
    title = (repo_id or base_model or type(model).__name__).split("/")[-1]
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized" if base_model else None,
        library_name="transformers",
        pipeline_tag=task,
        license=license,
        datasets=[dataset] if isinstance(dataset, str) else dataset,
        tags=[*TAGS, *(tag for tag in tags if tag not in TAGS)],
        model_name=title if rows else None,
        eval_results=[row.to_eval_result(task) for row in rows] or None,
    )
    repo_id = repo_id or "<name of this repository>"
    return ModelCard.from_template(
        data,
        template_str=files(__package__).joinpath("model_card.md.j2").read_text(encoding="utf-8"),
        title=title,
        block_start=BLOCK_START,
        block_end=BLOCK_END,
        architecture=type(model).__name__,
        auto_model="AutoModelForImageTextToText" if multimodal else "AutoModelForCausalLM",
        auto_processor="AutoProcessor" if multimodal else "AutoTokenizer",
        processor_variable="processor" if multimodal else "tokenizer",
        repo_id=repo_id,
        processor_id=base_model if base_model and not with_processor else repo_id,
        metrics=rows,
        kv_bytes={name: (kv_bytes or kv_bytes_per_token(model))[name] for name in ("dense", "compressed")},
        latent=any(layout is not None for layout in config.key_layout),
        cache=None if config.cache is None else json.dumps(packed_fields(config.cache)),
        image_tokens=config.storage is not None and config.storage.by_class,
        guards=guard_facts(config),
        low_precision=None if config.low_precision is None else config.low_precision.summary(),
        weight_bytes=weight_bytes(model),
        packed_tokens=PACKED_TOKENS,
        head_dim=" or ".join(map(str, config.decoder_shape["head_dim"])),
        k_ranks=describe_ranks(_cached_ranks(config.k_rank, config.key_layout)),
        v_ranks=describe_ranks(_cached_ranks(config.v_rank, config.key_layout)),
        calibration_info={_table_text(name).replace("_", " "): _table_text(value) for name, value in info.items()},
        self_check=self_check_of(model),
        versions={"hf_wsvd": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
    )


def weight_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Bytes of the layers that are quantized, and of the same weights in the model's dtype."""
    modules = quantized_modules(model).values()
    held = sum(module.weight.nbytes + module.weight_scales.nbytes for module in modules)
    whole = sum(len(module.weight) * module.in_features for module in modules) * model.dtype.itemsize
    return {"held": held, "whole": whole}


def packed_fields(cache: CacheConfig) -> dict[str, Any]:
    """The fields of a packed cache without its guard map, which is long and described by itself."""
    return {name: value for name, value in cache.to_dict().items() if name != "guard_map"}


def guard_facts(config: WSVDConfig) -> dict[str, Any] | None:
    """What the card says of guarded heads, as text fit for Markdown; None without any."""
    if config.guard_map is None:
        return None
    facts = guard_summary(config.guard_map)
    fraction = facts["guarded_heads"] / max(1, facts["heads"])
    if config.head_guard is not None and config.head_guard.selector == facts["selector"]:
        fraction = config.head_guard.fraction
    sides = {"k": "keys", "v": "values", "kv": "keys and values"}.get(facts["protect"], facts["protect"])
    return {
        **facts,
        "selector": _table_text(facts["selector"] or "not recorded"),
        "fraction": f"{fraction:.4g}",
        "sides": sides,
        "bits": " or ".join(map(str, facts["bits"])),
        "tokens": "all tokens" if facts["tokens"] == "all" else "tokens of images and videos",
    }


def hub_name(name: str | None) -> str | None:
    """`name` if it can be a repository's, None if it is a path: a local folder means nothing to others.

    A folder that exists goes first, as in `from_pretrained`.
    """
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return None
    return name if name and not os.path.exists(name) else None


def base_model_on_hub(model: PreTrainedModel) -> str | None:
    """The repository that a dense model was loaded from, or None.

    It must be in the Hub cache: nothing else tells a repository from `"runs/best"`, a folder that has moved since.
    """
    name = hub_name(getattr(model.config, "_name_or_path", None))
    if name is None:
        return None
    folder = repo_folder_name(repo_id=name, repo_type="model")
    return name if os.path.isdir(os.path.join(constants.HF_HUB_CACHE, folder)) else None


def check_compressed(model: PreTrainedModel) -> None:
    """Raise ValueError unless the model holds WSVD latents."""
    config = getattr(model.config, "quantization_config", None)
    if getattr(config, "quant_method", None) != "wsvd":
        raise ValueError(f"{type(model).__name__} is not compressed with WSVD: it has no hf_wsvd model card")


def merge_cards(present: ModelCard, new: ModelCard) -> ModelCard:
    """`present` with its generated block brought up to date, and everything that people wrote kept.

    The block is appended where there is none. Metadata of `new` replaces what is present, the rest stays, and tags and
    data sets are joined. Scores are always the new ones: numbers belong to the weights beside them.
    """
    block = GENERATED_BLOCK.search(new.text).group()
    if GENERATED_BLOCK.search(present.text):
        text = GENERATED_BLOCK.sub(lambda _: block, present.text, count=1)
    else:
        text = f"{present.text.rstrip()}\n\n{block}\n"
    kept, added = present.data.to_dict(), new.data.to_dict()
    kept.pop("model-index", None)
    joined = {
        key: _union(kept.get(key), added.get(key)) for key in ("tags", "datasets") if key in kept or key in added
    }
    return ModelCard(f"---\n{ModelCardData(**(kept | added | joined)).to_yaml()}\n---\n{text}")


def describe_ranks(ranks: list[int | None]) -> str:
    """`"64"`, or `"16 to 64, 40.0 on average"`, with the number of layers kept dense."""
    cut = [rank for rank in ranks if rank is not None]
    if not cut:
        return "dense in all layers"
    text = str(cut[0]) if min(cut) == max(cut) else f"{min(cut)} to {max(cut)}, {sum(cut) / len(cut):.1f} on average"
    dense = len(ranks) - len(cut)
    return f"{text} ({dense} of {len(ranks)} layers dense)" if dense else text


def kv_bytes_per_token(model: PreTrainedModel) -> dict[str, int]:
    """Bytes that one token adds to the cache of one sequence, over all decoder layers: dense, and with the latents.

    The rotary rows that latent layers share count, with `head_dim` numbers a token and kind of rotation (a model that
    rotates a part of each head holds fewer). Packed caches are taken at `PACKED_TOKENS` tokens, windows included, of
    images where these are kept otherwise than others.
    """
    if model_cache_config(model) is not None:
        estimate = estimate_memory(model, PACKED_TOKENS, image_tokens=PACKED_TOKENS)
        return {
            "dense": estimate.dense_cache_bytes // PACKED_TOKENS,
            "compressed": estimate.cache_bytes // PACKED_TOKENS,
        }
    latent = bound_layers(model)
    dense = compressed = 0
    rows = {}
    for attention in decoder_attentions(model):
        whole = 2 * attention.heads * attention.head_dim
        dense += whole
        if attention.layer in latent:
            projections = attention.module.k_proj, attention.module.v_proj
            compressed += sum(projection.weight.shape[0] for projection in projections)
            binding = attention.module._wsvd
            if binding.layout.rotation != "none":
                rows[binding.row_group] = attention.head_dim
        else:
            compressed += whole
    size = torch.empty((), dtype=model.dtype).element_size()
    return {"dense": size * dense, "compressed": size * (compressed + sum(rows.values()))}


def _table_text(value: Any) -> str:
    """What came from outside as text that stays inside its cell of a Markdown table: one line, no markup of HTML."""
    return html.escape(" ".join(str(value).split()), quote=False).replace("|", "&#124;")


def _cached_ranks(ranks: list[int | None], layouts: list[str | None]) -> list[int | None]:
    """Ranks as the cache has them: a layer without a key layout caches dense keys and values."""
    return [rank if layout is not None else None for rank, layout in zip(ranks, layouts)]


def _is_image_text_to_text(model: PreTrainedModel) -> bool:
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(model.config), ())
    return isinstance(model, classes)


def _union(first: str | list[str] | None, second: str | list[str] | None) -> list[str]:
    values = [[value] if isinstance(value, str) else value or [] for value in (first, second)]
    return list(dict.fromkeys(values[0] + values[1]))
