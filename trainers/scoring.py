"""The teacher of a distillation: loaded beside the student, or its scores of the rows stored before training.

Stored scores lie in `<workspace>/teacher_logits`: Arrow shards aligned with the prepared rows, one row each, with the
log-probabilities of the teacher's likeliest tokens at every trained position. `_manifest.json` is written last.
`trainers.teacher` is the step that makes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from accelerate.utils import extract_model_from_parallel
from datasets import Dataset, concatenate_datasets
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from blueprints.digests import digest, hash_file, tokenizer_digest
from blueprints.errors import DataError, EnvironmentFault
from blueprints.measures import label
from blueprints.progress import Progress
from blueprints.recipe.schema import DistillOptions, Recipe
from trainers import evaluate
from trainers.checkpoint import write_json
from trainers.data import PreparedData, open_prepared, read_manifest, with_labels
from trainers.divergence import TopK, negative_log_likelihood, top_k
from trainers.model import DTYPES, embedding_rows, load_causal_lm, load_tokenizer, mixed_precision
from trainers.process import Workspace, say, world

FORMAT = 1
"""Version of the stored scores: raised with whatever changes what they hold."""
SHARD_ROWS = 1024
MANIFEST = "_manifest.json"
SCORE_AGAIN = (
    "run `python -m trainers.teacher` with this recipe after the initializers (the runtime llm-distill-offline does), or "
    "set distill.teacher_top_k=null"
)


@dataclass(frozen=True)
class Stored:
    """The teacher's stored scores.

    Attributes:
        train, eval: one row for each prepared row: `top_ids`, `top_log_probs` (flat, K for each trained position),
            `rest` (one for each).
        manifest: its `_manifest.json`.
    """

    train: Dataset
    eval: Dataset | None
    manifest: Mapping[str, Any]

    @property
    def vocabulary(self) -> int:
        """Tokens that teacher and student have in common."""
        return int(self.manifest["vocabulary"])

    @property
    def measures(self) -> dict[str, float]:
        """The teacher's own on the held-out rows, see `held_out_measures`."""
        return dict(self.manifest["held_out"])


def load_teacher(where: Workspace, recipe: Recipe, device: torch.device) -> PreTrainedModel:
    """The teacher, frozen and in evaluation mode, on `device`.

    Raises:
        DataError: it is not in the workspace, is no complete language model, or has another vocabulary.
        EnvironmentFault: bitsandbytes is asked for and not installed.
    """
    options = recipe.distill
    assert options is not None
    if not (where.teacher / MANIFEST).exists():
        raise DataError(
            "the teacher is not in the workspace", where=str(where.teacher), todo="run the model initializer again"
        )
    same_vocabulary(where.model, where.teacher, recipe)
    settings: dict[str, Any] = {
        "dtype": _dtype(options, device),
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    if options.teacher_quantize:
        settings["quantization_config"] = _four_bits(recipe, device)
    if device.type == "cuda":
        settings["device_map"] = {"": device.index or 0}
    model = load_causal_lm(where.teacher, ["sdpa", "eager"], settings)
    return model.requires_grad_(False).eval()


def _dtype(options: DistillOptions, device: torch.device) -> torch.dtype | str:
    if options.teacher_dtype != "auto":
        return DTYPES[options.teacher_dtype]
    return torch.float32 if device.type == "cpu" else "auto"


def _four_bits(recipe: Recipe, device: torch.device) -> BitsAndBytesConfig:
    try:
        import bitsandbytes  # noqa: F401 - only to see that it is there
    except ImportError as error:
        raise EnvironmentFault(
            f"distill.teacher_quantize needs bitsandbytes, which cannot be imported: {error}",
            where="distill.teacher_quantize",
            todo="pip install bitsandbytes, or set distill.teacher_quantize=false",
        ) from error
    compute = torch.bfloat16 if mixed_precision(recipe, device) else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def same_vocabulary(student: Path, teacher: Path, recipe: Recipe) -> None:
    """Check that both models mean the same text by the same token.

    One may have tokens beyond those of the other, and embeddings padded to another size: distributions are compared
    over what both have.

    Raises:
        DataError: a token of one is another token of the other.
    """
    if tokenizer_digest(student) == tokenizer_digest(teacher):
        return
    tokens = [
        {
            number: text
            for text, number in AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=recipe.model.trust_remote_code
            )
            .get_vocab()
            .items()
        }
        for path in (student, teacher)
    ]
    shared = tokens[0].keys() & tokens[1].keys()
    other = sorted(number for number in shared if tokens[0][number] != tokens[1][number])
    if other:
        first = other[0]
        raise DataError(
            f"the teacher has another vocabulary: {len(other):,} of {len(shared):,} tokens differ (token {first} is "
            f"{tokens[0][first]!r} to the student and {tokens[1][first]!r} to the teacher), so that their distributions "
            "cannot be compared",
            where="distill.teacher",
            todo="use a teacher of the student's model family, or train on the teacher's text alone: distill.seq_kd=true "
            "with rows it has written and distill.teacher=null",
        )


