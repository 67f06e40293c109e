"""A tiny random LLaVA with its processor: images of 16 x 16 pixels, four image tokens, bytes as text."""

import datasets
import torch
from PIL import Image
from tiny_text import byte_tokenizer
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)


IMAGE_TOKEN_ID = 258
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if message.role == 'assistant' %}</s>{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_processor() -> LlavaProcessor:
    """Byte tokens, `<image>` as 258, and a chat template that closes an answer with `</s>`."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )


def tiny_llava(seed: int = 0) -> LlavaForConditionalGeneration:
    """Random weights; 2 decoder layers of 4 query heads and 2 KV heads of 16."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = LlamaConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
        initializer_range=0.2,  # large enough for answers that depend on every token
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN_ID, image_seq_length=4)
    model = LlavaForConditionalGeneration(config).eval()
    for weight in model.model.multi_modal_projector.parameters():
        weight.data.mul_(30)  # at 0.02 the random projector hides the image
    return model


def tiny_questions(count: int = 5) -> datasets.Dataset:
    """Plain coloured pictures with questions of different lengths."""
    rows = [
        {
            "image": Image.new("RGB", (16, 16), (50 * number % 256, 200 - 40 * number % 200, 90)),
            "question": "What is it" + "?" * (number + 1),
            "answer": "ab" * (number + 1),
            "question_type": ("at", "list")[number % 2],
        }
        for number in range(count)
    ]
    return datasets.Dataset.from_list(rows)
