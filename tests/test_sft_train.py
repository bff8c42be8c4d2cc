"""The SFT trainer as a user runs it: one command, a workspace, files and lines that come out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from sft_workspace import build, command, environment, losses, run_record, train, train_here

from blueprints.errors import BlueprintError, DataError, UsageError

VARIANTS = {
    "full": ["lora=null", "training.learning_rate=1.0e-3"],
    "lora": [],
    "dora": ["lora.use_dora=true"],
    "rslora": ["lora.use_rslora=true"],
    "qlora": ["lora.quantize_base=true"],
}
GOLDEN = json.loads((Path(__file__).parent / "golden" / "sft_losses.json").read_text())
# 4-bit kernels and bfloat16 adapters round differently from one CPU to the next.
TOLERANCE = {"qlora": 5e-3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a complete LoRA run through the launcher and torchrun."""
    root = build(tmp_path_factory.mktemp("lora"))
    done = train(root, "output.merge=true", launch=True)
    assert done.returncode == 0, done.stdout
    (root / "log.txt").write_text(done.stdout)
    return root


def test_a_run_leaves_what_the_workspace_contract_says(finished: Path) -> None:
    output = finished / "output"
    record = run_record(finished)
    assert record["status"] == "complete"
    assert record["recipe"]["lora"]["r"] == 4
    assert len(record["recipe_hash"]) == 64
    assert record["metrics"]["steps"] == 6
    assert record["metrics"]["eval_loss_after"] < record["metrics"]["eval_loss_before"]
    assert {"adapter", "merged", "mask"} <= set(record["proofs"])
    for name in ("adapter/adapter_model.safetensors", "adapter/tokenizer.json", "model/model.safetensors",
                 "proof.json", "report.html", "metrics.jsonl", "samples.jsonl", "eval.json"):  # fmt: skip
        assert (output / name).is_file(), name
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4
    assert set(samples[0]) == {"prompt", "reference", "before", "after"}


def test_the_log_holds_settings_mask_steps_and_proof(finished: Path) -> None:
    log = (finished / "log.txt").read_text()
    assert "trainable parameters     4,096" in log
    assert "⟦" in log
    assert "step 6/6  loss" in log
    assert "proof of the adapter: passed" in log
    assert "Warning" not in log
    assert "Traceback" not in log


def test_progress_ends_with_done(finished: Path) -> None:
    assert json.loads((finished / "progress.json").read_text())["phase"] == "done"


def test_running_it_again_does_nothing_and_says_so(finished: Path) -> None:
    before = (finished / "output" / "run.json").read_bytes()
    again = train(finished, "output.merge=true")
    assert again.returncode == 0
    assert "complete already" in again.stdout
    assert (finished / "output" / "run.json").read_bytes() == before


def test_another_recipe_is_refused_in_the_same_output(finished: Path) -> None:
    other = train(finished, "lora.r=8", launch=True)
    assert other.returncode == 2
    assert "another recipe" in other.stdout
    assert "delete" in other.stdout
    assert json.loads((finished / "termination").read_text())["exit_code"] == 2