def vocabulary(student: PreTrainedModel, teacher: PreTrainedModel) -> int:
    """Number of tokens over which the two are compared: embeddings may be padded to different sizes."""
    return min(embedding_rows(student), embedding_rows(teacher))


def logits_at(model: Any, inputs: Mapping[str, Tensor], size: int) -> Tensor:
    """Logits of the first `size` tokens at the positions that predict a trained token, (N, size), row by row.

    Args:
        model: a causal language model, wrapped for several processes or not.
        inputs: `input_ids`, `attention_mask`, `labels`, padded on the right.
        size: the common vocabulary.
    """
    mask = inputs["labels"][:, 1:] >= 0
    columns = mask.any(0).nonzero().flatten()
    if not len(columns):  # a micro-batch without a trained token still takes its part in the backward pass
        columns = torch.zeros(1, dtype=torch.long, device=mask.device)
    given: dict[str, Any] = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    if "logits_to_keep" in inspect.signature(plain(model).forward).parameters:
        found: Tensor = model(**given, use_cache=False, logits_to_keep=columns).logits
    else:
        found = model(**given, use_cache=False).logits[:, columns]
    return found[mask[:, columns]][:, :size]


def plain(model: Any) -> PreTrainedModel:
    """The Transformers model inside what wraps it for several processes and for adapters."""
    inner = extract_model_from_parallel(model)
    return inner.get_base_model() if isinstance(inner, PeftModel) else inner


def labels_at(inputs: Mapping[str, Tensor]) -> Tensor:
    """The trained tokens in the order of `logits_at`, (N,)."""
    labels = inputs["labels"][:, 1:]
    return labels[labels >= 0]


@torch.no_grad()
def held_out_measures(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, rows: Dataset | None, size: int
) -> dict[str, float]:
    """What the teacher reaches on the held-out rows, and the student is measured against.

    Every process takes part and gets the same.

    Args:
        rows: with labels; None: nothing is held out.
        size: the common vocabulary.

    Returns:
        `nll` (mean negative log-likelihood of a trained token, in nats) and the recipe's metric of its greedy answers.
    """
    if rows is None:
        return {}
    here, device = world(), next(model.parameters()).device
    batch_size = recipe.training.per_device_eval_batch_size
    sums = torch.zeros(2, dtype=torch.float64)
    for start in range(here.rank * batch_size, len(rows), here.size * batch_size):
        chosen = list(rows.select(range(start, min(start + batch_size, len(rows)))))
        inputs = {name: value.to(device) for name, value in padded(chosen, tokenizer.pad_token_id).items()}
        labels = labels_at(inputs)
        nll = negative_log_likelihood(logits_at(model, inputs, size), labels).sum()
        sums += torch.tensor([nll.item(), labels.numel()], dtype=torch.float64)
    if here.size > 1:
        gathered: list[Any] = [None] * here.size
        torch.distributed.all_gather_object(gathered, sums)
        sums = torch.stack(gathered).sum(0)
    found = {"nll": float(sums[0] / sums[1])} if sums[1] else {}
    if recipe.eval.metric == "none":
        return found
    asked, stops = evaluate.questions(rows, tokenizer, len(rows))
    given = evaluate.shared_answers(
        here,
        asked,
        lambda prompts: evaluate.answers(
            model, tokenizer, prompts, stops=stops, batch_size=batch_size,
            max_new_tokens=recipe.eval.max_new_tokens, bf16=False, tick=lambda _done: None,
        ),
    )  # fmt: skip
    return found | evaluate.scores(recipe, given, asked)


