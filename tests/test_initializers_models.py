"""The further models of a run: a teacher, a reward model, an adapter to go on from; each of the right kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from initializers_kit import environment, manifest, step, tiny_model

from blueprints.errors import BlueprintError, DataError, ExitCode

DISTILL = 'method: distill\nmodel: "file:///m"\ndataset: "file:///d"\ndistill: {{teacher: "{}"}}\n'
PPO = 'method: ppo\nmodel: "file:///m"\ndataset: "file:///d"\nppo: {{reward_model: "{}"}}\n'
GO_ON = 'method: sft\nmodel: "file:///m"\ndataset: "file:///d"\nlora: {{from: "{}"}}\n'


def run(tmp_path: Path, recipe: str, source: Path | str) -> int:
    """The model step for a recipe that names one further model."""
    (tmp_path / "recipe.yaml").write_text(recipe.format(f"file://{source}" if isinstance(source, Path) else source))
    return step("model", environment(tmp_path / "work", tmp_path / "student", recipe=tmp_path / "recipe.yaml"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def classifier(directory: Path) -> Path:
    change(tiny_model(directory) / "config.json", architectures=["LlamaForSequenceClassification"])
    return directory


def adapter(directory: Path) -> Path:
    made = tiny_model(directory)
    (made / "model.safetensors").rename(made / "adapter_model.safetensors")
    (made / "config.json").unlink()
    (made / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "base_model_name_or_path": "b"}))
    return made


@pytest.fixture(autouse=True)
def student(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "student")


def test_the_teacher_comes_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = tiny_model(tmp_path / "t", None)
    change(teacher / "config.json", vocab_size=512)  # padded to another size, the same tokens
    assert run(tmp_path, DISTILL, teacher) == 0
    found = manifest(tmp_path / "work", "teacher")
    assert found["source"] == f"file://{teacher}"
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert {item["path"] for item in found["files"]} >= {"config.json", "model.safetensors"}
    capsys.readouterr()
    assert run(tmp_path, DISTILL, teacher) == 0
    assert capsys.readouterr().out.count("nothing to do: ") == 2
    (tmp_path / "work" / "teacher" / "model.safetensors").write_bytes(b"")
    assert run(tmp_path, DISTILL, teacher) == 0
    assert "damaged (model.safetensors has 0 bytes" in capsys.readouterr().out
    assert run(tmp_path, DISTILL, tmp_path / "student") == 0
    assert manifest(tmp_path / "work", "teacher")["source"] == f"file://{tmp_path}/student"


def test_an_embedded_teacher(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(DISTILL.format("builtin://tiny-llama"))
    assert step("model", environment(tmp_path / "work", "builtin://tiny-llama", recipe=tmp_path / "recipe.yaml")) == 0
    assert manifest(tmp_path / "work", "teacher")["files"] == manifest(tmp_path / "work", "model")["files"]


def _tokenizer(directory: Path, change: str) -> None:
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text())
    if change == "more":
        data["added_tokens"].append(
            data["added_tokens"][-1] | {"id": len(data["model"]["vocab"]), "content": "<|think|>"}
        )
    else:
        vocabulary = data["model"]["vocab"]
        vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (
            "more",
            r"the teacher has 261 tokens, the student 260; the teacher's token '<\|think\|>' \(number 260\) does not",
        ),
        ("other", r"the student's token '.' \(number \d+\) has the number \d+ in the teacher's"),
    ],
)
def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path, how: str, match: str) -> None:
    _tokenizer(tiny_model(tmp_path / "t"), how)
    for _ in range(2):  # the second time nothing is fetched, and it is refused all the same
        with pytest.raises(DataError, match=rf"distill\.teacher: .*different vocabularies: {match}") as caught:
            run(tmp_path, DISTILL, tmp_path / "t")
        assert caught.value.exit_code == ExitCode.INVALID_DATA


def test_a_reward_model_scores_texts(tmp_path: Path) -> None:
    assert run(tmp_path, PPO, classifier(tmp_path / "r")) == 0
    assert manifest(tmp_path / "work", "reward_model")["architectures"] == ["LlamaForSequenceClassification"]


def test_an_adapter_to_go_on_from(tmp_path: Path) -> None:
    assert run(tmp_path, GO_ON, adapter(tmp_path / "a")) == 0
    found = manifest(tmp_path / "work", "adapter")
    assert (found["peft_type"], found["r"], found["base_model"], found["parameters"]) == ("LORA", 4, "b", 1)


@pytest.mark.parametrize(
    ("recipe", "make", "match"),
    [
        (DISTILL, classifier, r"distill\.teacher: the model classifies text and generates none"),
        (DISTILL, adapter, "an adapter, not a model"),
        (PPO, tiny_model, r"ppo\.reward_model: the model is no sequence classification.*LlamaForCausalLM"),
        (PPO, adapter, "an adapter, not a model"),
        (GO_ON, tiny_model, "a whole model, not an adapter"),
    ],
)
def test_the_wrong_kind_is_refused(tmp_path: Path, recipe: str, make: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        run(tmp_path, recipe, make(tmp_path / "x"))
    assert not {"teacher", "reward_model", "adapter"} & {path.name for path in (tmp_path / "work").iterdir()}


def test_a_classifier_is_no_model_to_train(tmp_path: Path) -> None:
    change(tmp_path / "student" / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(DataError, match="generates none"):
        step("model", environment(tmp_path / "work", tmp_path / "student"))


def test_pickled_and_damaged_adapters_are_refused(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a") / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"adapter_model\.safetensors"):
        run(tmp_path, GO_ON, tmp_path / "a")
    path.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(DataError, match=r"lora\.from: the adapter has no adapter_model\.safetensors"):
        run(tmp_path, GO_ON, tmp_path / "a")


def test_a_source_that_is_not_there_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(BlueprintError, match=r"distill\.teacher: .*does not exist"):
        run(tmp_path, DISTILL, tmp_path / "nothing")
