"""Train the embedded demo model: a small LLaVA that answers questions about emoji grids. About ten minutes on one GPU.

    python examples/train_demo_model.py --output-dir demo_model --minutes 8

The output is an ordinary Transformers checkpoint with processor, and `metrics.json` with its accuracy on held-out
scenes. What makes it train in minutes: scenes and questions are made on the GPU, and one sequence holds one image and
32 questions about it. Each question sees the image and itself only and counts its positions from the end of the
image, so that every one is trained exactly as it is asked alone.
"""

import argparse
import json
import math
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    AttentionInterface,
    AutoProcessor,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from hf_wsvd.demo.checkpoint import (
    ASSISTANT,
    END,
    IMAGE_TOKENS,
    PAD,
    PATCH,
    TILE,
    USER,
    build_model,
    build_processor,
    split_words,
)
from hf_wsvd.demo.dataset import evaluation_rows, messages, training_batches
from hf_wsvd.demo.questions import FORMS, QUESTION_TYPES, ask, words
from hf_wsvd.demo.scenes import GRID, load_tiles


PREFIX = 1 + IMAGE_TOKENS  # <|user|> and the image

# Questions of each form behind one image, in the order of FORMS. Reading tiles and places first: without that dense
# signal the loss stays at the answers' prior. Relations and counts then get most of the schedule.
CURRICULUM = (
    (0.15, (8, 4, 2, 8, 1, 1, 1, 1, 1, 1, 1, 1, 2)),
    (1.00, (2, 2, 5, 3, 3, 3, 3, 3, 1, 1, 1, 1, 4)),
)
TILE_LOSS_UNTIL = 0.25  # naming the tile behind each image token, by a throw-away linear layer


