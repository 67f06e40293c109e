"""Which questions a model answers right, for one choice of guarded heads after another.

Images run once (headguard_heads.py). One evaluation writes, per layer, head and side, exact or packed image tokens
into fixed buffers, and runs what follows, the expected answer included, over them: an answer is right if each of
its tokens is the most likely one after the right ones before it, which is so exactly if greedy generation writes it.
On CUDA that run is a graph, captured once a batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from headguard_heads import Heads, Packed, Sides
from headguard_questions import QuestionBatch
from hf_wsvd.compat import CACHE_ARGUMENT


class PresetLayer(DynamicLayer):
    """A cache layer over fixed buffers whose first `preset` tokens others write.

    Args:
        keys, values: `[B, H, preset + new tokens, D]`; a call fills in the new ones.
    """

    def __init__(self, keys: Tensor, values: Tensor, preset: int):
        super().__init__()
        self.keys, self.values, self.preset = keys, values, preset
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> Sides:
        self.keys[:, :, self.preset :] = key_states
        self.values[:, :, self.preset :] = value_states
        return self.keys, self.values

    def get_seq_length(self, *args) -> int:
        return self.preset


class BatchRun:
    """The second call of one batch over buffers of fixed address.

    Args:
        exact: keys and values of the prompts, `[L, B, H, prompt, D]`.
        pool: of the CUDA graphs' memory, which all batches may share: they run one after another.
    """

    def __init__(self, model: PreTrainedModel, batch: QuestionBatch, exact: Sides, pool: tuple | None):
        self.model, self.image = model, batch.image
        new, device = batch.embeds.shape[1] - batch.prompt, batch.embeds.device
        self.buffers = tuple(torch.nn.functional.pad(side, (0, 0, 0, new)) for side in exact)
        self.exact = tuple(side[:, :, :, batch.image] for side in exact)
        self.cache = Cache(layers=[PresetLayer(k, v, batch.prompt) for k, v in zip(*self.buffers)])
        self.embeds = batch.embeds[:, batch.prompt :].contiguous()
        self.positions = torch.arange(batch.prompt, batch.prompt + new, device=device)[None]
        hidden = torch.full((new, batch.prompt + new), float("-inf"), device=device, dtype=batch.embeds.dtype)
        self.mask = hidden.triu(batch.prompt + 1)[None, None]
        self.counted = batch.counted.nonzero(as_tuple=True)
        targets = torch.nn.functional.pad(batch.labels[:, batch.prompt + 1 :], (0, 1))
        self.targets = targets[self.counted]
        self.wrong = torch.zeros(len(batch.labels), device=device)
        self.replay: Callable[[], None] = self.run
        if device.type == "cuda":
            self.replay = self.captured(pool)

    def run(self) -> None:
        """Fill `wrong` `[B]` with the number of tokens that are not the most likely ones."""
        states = self.model.get_decoder()(
            inputs_embeds=self.embeds,
            attention_mask=self.mask,
            position_ids=self.positions,
            use_cache=True,
            **{CACHE_ARGUMENT: self.cache},
        ).last_hidden_state[self.counted]
        missed = self.model.get_output_embeddings()(states).argmax(-1) != self.targets
        self.wrong.zero_().index_add_(0, self.counted[0], missed.float())

    def captured(self, pool: tuple | None) -> Callable[[], None]:
        """`run` as a CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.run()
        return graph.replay

    def set_image(self, side: int, tokens: Tensor) -> None:
        """Let attention read `tokens [L, B, H, I, D]` as the keys (0) or values (1) of the image."""
        self.buffers[side][:, :, :, self.image] = tokens


class Evaluator:
    """Right and wrong answers by stored heads.

    Args:
        model: the one that `heads` are of.
    """

    def __init__(self, model: PreTrainedModel, heads: Heads):
        pool = torch.cuda.graph_pool_handle() if heads.batches[0].embeds.is_cuda else None
        self.heads = heads
        with torch.no_grad():
            self.runs = [BatchRun(model, b, exact, pool) for b, exact in zip(heads.batches, heads.exact)]

    @torch.no_grad()
    def right(self, base: Packed | None = None, guarded: Tensor | None = None, guard: Packed | None = None) -> Tensor:
        """bool `[questions]`, in the order of the batches, on the CPU.

        Args:
            base: how image tokens are kept; None: all of them exactly.
            guarded: bool `[2, L, H]` (keys, values): heads that are kept as in `guard`.
            guard: None: exactly.
        """
        for number, run in enumerate(self.runs):
            for side in range(2):
                tokens = run.exact[side] if base is None else base.sides[number][side]
                if base is not None and guarded is not None:
                    kept = run.exact[side] if guard is None else guard.sides[number][side]
                    tokens = torch.where(guarded[side][:, None, :, None, None].to(tokens.device), kept, tokens)
                run.set_image(side, tokens)
            run.replay()
        return torch.cat([run.wrong for run in self.runs]).cpu() == 0
