"""The files of the embedded data sets, made by their generators.

python -m initializers.builtin.generate_data                   # rewrite the committed files of all
python -m initializers.builtin.generate_data orders            # of one
python -m initializers.builtin.generate_data --check           # compare, exit 1 if they differ
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from initializers.builtin import DATA, amounts, orders, reviews

GENERATORS: Mapping[str, Callable[[], dict[str, str]]] = {
    "amounts": amounts.generate,
    "orders": orders.generate,
    "reviews": reviews.generate,
}
"""What makes the files of each data set: file name to content, the same wherever it is called."""


def differing(out: Path, files: Mapping[str, str]) -> list[str]:
    """Names of the files under `out` that are missing or are not what `files` says."""
    return [
        name for name, text in files.items() if not (out / name).is_file() or (out / name).read_bytes() != text.encode()
    ]


def write(out: Path, files: Mapping[str, str]) -> None:
    """Write the files of one data set and say how large they are."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_bytes(text.encode())
        print(f"{out.name}/{name}: {text.count(chr(10))} rows, {len(text.encode())} bytes")


def main(argv: list[str] | None = None) -> int:
    """The command line; 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(description="Generate the embedded data sets.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(GENERATORS)} (default: all)")
    parser.add_argument("--out", type=Path, default=DATA, help="folder of all data sets to write or check")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a difference")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in GENERATORS]
    if unknown:
        parser.error(f"no data set is called {', '.join(unknown)}; known: {', '.join(GENERATORS)}")
    stale: list[str] = []
    for name in args.names or GENERATORS:
        files = GENERATORS[name]()
        if args.check:
            stale += [f"{name}/{file}" for file in differing(args.out / name, files)]
        else:
            write(args.out / name, files)
    if args.check:
        print(f"differs: {', '.join(stale)}" if stale else "up to date")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
