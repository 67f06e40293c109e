"""Options that say how guarded heads are chosen and what they are guarded from."""

from typing import Annotated

import typer

from ..quantizer_config import SELECTORS
from ..quantizer_config.head_guard_config import CHOICES


def named(field: str) -> str:
    """The values that a field of `HeadGuardConfig` takes."""
    return ", ".join(str(choice) for choice in CHOICES[field] if choice is not None)


Bits = Annotated[
    int | None,
    typer.Option("--bits", help="Bits of other heads: 8, 4, 3 or 2. Default: the checkpoint's."),
]
Scheme = Annotated[
    str | None, typer.Option("--scheme", help="Storage scheme: minmax, hadamard, turboquant, kivi, fp8.")
]
GroupSize = Annotated[int | None, typer.Option("--group-size", help="Channels that share a scale.")]
TextBits = Annotated[
    int | None, typer.Option("--text-bits", help="Bits of tokens that are not of images. Default: 16 with guards.")
]
Fraction = Annotated[float, typer.Option("--fraction", help="Share of all KV heads that is guarded, in (0, 1].")]
SelectorName = Annotated[str, typer.Option("--selector", help=f"What ranks the heads: {', '.join(SELECTORS)}.")]
Protect = Annotated[str, typer.Option("--protect", help="k: keys of guarded heads; kv: keys and values.")]
GuardBits = Annotated[int, typer.Option("--guard-bits", help=f"Bits of guarded heads: {named('bits')}.")]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="image or all. Default: image for a model that reads images.")
]
Sensitivity = Annotated[str, typer.Option("--sensitivity", help=f"Of gradients: {named('sensitivity')}.")]
Answer = Annotated[str, typer.Option("--answer", help=f"Of the image score: {named('answer')}.")]
ImageQueries = Annotated[str, typer.Option("--image-queries", help=f"Of the image gate: {named('image_queries')}.")]
TextLoss = Annotated[str, typer.Option("--text-loss", help=f"Of the output score: {named('text_loss')}.")]
Normalization = Annotated[str, typer.Option("--normalization", help=f"Of z-scores: {named('normalization')}.")]
