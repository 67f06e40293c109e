"""Emoji-grid scenes: 4x4 tiles with names, drawn in several styles on one pastel colour.

Everything is a batch of tensors, so that the same code draws the evaluation set on a CPU and feeds training on a GPU.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..assets import tiles_path


GRID = 4
CELLS = GRID * GRID
FEWEST_NAMES, MOST_NAMES = 5, 15
DARKEST_BACKGROUND = 150

# The third style (3D drawings) of every even-numbered name is never trained: "unseen" scenes consist of those alone.
UNSEEN_STYLE = 2
# A scene whose checksum is divisible by this belongs to evaluation, every other one to training.
HELD_OUT_EVERY = 8

Split = Literal["train", "evaluation"]
Styles = Literal["seen", "unseen"]


@dataclass(frozen=True)
class Tiles:
    """Drawings of every name in every style. pixels: uint8 [names, styles, rgba, size, size]."""

    pixels: Tensor
    names: tuple[str, ...]
    styles: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.pixels.shape[-1]

    def to(self, device: torch.device | str) -> "Tiles":
        return Tiles(self.pixels.to(device), self.names, self.styles)


@dataclass(frozen=True)
class Scenes:
    """A batch of N scenes. names, styles: int64 [N, 16], row by row; background: uint8 [N, 3]."""

    names: Tensor
    styles: Tensor
    background: Tensor

    def __len__(self) -> int:
        return self.names.shape[0]

    def __getitem__(self, index: Tensor | slice) -> "Scenes":
        return Scenes(self.names[index], self.styles[index], self.background[index])


@lru_cache
def tile_names() -> tuple[str, ...]:
    """The names that tiles can have; a scene stores indices into this tuple."""
    with np.load(tiles_path(), allow_pickle=False) as archive:
        return tuple(str(name) for name in archive["names"])


@lru_cache
def load_tiles(size: int = 32) -> Tiles:
    """The shipped drawings, scaled to `size` pixels (32 gives 128-pixel scenes, 42 the original 168-pixel ones)."""
    with np.load(tiles_path(), allow_pickle=False) as archive:
        pixels, styles = archive["tiles"], tuple(str(style) for style in archive["styles"])
    if size != pixels.shape[-1]:
        flat = pixels.reshape(-1, *pixels.shape[2:]).transpose(0, 2, 3, 1)
        scaled = [
            np.asarray(Image.fromarray(np.ascontiguousarray(tile), "RGBA").resize((size, size), Image.LANCZOS))
            for tile in flat
        ]
        pixels = np.stack(scaled).transpose(0, 3, 1, 2).reshape(*pixels.shape[:3], size, size)
    return Tiles(torch.tensor(np.ascontiguousarray(pixels)), tile_names(), styles)


def is_held_out(names: Tensor) -> Tensor:
    """Whether a scene belongs to evaluation, read off its content. names: [N, 16] -> bool [N]."""
    weights = torch.arange(1, 2 * CELLS, 2, device=names.device)
    return (names * weights).sum(-1) % HELD_OUT_EVERY == 0


def sample_scenes(
    count: int, generator: torch.Generator, split: Split = "evaluation", styles: Styles = "seen"
) -> Scenes:
    """Draw `count` scenes of one split on the generator's device; no scene can belong to both splits."""
    share = 1 / HELD_OUT_EVERY if split == "evaluation" else 1 - 1 / HELD_OUT_EVERY
    # Six standard deviations above the mean number of draws needed, so that no second round is.
    draws = int(count / share + 6 * (count + 40) ** 0.5 / share)
    names = _sample_names(draws, generator, styles)
    wanted = is_held_out(names) == (split == "evaluation")
    chosen = torch.argsort(wanted.to(torch.uint8), descending=True, stable=True)[:count]
    names = names[chosen]
    background = torch.randint(DARKEST_BACKGROUND, 256, (count, 3), generator=generator, device=generator.device)
    return Scenes(names, _sample_styles(names, generator, styles), background.to(torch.uint8))


def render(scenes: Scenes, tiles: Tiles) -> Tensor:
    """Blend the tiles over the background in integers, alike on every device. Returns uint8 [N, 3, 4*size, 4*size]."""
    tile = tiles.pixels[scenes.names, scenes.styles].to(torch.int32)  # [N, 16, rgba, size, size]
    color, alpha = tile[:, :, :3], tile[:, :, 3:]
    background = scenes.background.to(torch.int32)[:, None, :, None, None]
    weighted = color * alpha + background * (255 - alpha) + 128
    blended = (weighted + (weighted >> 8)) >> 8  # weighted / 255, rounded: several times faster than a division
    grid = blended.to(torch.uint8).unflatten(1, (GRID, GRID))  # [N, row, column, rgb, size, size]
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(scenes), 3, GRID * tiles.size, GRID * tiles.size)


def to_images(pixels: Tensor) -> list[Image.Image]:
    """uint8 [N, 3, H, W] -> N Pillow images."""
    return [Image.fromarray(array) for array in pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()]


def _sample_names(count: int, generator: torch.Generator, styles: Styles) -> Tensor:
    """5 to 15 distinct names a scene, each at least once, the other tiles drawn from the same names: [count, 16]."""
    device = generator.device
    order = torch.rand(count, len(tile_names()), generator=generator, device=device)
    if styles == "unseen":
        order[:, 1::2] = 2.0  # odd-numbered names were trained in every style: sort them last
    pool = order.argsort(-1)[:, :MOST_NAMES]
    distinct = torch.randint(FEWEST_NAMES, MOST_NAMES + 1, (count, 1), generator=generator, device=device)
    repeats = (torch.rand(count, CELLS, generator=generator, device=device) * distinct).long()
    position = torch.arange(CELLS, device=device).expand(count, CELLS)
    names = pool.gather(1, torch.where(position < distinct, position, repeats))
    shuffle = torch.rand(count, CELLS, generator=generator, device=device).argsort(-1)
    return names.gather(1, shuffle)


def _sample_styles(names: Tensor, generator: torch.Generator, styles: Styles) -> Tensor:
    """A style for each tile among those that training may show (or, "unseen", the one it never does): [N, 16]."""
    if styles == "unseen":
        return torch.full_like(names, UNSEEN_STYLE)
    choices = torch.where(names % 2 == 0, UNSEEN_STYLE, UNSEEN_STYLE + 1)
    return (torch.rand(names.shape, generator=generator, device=names.device) * choices).long()
