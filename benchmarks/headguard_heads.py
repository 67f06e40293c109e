"""Image keys and values as a cache reads them back, for all questions, layers and heads at once.

A packed cache is deterministic: what it reads back of an image does not depend on which other heads are guarded. So
every storage is applied once, by the package's own stores, and a choice of guarded heads only picks between tensors.
"""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from headguard_questions import QuestionBatch
from hf_wsvd import WSVDCache
from hf_wsvd.attention import bound_layers
from hf_wsvd.call import key_norms
from hf_wsvd.compat import CACHE_ARGUMENT
from hf_wsvd.decoder import DecoderAttention, decoder_attentions
from hf_wsvd.kernels import LatentHeads, Rotation, cached_key
from hf_wsvd.quantizer_config import CacheConfig, GuardMap, StorageSpec
from hf_wsvd.quantizer_config.guard_map import SIDES
from hf_wsvd.storage import make_store


Sides = tuple[Tensor, Tensor]  # keys and values, each `[L, B, H, tokens, width of a head]`


@dataclass(frozen=True)
class Packed:
    """Image tokens in one storage.

    Attributes:
        sides: what attention reads back, by batch.
        used: bytes of a token and head, fp64 `[2, L]` (keys, values): payload, scales, exact windows.
        slack: bytes of a token and head that are allocated beside them.
    """

    sides: list[Sides]
    used: Tensor
    slack: Tensor


class Heads(ABC):
    """Exact keys and values of all questions, and their image tokens in any storage.

    Attributes:
        exact: of the prompts, by batch, as attention reads them from a cache in the model's dtype.
    """

    latent: bool

    def __init__(self, model: PreTrainedModel, batches: list[QuestionBatch]):
        self.model, self.batches = model, batches
        self.attentions = decoder_attentions(model)
        self.exact: list[Sides] = [self.prefilled(number) for number in range(len(batches))]
        self.packed_sides: dict[tuple, tuple[list[Tensor], Tensor, Tensor]] = {}

    @abstractmethod
    def prefilled(self, number: int) -> Sides:
        """Run the prompts of a batch; their keys and values as attention reads them."""

    @abstractmethod
    def stored(self, side: str, number: int, layer: int) -> Tensor:
        """Image tokens of a batch as a cache would be given them, `[B, H, I, width]`."""

    @abstractmethod
    def expanded(self, side: str, number: int, layer: int, tokens: Tensor) -> Tensor:
        """Keys or values out of what a cache reads back, `[B, H, I, D]`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads and numbers of a head in a dense cache."""
        return len(self.attentions), self.attentions[0].heads, self.attentions[0].head_dim

    @property
    def num_key_value_heads(self) -> list[int]:
        """As `GuardMap` has them."""
        return [attention.heads for attention in self.attentions]

    def exact_used(self) -> Tensor:
        """Bytes of a token and head in the model's dtype, fp64 `[2, L]`."""
        stored = [[self.stored(side, 0, layer) for layer in range(len(self.attentions))] for side in SIDES]
        return torch.tensor([[x.shape[3] * x.element_size() for x in side] for side in stored]).double()

    def packed(self, config: CacheConfig, guard_bits: int | None = None) -> Packed:
        """Image tokens stored as `config` says, for heads that are not guarded or for those guarded at `guard_bits`.

        Raises:
            ValueError: group sizes that do not divide a width.
        """
        layers = len(self.attentions)
        if guard_bits is not None:
            everyone = {layer: dict.fromkeys(range(a.heads), guard_bits) for layer, a in enumerate(self.attentions)}
            guard_map = GuardMap(everyone, everyone, self.num_key_value_heads)
            config = dataclasses.replace(config, guard_map=guard_map)
        sides = []
        for side in SIDES:
            specs = [getattr(config.storage(layer, layers, self.latent), side) for layer in range(layers)]
            if guard_bits is not None:
                specs = [spec.guards[0][0] for spec in specs]
            specs = [spec._replace(text=None, guards=()) for spec in specs]
            key = (side, tuple(specs))
            if key not in self.packed_sides:
                self.packed_sides[key] = self._side(side, specs)
            sides.append(self.packed_sides[key])
        read = list(zip(*(tensors for tensors, _, _ in sides)))
        return Packed(read, *(torch.stack([side[i] for side in sides]) for i in (1, 2)))

    def forget(self) -> None:
        """Free what earlier storages read back."""
        self.packed_sides = {}

    @torch.no_grad()
    def _side(self, side: str, specs: list[StorageSpec]) -> tuple[list[Tensor], Tensor, Tensor]:
        read, used, slack = [], torch.zeros(len(specs), dtype=torch.float64), torch.zeros(len(specs)).double()
        tokens_of = [len(batch.embeds) * (batch.image.stop - batch.image.start) for batch in self.batches]
        for number in range(len(self.batches)):
            layers = []
            for layer, spec in enumerate(specs):
                tokens = self.stored(side, number, layer)
                store = make_store(spec, side, tokens.shape[1], tokens.shape[3], tokens.dtype)
                store.append(tokens)
                layers.append(self.expanded(side, number, layer, store.read()))
                pieces = [piece for piece in store.pieces() if piece.kind != "constants"]
                held = sum(piece.used for piece in pieces)
                used[layer] += held / tokens.shape[1]
                slack[layer] += (sum(p.tensor.untyped_storage().nbytes() for p in pieces) - held) / tokens.shape[1]
            read.append(torch.stack(layers))
        return read, used / sum(tokens_of), slack / sum(tokens_of)


