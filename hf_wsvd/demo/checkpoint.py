"""The embedded model as a Transformers checkpoint: word tokenizer, processor and LLaVA architecture.

The shipped weights are trained for exactly these; `examples/train_demo_model.py` does it.
"""

import re

import tokenizers
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from .questions import FORMS, words
from .scenes import GRID


TILE, PATCH = 32, 8
IMAGE_SIZE = GRID * TILE
IMAGE_TOKENS = (IMAGE_SIZE // PATCH) ** 2
PAD, UNKNOWN, IMAGE, USER, ASSISTANT, END = "<pad>", "<unk>", "<image>", "<|user|>", "<|assistant|>", "<|end|>"

# The images come first whatever the order in the message, as in training. The model knows no system role.
CHAT_TEMPLATE = """\
{%- for message in messages if message['role'] != 'system' -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}
{%- for item in message['content'] if item['type'] == 'image' -%}<image>{%- endfor -%}
{%- for item in message['content'] if item['type'] == 'text' -%}{{- item['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def split_words(text: str) -> list[str]:
    """Words and punctuation marks of a form, placeholders such as {0} whole."""
    return re.findall(r"\{\d\}|\w+|[^\w\s]", text.lower())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word. Decoding joins by spaces and closes them before punctuation."""
    specials = [PAD, UNKNOWN, IMAGE, USER, ASSISTANT, END]
    templates = {word for form in FORMS for word in split_words(f"{form.question} {form.answer}") if word[0] != "{"}
    vocabulary = [*specials, *sorted(templates | set(words()))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.decoder = tokenizers.decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        padding_side="left",
        model_max_length=4096,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> LlavaProcessor:
    """Tokenizer and image processor. Pixels map to -1..1; 128-pixel images are not resized."""
    # The class of this name needs torchvision from transformers 5 on; the other one writes the same configuration.
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image_processor = CLIPImageProcessorPil(
        size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """An untrained model of 7.1 M parameters.

    Layers times heads is 48, so that the rotary row that a latent cache keeps for each token is small beside the
    token's keys and values.
    """
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=IMAGE_SIZE,
        patch_size=PATCH,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=IMAGE_TOKENS,
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    return model
