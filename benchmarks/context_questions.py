"""Questions about a passage that contradicts what a model may know, as tokens for SmolLM2.

They are bigbench's `contextual_parametric_knowledge_conflicts`: each has the answer that the passage gives and another
one, which was true before the passage was changed. The prompt holds four solved examples, the passage and the
question. Questions come in groups whose prompts have the same number of tokens, so that no batch needs padding.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from smollm2 import bigbench_examples


TASK = "contextual_parametric_knowledge_conflicts"
SHOTS = 4
SHOT_CHARACTERS = range(150, 350)
GROUP, GROUPS = 16, 32  # questions of a group, and how many groups
LENGTHS = range(60, 300)  # tokens of passage and question


class ContextQuestion(NamedTuple):
    """Tokens of a prompt, of the passage's answer and of the other one (int64 vectors)."""

    prompt: Tensor
    answer: Tensor
    other: Tensor


def passage_question(example: dict[str, Any]) -> str:
    """Passage first, then question, up to where the answer begins."""
    question, passage = example["input"].strip().split("\nContext:", 1)
    return f"Context: {passage.strip()}\nQuestion: {question.removeprefix('Question:').strip()}\nAnswer:"


def other_answer(example: dict[str, Any]) -> str | None:
    """The answer that the passage does not give."""
    return next((answer for answer, score in example["target_scores"].items() if not score), None)


def order_of(example: dict[str, Any]) -> str:
    """What examples are sorted by: no order of the file and no seed changes it."""
    return hashlib.sha256(example["input"].encode()).hexdigest()


def usable(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose answer stands in the passage, in an order of their own."""
    kept = [
        example
        for example in examples
        if other_answer(example) and example["target"].lower() in example["input"].lower().partition("context:")[2]
    ]
    return sorted(kept, key=order_of)


def grouped_by_length(lengths: list[int], group: int, groups: int) -> list[list[int]]:
    """`groups` lists of `group` indices of equal length, spread evenly over the lengths that have so many."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    full = [indices[:group] for _, indices in sorted(by_length.items()) if len(indices) >= group]
    if len(full) < groups:
        raise ValueError(f"{len(full)} lengths have {group} questions, wanted {groups}")
    return [full[number * len(full) // groups] for number in range(groups)]


def prepare_questions(tokenizer: Any, sdist: Path, target: Path) -> dict[str, int]:
    """Write the tokens of `GROUPS * GROUP` questions, and return how many tokens each part has.

    `target` becomes a safetensors file: for each of prompt, answer and other, all tokens one after the other (int32),
    and under the name with `_lengths` how many each question has.
    """
    examples = usable(bigbench_examples(sdist, TASK))
    shots = [example for example in examples if len(example["input"]) in SHOT_CHARACTERS][:SHOTS]
    shown = {id(example) for example in shots}
    examples = [example for example in examples if id(example) not in shown]
    prefix = tokens_of(tokenizer, ["".join(f"{passage_question(e)} {e['target']}\n\n" for e in shots)])[0]
    asked = tokens_of(tokenizer, [passage_question(example) for example in examples])
    fitting = [index for index, ids in enumerate(asked) if len(ids) in LENGTHS]
    groups = grouped_by_length([len(asked[index]) for index in fitting], GROUP, GROUPS)
    chosen = [fitting[index] for group in groups for index in group]
    columns = {
        "prompt": [prefix + asked[index] for index in chosen],
        "answer": tokens_of(tokenizer, [f" {examples[index]['target']}\n" for index in chosen]),
        "other": tokens_of(tokenizer, [f" {other_answer(examples[index])}\n" for index in chosen]),
    }
    tensors = {}
    for name, rows in columns.items():
        tensors[name] = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        tensors[f"{name}_lengths"] = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    save_file(tensors, target)
    return {name: len(tensors[name]) for name in columns}


def tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Of each text."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def load_questions(path: Path) -> list[ContextQuestion]:
    """What `prepare_questions` wrote."""
    tensors = {name: values.long() for name, values in load_file(path).items()}
    columns = [tensors[name].split(tensors[f"{name}_lengths"].tolist()) for name in ContextQuestion._fields]
    return [ContextQuestion(*parts) for parts in zip(*columns)]