class DenseHeads(Heads):
    """Of a model that is not compressed: the cache holds keys (rotated) and values."""

    latent = False

    @torch.no_grad()
    def prefilled(self, number: int) -> Sides:
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        fill(self.model, self.batches[number], cache)
        layers = [cache.layers[attention.layer] for attention in self.attentions]
        return torch.stack([layer.keys for layer in layers]), torch.stack([layer.values for layer in layers])

    def stored(self, side: str, number: int, layer: int) -> Tensor:
        return self.exact[number][SIDES.index(side)][layer][:, :, self.batches[number].image]

    def expanded(self, side: str, number: int, layer: int, tokens: Tensor) -> Tensor:
        return tokens


class CompressedHeads(Heads):
    """Of a compressed model: the cache holds latents, which attention expands."""

    latent = True

    def __init__(self, model: PreTrainedModel, batches: list[QuestionBatch]):
        self.latents: list[tuple[list[Tensor], list[Tensor]]] = []  # by batch, side and layer, image tokens alone
        self.rows: list[Sides] = []
        super().__init__(model, batches)
        missing = {attention.layer for attention in self.attentions} - bound_layers(model)
        if missing:
            raise ValueError(f"decoder layers {sorted(missing)} hold no latents")

    @torch.no_grad()
    def prefilled(self, number: int) -> Sides:
        cache, batch = WSVDCache(self.model), self.batches[number]
        fill(self.model, batch, cache)
        layers = [cache.layers[attention.layer] for attention in self.attentions]
        cos, sin = layers[0].rows.angles
        sides = [layer.keys for layer in layers], [layer.values for layer in layers]
        self.latents.append(tuple([tokens[:, :, batch.image].clone() for tokens in side] for side in sides))
        self.rows.append((cos[:, batch.image], sin[:, batch.image]))
        return tuple(
            torch.stack([self.expansion(name, a, latent, (cos, sin)) for a, latent in zip(self.attentions, side)])
            for name, side in zip(SIDES, sides)
        )

    def stored(self, side: str, number: int, layer: int) -> Tensor:
        return self.latents[number][SIDES.index(side)][layer]

    def expanded(self, side: str, number: int, layer: int, tokens: Tensor) -> Tensor:
        return self.expansion(side, self.attentions[layer], tokens, self.rows[number])

    @staticmethod
    def expansion(side: str, attention: DecoderAttention, latent: Tensor, rows: Sides) -> Tensor:
        """Dense heads out of latents, as the model's own cache layer expands them."""
        projection = getattr(attention.module, f"{side[0]}_proj")
        bias = None if projection.bias is None else projection.bias.view(projection.heads, projection.head_dim)
        heads = LatentHeads(latent, projection.up, bias)
        if side == "value":
            return heads.expand()
        layout = attention.module._wsvd.layout
        rotation = None
        if layout.rotation != "none":
            rotation = Rotation(*rows, interleaved=layout.rotation != "halves")
        return cached_key(heads, rotation, **key_norms(attention.module, layout))


def fill(model: PreTrainedModel, batch: QuestionBatch, cache: DynamicCache | WSVDCache) -> None:
    """Run the prompts of a batch into `cache`."""
    embeds = batch.embeds[:, : batch.prompt]
    model.get_decoder()(inputs_embeds=embeds, use_cache=True, **{CACHE_ARGUMENT: cache})


def heads_of(model: PreTrainedModel, batches: list[QuestionBatch]) -> Heads:
    """Exact heads of a dense or of a compressed model."""
    return CompressedHeads(model, batches) if bound_layers(model) else DenseHeads(model, batches)
