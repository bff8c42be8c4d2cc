"""The documentation speaks of what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("blueprints", "trainers", "initializers")
    for path in (ROOT / folder).rglob("*.py")
)
# Adjacent string literals are one message.
SOURCE_TEXT = re.sub(r'"\s*\n?\s*f?"', "", SOURCES)
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"))
EXAMPLES = {"file.jsonl:812: messages[1].content: …", "the loss became nan"}


@pytest.mark.parametrize("message", [text for text in QUOTED if text not in EXAMPLES])
def test_troubleshooting_quotes_real_messages(message: str) -> None:
    assert message in SOURCE_TEXT


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_no_template_is_left_unfilled() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"<!-- .*(output|example).*-->", page.read_text(encoding="utf-8")), page.name
