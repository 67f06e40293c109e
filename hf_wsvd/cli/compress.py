"""`hf-wsvd compress`: a dense model in, a compressed checkpoint folder out."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, GgufConfig, PreTrainedModel

from ..auto_class import auto_class_of
from ..calibration import load_statistics
from ..evaluate.cache_size import cache_size
from ..files import check_output, replaced_folder
from ..quantizer import compress as compress_model
from ..quantizer_config import (
    LOW_PRECISION_METHODS,
    METHODS,
    CacheConfig,
    HeadGuardConfig,
    LowPrecisionConfig,
    WSVDConfig,
)
from ..surgery import needs_batches
from .dataset_options import (
    Dataset,
    DatasetName,
    MaxTokens,
    PresetName,
    Samples,
    Seed,
    Split,
    Streaming,
    built_in_batches,
    dataset_batches,
)


DTYPES = ("auto", "float32", "float16", "bfloat16")


def compress(
    model: Annotated[str, typer.Argument(help="Folder or Hub repository of a dense text or vision-language model.")],
    output_dir: Annotated[Path, typer.Option("-o", "--output-dir", help="Folder to write; new or empty.")],
    rank_ratio: Annotated[
        str, typer.Option(help="Latent width as a fraction of the head dimension; none: no head is cut.")
    ] = "0.5",
    k_rank: Annotated[int | None, typer.Option(help="Rank of every K head, in place of the ratio.")] = None,
    v_rank: Annotated[int | None, typer.Option(help="Rank of every V head, in place of the ratio.")] = None,
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}; the others are for comparison.")] = "wsvd",
    rank_allocation: Annotated[
        str | None, typer.Option(help="gradient (the ratio's bytes go where they help most) or uniform.")
    ] = None,
    refinement: Annotated[
        str | None,
        typer.Option(
            help="distillation (the factors learn the dense model's answers; best on a GPU), fisher or none."
        ),
    ] = None,
    refinement_steps: Annotated[int | None, typer.Option(min=1, help="Steps of the distillation; 60.")] = None,
    latent_rotation: Annotated[
        str, typer.Option(help="hadamard (latent channels of even size, for caches of few bits) or none.")
    ] = "hadamard",
    bits: Annotated[
        int | None, typer.Option(help="Bits that the model's caches are packed in: 16, 8, 4, 3 or 2; the model's own.")
    ] = None,
    head_guard: Annotated[
        float | None,
        typer.Option(help="With --bits: share of the KV heads that keep 16. See `hf-wsvd headguard`."),
    ] = None,
    selector: Annotated[str | None, typer.Option(help="With --head-guard: what ranks the heads; headguard.")] = None,
    protect: Annotated[str | None, typer.Option(help="With --head-guard: k (keys) or kv (and values); k.")] = None,
    weight_bits: Annotated[
        int | None, typer.Option(help="Bits of the decoder's weights: 8 or 4; the model's own dtype.")
    ] = None,
    activation_bits: Annotated[
        int | None, typer.Option(help="With --weight-bits: bits of what they are multiplied with, 16, 8 or 4; 8.")
    ] = None,
    low_precision_method: Annotated[
        str | None, typer.Option(help=f"With --weight-bits: {', '.join(LOW_PRECISION_METHODS)}; wsvd_qat.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Statistics of `hf-wsvd calibrate`, in place of a data set.")
    ] = None,
    self_check: Annotated[
        str, typer.Option(help="Inputs recorded in the checkpoint: calibration (samples of the data), probe or none.")
    ] = "calibration",
    dataset: Dataset = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    preset: PresetName = None,
    streaming: Streaming = False,
    samples: Samples = 64,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto keeps the checkpoint's.")] = "auto",
    device: Annotated[str, typer.Option(help="Device to calibrate on (cpu, cuda:0), or auto to spread.")] = "cpu",
    gguf_file: Annotated[str | None, typer.Option(help="A GGUF file in the model's folder or repository.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output folder that is not empty.")
    ] = False,
) -> None:
    """Compress a model's KV cache and save the checkpoint with its tokenizer or processor."""
    check_output(output_dir, overwrite)
    if Path(model).resolve().is_relative_to(output_dir.resolve()):
        raise ValueError(f"{output_dir} is, or holds, the model that is to be compressed")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype}")
    check_device(device)
    config = WSVDConfig(
        rank_ratio=ratio(rank_ratio),
        k_rank=k_rank,
        v_rank=v_rank,
        method=method,
        rank_allocation=rank_allocation,
        refinement=refinement,
        latent_rotation=latent_rotation,
        cache=None if bits is None else CacheConfig(bits=bits),
        head_guard=guard_config(head_guard, selector, protect, seed),
        low_precision=low_precision_config(weight_bits, activation_bits, low_precision_method),
        seed=seed,
        self_check=self_check,
        **({} if refinement_steps is None else {"refinement_steps": refinement_steps}),
    )
    if refinement_steps is not None and config.refinement != "distillation":
        raise ValueError(f"--refinement-steps are those of the distillation, and --refinement is {config.refinement}")
    if calibration is not None and (dataset is not None or max_tokens is not None):
        lone = "--dataset" if dataset is not None else "--max-tokens"
        raise ValueError(f"--calibration names finished statistics: {lone} says nothing beside it, leave one out")
    source, auto_class = find_model(model, gguf_file)
    processor = load_processor(model, source, auto_class)
    batches = dataset_batches(  # before the weights: data that do not fit fail early
        processor,
        dataset=dataset,
        dataset_name=dataset_name,
        split=split,
        preset=preset,
        streaming=streaming,
        samples=samples,
        max_tokens=max_tokens,
        seed=seed,
    )
    statistics = None if calibration is None else load_statistics(calibration)
    dense = load_dense(model, source, auto_class, dtype, device)
    if batches is None and statistics is None and (config.compresses or needs_batches(config)):
        batches = built_in_batches(dense, processor, samples, max_tokens, seed)
    compressed = compress_model(dense, config, calibration=batches, statistics=statistics)
    with replaced_folder(output_dir) as partial:
        compressed.save_pretrained(partial)
        processor.save_pretrained(partial)
    size = sum(file.stat().st_size for file in output_dir.rglob("*") if file.is_file())
    typer.echo(f"{output_dir}: {size / 1e6:.1f} MB")
    typer.echo(cache_size(compressed.config).summary())