def test_the_adapter_loads_with_peft_alone(finished: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(finished / "output" / "adapter")
    assert any("lora_B" in name and bool(parameter.abs().sum() > 0) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_the_golden_ones(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    assert train_here(root, monkeypatch, *VARIANTS[variant], "training.max_steps=4") == 0
    assert losses(root) == pytest.approx(GOLDEN[variant], rel=TOLERANCE.get(variant, 1e-5))
    assert all(found["passed"] for kind, found in run_record(root)["proofs"].items() if kind != "mask")


def test_a_hub_model_stays_the_adapters_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    manifest = root / "model" / "_manifest.json"
    manifest.write_text(json.dumps({"source": "hf://some/model", "revision": "a" * 40}))
    train_here(root, monkeypatch, "model.uri=hf://some/model", "training.max_steps=1")
    config = json.loads((root / "output" / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", "a" * 40)


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["lora.target_modules=[q_prj,v_proj]"], 2, ["'q_prj'", "q_proj"]),
        (["lora.exclude_modules=[nothing_like_it]"], 2, ["nothing_like_it"]),
        (["lora.target_modules=[q_proj]", "lora.layers_to_transform=[7]"], 2, ["no layer 7", "0 to 1"]),
        (["lora.target_modules=[mlp]"], 2, ["'model.layers.0.mlp'", "LlamaMLP", "down_proj"]),
        (["lora.exclude_modules=.*"], 2, ["no layer gets an adapter"]),
        (["lora.target_modules=[q_proj,v_proj]", "lora.exclude_modules=[q_proj]"], 2, ["'q_proj'", "excluded"]),
        (["lora.target_modules=[v_proj]", "lora.rank_pattern={q_proj: 2}"], 2, ["rank_pattern", "would do nothing"]),
        (["lora.alpha_pattern={lm_head: 2}"], 2, ["alpha_pattern", "would do nothing"]),
        (["lora.modules_to_save=[norm]"], 2, ["input_layernorm", "model.norm"]),
        (["lora.modules_to_save=[rotary_emb]"], 2, ["no weights"]),
        (["lora.bias=all"], 2, ["the model has no biases"]),
        (["resources.num_proc_per_node=2"], 2, ["2 process(es)", "1 process(es)"]),
        (["resources.gpu=1"], 5, ["asks for 1 GPU(s)", "resources.gpu=0"]),
        (["training.max_length=32"], 3, ["max_length=64"]),
        (["training.report_to=[wandb]"], 5, ["pip install wandb"]),
    ],
)
def test_what_cannot_be_had_stops_the_run(
    overrides: list[str], code: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = build(tmp_path)
    with pytest.raises(BlueprintError) as caught:
        train_here(root, monkeypatch, *overrides)
    assert caught.value.exit_code == code
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("architecture", ["nosuchtype", "t5"])
def test_a_model_that_is_no_known_language_model_is_invalid_data(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = build(tmp_path)
    (root / "model" / "config.json").write_text(json.dumps({"model_type": architecture}))
    with pytest.raises(DataError, match=r"architecture is not known|no causal language model"):
        train_here(root, monkeypatch)
    assert run_record(root)["status"] == "failed"


def test_a_terminal_without_unicode_is_no_obstacle(tmp_path: Path) -> None:
    root = build(tmp_path)
    ascii_only = environment(root) | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        command(root, "training.max_steps=1"), env=ascii_only, cwd=root, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u27e6" in done.stdout


def test_a_mixture_of_experts_is_trained_and_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    root = build(tmp_path)
    vocabulary = json.loads((root / "model" / "config.json").read_text())["vocab_size"]
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, num_local_experts=4, num_experts_per_tok=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(root / "model")
    assert train_here(root, monkeypatch, "training.max_steps=2") == 0
    assert run_record(root)["proofs"]["adapter"]["passed"]


def test_a_corrected_recipe_may_use_the_output_of_a_start_that_got_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = build(tmp_path)
    with pytest.raises(BlueprintError):
        train_here(root, monkeypatch, "lora.target_modules=[nope]")
    assert run_record(root)["status"] == "failed"
    assert train_here(root, monkeypatch, "training.max_steps=1") == 0


def test_a_method_without_a_trainer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainers.__main__ import METHODS

    root = build(tmp_path)
    (root / "recipe.yaml").write_text("method: dpo\nmodel: file:///m\ndataset: file:///d\n")
    monkeypatch.delitem(METHODS, "dpo")
    with pytest.raises(UsageError, match="no trainer for method 'dpo'"):
        train_here(root, monkeypatch)


def test_lora_config_in_the_environment_is_a_layer(tmp_path: Path) -> None:
    root = build(tmp_path)
    environment_ = environment(root) | {"LORA_CONFIG": '{"r": 2, "lora_alpha": 2}'}
    done = subprocess.run(command(root, "training.max_steps=1"), env=environment_, cwd=root, check=False)
    assert done.returncode == 0
    assert run_record(root)["recipe"]["lora"]["r"] == 2


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    root = build(tmp_path)
    both = ("resources.num_proc_per_node=2", "training.per_device_train_batch_size=2", "training.max_steps=4")
    done = train(root, *both, processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    assert losses(root) == pytest.approx(GOLDEN["lora"], rel=1e-5)


def test_losses_that_leave_the_numbers_stop_the_run(tmp_path: Path) -> None:
    root = build(tmp_path)
    done = train(root, "lora=null", "training.learning_rate=1.0e+30", "training.max_grad_norm=0",
                 "training.lr_scheduler_type=constant", launch=True)  # fmt: skip
    assert done.returncode == 4, done.stdout
    assert "training.learning_rate" in done.stdout
    assert "Traceback" not in done.stdout
    assert run_record(root)["status"] == "failed"
    assert json.loads((root / "termination").read_text())["exit_code"] == 4
