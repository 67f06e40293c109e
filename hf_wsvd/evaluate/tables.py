"""Tables of text, for the console and for Markdown."""


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Columns aligned by spaces: the first to the left, the others, which hold numbers, to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in (header, rule, *rows)
    )


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """The same as a GitHub-flavoured Markdown table."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))
