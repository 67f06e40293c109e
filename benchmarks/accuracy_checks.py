"""Two checks beside the sweep of accuracy.py: the fit's predicted loss, and answers by real generation."""

import copy
import json
import sys
from typing import Any

import torch

from accuracy_measure import measure
from accuracy_methods import configuration, kv_share, random_plans, spearman
from accuracy_tasks import Task, VisionTask, answers_right
from hf_wsvd import WSVDConfig, compress
from hf_wsvd.calibration.chat import chat_inputs, chunks, place
from hf_wsvd.decoder import decoder_attentions
from hf_wsvd.surgery import fitted


PLAN_SEED = 0  # of calibration and of the random plans


def prediction(task: Task, statistics: Any, count: int) -> dict[str, Any]:
    """Predicted loss and measured KL of random rank plans: `count` of different totals, `count` of half the bytes."""
    attentions = decoder_attentions(task.model)
    layers, head_dim = len(attentions), attentions[0].head_dim
    generator = torch.Generator().manual_seed(PLAN_SEED)
    result: dict[str, Any] = {"seed": PLAN_SEED, "measured": "KL(dense || compressed), nats a counted token, held out"}
    for name, ratio in (("different_totals", None), ("equal_totals", 0.5)):
        plans = []
        for k_rank, v_rank in random_plans(count, layers, head_dim, generator, ratio):
            config = WSVDConfig(k_rank=k_rank, v_rank=v_rank, refinement="none")
            with fitted(task.model, config, statistics) as fit:
                measured = task.scores(task.model)["kl"].value
            share = kv_share(k_rank, v_rank, head_dim)
            plan = {"kv_share": share, "predicted": fit.predicted_loss, "measured": measured}
            plans.append({**plan, "k_rank": k_rank, "v_rank": v_rank})
        correlation = spearman([p["predicted"] for p in plans], [p["measured"] for p in plans])
        print(f"prediction, {name}: Spearman {correlation:.3f}", file=sys.stderr, flush=True)
        result[name] = {"spearman": correlation, "plans": plans}
    return result


def generation_check(
    task: VisionTask, statistics: Any, method: str, ratio: float, refinement_steps: int | None
) -> dict[str, Any]:
    """Right answers by generation on the latent cache and by teacher forcing, of one and the same compressed model."""
    config = configuration(method, ratio, refinement_steps)
    compressed = compress(copy.deepcopy(task.model), config, statistics=statistics)
    forced = answers_right(measure(compressed, task.batches, task.dense_states)).tolist()
    generated = []
    for rows in chunks(task.rows, 100):
        inputs = place(chat_inputs(task.processor, rows, with_answer=False), compressed)
        with torch.no_grad():
            tokens = compressed.generate(**inputs, max_new_tokens=32, do_sample=False)
        answers = task.processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        generated += [answer.strip() == row["answer"] for answer, row in zip(answers, rows)]
    check = {
        "method": method,
        "kv_ratio": ratio,
        "questions": len(forced),
        "right_by_generation": sum(generated),
        "right_by_teacher_forcing": sum(forced),
        "agreeing": sum(a == b for a, b in zip(generated, forced)),
    }
    print(json.dumps(check), file=sys.stderr, flush=True)
    return check
