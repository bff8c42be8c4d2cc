"""Text for people: styled at a terminal, plain in a pipe or with NO_COLOR."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A piece of a line and its rich style."""

    text: str
    style: str = ""


def echo(*spans: Span) -> None:
    """Print one line on standard output."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        print("".join(span.text for span in spans))
        return
    from rich.console import Console
    from rich.text import Text

    line = Text()
    for span in spans:
        line.append(span.text, style=span.style)
    Console(highlight=False, soft_wrap=True).print(line)
