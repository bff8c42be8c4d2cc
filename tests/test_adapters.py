"""Adapters: however they start and whatever they sit on, they are saved for the base as it was fetched, and merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from sft_workspace import as_if_killed_at, build, losses, raw_rows, run_record, tokenised, train_here, write_shard

from blueprints.errors import BlueprintError, DataError, UsageError
from blueprints.recipe import load_recipe

MERGE = "output.merge=true"


def adapter_config(root: Path) -> dict[str, Any]:
    """What PEFT reads of the saved adapter."""
    found: dict[str, Any] = json.loads((root / "output" / "adapter" / "adapter_config.json").read_text())
    return found


def setting(root: Path, name: str) -> str:
    """A line of the effective settings."""
    return str(run_record(root)["effective"][name])


def passed(root: Path, *kinds: str) -> bool:
    """Whether just these artifacts were proved."""
    proofs = run_record(root)["proofs"]
    return {kind for kind in proofs if kind != "mask"} == set(kinds) and all(proofs[kind]["passed"] for kind in kinds)


@pytest.mark.covers(method="sft", tuning="lora", world="1 process", feature=["train", "resume", "export"])
@pytest.mark.parametrize(
    "how",
    [
        ("lora.init_lora_weights=pissa",),
        pytest.param(
            (
                "lora.init_lora_weights=pissa", "lora.use_rslora=true", "lora.rank_pattern={q_proj: 2}",
                "lora.alpha_pattern={q_proj: 3}",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(("lora.init_lora_weights=olora", "lora.use_dora=true"), marks=pytest.mark.slow),
    ],
    ids=["pissa", "pissa-rslora-patterns", "olora-dora"],
)  # fmt: skip
def test_an_adapter_taken_out_of_the_base_fits_the_untouched_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    root = build(tmp_path)
    assert train_here(root, monkeypatch, *how, MERGE) == 0
    assert passed(root, "adapter", "merged")
    config = adapter_config(root)
    assert config["init_lora_weights"] is True
    assert config["r"] == 8
    tokens = torch.arange(3, 20)[None]
    adapted = AutoPeftModelForCausalLM.from_pretrained(root / "output" / "adapter")
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    with adapted.disable_adapter(), torch.no_grad():
        assert torch.equal(adapted(tokens).logits, base(tokens).logits)
    merged = AutoModelForCausalLM.from_pretrained(root / "output" / "model")
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-3)
        assert (adapted(tokens).logits - base(tokens).logits).abs().max() > 1e-2

    unbroken, weights = losses(root), (root / "output" / "adapter" / "adapter_model.safetensors").read_bytes()
    as_if_killed_at(root, 4)
    assert train_here(root, monkeypatch, *how, MERGE) == 0
    assert losses(root) == unbroken
    assert (root / "output" / "adapter" / "adapter_model.safetensors").read_bytes() == weights


@pytest.mark.slow
@pytest.mark.parametrize("start", ["gaussian", "orthogonal", "false"])
def test_other_starts_leave_the_base_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    root = build(tmp_path)
    assert train_here(root, monkeypatch, f"lora.init_lora_weights={start}", MERGE, "training.max_steps=2") == 0
    assert passed(root, "adapter", "merged")
    assert adapter_config(root)["r"] == 4


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a DoRA adapter on two layers and a whole head."""
    root = build(tmp_path_factory.mktemp("earlier"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        how = ("lora.target_modules=[q_proj, v_proj]", "lora.use_dora=true", "lora.modules_to_save=[lm_head]")
        assert train_here(root, monkeypatch, *how) == 0
    return root


class TestGoingOn:
    """`lora.from`."""

    def follow(self, earlier: Path, root: Path, lora: str = "{}") -> Path:
        """A workspace whose recipe goes on from the adapter of `earlier`."""
        build(root, lora=f"lora: {lora}")
        shutil.copytree(earlier / "output" / "adapter", root / "adapter")
        return root

    @pytest.mark.covers(method="sft", tuning="dora", world="1 process", feature=["train", "resume", "eval"])
    def test_it_starts_where_the_earlier_run_ended(
        self, earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = self.follow(earlier, tmp_path)
        assert train_here(root, monkeypatch, "lora.from=file:///earlier", MERGE) == 0
        before, after = run_record(earlier)["metrics"], run_record(root)["metrics"]
        assert after["eval_loss_before"] == before["eval_loss_after"]
        assert after["eval_loss_after"] < after["eval_loss_before"]
        assert passed(root, "adapter", "merged")
        assert "file:///earlier" in setting(root, "goes on from")
        old, new = adapter_config(earlier), adapter_config(root)
        for key in ("r", "lora_alpha", "use_dora", "modules_to_save"):
            assert old[key] == new[key]
        assert sorted(new["target_modules"]) == ["q_proj", "v_proj"]

        unbroken = losses(root)
        as_if_killed_at(root, 2)
        assert train_here(root, monkeypatch, "lora.from=file:///earlier", MERGE) == 0
        assert losses(root) == unbroken

    def test_what_the_recipe_says_must_be_so(
        self, earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = self.follow(earlier, tmp_path, "{r: 8, lora_alpha: 8, use_dora: true, target_modules: [q_proj]}")
        with pytest.raises(UsageError, match=r"lora.r is 8 in the recipe \(.*recipe.yaml:\d+\) and 4 in the adapter"):
            train_here(root, monkeypatch, "lora.from=file:///earlier")
        with pytest.raises(UsageError, match=r"lora.target_modules .* differ on 2 layers, such as .*v_proj"):
            train_here(root, monkeypatch, "lora.from=file:///earlier", "lora.r=4")
        same = "lora.target_modules='.*\\.(q|v)_proj'"
        assert train_here(root, monkeypatch, "lora.from=file:///e", "lora.r=null", same, "training.max_steps=1") == 0

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            ({"peft_type": "IA3"}, "found IA3, no LoRA adapter"),
            ({"init_lora_weights": "pissa"}, "made with init_lora_weights=pissa"),
            ({"r": 3}, "does not fit the model"),
            ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "lacks 6 weights"),
        ],
    )
    def test_an_adapter_that_is_none(
        self, earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any], words: str
    ) -> None:
        root = self.follow(earlier, tmp_path)
        path = root / "adapter" / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))
        with pytest.raises(DataError, match=words):
            train_here(root, monkeypatch, "lora.from=file:///earlier")

    def test_no_adapter_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(DataError, match="no adapter is there"):
            train_here(build(tmp_path), monkeypatch, "lora.from=file:///earlier")


