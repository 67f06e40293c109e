"""Bytes of weights in low precision, over those of the dense model in bf16, from shapes alone.

    python benchmarks/lowbit_bytes.py --output docs/results/lowbit_bytes.json

Models stand on the meta device: what counts is every parameter and buffer as it is allocated and as it is written,
codes, scales, up factors, norms and biases. `blocks` are the decoder's blocks, `decoder` the blocks with embeddings
and final norm, `language model` those with the head, `all` with vision tower and projector.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, PretrainedConfig, PreTrainedModel

from hf_wsvd.decoder import decoder_of
from hf_wsvd.evaluate.environment import environment
from hf_wsvd.evaluate.tables import text_table
from hf_wsvd.files import write_text
from hf_wsvd.low_precision.chosen import decoder_blocks
from hf_wsvd.meta_model import MetaModel
from record import command_line


FORMATS = {"bf16": None, "W8A8": {"weight_bits": 8}, "W4A16": {"weight_bits": 4, "activation_bits": 16}}
RANK_RATIOS = (None, 0.5)


def llava_7b() -> PretrainedConfig:
    """The shape of LLaVA-1.5-7B."""
    text = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32064,
        tie_word_embeddings=False,
    )
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    return LlavaConfig(text_config=text, vision_config=vision, vision_feature_layer=-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    dense = part_bytes(MetaModel(llava_7b(), dtype=torch.bfloat16).model)
    rows = [
        row(name, settings, rank_ratio, dense)
        for rank_ratio in RANK_RATIOS
        for name, settings in FORMATS.items()
        if (name, rank_ratio) != ("bf16", None)
    ]
    same_rank = {r["rank_ratio"]: r["bytes"] for r in rows if r["weights"] == "bf16"} | {None: dense}
    for r in rows:
        held = same_rank[r["rank_ratio"]]
        r["share_of_bf16_at_same_rank"] = {part: round(r["bytes"][part] / held[part], 4) for part in held}
    print(table(rows))
    results = {
        "command": command_line("lowbit_bytes.py"),
        "environment": environment(),
        "model": "shape of LLaVA-1.5-7B",
        "dense_bytes": dense,
        "rows": rows,
    }
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(results, indent=1) + "\n")


def row(name: str, settings: dict[str, Any] | None, rank_ratio: float | None, dense: dict[str, int]) -> dict[str, Any]:
    """Bytes by part of one setting, and the shares of the dense model in bf16."""
    low_precision = None if settings is None else {"method": "rtn", **settings}
    model = MetaModel(llava_7b(), dtype=torch.bfloat16, rank_ratio=rank_ratio, low_precision=low_precision).model
    held = part_bytes(model)
    up = sum(p.nbytes for name, p in model.named_parameters() if name.endswith("_proj.up"))
    return {
        "weights": name,
        "rank_ratio": rank_ratio,
        "bytes": held,
        "share_of_bf16": {part: round(held[part] / dense[part], 4) for part in dense},
        "up_factor_bytes": up,
        "up_factor_share_of_dense": round(up / dense["language model"], 4),
        "up_factor_share_of_own": round(up / held["language model"], 4),
    }


def part_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Bytes of parameters and buffers by part of a LLaVA."""
    decoder, head = decoder_of(model), model.get_output_embeddings()
    parts = {"blocks": decoder_blocks(model)[1], "decoder": decoder, "all": model}
    sizes = {name: sum(t.nbytes for t in (*part.parameters(), *part.buffers())) for name, part in parts.items()}
    return {**sizes, "language model": sizes["decoder"] + head.weight.nbytes}


def table(rows: list[dict[str, Any]]) -> str:
    """The shares for people."""
    parts = ("blocks", "decoder", "language model", "all")
    body = [
        [
            r["weights"],
            "-" if r["rank_ratio"] is None else str(r["rank_ratio"]),
            *(f"{r['bytes'][part] / 1e9:.2f} GB ({r['share_of_bf16'][part]:.3f})" for part in parts),
            f"{r['up_factor_share_of_own']:.1%}",
        ]
        for r in rows
    ]
    return text_table(["weights", "rank ratio", *parts, "up factors"], body)


if __name__ == "__main__":
    main()
