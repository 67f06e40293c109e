"""`hf-wsvd tune`: time the tiles of the decode kernels on this GPU and keep the fastest in a table."""

from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..evaluate.decode_operands import BITS_OF_A_CODE, DecodeShape
from ..kernels.tiles import device_facts, user_table


def tune(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Table to write or go on with; default: your own, which kernels read."),
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.")] = 128,
    rank: Annotated[list[int] | None, typer.Option(help="Numbers stored of a head; repeatable; default: 64.")] = None,
    bits: Annotated[
        list[int] | None, typer.Option(help="Bits of a stored number: 16, 8, 4, 3, 2; repeatable; default: 16.")
    ] = None,
    code: Annotated[
        str, typer.Option(help="What fewer bits stand for: symmetric, asymmetric, codebook or fp8.")
    ] = "symmetric",
    query_heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads; default: as many.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; repeatable; default: 1.")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Cached tokens; repeatable; default: 4096 and 32768.")
    ] = None,
    queries: Annotated[int, typer.Option(help="Query tokens of a step.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Time what the table has already as well.")] = False,
) -> None:
    """Time candidate tiles on the GPU with a cold cache; one table entry for every combination.

    Each is written as soon as it is there: a run that was interrupted goes on where it stopped.
    """
    ranks, tokens, batch, bits = rank or [64], tokens or [4096, 32768], batch or [1], bits or [16]
    kv_heads = query_heads if kv_heads is None else kv_heads
    cases = checked_cases(head_dim, ranks, bits, code, query_heads, kv_heads, batch, tokens, queries)
    if not torch.cuda.is_available():
        raise ValueError("tune needs a CUDA device, and torch finds none here")
    # Only now: importing kernels needs Triton.
    from ..evaluate.tile_tuning import Case, TableFile, tune_case
    from ..kernels.fused_attention import fused_attention

    name, _ = device_facts("cuda")
    table = TableFile(output or user_table(name))
    for number, (shape, of_code, of_bits) in enumerate(cases, 1):
        case = Case(shape, of_code, of_bits)
        what = f"[{number}/{len(cases)}] " + ", ".join(f"{key} {value}" for key, value in case.keys().items())
        if table.has(case) and not again:
            typer.echo(f"{what}: in the table", err=True)
            continue
        with torch.inference_mode():
            tuned = tune_case(
                case,
                lambda some: fused_attention(some.query, [some.part], some.rotation, scaling=some.scaling),
                lambda line: typer.echo(f"  left out: {line}", err=True),
            )
        table.add(case, tuned)
        tile = ", ".join(f"{field} {value}" for field, value in tuned.tile._asdict().items())
        typer.echo(
            f"{what}: {tuned.kernel}, {tile}: {tuned.times.median:.4f} ms, best of {tuned.candidates}", err=True
        )
    typer.echo(str(table.path))


def checked_cases(
    head_dim: int,
    ranks: list[int],
    bits: list[int],
    code: str,
    query_heads: int,
    kv_heads: int,
    batch: list[int],
    tokens: list[int],
    queries: int,
) -> list[tuple[DecodeShape, str, int]]:
    """All combinations. Raises ValueError that names an option, what was given and what is allowed."""
    codes = [name for name in BITS_OF_A_CODE if name != "float"]
    if code not in codes:
        raise ValueError(f"--code must be one of {', '.join(codes)}, got {code}")
    for count in bits:
        if count != 16 and count not in BITS_OF_A_CODE[code]:
            allowed = ", ".join(map(str, (16, *BITS_OF_A_CODE[code])))
            raise ValueError(f"--bits must be one of {allowed} with --code {code}, got {count}")
    if not 1 <= head_dim <= 256 or head_dim % 2:
        raise ValueError(f"--head-dim must be an even number from 2 to 256, got {head_dim}")
    for rank in ranks:
        if not 1 <= rank <= head_dim:
            raise ValueError(f"--rank must be from 1 to --head-dim ({head_dim}), got {rank}")
    if not 1 <= queries <= 16:
        raise ValueError(f"--queries must be from 1 to 16, got {queries}")
    for option, values in (("--batch", batch), ("--tokens", tokens), ("--kv-heads", [kv_heads])):
        if min(values) < 1:
            raise ValueError(f"{option} must be at least 1, got {min(values)}")
    if query_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"--query-heads must be a multiple of --kv-heads ({kv_heads}), got {query_heads}")
    return [
        (
            DecodeShape(sequences, length, query_heads, kv_heads, head_dim, rank, rank, queries),
            "float" if count == 16 else code,
            count,
        )
        for rank, count, sequences, length in product(ranks, bits, batch, tokens)
    ]
