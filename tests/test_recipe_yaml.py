"""Recipe texts that are no recipe: one clear message each, with file and line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from blueprints.errors import Fault, RecipeError
from blueprints.recipe import load_recipe
from blueprints.recipe.shipped import shipped_names

GOOD = "method: sft\nmodel: builtin://tiny-llama\ndataset: builtin://orders\n"


def faults(tmp_path: Path, content: str | bytes) -> list[Fault]:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), environ={})
    assert caught.value.exit_code == 2
    return [
        Fault(fault.where.replace(str(path), "recipe.yaml"), fault.key, fault.problem, fault.expected, fault.hint)
        for fault in caught.value.faults
    ]


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{below}'] * 9)}]\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("content", "where", "words"),
    [
        ("", "recipe.yaml:1", "the file is empty"),
        ("# only\n\n# comments\n", "recipe.yaml:1", "nothing but comments"),
        ("~\n", "recipe.yaml:1", "found null"),
        ("- method: sft\n", "recipe.yaml:1", "found a list of 1 item; expected a map"),
        ("hello\n", "recipe.yaml:1", 'found the string "hello"; expected a map'),
        (GOOD + "lora:\n\tr: 4\n", "recipe.yaml:5", "a tab at column 1; expected spaces"),
        (GOOD + "lora: {r: 4\ntraining: {}\n", "recipe.yaml:5", "a flow mapping that begins on line 4"),
        (GOOD + 'x: "abc\n', "recipe.yaml:4", "a quoted scalar, found unexpected end"),
        (GOOD + "---\n" + GOOD, "recipe.yaml:4", "a second YAML document"),
        (GOOD.encode() + b"# caf\xe9\n", "recipe.yaml:4", "byte 0xe9 at offset 71 is not UTF-8"),
        (GOOD.encode("utf-16"), "recipe.yaml:1", "the file is UTF-16; expected UTF-8"),
        (GOOD.encode("utf-32"), "recipe.yaml:1", "the file is UTF-32; expected UTF-8"),
        (GOOD + '"a\\nb": 1\n', "recipe.yaml:4", "recipe.yaml:4: a\\nb: unknown key"),
        (GOOD + "# \x00\n", "recipe.yaml:4", "control character U+0000"),
        (GOOD + "lora: &a\n  rank_pattern: *a\n", "recipe.yaml:5", "`*a` stands inside its own anchor"),
        (GOOD + "lora: *gone\n", "recipe.yaml:4", "`*gone` has no anchor `&gone`"),
        (BOMB, "recipe.yaml:5", "more than 20000 values, anchors expanded"),
        (GOOD + "lora: " + "[" * 5000 + "]" * 5000, "recipe.yaml:4", "nested deeper than 32 levels"),
        (GOOD + "# " + "x" * (1 << 20), "recipe.yaml", "larger than 1048576 bytes"),
        (GOOD + "lora: !!python/object/apply:os.system [ls]\n", "recipe.yaml:4", "`!!python/object/apply:os.system`"),
        (GOOD + "training:\n  seed: !!str 3\n", "recipe.yaml:5", "the tag `!!str`"),
        (GOOD + "lora:\n  <<: {r: 4}\n", "recipe.yaml:5", "the merge key `<<`"),
        (GOOD + "1: x\n", "recipe.yaml:4", "found the integer 1 as a key; expected a string. Put it into quotes"),
        (GOOD + "null: x\n", "recipe.yaml:4", "found null as a key"),
        (GOOD + "true: x\n", "recipe.yaml:4", "found the boolean true as a key"),
        (GOOD + "? [a, b]\n: x\n", "recipe.yaml:4", "found a list of 2 items as a key"),
        (GOOD + "training: {seed: " + "9" * 5000 + "}\n", "recipe.yaml:4", "a number of 5000 digits"),
        (GOOD + "training: {save_steps: " + "9" * 100 + "}\n", "recipe.yaml:4", "a number of sensible size"),
        (GOOD + "training: {learning_rate: .nan}\n", "recipe.yaml:4", "found nan, which is not a finite number"),
        (GOOD + "training: {weight_decay: 1e999}\n", "recipe.yaml:4", "found inf, which is not a finite number"),
        (GOOD + 'runtime: {image: "\\ud800"}\n', "recipe.yaml:4", "U+D800, which is no character"),
        (GOOD + 'runtime: {image: "\\U99999999"}\n', "recipe.yaml:4", "not YAML"),
        ("%YAML 3.0\n---\n" + GOOD, "recipe.yaml:1", "incompatible YAML document"),
    ],
)  # fmt: skip
def test_one_message_with_its_place(tmp_path: Path, content: str | bytes, where: str, words: str) -> None:
    found = faults(tmp_path, content)
    assert [fault.where for fault in found if words in str(fault)] == [where]
    assert all(fault.where.startswith("recipe.yaml") for fault in found)


def test_duplicate_keys_are_named_at_any_depth_beside_other_faults(tmp_path: Path) -> None:
    found = faults(
        tmp_path, GOOD + "lora:\n  r: 4\n  lora_rank: 3\n  r: 8\nmethod: dpo\nruntime: {env: {A: x, A: y}}\n"
    )
    assert [(fault.where, fault.key, fault.problem) for fault in found] == [
        ("recipe.yaml:6", "lora.lora_rank", "unknown key"),
        ("recipe.yaml:7", "lora.r", "duplicate key, first set on line 5"),
        ("recipe.yaml:8", "method", "duplicate key, first set on line 1"),
        ("recipe.yaml:9", "runtime.env.A", "duplicate key, first set on line 9"),
    ]


def test_what_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    hashes = set()
    for content in (
        GOOD.encode(),
        b"\xef\xbb\xbf" + GOOD.encode(),
        b"---\n" + GOOD.encode() + b"...\n",
        GOOD.replace("\n", "\r\n").encode(),
    ):
        path.write_bytes(content)
        hashes.add(load_recipe(str(path), environ={}).recipe.hash())
    assert len(hashes) == 1


def test_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        GOOD + "training: {learning_rate: 2e-4, seed: 0o17, save_steps: 0x10, logging_steps: 012, weight_decay: 0}\n"
        "runtime:\n  env: {A: yes, B: off, C: 1:30, D: 2026-11-21, E: 1_000, F: '2e-4'}\n",
        encoding="utf-8",
    )
    recipe = load_recipe(str(path), environ={}).recipe
    training = recipe.training
    assert (training.learning_rate, training.seed, training.save_steps, training.logging_steps) == (2e-4, 15, 16, 12)
    assert recipe.runtime.env == {"A": "yes", "B": "off", "C": "1:30", "D": "2026-11-21", "E": "1_000", "F": "2e-4"}


def test_anchors_within_reason_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD + "lora:\n  target_modules: &m [q_proj]\n  exclude_modules: *m\n", encoding="utf-8")
    lora = load_recipe(str(path), environ={}).recipe.lora
    assert lora is not None
    assert lora.target_modules == lora.exclude_modules == ["q_proj"]


def test_pipes_are_read_and_waited_for_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blueprints.recipe.document.PIPE_SECONDS", 0.5)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RecipeError, match="nothing came through the pipe"):
        load_recipe(str(pipe), environ={})
    with pytest.raises(RecipeError, match="nothing came through the pipe"):
        load_recipe("sft", overlays=[pipe], environ={})
    writer = threading.Thread(target=pipe.write_text, args=(GOOD,))
    writer.start()
    assert load_recipe(str(pipe), environ={}).recipe.method == "sft"
    writer.join()


def test_a_link_to_nothing_says_so(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").symlink_to("gone.yaml")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: a link to gone\.yaml, which does not exist"):
        load_recipe(str(tmp_path / "recipe.yaml"), environ={})


def test_names_are_near_in_any_case() -> None:
    with pytest.raises(RecipeError, match="Did you mean `sft-lora`"):
        load_recipe("SFT-LORA", environ={})


def test_a_directory_a_missing_file_and_a_wrong_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "chats.yaml").write_text(GOOD, encoding="utf-8")
    for source, words in (
        ("recipes", "this is a directory; expected a recipe file. Recipes in it: chats.yaml."),
        (
            "recipes/chat.yaml",
            f"no such recipe; expected a shipped recipe ({', '.join(shipped_names())}) or the",
        ),
        ("recipes/chat.yaml", "Did you mean `recipes/chats.yaml`?"),
        ("recipes/chats.yml", "Did you mean `recipes/chats.yaml`?"),
        ("recipes/chats", "Did you mean `recipes/chats.yaml`?"),
        ("nowhere/chats.yaml", "The directory nowhere does not exist."),
        ("quickstart.yml", "The shipped recipe is called `quickstart`, without the ending."),
        ("sft-lroa", "Did you mean `sft-lora`"),
        ("", "the name is empty"),
        ("a\0b", "no such recipe"),
        ("x" * 5000, "no file can have this name"),
    ):
        with pytest.raises(RecipeError) as caught:
            load_recipe(source, environ={})
        assert words in str(caught.value)


def test_an_overlay_that_is_missing_or_broken_is_told_with_the_others(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("lora:\n\tr: 3\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe("sft", overlays=[broken, tmp_path / "gone.yaml"], overrides=["lora.rr=1", "x"], environ={})
    assert [fault.where.rpartition("/")[2] for fault in caught.value.faults] == [
        "broken.yaml:2",
        "gone.yaml",
        "override 'x'",
        "override 'lora.rr=1'",
    ]
