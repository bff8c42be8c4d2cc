"""`python -m trainers.evaluation REQUEST.json`: a finished run's base model beside the tuned one, on prepared rows or by
lm-evaluation-harness. The result goes to the path the request names; `blueprints eval` writes the request.

The request: `output` and `model` (directories of the run), `dataset` (a data set's directory with prepared rows) and
`recipe` (the file they were prepared for), or `tasks`; `metrics`, `max_rows`, `max_new_tokens`, `batch_size`, `samples`,
`limit`, `include_path`, `result`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blueprints.errors import EnvironmentFault, ExitCode, JobFailedError, UsageError

Numbers = dict[str, float]
HARNESS = "lm_eval"


def main(path: Path) -> int:
    """Evaluate what the request in `path` says; see the module.

    Raises:
        DataError: the rows are not what the model can take.
        JobFailedError: the artifact cannot be loaded whole.
        EnvironmentFault: lm-evaluation-harness is asked for and not installed.
    """
    request = json.loads(path.read_text(encoding="utf-8"))
    if request.get("tasks") and importlib.util.find_spec(HARNESS) is None:
        raise EnvironmentFault("lm-evaluation-harness is not installed", where="--harness lm_eval", todo=INSTALL)
    from trainers.quiet import quiet

    if request.get("tasks"):
        os.environ.setdefault("HF_HUB_OFFLINE", "0")  # the harness fetches its tasks' data
    quiet(main=False)
    from trainers.checkpoint import write_json

    measure = _harness if request.get("tasks") else _prepared_rows
    found = measure(request)
    write_json(Path(request["result"]), found)
    return int(ExitCode.DONE)


INSTALL = "pip install lm_eval"


def _models(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`base` and then `tuned` with the model of each; one after the other in memory."""
    from trainers.prove import reload

    output = Path(request["output"])
    kind = _kind(output)
    specification = _specification(output) | {"base": request["model"]}
    faults: list[str] = []
    print("loading the model", flush=True)
    if kind == "adapter":
        model = reload(specification, output, faults)
        _whole(faults)
        with model.disable_adapter():
            yield "base", model
        yield "tuned", model
        return
    for when, artifact in (("base", request["model"]), ("tuned", specification["artifact"])):
        # An absolute path stays what it is below any directory.
        model = reload(specification | {"artifact": artifact}, output, faults)
        _whole(faults if when == "tuned" else [])
        yield when, model
        del model


def _whole(faults: list[str]) -> None:
    if faults:
        raise JobFailedError(
            f"the artifact cannot be loaded whole: {'; '.join(faults)}", where="output", todo="train again"
        )


def _prepared_rows(request: Mapping[str, Any]) -> dict[str, Any]:
    """Held-out loss, metrics and answers of both models on prepared rows."""
    from blueprints.recipe import load_recipe
    from trainers.data import open_prepared, with_labels
    from trainers.model import load_tokenizer

    recipe = load_recipe(request["recipe"], environ={}).recipe
    model_directory = Path(request["model"])
    tokenizer = load_tokenizer(model_directory, recipe)
    data = open_prepared(Path(request["dataset"]), recipe, _vocabulary(model_directory, tokenizer))
    rows, split = (data.train, "train") if data.eval is None else (data.eval, "eval")
    rows = rows.select(range(min(len(rows), request["max_rows"])))
    if data.kind == "supervised":
        rows = with_labels(rows)
    from trainers.evaluate import questions_of

    asked, stops = questions_of(rows, data.kind, tokenizer, len(rows))
    results: dict[str, Any] = {}
    for when, model in _models(request):
        results[when] = _measured(when, model, rows, data.kind, asked, stops, tokenizer, request)
    samples = [
        {"prompt": question.prompt, "reference": question.reference}
        | {when: found["answers"][index] for when, found in results.items() if found["answers"]}
        for index, question in enumerate(asked[: request["samples"]])
    ]
    return {
        "rows": len(rows),
        "split": split,
        "source": data.manifest.get("source"),
        **{when: found["measures"] for when, found in results.items()},
        "samples": samples,
    }


