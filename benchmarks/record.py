"""What a result was measured by, for the record beside its numbers and below its table."""

import shlex
import sys
from pathlib import Path
from typing import Any


def command_line(script: str) -> str:
    """How `script` (a file in benchmarks/) was called, without the folders of this machine.

    Paths outside the repository stand by their names alone.
    """
    arguments = [Path(argument).name if argument.startswith("/") else argument for argument in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{script}", *arguments])


def with_note(table: str, note: str, results: dict[str, Any]) -> str:
    """The table and below it what it was measured on and by which command."""
    where = results["environment"]
    load = f"threads: {where['threads']}, load average {where['load_average']}"
    versions = f"transformers {where['transformers']}, torch {where['torch']}"
    notes = "".join(f" {text}" for text in results.get("notes", ()))
    return f"{table}\n\n{note}. {where['device']}, {load}, {versions}. `{results['command']}`{notes}"
