"""A byte-level tokenizer and a tiny random Llama: any text, no download."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def byte_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """256 bytes and the special tokens `<s>`, `</s>`; with `bos`, `<s>` is put before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    if bos:
        from tokenizers.processors import TemplateProcessing

        core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def chat_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """`byte_tokenizer` with a chat template that closes an answer with `</s>`."""
    tokenizer = byte_tokenizer(bos)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% if message.role == 'assistant' %}</s>{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def tiny_llama(layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """Random weights; 4 query heads and 2 KV heads of 16; a vocabulary of 258, as `byte_tokenizer`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )
    return LlamaForCausalLM(config).eval()
