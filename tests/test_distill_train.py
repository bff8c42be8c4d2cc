"""Distillation through the real command: what it measures, resumes, stores and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import methods_kit
import pyarrow as pa
import pytest
from distill_workspace import answers, build, manifest, score_here
from methods_kit import TUNINGS, check_golden, curve, interrupt
from sft_workspace import losses, raw_rows, run_record, save_model, train_here

from blueprints.errors import DataError, RecipeError

STORED = "distill.teacher_top_k=8"


@pytest.mark.covers(method="distill", tuning=["full", "lora", "qlora", "dora"], world="1 process", feature="train")
@pytest.mark.parametrize("case", TUNINGS)
def test_losses_are_the_golden_ones(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("distill", case, build(tmp_path), monkeypatch)
    assert run_record(tmp_path)["proofs"]["model" if case == "full" else "adapter"]["passed"]


@pytest.mark.covers(method="distill", tuning="lora", world="1 process", feature=["eval", "export"])
def test_a_mixed_run_tells_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = build(tmp_path)
    settings = ("training.max_steps=12", "output.merge=true", "training.eval_steps=6", "training.logging_steps=3")
    assert train_here(root, monkeypatch, *settings) == 0
    log, record = capfd.readouterr().out, run_record(root)
    assert "generalised Jensen-Shannon divergence, beta 0.5, temperature 0.9" in record["effective"]["loss"]
    assert "50% of the batches the student's own" in record["effective"]["answers"]
    assert "frozen, beside the student" in record["effective"]["teacher"]
    shares = curve(root, "on_policy")
    assert len(shares) == 4  # a line of three steps each
    assert 0 < sum(shares) / len(shares) < 1
    for name in ("teacher_kl", "teacher_agreement", "completion_length", "completions_cut", "eval_teacher_kl"):
        assert curve(root, name), name
    metrics = record["metrics"]
    assert metrics["teacher_kl_after"] < metrics["teacher_kl_before"]
    for name in ("eval_loss", "nll", "teacher_kl", "teacher_agreement", "exact_match"):
        assert f"{name}_before" in metrics
        assert f"{name}_after" in metrics
    assert metrics["teacher_nll"] > 0
    assert metrics["teacher_exact_match"] == 0
    assert "The first batch of sampled answers. Mask proof" in log
    texts = [row["text"] for row in record["proofs"]["mask"]["rows"]]
    assert len(texts) == 6  # of the rows' answers and of sampled ones
    assert all(text.startswith("copy") and "⟦" in text for text in texts)
    assert "is as good as the teacher's: no gap to close" in log  # neither knows the answers


def test_prompts_alone_are_answered_by_the_student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path, lmbda=1, prompts_alone=True)
    assert train_here(root, monkeypatch, "training.max_steps=8", "lora=null") == 0
    assert curve(root, "on_policy") == [1.0] * 8
    record = run_record(root)
    # The teacher's greedy answers are what is held out: it gives them all, and the student comes nearer.
    assert record["metrics"]["teacher_exact_match"] == 1
    assert record["metrics"]["teacher_kl_after"] < record["metrics"]["teacher_kl_before"]
    assert 0 <= record["metrics"]["teacher_gap_closed"] < 1
    samples = [json.loads(line) for line in (root / "output" / "samples.jsonl").read_text().splitlines()]
    assert all(sample["reference"] and sample["prompt"].startswith("copy") for sample in samples)


@pytest.mark.covers(method="distill", tuning=["full", "lora"], world="1 process", feature="resume")
@pytest.mark.parametrize(
    "settings",
    [("lora.lora_dropout=0.1",), pytest.param(("lora=null", "distill.lmbda=1.0"), marks=pytest.mark.slow)],
    ids=["mixed", "on-policy"],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (*settings, "training.max_steps=14", "training.gradient_accumulation_steps=2", "training.logging_steps=2")
    whole, broken = build(tmp_path / "whole"), build(tmp_path / "broken")
    assert train_here(whole, monkeypatch, *steps) == 0
    interrupt(broken, monkeypatch, 5, *steps)
    assert train_here(broken, monkeypatch, *steps) == 0
    for name in ("loss", "on_policy", "teacher_kl", "num_tokens"):
        assert curve(broken, name) == curve(whole, name), name
    same = ("train_loss", "eval_loss_before", "eval_loss_after", "nll_after", "teacher_nll")
    before, after = run_record(whole)["metrics"], run_record(broken)["metrics"]
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_a_longer_vocabulary_of_the_teacher_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    equal, padded = build(tmp_path / "equal", lmbda=0), build(tmp_path / "padded", lmbda=0, teacher_rows=12)
    tables = []
    for root in (equal, padded):
        assert score_here(root, monkeypatch, "distill.teacher_top_k=200") == 0
        assert (manifest(root)["vocabulary"], manifest(root)["top_k"]) == (84, 84)
        tables.append(pa.ipc.open_stream(root / "teacher_logits" / "train-00000.arrow").read_all())
    for name in ("top_log_probs", "rest"):
        ours, theirs = (table[name].combine_chunks().flatten().to_pylist() for table in tables)
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    path = root / "teacher" / "tokenizer.json"
    path.write_text(path.read_text().replace('"w1": ', '"other": '))
    with pytest.raises(DataError, match=r"another vocabulary: 1 of 84 tokens differ .*'w1' to the student and 'other'"):
        train_here(root, monkeypatch)


def test_a_teacher_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    (root / "teacher" / "_manifest.json").unlink()
    with pytest.raises(DataError, match="the teacher is not in the workspace"):
        train_here(root, monkeypatch)


@pytest.mark.slow
def test_a_teacher_that_is_the_student_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = build(tmp_path)
    save_model(root / "teacher")
    assert train_here(root, monkeypatch, "training.max_steps=1") == 0
    assert "there is nothing to learn from it" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("option", ["distill.teacher_quantize=true", "distill.teacher_dtype=bfloat16"])
def test_a_smaller_teacher_says_nearly_the_same(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, small = build(tmp_path / "whole"), build(tmp_path / "small")
    assert train_here(whole, monkeypatch, "training.max_steps=1") == 0
    assert train_here(small, monkeypatch, option, "training.max_steps=1") == 0
    assert losses(small) != losses(whole)
    assert losses(small) == pytest.approx(losses(whole), rel=0.2)
    assert ("4 bits" if "quantize" in option else "bfloat16") in run_record(small)["effective"]["teacher"]


# --- the teacher's text --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_text_of_the_teacher_is_trained_on_as_supervised_fine_tuning_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sft_workspace

    root, plain = build(tmp_path / "distill", lmbda=0), sft_workspace.build(tmp_path / "sft")
    recipe = (root / "recipe.yaml").read_text()
    (root / "recipe.yaml").write_text(recipe.replace('teacher: "file:///teacher", lmbda: 0', "seq_kd: true"))
    steps = ("training.max_steps=6", "training.learning_rate=5.0e-3")
    assert train_here(root, monkeypatch, *steps) == 0
    assert train_here(plain, monkeypatch, *steps) == 0
    assert losses(root) == pytest.approx(losses(plain), rel=1e-6)
    assert run_record(root)["effective"]["teacher"] == "none: the rows are its text"


def test_the_teacher_writes_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = methods_kit.build(
        tmp_path, "distill", answers,
        'eval: {metric: none}\ndistill: {teacher: "file:///teacher", seq_kd: true, max_completion_length: 8}\n',
    )  # fmt: skip
    save_model(root / "teacher", layers=3, hidden=48, seed=7)
    assert train_here(root, monkeypatch, "training.max_steps=8") == 0
    assert len(curve(root, "completion_length")) == 8
    record = run_record(root)
    assert "the teacher's, sampled" in record["effective"]["answers"]
    references = {row["completion"].strip() for row in raw_rows(40, 1)}
    assert not any(
        text.partition("⟦")[2] in references for text in (r["text"] for r in record["proofs"]["mask"]["rows"])
    )


# --- stored scores -------------------------------------------------------------------------------------------------


def test_scoring_goes_on_where_it_was_killed_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from trainers import scoring

    monkeypatch.setattr(scoring, "SHARD_ROWS", 16)
    whole, broken = build(tmp_path / "whole", lmbda=0), build(tmp_path / "broken", lmbda=0)
    assert score_here(whole, monkeypatch, STORED) == 0
    write, written = scoring.write_shard, []

    def killed(path: Path, scored: Any) -> None:
        if len(written) == 2:
            raise SystemExit(143)
        written.append(path)
        write(path, scored)

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "write_shard", killed)
        with pytest.raises(SystemExit):
            score_here(broken, monkeypatch, STORED)
    assert not (broken / "teacher_logits").exists()
    capfd.readouterr()
    assert score_here(broken, monkeypatch, STORED) == 0
    assert "2 of 4 shards are there already" in capfd.readouterr().out
    assert manifest(broken)["splits"] == manifest(whole)["splits"]
    assert manifest(broken)["held_out"] == manifest(whole)["held_out"]
    assert score_here(broken, monkeypatch, STORED) == 0
    assert "nothing to do" in capfd.readouterr().out
    assert score_here(broken, monkeypatch, "distill.teacher_top_k=9") == 0
    assert manifest(broken)["top_k"] == 9
    assert {path.name for path in (broken / "teacher_logits").iterdir()} >= {"train-00000.arrow", "eval-00000.arrow"}


def test_training_uses_stored_scores_without_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path, lmbda=0)
    assert score_here(root, monkeypatch, STORED) == 0
    for path in (root / "teacher").iterdir():
        path.unlink()
    assert train_here(root, monkeypatch, STORED) == 0
    record = run_record(root)
    assert "8 likeliest tokens and the rest, stored; the model is not loaded" in record["effective"]["teacher"]
    assert record["metrics"]["teacher_nll"] == manifest(root)["held_out"]["nll"]
    assert record["metrics"]["teacher_kl_after"] > 0


@pytest.mark.parametrize(
    ("scored", "trained", "words"),
    [
        (None, STORED, "the rows have not been scored by the teacher"),
        (STORED, "distill.teacher_top_k=9", "top_k 8 instead of 9"),
        (STORED, f"{STORED} distill.temperature=0.8", "temperature 0.9 instead of 0.8"),
    ],
)
def test_scores_of_another_run_are_refused(
    scored: str | None, trained: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = build(tmp_path, lmbda=0)
    if scored:
        score_here(root, monkeypatch, scored)
    with pytest.raises(DataError, match=words) as caught:
        train_here(root, monkeypatch, *trained.split())
    assert "python -m trainers.teacher" in caught.value.todo


def test_a_damaged_shard_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path, lmbda=0)
    score_here(root, monkeypatch, STORED)
    path = root / "teacher_logits" / "train-00000.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="missing or damaged"):
        train_here(root, monkeypatch, STORED)


def test_without_stored_scores_the_step_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = build(tmp_path)
    assert score_here(root, monkeypatch) == 0
    assert "nothing to do: the recipe has no distill.teacher_top_k" in capfd.readouterr().out
    assert not (root / "teacher_logits").exists()


# --- the recipe ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["distill.teacher_top_k=8"], "it cannot have scored what the student answers later"),
        (["distill.teacher_top_k=8", "distill.seq_kd=true"], "`distill.seq_kd` trains on text alone"),
        (["distill.seq_kd=true", "distill.beta=0.1"], "the loss is the likelihood of the teacher's text"),
        (["distill.lmbda=0", "distill.max_completion_length=9"], "nothing is sampled"),
        (["distill.teacher=null"], "distillation compares the model with a teacher"),
        (
            ["distill.seq_kd=true", "distill.teacher=null", "distill.teacher_quantize=true"],
            "there is no `distill.teacher`",
        ),
        (["distill.beta=1.5"], "at most 1"),
        (["dataset.format=text"], "have no prompts"),
        (["dataset.format=prompt"], "have no answers"),
    ],
)
def test_what_cannot_work_is_refused_with_the_recipe(overrides: list[str], words: str) -> None:
    from blueprints import load_recipe

    with pytest.raises(RecipeError) as caught:
        load_recipe("distill", overrides=overrides, environ={})
    assert words in str(caught.value)