def _vocabulary(directory: Path, tokenizer: Any) -> int:
    from transformers import AutoConfig

    return max(len(tokenizer), int(AutoConfig.from_pretrained(directory).get_text_config().vocab_size))


def _measured(
    when: str,
    model: Any,
    rows: Any,
    kind: str,
    asked: Any,
    stops: set[int],
    tokenizer: Any,
    request: Mapping[str, Any],
) -> dict[str, Any]:
    from trainers import evaluate
    from trainers.measures import without_router_logits
    from trainers.metrics import measure

    bf16 = bool(_specification(Path(request["output"]))["load"]["bf16"])
    measures: Numbers = {}
    if kind == "supervised":
        print(f"{when}: loss on {len(rows)} rows", flush=True)
        measures["eval_loss"] = evaluate.mean_loss(
            model, rows, batch_size=request["batch_size"], bf16=bf16, pad=tokenizer.pad_token_id
        )
    count = len(asked) if request["metrics"] else min(request["samples"], len(asked))
    given: list[str] = []
    if count:
        with without_router_logits(model):
            given = evaluate.answers(
                model,
                tokenizer,
                [question.ids for question in asked[:count]],
                stops=stops,
                batch_size=request["batch_size"],
                max_new_tokens=request["max_new_tokens"],
                bf16=bf16,
                tick=_ticker(when, count),
            )
    for name in request["metrics"]:
        measures |= measure(name, [one.prompt for one in asked], given, [one.reference for one in asked])
    return {"measures": measures, "answers": given}


def _kind(output: Path) -> str:
    return "adapter" if (output / "adapter").is_dir() else "model"


def _specification(output: Path) -> dict[str, Any]:
    """How the run's artifact is loaded, as its proof did."""
    found: dict[str, Any] = json.loads((output / "proof" / f"{_kind(output)}.json").read_text(encoding="utf-8"))
    return found


def _ticker(when: str, count: int) -> Callable[[int], None]:
    """Says at about every tenth of the answers how far it is."""
    said = [0]

    def tick(done: int) -> None:
        if done == count or done - said[0] >= max(1, count // 10):
            said[0] = done
            print(f"{when}: {done} of {count} answers", flush=True)

    return tick


def _harness(request: Mapping[str, Any]) -> dict[str, Any]:
    """lm-evaluation-harness on both models."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    output = Path(request["output"])
    tokenizer = AutoTokenizer.from_pretrained(output / _kind(output))
    manager = TaskManager(include_path=request["include_path"])
    unknown = [task for task in request["tasks"] if task not in manager.all_tasks]
    if unknown:
        raise UsageError(
            f"lm-evaluation-harness has no task {', '.join(unknown)}",
            where="--tasks",
            todo="`lm_eval --tasks list` names them; tasks of your own are found with --include-path",
        )
    results: dict[str, Numbers] = {}
    for when, model in _models(request):
        print(f"{when}: {', '.join(request['tasks'])}", flush=True)
        model.eval()
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=request["batch_size"])
        found = lm_eval.simple_evaluate(
            model=wrapped, tasks=list(request["tasks"]), limit=request["limit"], task_manager=manager
        )
        results[when] = {
            f"{task}/{name.removesuffix(',none')}": float(value)
            for task, numbers in found["results"].items()
            for name, value in numbers.items()
            if isinstance(value, int | float) and "stderr" not in name and name != "sample_len"
        }
    return {"tasks": list(request["tasks"]), "limit": request["limit"], **results, "samples": []}


def run() -> int:
    """The whole life of the process: its exit code, with every failure explained on standard error."""
    from trainers import diagnose

    try:
        return main(Path(sys.argv[1]))
    except Exception as error:  # noqa: BLE001 - the edge of the process: all becomes an exit code
        return diagnose.report(error)


if __name__ == "__main__":
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