def save(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Write the bf16 checkpoint, leaving the model in training as it is."""
    state = {key: value.detach().to("cpu", torch.bfloat16) for key, value in model.state_dict().items()}
    shell = build_model(processor.tokenizer).to(torch.bfloat16)
    shell.load_state_dict(state)
    shell.save_pretrained(folder)
    processor.save_pretrained(folder)


# --- questions behind one image -------------------------------------------------------------------------------------


class QuestionPacker:
    """Turns sampled questions into blocks of tokens of one length."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        ids = tokenizer.convert_tokens_to_ids
        rows, answers = [], []
        for form in FORMS:
            question = [*split_words(form.question), END, ASSISTANT]
            answer = [*split_words(form.answer), END]
            # A placeholder {n} is stored as -1 - n.
            rows.append([-1 - int(word[1]) if word[0] == "{" else ids(word) for word in question + answer])
            answers.append([False] * len(question) + [True] * len(answer))
        self.length = max(map(len, rows))
        pad = ids(PAD)
        self.templates = torch.tensor([row + [pad] * (self.length - len(row)) for row in rows], device=device)
        self.answers = torch.tensor([row + [False] * (self.length - len(row)) for row in answers], device=device)
        self.word_tokens = torch.tensor(ids(list(words())), device=device)

    def blocks(self, forms: Tensor, slots: Tensor) -> Tensor:
        """forms: [Q]; slots: [B, Q, 6] -> tokens [B, Q, length]."""
        template = self.templates[forms].expand(slots.shape[0], -1, -1)
        filled = self.word_tokens[slots].gather(-1, (-1 - template).clamp(min=0))
        return torch.where(template < 0, filled, template)


def packed_visibility(block_length: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask function of flex attention: which keys a query sees."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_block = (query - PREFIX) // block_length == (key - PREFIX) // block_length
        return (key <= query) & ((key < PREFIX) | same_block)

    return visible


@dataclass(eq=False)
class PackedAttention:
    """Causal attention in which each block of questions sees the prefix and itself. Registered as "packed"."""

    block_length: int
    blocks: int
    device: torch.device

    def __post_init__(self) -> None:
        self.total = PREFIX + self.blocks * self.block_length
        offset = torch.arange(self.block_length, device=self.device).repeat(self.blocks)
        prefix = torch.arange(PREFIX, device=self.device)
        self.position_ids = torch.cat([prefix, PREFIX + offset])[None]
        if self.device.type == "cuda":
            visible = packed_visibility(self.block_length)
            self.mask = create_block_mask(visible, None, None, self.total, self.total, device=self.device)
        else:
            index = torch.arange(self.total, device=self.device)
            self.mask = packed_visibility(self.block_length)(0, 0, index[:, None], index[None, :])

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_, scaling: float, **__):
        """query, key, value: [B, heads, S, D] -> [B, S, heads, D]."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # the rotation left them in fp32
        if self.device.type == "cuda":
            output = flex_attention(query, key, value, block_mask=self.mask, scale=scaling)
        else:
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=scaling)
        return output.transpose(1, 2), None


class PackedModel(nn.Module):
    """The checkpoint's own layers, run over an image and many questions at once."""

    def __init__(self, model: LlavaForConditionalGeneration, attention: PackedAttention) -> None:
        super().__init__()
        AttentionInterface.register("packed", attention)
        model.model.language_model.config._attn_implementation = "packed"
        self.llava, self.attention = model, attention
        self.tile_head = nn.Linear(model.config.text_config.hidden_size, len(words()))

    def forward(self, pixels: Tensor, blocks: Tensor, tile_names: Tensor) -> tuple[Tensor, Tensor]:
        """pixels: [B, 3, H, W]; blocks: [B, Q, T]; tile_names: [B, 16] -> logits [B, Q, T, V], tile loss."""
        llava, text = self.llava.model, self.llava.model.language_model
        hidden = llava.vision_tower.pre_layrnorm(llava.vision_tower.embeddings(pixels))
        for layer in llava.vision_tower.encoder.layers:
            hidden = layer(hidden, attention_mask=None)
        image = llava.multi_modal_projector(hidden[:, 1:])

        tokens = blocks.flatten(1)
        first = text.embed_tokens(tokens.new_full((len(tokens), 1), self.llava.config.user_token_id))
        hidden = torch.cat([first, image.to(first.dtype), text.embed_tokens(tokens)], dim=1)
        rotary = text.rotary_emb(hidden, self.attention.position_ids)
        for layer in text.layers:
            hidden = layer(hidden, position_ids=self.attention.position_ids, position_embeddings=rotary)
        logits = self.llava.lm_head(text.norm(hidden[:, PREFIX:])).unflatten(1, blocks.shape[1:])
        return logits, self.tile_loss(image, tile_names)

    def tile_loss(self, image: Tensor, tile_names: Tensor) -> Tensor:
        """Cross-entropy of the name behind each image token. image: [B, 256, hidden]."""
        patches = TILE // PATCH
        target = tile_names.unflatten(1, (GRID, GRID))
        target = target.repeat_interleave(patches, 1).repeat_interleave(patches, 2)
        return F.cross_entropy(self.tile_head(image).flatten(0, 1).float(), target.flatten())


def answer_loss(logits: Tensor, blocks: Tensor, answers: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss over the valid questions, each the mean over its answer's tokens, and which answers are right.

    logits: [B, Q, T, V]; blocks: [B, Q, T]; answers: bool [Q, T]; valid: bool [B, Q] -> scalar, bool [B, Q].
    """
    logits, target, counted = logits[:, :, :-1], blocks[:, :, 1:], answers[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 2).float(), target.flatten(), reduction="none").view_as(target)
    loss = (loss * counted).sum(-1) / counted.sum(-1)
    right = ((logits.argmax(-1) == target) | ~counted).all(-1)
    return (loss * valid).sum() / valid.sum().clamp(min=1), right


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 [B, 3, H, W] -> floats from -1 to 1; half the images get other colours, noise and the batch's shift."""
    images, device = len(pixels), pixels.device
    values = pixels.float() / 127.5 - 1
    chosen = (torch.rand(images, 1, 1, 1, generator=generator, device=device) < 0.5).float()
    gain = 1 + 0.15 * (2 * torch.rand(images, 3, 1, 1, generator=generator, device=device) - 1)
    offset = 0.15 * (2 * torch.rand(images, 3, 1, 1, generator=generator, device=device) - 1)
    noise = 0.04 * torch.randn(values.shape, generator=generator, device=device)
    shift = torch.randint(-2, 3, (2,)).tolist()
    changed = (values * gain + offset + noise).roll(shift, (2, 3)).clamp(-1, 1)
    return torch.where(chosen.bool(), changed, values)


# --- training and evaluation ----------------------------------------------------------------------------------------


def training_steps(
    packer: QuestionPacker, batch_size: int, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Endless (pixels, tile names, forms [Q], blocks [B, Q, T], valid [B, Q]); send the progress to advance."""
    generator = torch.Generator(device).manual_seed(seed)
    progress = yield
    for scenes, pixels in training_batches(batch_size, generator, load_tiles(TILE).to(device)):
        counts = next(counts for until, counts in CURRICULUM if progress <= until)
        asked = [ask(form, scenes.names, count, generator) for form, count in zip(FORMS, counts)]
        slots, valid = (torch.cat(parts, dim=1) for parts in zip(*asked))
        forms = torch.arange(len(FORMS)).repeat_interleave(torch.tensor(counts)).to(device)
        progress = yield augment(pixels, generator), scenes.names, forms, packer.blocks(forms, slots), valid


def learning_rate(progress: float, step: int, peak: float) -> float:
    return peak * min(1.0, (step + 1) / 300) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def train(model: LlavaForConditionalGeneration, processor: LlavaProcessor, args: argparse.Namespace) -> list[dict]:
    """Train for `args.minutes` (or `args.steps`), saving now and then. Returns the log."""
    device = torch.device(args.device)
    model.config.user_token_id = processor.tokenizer.convert_tokens_to_ids(USER)
    packer = QuestionPacker(processor.tokenizer, device)
    attention = PackedAttention(packer.length, sum(CURRICULUM[0][1]), device)
    packed = PackedModel(model.to(device).train(), attention).to(device)
    forward = torch.compile(packed, dynamic=False) if device.type == "cuda" else packed
    matrices = [p for p in packed.parameters() if p.ndim >= 2]
    vectors = [p for p in packed.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    log, step, progress = [], 0, 0.0
    totals = torch.zeros(3, len(FORMS), device=device)  # right, valid, loss
    batches = training_steps(packer, args.batch_size, args.seed, device)
    next(batches)
    started = saved = time.time()
    while progress < 1.0:
        pixels, names, forms, blocks, valid = batches.send(progress + args.curriculum_start)
        with torch.autocast(device.type, torch.bfloat16):
            logits, tile_loss = forward(pixels, blocks, names)
        loss, right = answer_loss(logits, blocks, packer.answers[forms], valid)
        tile_weight = max(0.0, 1 - (progress + args.curriculum_start) / TILE_LOSS_UNTIL)
        (loss + tile_weight * tile_loss).backward()
        nn.utils.clip_grad_norm_(packed.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, step, args.learning_rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        totals[0].index_add_(0, forms, (right & valid).sum(0).float())
        totals[1].index_add_(0, forms, valid.sum(0).float())
        totals[2] += loss.detach()
        step += 1
        if step == 3:  # compilation does not count
            torch.cuda.synchronize() if device.type == "cuda" else None
            started = time.time()
        if step % args.log_every == 0:
            log.append(summary(totals, step, time.time() - started, args))
            print(json.dumps(log[-1]), flush=True)
            totals.zero_()
        if step % 10 == 0:  # waiting for the device keeps the clock honest
            loss.item()
        if time.time() - saved > 120:
            save(model, processor, args.output_dir)
            saved = time.time()
        progress = step / args.steps if args.steps else (time.time() - started) / 60 / args.minutes
    save(model, processor, args.output_dir)
    return log


def summary(totals: Tensor, step: int, seconds: float, args: argparse.Namespace) -> dict:
    right, valid, loss = totals.tolist()
    by_type = {}
    for name in QUESTION_TYPES:
        of_type = [index for index, form in enumerate(FORMS) if form.question_type == name]
        by_type[name] = round(sum(right[i] for i in of_type) / max(1, sum(valid[i] for i in of_type)), 4)
    images = step * args.batch_size
    return {
        "step": step,
        "seconds": round(seconds, 1),
        "images_per_second": round(images / max(seconds, 1)),
        "loss": round(loss[0] / args.log_every, 4),
        **by_type,
    }


@torch.inference_mode()
def accuracy(folder: Path, styles: str, args: argparse.Namespace) -> dict[str, float]:
    """Exact match of greedy decoding from the saved checkpoint, by question type and by direction."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16).to(args.device).eval()
    processor = AutoProcessor.from_pretrained(folder)
    rows = evaluation_rows(args.evaluation_seed, args.questions_per_type, styles)
    right: dict[str, list[bool]] = {}
    for start in range(0, len(rows["image"]), args.evaluation_batch):
        part = {key: column[start : start + args.evaluation_batch] for key, column in rows.items()}
        prompts = [
            processor.apply_chat_template(messages(question, image), add_generation_prompt=True)
            for question, image in zip(part["question"], part["image"])
        ]
        inputs = processor(text=prompts, images=part["image"], padding=True, return_tensors="pt").to(model.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        texts = processor.batch_decode(tokens, skip_special_tokens=True)
        for text, question, answer, name in zip(texts, part["question"], part["answer"], part["question_type"]):
            right.setdefault(name, []).append(text == answer)
            direction = re.search(r"left of|right of|above|below", question)
            if direction:
                right.setdefault(f"{name} {direction[0]}", []).append(text == answer)
    return {name: round(sum(hits) / len(hits), 4) for name, hits in sorted(right.items())}


def dump_metrics(metrics: dict) -> str:
    """JSON with each entry of the log on one line."""
    head = {key: value for key, value in metrics.items() if key != "log"}
    log = ",\n".join(f"  {json.dumps(entry)}" for entry in metrics["log"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "log": [\n{log}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--initial-checkpoint", type=Path, help="go on from these weights")
    parser.add_argument(
        "--curriculum-start", type=float, default=0.0, help="progress that the first weights stand for"
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, help="instead of minutes")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evaluation-seed", type=int, default=0)
    parser.add_argument("--questions-per-type", type=int, default=1000)
    parser.add_argument("--evaluation-batch", type=int, default=500)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    processor = build_processor()
    if args.initial_checkpoint:
        model = LlavaForConditionalGeneration.from_pretrained(args.initial_checkpoint, dtype=torch.float32)
    else:
        model = build_model(processor.tokenizer)
    arguments = [argument.replace(str(args.output_dir), args.output_dir.name) for argument in sys.argv[1:]]
    metrics = {
        "command": " ".join(["python", "examples/train_demo_model.py", *arguments]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seeds": {"training": args.seed, "evaluation": args.evaluation_seed},
        "parameters": sum(p.numel() for p in model.parameters()),
        "log": train(model, processor, args),
        "questions_per_type": args.questions_per_type,
    }
    metrics["accuracy"] = {styles: accuracy(args.output_dir, styles, args) for styles in ("seen", "unseen")}
    (args.output_dir / "metrics.json").write_text(dump_metrics(metrics))
    print(json.dumps(metrics["accuracy"], indent=1))


if __name__ == "__main__":
    main()
