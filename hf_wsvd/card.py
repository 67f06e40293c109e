"""The model card of a compressed model: what was done to it, what that costs, and how to load it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel
from transformers.utils import logging

from .version import __version__


logger = logging.get_logger(__name__)

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


def model_card(
    model: PreTrainedModel,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    metrics: Iterable[Measurement | Mapping[str, Any]] | None = None,
    kv_bytes: Mapping[str, float] | None = None,
    dataset: str | list[str] | None = None,
    license: str | None = None,
    processor_id: str | None = None,
    tags: Iterable[str] = (),
) -> ModelCard:
    """The card of a model compressed with WSVD.

    Args:
        model: The compressed model.
        repo_id: Where it is going to live; the snippet loads it from there.
        base_model: The dense model's name on the Hub. Taken from the model where it is known to come from the Hub;
            a local folder is left out, with a warning.
        metrics: Scores as `Measurement`, or as mappings with its fields.
        kv_bytes: Bytes per token over all layers, under the keys `"dense"` and `"compressed"`. Counted from the ranks
            by default.
        dataset: Names on the Hub of the data the ranks were fitted on.
        license: Its identifier on the Hub, such as `"apache-2.0"`.
        processor_id: Where the snippet loads the processor or tokenizer from; `repo_id` by default.
        tags: More tags.

    Raises:
        ValueError: the model is not compressed.
        TypeError: a measurement with an unknown or a missing field.
    """
    check_compressed(model)
    config = model.config.quantization_config
    rows = [row if isinstance(row, Measurement) else Measurement(**row) for row in metrics or ()]
    known = _base_model(model, base_model)
    if known is None and (base_model or (repo_id and not model.hf_quantizer.pre_quantized)):
        name = base_model or model.config._name_or_path
        logger.warning(
            f"The model card names no base model ({name!r} is not one on the Hub); pass base_model='owner/name'"
        )
    base_model = known
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
        processor_id=processor_id or repo_id,
        metrics=rows,
        kv_bytes=kv_bytes or kv_bytes_per_token(model),
        head_dim=_decoder_shape(model)[1],
        k_ranks=describe_ranks(config.k_rank),
        v_ranks=describe_ranks(config.v_rank),
        calibration_info=config.calibration_info,
        versions={"hf_wsvd": __version__, "transformers": transformers.__version__, "torch": torch.__version__},
    )


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


def kv_bytes_per_token(model: PreTrainedModel) -> dict[str, float]:
    """Bytes that one token adds to the cache, over all decoder layers, dense and with the model's latents."""
    config = model.config.quantization_config
    heads, head_dim = _decoder_shape(model)
    numbers = sum(head_dim if rank is None else rank for rank in [*config.k_rank, *config.v_rank])
    dense = head_dim * (len(config.k_rank) + len(config.v_rank))
    size = heads * torch.empty((), dtype=model.dtype).element_size()
    return {"dense": float(size * dense), "compressed": float(size * numbers)}


def _decoder_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Key/value heads and head dimension of the text decoder."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, head_dim


def _is_image_text_to_text(model: PreTrainedModel) -> bool:
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(model.config), ())
    return isinstance(model, classes)


def _base_model(model: PreTrainedModel, given: str | None) -> str | None:
    """The dense model's name on the Hub, or None: a local folder means nothing to a reader of the card.

    A name that nobody gave counts only if its config.json is in the Hub cache: nothing else tells a repository from
    `"runs/best"`, a folder that has been moved since.
    """
    if given is None and model.hf_quantizer.pre_quantized:
        return None  # it was loaded from a compressed repository, whose card names the base
    name = given or model.config._name_or_path
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    if not name or os.path.exists(name):
        return None
    is_known = given is not None or isinstance(try_to_load_from_cache(name, "config.json"), str)
    return name if is_known else None


def _union(first: str | list[str] | None, second: str | list[str] | None) -> list[str]:
    values = [[value] if isinstance(value, str) else value or [] for value in (first, second)]
    return list(dict.fromkeys(values[0] + values[1]))
