"""placeholder"""

from pathlib import Path
from typing import Any


def write(output: Path, origins: Any) -> Path:
    return output / "report.html"