def said(measures: Mapping[str, float]) -> str:
    """Measures as one line."""
    shown = ("{} {:{}}".format(label(name)[0], value, label(name)[1]) for name, value in measures.items())
    return ", ".join(shown) or "not measured: no rows are held out"


# --- stored scores -------------------------------------------------------------------------------------------------


def fingerprint(recipe: Recipe, data: PreparedData, teacher: Mapping[str, Any]) -> dict[str, Any]:
    """What stored scores depend on: rows, teacher and the recipe's settings."""
    options = recipe.distill
    assert options is not None
    splits = data.prepared["splits"]
    return {
        "format": FORMAT,
        "rows": digest({name: split.get("shards") for name, split in splits.items()}),
        "rows_fingerprint": data.prepared.get("fingerprint"),
        "teacher": options.teacher,
        "teacher_files": digest(teacher.get("files")),
        "teacher_dtype": options.teacher_dtype,
        "teacher_quantize": options.teacher_quantize,
        "top_k": options.teacher_top_k,
        "temperature": options.temperature,
        "held_out_rows": recipe.eval.max_rows,
        "metric": recipe.eval.metric,
    }


def open_stored(where: Workspace, recipe: Recipe, data: PreparedData) -> Stored:
    """The stored scores of exactly these rows, by exactly this teacher.

    Raises:
        DataError: there are none, they are of other rows, another teacher or other settings, or a shard is damaged.
    """
    root = where.teacher_logits
    try:
        manifest: dict[str, Any] = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        raise DataError(
            "distill.teacher_top_k is set, and the rows have not been scored by the teacher",
            where=str(root),
            todo=SCORE_AGAIN,
        ) from None
    teacher = read_manifest(where.teacher) if (where.teacher / MANIFEST).exists() else None
    wanted, stated = fingerprint(recipe, data, teacher or {}), manifest["inputs"]
    if teacher is None:  # it is not needed any more, so it may have been removed
        wanted["teacher_files"] = stated.get("teacher_files")
    other = [name for name, value in wanted.items() if stated.get(name) != value]
    if other:
        said = ", ".join(f"{name} {stated.get(name)!r} instead of {wanted[name]!r}" for name in other)
        raise DataError(f"the teacher's scores are not of this run: {said}", where=str(root), todo=SCORE_AGAIN)
    return Stored(
        train=_open_split(root, "train", manifest, len(data.train)),
        eval=_open_split(root, "eval", manifest, len(data.eval)) if data.eval is not None else None,
        manifest=manifest,
    )


def _open_split(root: Path, name: str, manifest: Mapping[str, Any], rows: int) -> Dataset:
    parts = []
    for shard in manifest["splits"][name]:
        path = root / str(shard["path"])
        whole = path.is_file() and path.stat().st_size == shard["size"]
        if not whole or (world().main and hash_file(path) != shard["sha256"]):
            raise DataError("a shard of the teacher's scores is missing or damaged", where=str(path), todo=SCORE_AGAIN)
        parts.append(Dataset.from_file(str(path)))
    found: Dataset = concatenate_datasets(parts)
    if len(found) > rows or (name == "train" and len(found) != rows):
        problem = f"the teacher has scored {len(found)} rows of the split {name}, which has {rows}"
        raise DataError(problem, where=str(root), todo=SCORE_AGAIN)
    return found


