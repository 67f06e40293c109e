"""Which layers of a model keep their weights in low precision."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ..decoder import decoder_of, matches
from ..modules import LatentProjection
from ..quantizer_config import WSVDConfig
from .weights import group_size_of


# Fields of text configs that say how many experts a router chooses from.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# What a router, or the module that holds it, is called: other layers may have as many outputs as there are experts.
ROUTER_NAMES = ("gate", "router")


def chosen_linears(model: PreTrainedModel, config: WSVDConfig) -> dict[str, nn.Linear | LatentProjection]:
    """By name within `model` the layers that `config.low_precision` quantizes, in the order of the model.

    These are the linear layers of the text decoder's blocks, in latent projections their down factor: queries, keys,
    values, attention's output, and the MLP. Embeddings, the head, vision towers and projectors stand outside the
    blocks and are left alone; so are routers of experts, and whatever is no `nn.Linear`, such as experts that share
    one parameter, convolutions and norms.

    Raises:
        ValueError: a decoder whose blocks are not found, no layer left to quantize, or a group size that does not
            divide the inputs of one.
    """
    prefix, blocks = decoder_blocks(model)
    text = model.config.get_text_config(decoder=True)
    settings = config.low_precision
    left_alone = [*(config.modules_to_not_convert or ()), *(settings.modules_to_not_convert or ())]
    found: dict[str, nn.Linear | LatentProjection] = {}
    for number, block in enumerate(blocks):
        if number in (config.layers_to_not_convert or ()):
            continue
        for name, module in block.named_modules(prefix=f"{prefix}.{number}"):
            if type(module) not in (nn.Linear, LatentProjection) or matches(name, left_alone):
                continue
            if not is_router(name, module, text):
                found[name] = module
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to quantize: its decoder has none, or layers_to_not_convert "
            "and modules_to_not_convert leave out all of them"
        )
    for name, module in found.items():
        try:
            group_size_of(module.in_features, settings.weight_bits, settings.group_size)
        except ValueError as error:
            raise ValueError(f"LowPrecisionConfig: {name}: {error}") from error
    return found


def decoder_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The blocks of the text decoder, and their name within `model`. ValueError if there is no list of them."""
    decoder = decoder_of(model)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    inside = {id(module) for module in decoder.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and id(module) in inside:
            return name, module
    raise ValueError(f"{type(model).__name__}: its decoder has no list of {count} blocks to quantize")


def is_router(name: str, module: nn.Linear | LatentProjection, text: PretrainedConfig) -> bool:
    """Whether a layer chooses among experts, or weighs one: its outputs are no features."""
    counts = {getattr(text, field, None) for field in EXPERT_COUNTS}
    chooses = module.out_features in counts and any(part in ROUTER_NAMES for part in name.split("."))
    return chooses or module.out_features == 1