def with_tokens(root: Path, *, tied: bool) -> None:
    """Rows with two tokens that the model does not have, as the initializer prepares them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainers.model import load_tokenizer

    if tied:
        model = AutoModelForCausalLM.from_pretrained(root / "model", tie_word_embeddings=True)
        model.save_pretrained(root / "model")
    recipe = load_recipe(str(root / "recipe.yaml"), overrides=[TOKENS], environ={}).recipe
    tokenizer = load_tokenizer(root / "model", recipe)
    known = len(AutoTokenizer.from_pretrained(root / "model"))
    assert tokenizer.convert_tokens_to_ids(["<a>", "<b>"]) == [known, known + 1]
    manifest = json.loads((root / "dataset" / "_manifest.json").read_text())
    for split, count, seed in (("train", 40, 1), ("eval", 12, 2)):
        rows = [
            {"prompt": f"<a> {row['prompt']}", "completion": f" <b>{row['completion']} <b>"}
            for row in raw_rows(count, seed)
        ]
        made = tokenised(rows, tokenizer)
        write_shard(
            root / "dataset" / "prepared" / split,
            [{"input_ids": ids, "completion_mask": mask} for ids, mask in made],
        )
    manifest["prepared"]["added_tokens"] = ["<a>", "<b>"]
    (root / "dataset" / "_manifest.json").write_text(json.dumps(manifest))


TOKENS = 'model.added_tokens=["<a>", "<b>"]'


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "how",
    [
        ("lora.r=4",),
        pytest.param(("lora=null",), marks=pytest.mark.slow),
        pytest.param(("lora.quantize_base=true",), marks=pytest.mark.slow),
        pytest.param(("lora.modules_to_save=[embed_tokens, lm_head]",), marks=pytest.mark.slow),
    ],
    ids=["lora", "full", "qlora", "whole"],
)
def test_added_tokens_are_trained_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...], tied: bool
) -> None:
    from transformers import AutoTokenizer

    root = build(tmp_path)
    with_tokens(root, tied=tied)
    overrides = (TOKENS, *how, *(() if how == ("lora=null",) else (MERGE,)))
    assert train_here(root, monkeypatch, *overrides) == 0
    assert losses(root)[-1] < losses(root)[0]
    kinds = ("model",) if how == ("lora=null",) else ("adapter", "merged")
    assert passed(root, *kinds)
    for name in {"model": ["model"], "adapter": ["adapter", "model"]}[kinds[0]]:
        saved = AutoTokenizer.from_pretrained(root / "output" / name)
        if how == ("lora.r=4",):
            checkpoint = root / "output" / "checkpoint-6" / "adapter_model.safetensors"
            for path in (root / "output" / "adapter" / "adapter_model.safetensors", checkpoint):
                shapes = [tuple(tensor.shape) for name, tensor in load_file(path).items() if "lora_" not in name]
                assert shapes == [(2, 32)] * (1 if tied else 2)  # the new rows alone
        assert saved.tokenize("copy <a> <b>")[-2:] == ["<a>", "<b>"]
    check_loaded(root, len(saved))


def check_loaded(root: Path, rows: int) -> None:
    """A user loads adapter and merged model, and they know the tokens and agree."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(root / "output" / "model")
    assert whole.get_input_embeddings().weight.shape[0] == rows
    table = whole.get_input_embeddings().weight
    assert not torch.equal(table[-1], table[-2])
    if (root / "output" / "adapter").exists() and 'quantize_base": true' not in json.dumps(run_record(root)["recipe"]):
        adapted = AutoPeftModelForCausalLM.from_pretrained(root / "output" / "adapter")
        tokens = torch.tensor([[3, rows - 2, 9, rows - 1]])
        with torch.no_grad():
            assert torch.allclose(adapted(tokens).logits, whole(tokens).logits, atol=1e-3)


