"""The layers of a model that a config compresses, and the ranks of their heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from .decoder import DecoderAttention, decoder_attentions, matches
from .quantizer_config import WSVDConfig, allocated_by_gradient, resolve_ranks


@dataclass(frozen=True)
class Target:
    """One attention layer to compress and the ranks of its heads.

    Attributes:
        q_rank: None leaves the queries whole.
        allocated: "k" and "v", as far as the fit may choose other ranks of the same bytes in all.
    """

    attention: DecoderAttention
    k_rank: int
    v_rank: int
    q_rank: int | None = None
    allocated: str = ""

    def sides(self) -> Iterator[tuple[str, int, nn.Module]]:
        """("q", "k" or "v", rank, present projection)."""
        if self.q_rank is not None:
            yield "q", self.q_rank, self.attention.module.q_proj
        yield "k", self.k_rank, self.attention.module.k_proj
        yield "v", self.v_rank, self.attention.module.v_proj


def targets(model: PreTrainedModel, config: WSVDConfig) -> list[Target]:
    """The layers that `config` compresses in `model`, with uniform ranks where the fit is to allocate them.

    A projection that the config leaves alone beside a compressed one takes rank `head_dim`: its latent is the dense
    head itself, and nothing is lost. A layer with K and V left alone is no target.

    A config without any rank, for its `cache` or `low_precision` alone, has no targets.

    Raises:
        ValueError: nothing to convert, ranks and layer numbers that do not fit the model, or queries to cut that are
            no plain linear layer.
    """
    attentions = decoder_attentions(model)
    if not config.compresses and (config.cache is not None or config.low_precision is not None):
        return []
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    head_dims: list[int | None] = [None] * layers
    for attention in attentions:
        head_dims[attention.layer] = attention.head_dim
    inputs = attentions[0].module.k_proj.in_features if attentions else None
    ranks = {side: resolve_ranks(config, side, head_dims, inputs) for side in "qkv"}
    found = []
    for attention in attentions:
        chosen: dict[str, int | None] = {}
        for side in "qkv":
            skipped = matches(attention.side_name(side), config.modules_to_not_convert)
            chosen[side] = None if skipped else ranks[side][attention.layer]
        if chosen["k"] is None and chosen["v"] is None:
            continue
        if chosen["q"] is not None and not attention.heads_of("q"):
            raise ValueError(f"{attention.side_name('q')} is no plain linear layer of whole heads: leave q_rank unset")
        allocated = "".join(s for s in "kv" if chosen[s] is not None and allocated_by_gradient(config, s))
        whole = {side: attention.head_dim if chosen[side] is None else chosen[side] for side in "kv"}
        found.append(Target(attention, whole["k"], whole["v"], chosen["q"], allocated))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layer to convert: "
            + (
                "its decoder has no attention with separate `k_proj` and `v_proj` linear layers"
                if not attentions
                else "the ranks, layers_to_not_convert and modules_to_not_convert of the WSVDConfig leave out all of "
                f"its {len(attentions)} attention layers"
            )
        )
    return found