def ratio(text: str) -> float | None:
    """What `--rank-ratio` says; ValueError for neither a number nor none."""
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--rank-ratio must be a number or none, got {text}") from None


def guard_config(
    fraction: float | None, selector: str | None, protect: str | None, seed: int
) -> HeadGuardConfig | None:
    """What `--head-guard` asks for; ValueError for options that say nothing without it."""
    given = {"selector": selector, "protect": protect}
    given = {name: value for name, value in given.items() if value is not None}
    if fraction is not None:
        return HeadGuardConfig(fraction=fraction, seed=seed if selector == "random" else 0, **given)
    if given:
        raise ValueError(f"{', '.join(f'--{name}' for name in given)} needs --head-guard")
    return None


def low_precision_config(
    weight_bits: int | None, activation_bits: int | None, method: str | None
) -> LowPrecisionConfig | None:
    """What `--weight-bits` asks for; ValueError for options that say nothing without it."""
    given = {"activation_bits": activation_bits, "method": method}
    given = {name: value for name, value in given.items() if value is not None}
    if weight_bits is not None:
        return LowPrecisionConfig(weight_bits=weight_bits, **given)
    if given:
        options = {"activation_bits": "--activation-bits", "method": "--low-precision-method"}
        raise ValueError(f"{', '.join(options[name] for name in given)} needs --weight-bits")
    return None


def check_device(device: str) -> None:
    """Raise ValueError unless torch has the device, or it is "auto"."""
    if device == "auto":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error


def find_model(model: str, gguf_file: str | None) -> tuple[dict[str, Any], Any]:
    """The arguments that every part of a dense model is loaded with, and its auto class.

    Code that comes with a repository is never run.

    Raises ValueError for a model that is quantized already or is neither a decoder nor a vision-language model.
    """
    # Without the refusal, transformers would ask on the terminal whether to run a repository's own code.
    source = {"trust_remote_code": False, **({"gguf_file": gguf_file} if gguf_file else {})}
    config = AutoConfig.from_pretrained(model, **source)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method is not None:
        raise ValueError(f"{model} is quantized already ({method}); compress the dense model it was made from")
    return source, auto_class_of(config)


def load_processor(model: str, source: dict[str, Any], auto_class: Any) -> Any:
    """The processor of an image model, the tokenizer of a text model."""
    images = auto_class.__name__ == "AutoModelForImageTextToText"
    return (AutoProcessor if images else AutoTokenizer).from_pretrained(model, **source)


def load_dense(model: str, source: dict[str, Any], auto_class: Any, dtype: str, device: str) -> PreTrainedModel:
    """The dense model, in evaluation mode."""
    device_map = {} if device == "cpu" else {"device_map": device}
    # Unpacked into plain weights: packed ones would be a quantized model, which cannot be compressed again.
    unpacked = {"quantization_config": GgufConfig(dequantize=True)} if "gguf_file" in source else {}
    return auto_class.from_pretrained(model, dtype=dtype, **device_map, **source, **unpacked).eval()
