"""`blueprints migrate`: jobs of Training Operator v1 as TrainJobs."""

from __future__ import annotations

import argparse
import sys

from blueprints.errors import UsageError
from blueprints.manifest_files import read_documents
from blueprints.migrate.read import left_alone, migrate


def run(args: argparse.Namespace) -> int:
    """Write the TrainJobs with their runtimes; what is not as it was goes to standard error."""
    documents = read_documents(args.file)
    found = migrate(documents, "standard input" if args.file == "-" else args.file, cluster=args.cluster)
    text = "---\n".join(migration.to_yaml() for migration in found)
    if args.output is None:
        sys.stdout.write(text)
    else:
        try:
            args.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write: {error.strerror}", where=f"--output {args.output}") from None
    sys.stdout.flush()
    for migration in found:
        count = len(migration.remarks)
        said = f"{count} thing{'' if count == 1 else 's'} not as it was:" if count else "carried over whole"
        print(f"{migration.kind} {migration.name}: {said}", file=sys.stderr)
        for remark in migration.remarks:
            print(f"  {remark}", file=sys.stderr)
    for remark in left_alone(documents):
        print(remark, file=sys.stderr)
    return 0
