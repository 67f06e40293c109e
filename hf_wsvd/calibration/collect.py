"""One pass over the calibration set."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

import torch
from transformers import PreTrainedModel

from .batches import Batch, recorded_source
from .collector import Collector
from .data import validate_batches
from .grouping import group_tokens, groups_of
from .progress import Progress
from .statistics import Statistics


@torch.enable_grad()
def collect_statistics(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    fisher: bool = False,
    keep_answers: bool = True,
    partial: str | PathLike[str] | None = None,
    save_every: float = 60.0,
) -> Statistics:
    """Run `batches` forward and backward through the dense model and accumulate what a fit needs.

    Padding (zeros of `attention_mask`) does not count. The loss of a sequence is the negative log-likelihood of its
    answer: of the tokens that `labels` holds, of all its text where a batch has no labels. Decoder layers are
    recomputed in the backward pass, so that the memory needed besides the model and the sums is one layer's
    activations and every layer's input for some 4,096 tokens (1,024 on a CPU).

    Args:
        model: not yet compressed; its weights get no gradients.
        batches: model inputs, with `input_ids` or `inputs_embeds`; on any device.
        fisher: also the element-wise Fisher information, one number a weight, which `refinement="fisher"` needs.
        keep_answers: keep the inputs and the dense model's answers, which `refinement="distillation"` needs.
        partial: a file for the running state, with the inputs seen so far. It is written every `save_every` seconds
            (less often if writing takes long), and when Ctrl-C or an error between two groups of sequences ends the
            run; an error within a group, or a kill, costs what came after the last write. If it is there at the
            start, the run goes on from it, with the same result as if it had never stopped. It stays until the
            caller removes it, having stored the result.
        save_every: seconds.

    Raises:
        ValueError: no batch, wrong columns, weights that are offloaded, no layer to measure, no labelled token, or
            activations or gradients that are not finite; a `partial` that is damaged, or of another model, other
            options or other data.
    """
    collector = Collector(model, fisher=fisher, keep_answers=keep_answers)
    progress, checked = Progress(collector, partial, save_every), validate_batches(batches, model)
    progress.resume(checked)
    with collector.hooked(), progress.kept():
        for members in groups_of(checked, group_tokens(model.device)):
            with progress.group(members):
                collector.add(members)
    collector.check()
    progress.save()
    return collector.statistics({**progress.contents.info(), **recorded_source(batches)})
