"""Questions about scenes: thirteen forms of seven types, sampled in batches, with exact answers.

A question is a form and six words: two that fill the question, four that fill the answer. Words are indices into
`words()`, so that evaluation turns them into text and training, by one table, into tokens.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .scenes import CELLS, GRID, tile_names


QUESTION_TYPES = ("at", "list", "count", "where", "relation", "neighbour", "exists")
DIRECTIONS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}  # (row, column) steps
SLOTS = 6


@dataclass(frozen=True)
class Form:
    """One wording. `question` uses words {0} and {1}, `answer` words {2} to {5}."""

    question_type: str
    question: str
    answer: str
    direction: str | None = None

    def text(self, slots: list[int]) -> tuple[str, str]:
        """Question and answer as the user and the model write them."""
        filled = [words()[index] for index in slots]
        return self.question.format(*filled), self.answer.format(*filled)


FORMS = (
    Form("at", "What is in row {0}, column {1}?", "{2}"),
    Form("list", "List row {0}.", "{2}, {3}, {4}, {5}"),
    Form("count", "How many {0} are there?", "{2}"),
    Form("where", "Where is the {0}?", "row {2}, column {3}"),
    *(Form("relation", f"Is the {{0}} {name} the {{1}}?", "{2}", name) for name in DIRECTIONS),
    *(Form("neighbour", f"What is directly {name} the {{0}}?", "{2}", name) for name in DIRECTIONS),
    Form("exists", "Is there a {0}?", "{2}"),
)


@lru_cache
def words() -> tuple[str, ...]:
    """Everything that can fill a slot: the names, then the numbers 0 to 16, then yes and no."""
    return (*tile_names(), *map(str, range(CELLS + 1)), "no", "yes")


def ask(form: Form, names: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ask `count` questions of one form about each scene.

    Args:
        names: int64 [N, 16], the scenes' tiles.

    Returns:
        slots int64 [N, count, 6] and valid bool [N, count]; a scene may hold nothing that the form can ask about.
    """
    names = names[:, None].expand(-1, count, -1)
    sampler = {
        "at": _at,
        "list": _list,
        "count": _count,
        "where": _where,
        "relation": _relation,
        "neighbour": _neighbour,
        "exists": _exists,
    }[form.question_type]
    filled, valid = sampler(names, generator, form)
    slots = names.new_zeros(*names.shape[:2], SLOTS)
    for index, value in filled.items():
        slots[..., index] = value
    return slots, valid.expand(names.shape[:2])


def _number(value: Tensor) -> Tensor:
    return value + len(tile_names())


def _yes(value: Tensor) -> Tensor:
    return value.long() + len(tile_names()) + CELLS + 1


def _choose(mask: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random set position along the last dimension, and whether there is one. mask: bool [..., M]."""
    score = torch.rand(mask.shape, generator=generator, device=mask.device) + 1e-3
    return (score * mask).argmax(-1), mask.any(-1)


def _pick(names: Tensor, cell: Tensor) -> Tensor:
    """names [..., 16] at cell [...] -> [...]."""
    return names.gather(-1, cell[..., None])[..., 0]


def _occurrences(names: Tensor) -> Tensor:
    """How often each tile's name occurs in its scene: [..., 16]."""
    return (names[..., :, None] == names[..., None, :]).sum(-1)


def _random_cells(names: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    return torch.randint(limit, names.shape[:2], generator=generator, device=names.device)


def _always(names: Tensor) -> Tensor:
    return torch.ones(1, 1, dtype=torch.bool, device=names.device)


def _at(names: Tensor, generator: torch.Generator, form: Form) -> tuple[dict[int, Tensor], Tensor]:
    cell = _random_cells(names, CELLS, generator)
    return {
        0: _number(cell // GRID + 1),
        1: _number(cell % GRID + 1),
        2: _pick(names, cell),
    }, _always(names)


def _list(names: Tensor, generator: torch.Generator, form: Form) -> tuple[dict[int, Tensor], Tensor]:
    row = _random_cells(names, GRID, generator)
    answers = {2 + column: _pick(names, row * GRID + column) for column in range(GRID)}
    return {0: _number(row + 1), **answers}, _always(names)


def _count(names: Tensor, generator: torch.Generator, form: Form) -> tuple[dict[int, Tensor], Tensor]:
    # First a number among those that occur, then a name of that number: else nearly every answer would be 1 or 2.
    occurrences = _occurrences(names)
    present = torch.zeros(*names.shape[:2], CELLS + 1, dtype=torch.bool, device=names.device)
    number, _ = _choose(present.scatter(-1, occurrences, True), generator)
    cell, valid = _choose(occurrences == number[..., None], generator)
    return {0: _pick(names, cell), 2: _number(number)}, valid


def _where(names: Tensor, generator: torch.Generator, form: Form) -> tuple[dict[int, Tensor], Tensor]:
    cell, valid = _choose(_occurrences(names) == 1, generator)
    return {0: _pick(names, cell), 2: _number(cell // GRID + 1), 3: _number(cell % GRID + 1)}, valid


def _relation(names: Tensor, generator: torch.Generator, form: Form) -> tuple[dict[int, Tensor], Tensor]:
    """Both names occur once; the answer is drawn before the pair, so that yes and no are equally frequent."""
    step_row, step_column = DIRECTIONS[form.direction]
    cells = torch.arange(CELLS, device=names.device)
    along = (cells // GRID) * step_row + (cells % GRID) * step_column
    holds = along[:, None] > along[None, :]  # [first, second]
    unique = _occurrences(names) == 1
    pair = unique[..., :, None] & unique[..., None, :] & ~torch.eye(CELLS, dtype=torch.bool, device=names.device)
    answer = _random_cells(names, 2, generator).bool()
    chosen, valid = _choose((pair & (holds == answer[..., None, None])).flatten(-2), generator)
    return {0: _pick(names, chosen // CELLS), 1: _pick(names, chosen % CELLS), 2: _yes(answer)}, valid


def _neighbour(names: Tensor, generator: torch.Generator, form: Form) -> tuple[dict[int, Tensor], Tensor]:
    step_row, step_column = DIRECTIONS[form.direction]
    cells = torch.arange(CELLS, device=names.device)
    row, column = cells // GRID + step_row, cells % GRID + step_column
    inside = (row >= 0) & (row < GRID) & (column >= 0) & (column < GRID)
    cell, valid = _choose((_occurrences(names) == 1) & inside, generator)
    neighbour = (cell + step_row * GRID + step_column).clamp(0, CELLS - 1)
    return {0: _pick(names, cell), 2: _pick(names, neighbour)}, valid


def _exists(names: Tensor, generator: torch.Generator, form: Form) -> tuple[dict[int, Tensor], Tensor]:
    present = torch.zeros(*names.shape[:2], len(tile_names()), dtype=torch.bool, device=names.device)
    present = present.scatter(-1, names, True)
    answer = _random_cells(names, 2, generator).bool()
    name, valid = _choose(present == answer[..., None], generator)
    return {0: name, 2: _yes(answer)}, valid