def stored_target(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The scores of a batch's rows, position by position in the order of `logits_at`."""
    rest = torch.tensor([value for row in rows for value in row["rest"]])
    return {
        "top_ids": torch.tensor([token for row in rows for token in row["top_ids"]]).view(len(rest), -1),
        "top_log_probs": torch.tensor([value for row in rows for value in row["top_log_probs"]]).view(len(rest), -1),
        "rest": rest,
    }


# --- the step that stores them -------------------------------------------------------------------------------------


class Scoring:
    """One run of the step: which shards there are to be, and what is done.

    Args:
        where: the workspace.
        inputs: what the scores depend on; scores of other inputs are thrown away.
    """

    def __init__(self, where: Workspace, inputs: Mapping[str, Any]) -> None:
        self.target, self.inputs = where.teacher_logits, dict(inputs)
        self.building = where.root / f".{self.target.name}.building"

    def done(self) -> bool:
        """Whether complete scores of these inputs are there already."""
        try:
            manifest = json.loads((self.target / MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return False
        shards = [shard for split in manifest["splits"].values() for shard in split]
        paths = [(self.target / shard["path"], shard["size"]) for shard in shards]
        return manifest["inputs"] == self.inputs and all(p.is_file() and p.stat().st_size == size for p, size in paths)

    def begin(self) -> None:
        """Make the directory to build in, or keep that of a step with the same inputs that was killed."""
        plan = self.building / "inputs.json"
        if plan.exists() and json.loads(plan.read_text(encoding="utf-8")) == self.inputs:
            return
        shutil.rmtree(self.building, ignore_errors=True)
        self.building.mkdir(parents=True)
        write_json(plan, self.inputs)

    def shards(self, split: str, rows: int) -> list[tuple[Path, range]]:
        """The shards of a split with the rows they hold."""
        starts = range(0, rows, SHARD_ROWS)
        return [
            (self.building / f"{split}-{index:05d}.arrow", range(start, min(start + SHARD_ROWS, rows)))
            for index, start in enumerate(starts)
        ]

    def finish(self, splits: Mapping[str, int], manifest: Mapping[str, Any]) -> None:
        """Write the manifest and move the directory to its place."""
        entries = {
            split: [
                {"path": path.name, "rows": len(rows), "size": path.stat().st_size, "sha256": hash_file(path)}
                for path, rows in self.shards(split, count)
            ]
            for split, count in splits.items()
        }
        write_json(self.building / MANIFEST, {"inputs": self.inputs, "splits": entries, **manifest})
        shutil.rmtree(self.target, ignore_errors=True)
        self.building.rename(self.target)


class Scorer:
    """Scores rows with the teacher.

    Args:
        model: the teacher.
        recipe: the resolved recipe.
        size: the common vocabulary.
        pad: token to pad with; it is seen by no position that counts.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe, size: int, pad: int) -> None:
        options = recipe.distill
        assert options is not None
        assert options.teacher_top_k is not None
        self.model, self.size, self.pad = model, size, pad
        self.k, self.temperature = min(options.teacher_top_k, size), options.temperature
        self.batch_size = recipe.training.per_device_eval_batch_size
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[TopK]:
        """The K likeliest tokens at the trained positions of each row."""
        found: dict[int, TopK] = {}
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            batch = padded([rows[index] for index in chosen], self.pad)
            inputs = {name: value.to(self.device) for name, value in batch.items()}
            counts = (inputs["labels"][:, 1:] >= 0).sum(1).tolist()
            best = top_k(logits_at(self.model, inputs, self.size), self.k, self.temperature)
            parts = zip(best.ids.split(counts), best.log_probs.split(counts), best.rest.split(counts), strict=True)
            found |= {index: TopK(*(part.cpu() for part in row)) for index, row in zip(chosen, parts, strict=True)}
        return [found[index] for index in range(len(rows))]


def padded(rows: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Tensor]:
    """Rows of `input_ids` and `labels` as one batch, padded on the right."""
    batch: dict[str, Tensor] = DataCollatorForLanguageModeling(pad)(
        [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
    )
    return batch


def write_shard(path: Path, scored: Sequence[TopK]) -> None:
    """One Arrow file, there at once or not at all."""
    table = pa.table(
        {
            "top_ids": pa.array([row.ids.flatten().numpy() for row in scored], pa.list_(pa.int32())),
            "top_log_probs": pa.array([row.log_probs.flatten().numpy() for row in scored], pa.list_(pa.float32())),
            "rest": pa.array([row.rest.numpy() for row in scored], pa.list_(pa.float32())),
        }
    )
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One step at a time stores scores in a workspace; whoever comes later waits.

    Of several processes under torchrun rank 0 holds the lock for all.
    """
    if not world().main:
        yield
        return
    with (root / ".teacher_logits.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def store(where: Workspace, recipe: Recipe, progress: Progress) -> None:
    """Score the prepared rows with the teacher, and leave complete scores; does nothing if they are there already.

    Raises:
        DataError: rows or teacher are not there, or do not belong together.
        EnvironmentFault: a GPU or a library is missing.
    """
    here = world()
    if here.size > 1:
        torch.distributed.init_process_group("gloo")
    with locked(where.root):
        _store(where, recipe, _device(recipe), progress)
    if here.size > 1:
        torch.distributed.destroy_process_group()


def _device(recipe: Recipe) -> torch.device:
    """A GPU if the recipe has one and it is here: this step may run where there is none."""
    if recipe.resources.gpu and torch.cuda.is_available():
        return torch.device("cuda", world().local_rank)
    return torch.device("cpu")


def _store(where: Workspace, recipe: Recipe, device: torch.device, progress: Progress) -> None:
    data = open_prepared(where.dataset, recipe, sys.maxsize)
    scoring = Scoring(where, fingerprint(recipe, data, read_manifest(where.teacher)))
    if scoring.done():
        say(f"nothing to do: {scoring.target} is complete for these rows and this teacher")
        return
    options = recipe.distill
    assert options is not None
    tokenizer, trusted = load_tokenizer(where.model, recipe), recipe.model.trust_remote_code
    model = load_teacher(where, recipe, device)
    config = AutoConfig.from_pretrained(where.model, local_files_only=True, trust_remote_code=trusted)
    size = min(embedding_rows(model), int(config.get_text_config().vocab_size))
    splits = {"train": with_labels(data.train)}
    if data.eval is not None:
        splits["eval"] = with_labels(data.eval).select(range(min(len(data.eval), recipe.eval.max_rows)))
    open_prepared(where.dataset, recipe, size)  # the teacher knows every token of the rows
    scorer = Scorer(model, recipe, size, tokenizer.pad_token_id)
    total = sum(len(rows) for rows in splits.values())
    say(f"the teacher {options.teacher} scores {total:,} rows on {device}: its {scorer.k} likeliest of {size:,} tokens")
    if world().main:
        scoring.begin()
    barrier()
    score_splits(scoring, scorer, splits, total, progress)
    barrier()
    found = held_out_measures(model, tokenizer, recipe, splits.get("eval"), size)
    say(f"the teacher on held-out rows: {said(found)}")
    if world().main:
        counts = {name: len(rows) for name, rows in splits.items()}
        scoring.finish(counts, {"vocabulary": size, "top_k": scorer.k, "held_out": found})
    barrier()
    progress.update("done", message="the teacher has scored the rows")
    say(f"done: {scoring.target}")


def barrier() -> None:
    """Wait for the other processes, if there are any."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def score_splits(
    scoring: Scoring, scorer: Scorer, splits: Mapping[str, Dataset], total: int, progress: Progress
) -> None:
    """Write the shards that are missing; each process makes its share."""
    here = world()
    work = [(rows, *shard) for name, rows in splits.items() for shard in scoring.shards(name, len(rows))]
    kept = sum(path.exists() for _, path, _ in work)
    if kept:
        say(f"{kept} of {len(work)} shards are there already")
    done = 0
    for index, (rows, path, part) in enumerate(work):
        if index % here.size == here.rank and not path.exists():
            write_shard(path, scorer.score(list(rows.select(part))))
        done += len(part)
        progress.update("prepare", done, total, unit="rows", message="the teacher scores the rows")