def test_tokens_that_are_there_already_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="has them already: copy"):
        train_here(build(tmp_path), monkeypatch, "model.added_tokens=[new, copy]")


def save_moe(root: Path, kind: str) -> None:
    """A tiny mixture of experts in the place of the model."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    vocabulary = json.loads((root / "model" / "config.json").read_text())["vocab_size"]
    shape: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "num_experts_per_tok": 2,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    if kind == "mixtral":
        MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=4)).save_pretrained(root / "model")
        return
    config = Qwen3MoeConfig(**shape, num_experts=4, moe_intermediate_size=24, head_dim=8)
    Qwen3MoeForCausalLM(config).save_pretrained(root / "model")


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("qwen3_moe", "[q_proj, v_proj]"), pytest.param("mixtral", "[]", marks=pytest.mark.slow)],
)
def test_experts_get_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, targets: str) -> None:
    root = build(tmp_path)
    save_moe(root, kind)
    experts = ("lora.target_parameters=[experts.gate_up_proj, experts.down_proj]", f"lora.target_modules={targets}")
    assert train_here(root, monkeypatch, *experts, MERGE, "training.max_steps=3") == 0
    assert passed(root, "adapter", "merged")
    assert sorted(adapter_config(root)["target_parameters"]) == ["experts.down_proj", "experts.gate_up_proj"]


def test_parameters_that_cannot_be_targeted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = build(tmp_path)
    save_moe(root, "qwen3_moe")
    with pytest.raises(BlueprintError, match=r"no parameter 'experts\.up'.*|.") as caught:
        train_here(root, monkeypatch, "lora.target_parameters=[experts.up]")
    assert "experts.down_proj, experts.gate_up_proj" in str(caught.value)
    with pytest.raises(BlueprintError, match="is the weight of a layer"):
        train_here(root, monkeypatch, "lora.target_parameters=[q_proj.weight]")
