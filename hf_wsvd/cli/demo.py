"""`hf-wsvd demo`: the embedded vision-language model, dense and compressed, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from ..demo.run import check_output_dir, parse_ratios, results_table, run_demo


def demo(
    output_dir: Annotated[Path, typer.Option(help="Folder for report.html and results.json.")],
    questions: Annotated[int, typer.Option(min=1, help="Questions of each of the seven types.")] = 20,
    ratios: Annotated[str, typer.Option(help="Latent widths to measure, as fractions of the head dimension.")] = (
        "0.75,0.5,0.375,0.25"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the questions and of the calibration set.")] = 0,
) -> None:
    """Ask the embedded model held-out questions, dense and at several ratios, and write a report."""
    wanted = parse_ratios(ratios)
    check_output_dir(output_dir)
    results = run_demo(output_dir, questions, wanted, seed)
    typer.echo(results_table(results))
    total = results["rows"][0]["accuracy"]["all"]
    typer.echo(
        f"{total['total']} questions, {questions} a type; standard error of a total at most "
        f"{max(row['accuracy']['all']['standard_error'] for row in results['rows']):.1%}, of a type at most "
        f"{0.5 / questions**0.5:.1%}; {results['seconds']:.0f} s"
    )
    typer.echo(f"Report: {output_dir / 'report.html'}")
