"""GRPO: what is computed, on which prompts and completions, what a resumed run does, and what a user is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from methods_kit import build, check_golden, curve, interrupt, prompts
from sft_workspace import losses, run_record, train_here

from blueprints import RecipeError, load_recipe
from blueprints.errors import DataError, EnvironmentFault, UsageError
from blueprints.recipe.schema import GRPOOptions

pytestmark = pytest.mark.usefixtures("proved_here")
LOSSES = get_args(GRPOOptions.model_fields["loss_type"].annotation)
RECIPE = """
grpo:
  reward_funcs:
    - {name: rewards_of_tests:early_letters}
    - {name: length, weight: 0.5, args: {max: 3}}
  num_generations: 4
  max_completion_length: 8
eval: {max_new_tokens: 8, samples: 4}
"""
REWARDS = '''
def early_letters(completions, answer, **kwargs):
    """The share of words with a number below 20: a random model gives it now and then."""
    found = []
    for completion in completions:
        words = completion.split()
        found.append(sum(int(w[1:]) < 20 for w in words if w[1:].isdigit()) / max(1, len(words)))
    return found
'''


@pytest.fixture(autouse=True)
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "modules"
    directory.mkdir()
    (directory / "rewards_of_tests.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(directory))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return build(tmp_path / "root", "grpo", prompts, RECIPE)


def plain_trl(root: Path, *, lora: bool, steps: int = 4, **settings: Any) -> list[dict[str, float]]:
    """TRL's own GRPOTrainer on the prompts' texts, with the same rewards as plain functions."""
    from datasets import Dataset
    from peft import LoraConfig
    from rewards_of_tests import early_letters
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0 if len(ids) <= 3 else 1 - (len(ids) - 3) / 3 if len(ids) < 6 else 0.0 for ids in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    rows = [{"prompt": row["prompt"], "answer": row["reference"]} for row in prompts(tokenizer, 40, 1)]
    given = {"per_device_train_batch_size": 4} | settings
    args = GRPOConfig(
        output_dir=str(root / "plain"), learning_rate=5e-3, max_steps=steps, lr_scheduler_type="cosine",
        warmup_steps=0.03, logging_steps=1, seed=42, use_cpu=True, bf16=False, activation_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, num_generations=4, max_completion_length=8,
        reward_weights=[1.0, 0.5], **given,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(root / "model"),
        reward_funcs=[early_letters, length],
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


# What is computed ----------------------------------------------------------------------------------------------------

REUSED = ("grpo.steps_per_generation=4", "grpo.num_iterations=2", "training.gradient_accumulation_steps=2")


@pytest.mark.covers(method="grpo", tuning=["full", "lora"], world="1 process", feature=["train", "eval"])
@pytest.mark.parametrize("case", ["lora", "full with a reference", "lora with a reference, reused"])
def test_the_curves_equal_plain_trl(case: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, settings = {
        "lora": ((), {}),
        "full with a reference": (("lora=null", "grpo.beta=0.2", "grpo.loss_type=grpo"), {"beta": 0.2, "loss_type": "grpo"}),
        "lora with a reference, reused": (
            ("grpo.beta=0.2", *REUSED),
            {"beta": 0.2, "steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 2},
        ),
    }[case]  # fmt: skip
    assert train_here(root, monkeypatch, *overrides, "training.max_steps=8") == 0
    expected = plain_trl(root, lora="full" not in case, steps=8, **settings)
    names = ["loss", "reward", "entropy", "completions/mean_length", "grad_norm"]
    names += ["kl"] if "grpo.beta=0.2" in overrides else []
    for name in names:
        theirs = [line[name] for line in expected if name in line]
        assert curve(root, name) == pytest.approx(theirs, rel=1e-5, abs=1e-7), name
    assert max(abs(loss) for loss in losses(root)) > 1e-4, "a test on losses of 0 shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_equals_plain_trl(loss: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    level = "sequence" if loss == "luspo" else "token"
    overrides = [f"grpo.loss_type={loss}", f"grpo.importance_sampling_level={level}", "grpo.num_iterations=2"]
    assert train_here(root, monkeypatch, *overrides) == 0
    high = {"epsilon_high": 5.0} if loss == "cispo" else {}
    expected = plain_trl(root, lora=True, loss_type=loss, importance_sampling_level=level, num_iterations=2, **high)
    assert losses(root) == pytest.approx([line["loss"] for line in expected], rel=1e-5)


def test_the_losses_are_those_of_trl() -> None:
    from trl import GRPOConfig

    said = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    assert set(re.findall(r"'(\w+)'", said)) - {"sequence"} == set(LOSSES)


@pytest.mark.covers(
    method="grpo", tuning=["full", "lora", "qlora", "dora"], world="1 process", feature=["train", "export"]
)
@pytest.mark.parametrize("case", ["full", "lora", "qlora", "dora"])
def test_golden_losses(case: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden("grpo", case, root, monkeypatch, "grpo.num_iterations=2")


def test_the_model_is_given_the_prepared_tokens_and_no_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    from trainers.grpo import Trainer

    rows = prompts(AutoTokenizer.from_pretrained(root / "model"), 40, 1)
    prepared = {tuple(row["prompt_ids"]) for row in rows}
    seen: list[tuple[int, ...]] = []
    whole = Trainer._generate_and_score_completions

    def generate(self: Any, inputs: Any) -> Any:
        found = whole(self, inputs)
        for ids, mask in zip(found["prompt_ids"].tolist(), found["prompt_mask"].tolist(), strict=True):
            seen.append(tuple(token for token, real in zip(ids, mask, strict=True) if real))
        return found

    monkeypatch.setattr(Trainer, "_generate_and_score_completions", generate)
    (root / "model" / "tokenizer.json").write_text(
        (root / "model" / "tokenizer.json").read_text().replace('"copy": 3', '"copy": 3, "copied": 200')
    )  # another tokenizer would make the same tokens here; the texts are replaced below, the tokens are not
    monkeypatch.setattr("trainers.grpo.with_columns", _other_texts)
    assert train_here(root, monkeypatch, "training.max_steps=2") == 0
    assert len(seen) == 8
    assert set(seen) <= prepared


def _other_texts(rows: Any) -> Any:
    return rows.with_transform(
        lambda batch: {"prompt": ["copy w1"] * len(batch["prompt_ids"]), "prompt_ids": batch["prompt_ids"],
                       "columns": [json.loads(text) for text in batch["columns"]]}
    )  # fmt: skip


# Resume --------------------------------------------------------------------------------------------------------------


@pytest.mark.covers(method="grpo", tuning=["full", "lora"], world="1 process", feature="resume")
@pytest.mark.parametrize(
    ("stop", "overrides"),
    [
        (1, ()),
        (3, ("grpo.beta=0.1", "lora.lora_dropout=0.1", *REUSED)),  # a batch is in use
        (3, ("lora=null", "training.per_device_train_batch_size=40", "training.logging_steps=2")),  # in epoch 1 of 6
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    stop: int, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("training.max_steps=6", *overrides)
    unbroken, root = (build(tmp_path / name, "grpo", prompts, RECIPE) for name in ("unbroken", "stopped"))
    assert train_here(unbroken, monkeypatch, *steps) == 0
    interrupt(root, monkeypatch, stop, *steps)
    assert train_here(root, monkeypatch, *steps) == 0
    ours, theirs = (
        [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in text.splitlines()]
        for text in ((path / "output" / "metrics.jsonl").read_text() for path in (root, unbroken))
    )
    assert ours == theirs
    assert any("reward" in line for line in ours)
    for name in ("completions.jsonl", "samples.jsonl"):
        assert (root / "output" / name).read_bytes() == (unbroken / "output" / name).read_bytes()
    weights = "output/model/model.safetensors" if "lora=null" in steps else "output/adapter/adapter_model.safetensors"
    assert (root / weights).read_bytes() == (unbroken / weights).read_bytes()
    ours, theirs = run_record(root)["metrics"], run_record(unbroken)["metrics"]
    for name in ("train_loss", "reward_before", "reward_after", "tokens"):
        assert ours[name] == theirs[name], name


# What is shown -------------------------------------------------------------------------------------------------------


def test_completions_rewards_and_settings_are_shown(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(root, monkeypatch, "grpo.beta=0.1", "grpo.top_k=50", "training.max_steps=2") == 0
    shown = capsys.readouterr().out
    effective = run_record(root)["effective"]
    assert effective["rewards"] == "early_letters × 1, length × 0.5; scaled by group"
    assert effective["reference"] == "the base, with the adapter switched off; KL × 0.1"
    assert "top_k 50" in effective["sampling"]
    assert effective["clipping"].startswith("idle")
    assert re.search(r"reward +[\d.]+  advantage [+-][\d.]+  copy w\d+.* -> ", shown)
    assert "before training: mean reward" in shown
    lines = [json.loads(line) for line in (root / "output" / "completions.jsonl").read_text().split("\n") if line]
    assert [line["step"] for line in lines] == [1] * 4 + [2] * 4
    for line in lines:
        assert line["reward"] == pytest.approx(line["rewards"]["early_letters"] + 0.5 * line["rewards"]["length"])
    assert sum(line["advantage"] for line in lines[:4]) == pytest.approx(0, abs=1e-4)
    report = (root / "output" / "report.html").read_text()
    assert "Completions sampled in training" in report
    assert "<th>early_letters</th>" in report
    for name in ("kl", "entropy", "completions/mean_length", "frac_reward_zero_std", "rewards/length/mean"):
        assert len(curve(root, name)) == 2, name
    rows = run_record(root)["proofs"]["mask"]["rows"]
    assert all(re.fullmatch(r"copy [^⟦]*⟦.*⟧", row["text"]) for row in rows)
    metrics = run_record(root)["metrics"]
    assert {"reward_before", "reward_after", "exact_match_before", "exact_match_after"} <= set(metrics)


def test_batches_that_teach_nothing_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build(
        tmp_path / "short", "grpo", prompts, RECIPE.replace("max_completion_length: 8", "max_completion_length: 1")
    )
    never = "grpo.reward_funcs=[{name: regex, args: {pattern: never}}]"
    assert train_here(root, monkeypatch, never, "training.max_steps=6", "training.seed=3") == 0
    shown = capsys.readouterr().out
    assert shown.count("there is nothing to learn from them") == 1
    assert "mean 0.00" in shown
    assert "no completion ended within grpo.max_completion_length=1" in shown


def test_held_out_rewards_are_logged_while_training(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(root, monkeypatch, "training.eval_steps=2") == 0
    assert len(curve(root, "eval_reward")) == 2
    assert curve(root, "eval_reward")[-1] == pytest.approx(run_record(root)["metrics"]["reward_after"])
    assert "held out: mean reward" in capsys.readouterr().out
    plain = build(root / "plain", "grpo", prompts, RECIPE)
    assert train_here(plain, monkeypatch) == 0
    assert losses(plain) == losses(root), "looking does not change what is trained"


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["grpo.num_generations=7"], "grpo.num_generations", "no whole number of groups of 7"),
        (["grpo.steps_per_generation=3", "grpo.num_generations=16"], "grpo.num_generations", "24 completions (8 per"),
        (["grpo.loss_type=luspo"], "grpo.importance_sampling_level", "ratios of whole completions"),
        (["grpo.importance_sampling_level=sequence"], "grpo.importance_sampling_level", "defined on the ratios of tokens"),
        (["grpo.loss_type=sapo", "grpo.epsilon=0.1"], "grpo.epsilon", "does not clip"),
        (["grpo.loss_type=vespo", "grpo.epsilon_high=0.3"], "grpo.epsilon_high", "does not clip"),
        (["lora.init_lora_weights=pissa"], "lora.init_lora_weights", "switched off"),
        (["grpo.vllm_mode=server"], "grpo.vllm_mode", "only with `grpo.use_vllm: true`"),
        (["grpo.use_vllm=true", "grpo.vllm_mode=server"], "grpo.vllm_server_base_url", "required"),
        (
            ["grpo.use_vllm=true", "grpo.vllm_mode=server", "grpo.vllm_server_base_url=host:8000"],
            "grpo.vllm_server_base_url",
            "http://host:port",
        ),
        (
            ["grpo.use_vllm=true", "grpo.vllm_mode=server", "grpo.vllm_server_base_url=http://h:1",
             "grpo.vllm_tensor_parallel_size=2"], "grpo.vllm_tensor_parallel_size", "started with its own",
        ),
        (["grpo.use_vllm=true", "resources.gpu=0"], "grpo.use_vllm", "vLLM runs on GPUs"),
        (["grpo.top_p=0"], "grpo.top_p", "found"),
        (["grpo.scale_rewards=groups"], "grpo.scale_rewards", "Did you mean `group`"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_the_recipe(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe("grpo-lora", overrides=overrides, environ={})
    assert [fault.key for fault in refused.value.faults] == [key]
    assert words in str(refused.value)


def test_derived_values() -> None:
    recipe = load_recipe("grpo-lora", environ={}).recipe
    assert recipe.grpo is not None
    assert (recipe.grpo.epsilon_high, recipe.grpo.steps_per_generation) == (0.2, 8)
    cispo = load_recipe("grpo-lora", overrides=["grpo.loss_type=cispo"], environ={}).recipe
    assert cispo.grpo is not None
    assert cispo.grpo.epsilon_high == 5.0, "0.2 would scale every loss down to a fifth"


def test_vllm_that_is_not_installed_is_said_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ("grpo.use_vllm=true", "grpo.vllm_mode=server", "grpo.vllm_server_base_url=http://127.0.0.1:9")
    with pytest.raises(EnvironmentFault, match="vLLM is not installed") as caught:
        train_here(root, monkeypatch, *server)
    assert caught.value.exit_code == 5


def test_too_few_prompts_for_a_batch_are_said_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there are 40 prompts, and a batch of completions has 50"):
        train_here(root, monkeypatch, "training.per_device_train_batch_size=200")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("rewards_of_tests:early_leters", "did you mean 'early_letters'"),
        ("own_rewards_that_fail:f", "raised ZeroDivisionError"),
        ("own_rewards_that_fail:g", "needs a parameter 'gold'"),
        ("own_rewards_that_fail:h", "returned nan for the completion"),
    ],
)
def test_rewards_at_fault_end_the_run_with_their_place(
    reward: str, words: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules" / "own_rewards_that_fail.py").write_text(
        "def f(completions, **_):\n    return [1 / 0 for c in completions]\n\n"
        "def g(completions, gold):\n    return []\n\n"
        "def h(completions, **_):\n    return [float('nan')] * len(completions)\n"
    )
    with pytest.raises(UsageError) as caught:
        train_here(root, monkeypatch, f"grpo.reward_funcs=[{{name: '{reward}'}}]")
    assert words in str(caught.value)
    if reward.endswith(":f"):
        assert caught.value.where.endswith("own_rewards_that_fail.py:2")
