"""Every verb of the command line with its arguments. Standard library only, so that `--help` is quick.

The functions that do the work are named as `module:function` and imported when their verb runs.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from blueprints.errors import UsageError

Configure = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Verb:
    """One verb.

    Attributes:
        name: what is typed.
        help: one line for the list of verbs.
        target: `module:function` that takes the parsed arguments and returns the exit code.
        configure: adds the verb's arguments to its parser.
        about: paragraphs below the usage.
        examples: command lines that show it.
        recipe: whether it takes a recipe, `-f` files and `key=value` texts.
    """

    name: str
    help: str
    target: str
    configure: Configure
    about: str = ""
    examples: tuple[str, ...] = ()
    recipe: bool = False


class Parser(argparse.ArgumentParser):
    """An argument parser whose faults are ours: exit code 2, one message, the nearest option named."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        todo = f"see `{self.prog} --help`"
        if message.startswith(prefix):
            unknown = message.removeprefix(prefix).split(" ")[0]
            options = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(unknown.split("=")[0], options, 1, 0.5)
            message = f"unknown option {unknown}"
            todo = f"did you mean {near[0]}? {todo}" if near else todo
        raise UsageError(message, where=self.prog, todo=todo)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _name(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("--name", metavar="NAME", help=help_text)


def _job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the job, as `blueprints jobs` lists it")


def _place(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument(
        "--backend", choices=("local", "kubernetes"), default="local", help="this machine or a cluster (default: local)"
    )
    where.add_argument(
        "--context", metavar="NAME", help="kubernetes: context of the kubeconfig (default: the current one)"
    )
    where.add_argument("--namespace", metavar="NAME", help="kubernetes: namespace of the jobs (default: the context's)")
    where.add_argument("--kubeconfig", metavar="FILE", help="kubernetes: the kubeconfig (default: as kubectl finds it)")


def _list_jobs(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    _place(parser)


def _change(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    _place(parser)


def _train(parser: argparse.ArgumentParser) -> None:
    _name(parser, "name of the job; the name of a stopped job with the same recipe resumes it (default: derived)")
    parser.add_argument("--detach", action="store_true", help="start the job and return at once, printing its name")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    _json(parser)
    _place(parser)


def _render(parser: argparse.ArgumentParser) -> None:
    _name(parser, "name of the TrainJob (default: derived from the recipe)")
    what = "the JobSet that the cluster makes of it (and a PodGroup and hostfile where there are), not the TrainJob"
    parser.add_argument("--jobset", action="store_true", help=what)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to FILE instead of standard output")


def _validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", action="store_true", help="also fetch the data set and check every row")
    _json(parser)


def _logs(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--step", metavar="STEP", help="one step only, such as dataset-initializer or node-0")
    parser.add_argument("--follow", action="store_true", help="go on printing until the job ends")
    _place(parser)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


_seconds.__name__ = "number of seconds"  # argparse names the type in its message


def _wait(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--timeout", metavar="S", type=_seconds, help="give up after S seconds (default: never)")
    _json(parser)
    _place(parser)


def _delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="+", help="names of jobs")
    parser.add_argument("--force", action="store_true", help="stop a running job first")
    parser.add_argument(
        "--claims",
        action="store_true",
        help="kubernetes: also remove the claim with what was trained, which stays otherwise",
    )
    _place(parser)


def _get(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    _json(parser)
    _place(parser)


def _runtimes(parser: argparse.ArgumentParser) -> None:
    actions = ("list", "render", "diff", "apply")
    parser.add_argument("action", choices=actions, metavar="list|render|diff|apply", help="what to do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="runtimes, such as llm-sft (default: all)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--overlay", metavar="NAME|DIR", help="as a scheduler wants them: coscheduling, kai, kueue, multikueue, volcano, "
        "yunikorn, or the folder of a kustomization of your own",
    )  # fmt: skip
    which.add_argument(
        "--generic", action="store_true", help="instead of ours, the general ones (torch-distributed, ...)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="render: write to FILE")
    parser.add_argument("--kubeconfig", metavar="FILE", help="diff, apply: the cluster (default: as kubectl finds it)")
    parser.add_argument(
        "--context", metavar="NAME", help="diff, apply: context of the kubeconfig (default: the current)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="apply: let the API server check everything, change nothing"
    )
    parser.add_argument("--json", action="store_true", help="list: print JSON, for scripts")


def _migrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="YAML file with PyTorchJobs or MPIJobs; - reads standard input")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to FILE instead of standard output")
    what = "make ClusterTrainingRuntimes, for every namespace, instead of TrainingRuntimes of the job's namespace"
    parser.add_argument("--cluster", action="store_true", help=what)


def _rows(text: str) -> int:
    rows = int(text)
    if rows < 1:
        raise ValueError(text)
    return rows


_rows.__name__ = "number of at least 1"


def _eval(parser: argparse.ArgumentParser) -> None:
    _job(parser)
    parser.add_argument("--dataset", metavar="URI", help="rows to evaluate on (default: those that the job held out)")
    parser.add_argument(
        "--split", metavar="NAME", help="split of --dataset (default: its held-out split, else its training split)"
    )
    parser.add_argument(
        "--metric", metavar="NAME", action="append",
        help="exact_match, numeric_match, ... or package.module:function; may be given several times (default: the recipe's)",
    )  # fmt: skip
    parser.add_argument("--max-rows", metavar="N", type=_rows, help="use the first N rows (default: the recipe's)")
    parser.add_argument("--max-new-tokens", metavar="N", type=_rows, help="longest answer (default: the recipe's)")
    parser.add_argument("--harness", choices=("lm_eval",), help="evaluate by lm-evaluation-harness, with --tasks")
    parser.add_argument("--tasks", metavar="A,B", help="tasks of the harness")
    parser.add_argument("--include-path", metavar="DIR", help="directory with tasks of your own for the harness")
    _json(parser)


def _nothing(_parser: argparse.ArgumentParser) -> None:
    pass


RECIPE_VERBS = (
    Verb(
        "recipes",
        "list the shipped recipes",
        "blueprints.cli.recipe:recipes",
        _json,
        "The recipes that come with the package; any of them is a starting point.",
        ("blueprints recipes", "blueprints recipes --json"),
    ),
    Verb(
        "show",
        "print a recipe in full, and where each value comes from",
        "blueprints.cli.recipe:show",
        _json,
        "Prints the resolved recipe: every value with the layer and the place that set it, and the recipe's hash.",
        ("blueprints show sft-lora", "blueprints show my.yaml -f big-gpu.yaml lora.r=8"),
        recipe=True,
    ),
    Verb(
        "explain",
        "say what a key means, what it takes and what set it",
        "blueprints.cli.recipe:explain",
        _json,
        "KEY is a dotted key (lora.r) or a block (lora). With a RECIPE, also the key's value there and what set it.",
        ("blueprints explain lora.r", "blueprints explain sft-lora training.learning_rate lora.r=64"),
        recipe=True,
    ),
    Verb(
        "validate",
        "check a recipe, and with --data its rows, before any job exists",
        "blueprints.cli.recipe:validate",
        _validate,
        "Names every fault at once. Exit code 0: the recipe is valid; 2: it is not; 3: its data is not. Also checks "
        "TrainJobs and runtimes that you wrote by hand: `-f FILE` without a recipe, `-f -` for standard input.",
        (
            "blueprints validate my.yaml",
            "blueprints validate my.yaml --data dataset=file:///data/rows.jsonl",
            "blueprints validate -f trainjob.yaml -f runtime.yaml",
        ),
        recipe=True,
    ),
    Verb(
        "schema",
        "print the JSON schema of recipes, for editors",
        "blueprints.cli.recipe:schema",
        _nothing,
        "JSON Schema, draft 2020-12. Editors use it through the comment `# yaml-language-server: $schema=FILE`.",
        ("blueprints schema > recipe.schema.json",),
    ),
)

JOB_VERBS = (
    Verb(
        "train",
        "run a recipe as a job",
        "blueprints.cli.job:train",
        _train,
        "Turns the recipe into a TrainJob and runs its steps. Ctrl-C asks the job to stop, saving its state; a second "
        "Ctrl-C kills it. A job in a cluster is only let go of, and goes on: `blueprints suspend` stops it.",
        (
            "blueprints train quickstart",
            "blueprints train sft-lora dataset=file:///data/chats.jsonl lora.r=8 --name chats",
            "blueprints train my.yaml -f big-gpu.yaml --detach",
            "blueprints train my.yaml --backend kubernetes --context gpus --namespace team-a",
        ),
        recipe=True,
    ),
    Verb(
        "render",
        "write the TrainJob of a recipe as YAML",
        "blueprints.cli.job:render",
        _render,
        "The TrainJob as a cluster with Kubeflow Trainer takes it: `blueprints render my.yaml | kubectl apply -f -`.",
        ("blueprints render sft-lora lora.r=8", "blueprints render my.yaml --name chats -o job.yaml"),
        recipe=True,
    ),
    Verb(
        "jobs",
        "list the jobs",
        "blueprints.cli.job:jobs",
        _list_jobs,
        "",
        ("blueprints jobs", "blueprints jobs --backend kubernetes"),
    ),
    Verb(
        "get",
        "show one job: state, steps, results",
        "blueprints.cli.job:get",
        _get,
        "",
        ("blueprints get chats", "blueprints get chats --json"),
    ),
    Verb(
        "logs",
        "print the logs of a job",
        "blueprints.cli.job:logs",
        _logs,
        "",
        ("blueprints logs chats --follow", "blueprints logs chats --step node-0"),
    ),
    Verb(
        "events",
        "show what happened to a job and its parts, in the order of time",
        "blueprints.cli.job:events",
        _get,
        "In a cluster the events of its TrainJob, JobSet, Jobs and Pods, those that are gone included.",
        ("blueprints events chats", "blueprints events chats --backend kubernetes"),
    ),
    Verb(
        "wait",
        "wait until a job has ended; its result is the exit code",
        "blueprints.cli.job:wait",
        _wait,
        "",
        ("blueprints wait chats", "blueprints wait chats --timeout 600"),
    ),
    Verb(
        "eval",
        "compare a finished job's base and tuned model on any rows",
        "blueprints.cli.evaluation:evaluate",
        _eval,
        "Held-out loss, metrics of generated answers and samples of both models; or tasks of lm-evaluation-harness. The "
        "result is also kept in the job's output/evals.",
        (
            "blueprints eval chats",
            "blueprints eval chats --dataset file:///data/test.jsonl --metric exact_match --metric rouge_l",
            "blueprints eval chats --harness lm_eval --tasks hellaswag --max-rows 100",
        ),
    ),
    Verb(
        "suspend",
        "stop a job so that it can go on later",
        "blueprints.cli.job:suspend",
        _change,
        "The trainer saves a checkpoint. In a cluster the Pods are deleted, and with them their logs.",
        ("blueprints suspend chats", "blueprints suspend chats --backend kubernetes"),
    ),
    Verb(
        "resume",
        "let a suspended job go on from its checkpoint",
        "blueprints.cli.job:resume",
        _change,
        "On this machine also a failed job.",
        ("blueprints resume chats", "blueprints resume chats --backend kubernetes"),
    ),
    Verb(
        "delete",
        "delete jobs with their files",
        "blueprints.cli.job:delete",
        _delete,
        "Deletes the job's state, logs and workspace. A running job is refused without --force. In a cluster the claim with "
        "what was trained stays, unless --claims is given.",
        ("blueprints delete chats", "blueprints delete chats old-job --force"),
    ),
)

CLUSTER_VERBS = (
    Verb(
        "runtimes",
        "list the runtimes; render them for a cluster, compare, install",
        "blueprints.cli.runtimes:run",
        _runtimes,
        "For the cluster's admin. A runtime says how a method runs: steps, images, retries, security. diff and apply ask "
        "the API server for a dry run of everything first; apply changes only runtimes labelled as managed by "
        "llm-blueprints, by server-side apply as field manager llm-blueprints.",
        (
            "blueprints runtimes list",
            "blueprints runtimes render llm-sft --overlay kueue",
            "blueprints runtimes diff --context production",
            "blueprints runtimes apply --context production",
        ),
    ),
    Verb(
        "migrate",
        "turn a Training Operator v1 PyTorchJob or MPIJob into a TrainJob",
        "blueprints.cli.migrate:run",
        _migrate,
        "Writes a TrainJob and its runtime for every job in FILE, valid as `blueprints validate` sees it. What could not be "
        "carried over, and what is started in another way, stands above them as comments and on standard error.",
        ("blueprints migrate pytorchjob.yaml -o trainjob.yaml", "blueprints migrate mpijob.yaml | kubectl apply -f -"),
    ),
)

VERBS = {verb.name: verb for verb in (*JOB_VERBS, *RECIPE_VERBS, *CLUSTER_VERBS)}

EXIT_CODES = (
    (0, "done"),
    (1, "a fault of llm-blueprints: please report it"),
    (2, "the recipe, an override or an argument is wrong"),
    (3, "the data set or the model is invalid for the recipe"),
    (4, "the job failed"),
    (5, "the environment lacks something: an extra, disk space, a port, the network"),
    (130, "interrupted with Ctrl-C"),
)


def top_parser() -> Parser:
    """The parser of `blueprints` without a verb."""
    parser = Parser(prog="blueprints", add_help=True, allow_abbrev=False, usage="blueprints VERB [arguments]")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.description = "Fine-tune any Hugging Face language model from one recipe.\n\n" + "\n".join(
        [*_listed("Run", JOB_VERBS), "", *_listed("Recipes", RECIPE_VERBS), "", *_listed("Cluster", CLUSTER_VERBS)]
    )
    parser.epilog = "\n".join(
        [
            "Examples:",
            "  blueprints train quickstart                 the whole chain on a tiny embedded model, no network needed",
            "  blueprints train sft-lora dataset=file:///data/chats.jsonl lora.r=8",
            "  blueprints show sft-lora lora.r=8           every value, and what set it",
            "  blueprints explain training.learning_rate   what a knob means and trades",
            "",
            "Values come in layers: defaults < RECIPE < -f FILE < key=value < LORA_CONFIG in the environment.",
            "",
            "Exit codes:",
            *(f"  {code:<4}{meaning}" for code, meaning in EXIT_CODES),
            "",
            "`blueprints VERB --help` says more about a verb.",
        ]
    )
    return parser


def _listed(title: str, verbs: tuple[Verb, ...]) -> list[str]:
    return [f"{title}:", *(f"  {verb.name:<10}{verb.help}" for verb in verbs)]


def verb_parser(verb: Verb) -> Parser:
    """The parser of one verb."""
    parser = Parser(prog=f"blueprints {verb.name}", allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n\n".join(
        filter(None, [verb.help[0].upper() + verb.help[1:] + ".", textwrap.fill(verb.about, 100)])
    )
    parser.epilog = "\n".join(["Examples:", *(f"  {example}" for example in verb.examples)])
    if verb.recipe:
        parser.usage = f"blueprints {verb.name} {_operands(verb)} [-f FILE ...] [key=value ...] [options]"
        parser.add_argument("words", nargs="*", metavar=_operands(verb), help=_operands_help(verb))
        parser.add_argument(
            "-f", "--file", dest="files", action="append", default=[], metavar="FILE",
            help="recipe file laid over RECIPE; may be given several times, later ones win",
        )  # fmt: skip
    verb.configure(parser)
    return parser


def _operands(verb: Verb) -> str:
    return "[RECIPE] KEY" if verb.name == "explain" else "RECIPE"


def _operands_help(verb: Verb) -> str:
    recipe = "name of a shipped recipe or path of a YAML file"
    values = "key=value sets a key: lora.r=8, model=hf://org/name, lora=null unsets"
    return f"{recipe}; KEY: dotted key or block; {values}" if verb.name == "explain" else f"{recipe}; {values}"


def parse(verb: Verb, words: list[str]) -> argparse.Namespace:
    """The arguments of a verb; with a recipe, `recipe`, `overrides` and (explain) `key` are told apart.

    Raises:
        UsageError: arguments that do not fit.
    """
    args = verb_parser(verb).parse_intermixed_args(words)
    if verb.recipe:
        _sort_words(verb, args)
    return args


def _sort_words(verb: Verb, args: argparse.Namespace) -> None:
    """`words` becomes `recipe`, `overrides` and `key`: what has a `=` is an override, unless it is a file's name."""
    operands = [word for word in args.words if _is_operand(word)]
    args.overrides = [word for word in args.words if not _is_operand(word)]
    del args.words
    where, most = f"blueprints {verb.name}", 2 if verb.name == "explain" else 1
    if not operands and verb.name == "validate" and args.files and not args.overrides:
        args.recipe = None  # manifests
        return
    if not operands:
        missing = "KEY is missing" if verb.name == "explain" else "RECIPE is missing"
        raise UsageError(missing, where=where, todo=f"see `{where} --help`, `blueprints recipes`")
    if len(operands) > most:
        raise UsageError(f"one argument too many: {operands[most]!r}", where=where, todo=_extra(operands[most]))
    if verb.name == "explain":
        args.key = operands.pop()
    args.recipe = operands[0] if operands else None


def _extra(word: str) -> str:
    """What an argument too many was meant as."""
    if word.endswith((".yaml", ".yml")):
        return f"a file is laid over the recipe with -f: -f {word}"
    key, colon, value = word.partition(":")
    return f"a value is set as key=value: {key.strip()}={value.strip() if colon else '...'}"


def _is_operand(word: str) -> bool:
    if "=" not in word:
        return True
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or a NUL byte
        return False


def nearest_verb(word: str) -> str:
    """A sentence that leads from an unknown verb to the right one."""
    near = difflib.get_close_matches(word, VERBS, 1, 0.6)
    return f"did you mean `blueprints {near[0]}`?" if near else f"verbs: {', '.join(VERBS)}"
