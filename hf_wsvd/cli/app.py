"""The command-line application and its errors: one line on stderr, exit code 2, no traceback."""

import os
import sys
from typing import Annotated

import typer
from transformers.utils import logging

from .. import __version__
from .calibrate import calibrate
from .compress import compress
from .demo import demo
from .estimate import estimate
from .headguard import headguard
from .inspect import inspect
from .tune import tune


TRACEBACK_VARIABLE = "HF_WSVD_TRACEBACK"

app = typer.Typer(
    name="hf-wsvd",
    help="Low-rank latent KV caches for Hugging Face vision-language and language models.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(calibrate)
app.command()(compress)
app.command()(headguard)
app.command()(estimate)
app.command()(inspect)
app.command()(tune)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Run one command line; its exit code: 0; 1 where a verification fails; 2 after an error; 130 after Ctrl-C."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        return app(args=arguments or ["--help"], standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        print("hf-wsvd: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        print(f"hf-wsvd: error: {error_line(error)}", file=sys.stderr)
        return 2


def error_line(error: Exception) -> str:
    """One line for any exception. Those that no check of ours or of transformers raised keep their class's name."""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    line = " ".join(text.split())
    if isinstance(error, (ValueError, OSError, ImportError)) or hasattr(error, "format_message"):
        return line or type(error).__name__
    return f"{type(error).__name__}: {line} (set {TRACEBACK_VARIABLE}=1 to see where)"


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))
