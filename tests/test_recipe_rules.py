"""Faults of recipes: the place, the key, the value, what was expected, what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from blueprints.errors import Fault, RecipeError
from blueprints.recipe import load_recipe


def faults(source: str, *overrides: str, environ: dict[str, str] | None = None) -> list[Fault]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, overrides=overrides, environ=environ or {})
    return list(caught.value.faults)


def test_all_faults_of_all_layers_at_once(tmp_path: Path) -> None:
    recipe, overlay = tmp_path / "recipe.yaml", tmp_path / "overlay.yaml"
    recipe.write_text(
        "method: sft\n"
        "model: hf://Qwen/Qwen3-0.6B\n"
        "datset: file:///rows.jsonl\n"
        "lora:\n"
        "  r: '4'\n"
        "  lora_rank: 3\n"
        "training:\n"
        "  learning_rat: 1e-4\n"
        "  warmup_steps: -1\n"
        "dpo: {beta: 0.1}\n"
        "learning_rate: 1e-4\n",
        encoding="utf-8",
    )
    overlay.write_text(
        "lora:\n  r: 8\n  use_dora: yes\nresources:\n  num_nodes: 0\n  strategy: fsdp\n", encoding="utf-8"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(
            str(recipe), overlays=[overlay], overrides=["sft.packing=1", "x=1"], environ={"LORA_CONFIG": '{"alpha": 1}'}
        )
    got = [(fault.where.replace(f"{tmp_path}/", ""), fault.key) for fault in caught.value.faults]
    assert got == [
        ("recipe.yaml:1", "dataset"),
        ("recipe.yaml:3", "datset"),
        ("recipe.yaml:5", "lora.r"),
        ("recipe.yaml:6", "lora.lora_rank"),
        ("recipe.yaml:8", "training.learning_rat"),
        ("recipe.yaml:9", "training.warmup_steps"),
        ("recipe.yaml:10", "dpo"),
        ("recipe.yaml:11", "learning_rate"),
        ("overlay.yaml:3", "lora.use_dora"),
        ("overlay.yaml:5", "resources.num_nodes"),
        ("overlay.yaml:6", "resources.strategy"),
        ("override 'sft.packing=1'", "sft.packing"),
        ("override 'x=1'", "x"),
        ("environment LORA_CONFIG", "lora.alpha"),
    ]
    text = str(caught.value)
    assert text.startswith(f"recipe {recipe}: 14 faults\n")
    assert caught.value.as_dict()["faults"][1]["hint"] == "Did you mean `dataset`?"


@pytest.mark.parametrize(
    ("override", "problem", "expected", "hint"),
    [
        ("lora.r='4'", 'found the string "4"', "an integer, at least 1", "Remove the quotes."),
        ("lora.r=4.0", "found the number 4.0", "an integer, at least 1", ""),
        ("lora.r=true", "found the boolean true", "an integer, at least 1", ""),
        ("lora.lora_dropout=1", "found the integer 1", "a number, at least 0 and below 1", ""),
        ("lora.use_dora=yes", 'found the string "yes"', "a boolean (true or false)", "Write `true`."),
        ("lora.use_dora=1", "found the integer 1", "a boolean (true or false)", ""),
        ("lora.bias=al", 'found the string "al"', "one of none, all, lora_only", "Did you mean `all`?"),
        ("lora=true", "found the boolean true", "a map with keys such as r, lora_alpha", "Write `lora: {}`"),
        ("lora=4", "found the integer 4", "a map with keys such as r, lora_alpha", ""),
        ("lora.target_modules=3", "found the integer 3", "a non-empty string, or a list of strings", ""),
        ("lora.from=3", "found the integer 3", "a URI", ""),
        ("training.report_to=wandb", 'found the string "wandb"', "a list of any of trackio", "`report_to: [wandb]`"),
        ("training.seed=-1", "found the integer -1", "an integer, at least 0 and at most 4294967295", ""),
        ("training.learning_rate=0", "found the integer 0", "a number, greater than 0", ""),
        ("dataset.test_size=1.5", "found the number 1.5", "at least 0 and below 1, or an integer, at least 0", ""),
        ("dataset.test_size=-1", "found the integer -1", "at least 0 and below 1, or an integer, at least 0", ""),
        ("resources.gpu=0.5", "found the number 0.5", "an integer, at least 0", ""),
        ("resources.memory=64GB", 'found the string "64GB"', "a quantity such as 8, 500m or 64Gi", ""),
        ("runtime.env.A=1", "found the integer 1", "a string", "'runtime.env.A=\"1\"'"),
        ("training=3", "found the integer 3", "a map with keys such as learning_rate", ""),
        ("method=dop", 'found the string "dop"', "one of sft, dpo, ppo, grpo, distill, qat", "Did you mean `dpo`?"),
        ("lora.r=", "found no value", "a value after `=`", "Write `lora.r=null` to unset it"),
        ("lora.target_modules=[q", "not YAML", "", "Quote a text that begins with a bracket"),
    ],
)
def test_wrong_values(override: str, problem: str, expected: str, hint: str) -> None:
    (fault,) = faults("sft-lora", override)
    assert fault.where == f"override '{override}'"
    assert fault.key == override.partition("=")[0]
    assert problem in fault.problem
    assert expected in fault.expected
    assert hint in fault.hint


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lora.lora_rank", "Here it is called `r`."),
        ("lora.rank", "Here it is called `r`."),
        ("lora.alpha", "Here it is called `lora_alpha`."),
        ("lora.dropuot", "Did you mean `lora_dropout`?"),
        ("lora.learning_rate", "`learning_rate` belongs under `training`."),
        ("lora_rank", "Here it is `r` under `lora`."),
        ("lr", "Here it is `learning_rate` under `training`."),
        ("batch_size", "Here it is `per_device_train_batch_size` under `training`."),
        ("epochs", "Here it is `num_train_epochs` under `training`."),
        ("max_seq_length", "Here it is `max_length` under `training`."),
        ("training.lr", "Here it is called `learning_rate`."),
        ("training.epochs", "Here it is called `num_train_epochs`."),
        ("training.packing", "Packing is a knob of the method: `sft.packing` or `qat.packing`."),
        ("packing", "Packing is a knob of the method"),
        ("training.gpu", "`gpu` belongs under `resources`."),
        ("training.use_dora", "`use_dora` belongs under `lora`."),
        ("sft.beta", "`beta` belongs under `dpo` or `grpo` or `distill`"),
        ("model_name_or_path", "Here it is `uri` under `model`."),
        ("trainning", "Did you mean `training`?"),
        ("Lora.r", "Did you mean `lora`?"),
        ("resources.num-nodes", "Did you mean `num_nodes`?"),
        ("eval.nonsense_of_mine", "Known keys: metric, max_rows, samples, max_new_tokens."),
    ],
)
def test_unknown_keys_lead_to_the_right_one(key: str, hint: str) -> None:
    (fault,) = faults("sft", f"{key}=1")
    assert fault.problem == "unknown key"
    assert fault.hint.startswith(hint)


@pytest.mark.parametrize(
    ("source", "overrides", "key", "words"),
    [
        ("sft-qlora", ("method=qat", "sft=null"), "lora.quantize_base", "QLoRA cannot be combined with the method qat"),
        ("sft-lora", ("method=dpo", "sft=null", "dpo.packing=true"), "dpo.packing", "`dpo` has no packing"),
        ("sft", ("method=grpo", "sft=null", "grpo.packing=true"), "grpo.packing", "`grpo` has no packing"),
        ("sft-lora", ("dpo.beta=0.2",), "dpo", "knobs of the method dpo, but the method is sft"),
        ("sft-lora", ("method=dpo",), "sft", "knobs of the method sft, but the method is dpo"),
        ("sft", ("resources.strategy=fsdp",), "resources.strategy", "the run has one"),
        ("sft", ("resources.strategy=zero3", "resources.gpu=0"), "resources.strategy", "the run has one"),
        ("sft-qlora", ("resources.strategy=fsdp", "resources.gpu=2"), "lora.quantize_base", "cannot be sharded"),
        ("sft", ("resources.num_proc_per_node=2",), "resources.num_proc_per_node", "2 processes cannot share 1 GPU"),
        ("sft", ("training.max_steps=5", "training.num_train_epochs=2"), "training.num_train_epochs", "does nothing"),
        ("sft", ("lora.bnb_4bit_quant_type=fp4",), "lora.bnb_4bit_quant_type", "does nothing"),
        ("sft", ("training.optim=sgd", "training.adam_beta1=0.8"), "training.adam_beta1", "does nothing"),
        ("sft", ("output.merge=true",), "output.merge", "no adapter to merge"),
        ("sft-lora", ("lora.layers_to_transform=[0]",), "lora.layers_to_transform", "among named modules"),
        ("sft-lora", ("lora.init_lora_weights=orthogonal", "lora.r=3"), "lora.init_lora_weights", "even rank"),
        ("sft-qlora", ("lora.init_lora_weights=pissa",), "lora.init_lora_weights", "not in 4"),
        ("sft-qlora", ("lora.init_lora_weights=olora",), "lora.init_lora_weights", "not in 4"),
        ("sft-lora", ("lora.target_modules=[]",), "lora.target_modules", "the list is empty"),
        ("sft-lora", ("lora.from=builtin://tiny-llama",), "lora.from", "no adapter is embedded"),
        ("sft-lora", ("lora.from=s4://a/b",), "lora.from", "not supported"),
        ("sft-lora", ("lora.from=hf://a/b", "lora.init_lora_weights=pissa"), "lora.init_lora_weights", "does nothing"),
        ("sft-lora", ("lora.target_parameters=[a.b]", "lora.use_dora=true"), "lora.use_dora", "cannot be combined"),
        ("sft-lora", ("lora.target_parameters=[a]", "lora.lora_dropout=0.1"), "lora.lora_dropout", "cannot be combined"),
        (
            "sft-lora", ("method=grpo", "sft=null", "lora.init_lora_weights=pissa"),
            "lora.init_lora_weights", "would lack what `pissa` takes out",
        ),
        ("sft-lora", ("method=grpo", "sft=null", "lora.bias=all"), "lora.bias", "would keep the trained biases"),
        ("ppo-lora", ("ppo.value_head=separate", "lora.bias=all"), "lora.bias", "the critic"),
        ("ppo-lora", ("ppo.value_head=separate", "lora.init_lora_weights=olora"), "lora.init_lora_weights", "the critic"),
        ("ppo-lora", ("ppo.kl_coef=0", "ppo.kl_target=3.0"), "ppo.kl_target", "there is no KL penalty"),
        ("ppo-lora", ("resources.gpu=2", "resources.strategy=fsdp"), "resources.strategy", "PPO samples with the policy"),
        (
            "ppo-lora",
            ("resources.gpu=2", "resources.strategy=zero3", "ppo.value_head=separate"),
            "ppo.value_head",
            "a part of them",
        ),
        ("ppo-lora", ("resources.gpu=2", "resources.strategy=zero3", "lora.bias=all"), "lora.bias", "as they started"),
        ("ppo-lora", ("resources.gpu=2", "resources.strategy=zero3", "lora.use_dora=true"), "lora.use_dora", "while the"),
        ("ppo-lora", ("ppo.kl_horizon=3.0",), "ppo.kl_horizon", "stays as it is"),
        ("ppo-lora", ("ppo.vf_coef=0", "ppo.cliprange_value=1.0"), "ppo.cliprange_value", "no value is learnt"),
        (
            "sft", ("model.added_tokens=[a]", "resources.gpu=2", "resources.strategy=zero3"),
            "model.added_tokens", "has sharded them",
        ),
        ("sft", ("model.added_tokens=[a, b, a]",), "model.added_tokens", "named twice: a"),
        ("sft", ("resources.gpu=0", "training.use_liger_kernel=true"), "training.use_liger_kernel", "GPUs alone"),
        ("sft", ("resources.gpu=0", "training.activation_offloading=true"), "training.activation_offloading", "is 0"),
        ("sft", ("resources.gpu=0", "training.optim=paged_lion_32bit"), "training.optim", "lion_32bit, which works"),
        ("sft", ("training.optim=lion_8bit", "training.adam_epsilon=1e-6"), "training.adam_epsilon", "does nothing"),
        (
            "sft", ("method=dpo", "sft=null", "training.neftune_noise_alpha=5"),
            "training.neftune_noise_alpha", "the method dpo cannot do this",
        ),
        (
            "sft", ("method=grpo", "sft=null", "training.activation_offloading=true"),
            "training.activation_offloading", "the method grpo cannot do this",
        ),
        ("sft", ("method=ppo", "sft=null", "training.use_liger_kernel=true"), "training.use_liger_kernel", "ppo cannot"),
        ("sft", ("model.dtype=float16",), "model.dtype", "cannot be trained in float16"),
        ("sft", ("resources.gpu=0", "training.optim=paged_adamw_8bit"), "training.optim", "`resources.gpu` is 0"),
        ("quickstart", ("model.attn_implementation=flash_attention_2",), "model.attn_implementation", "on GPUs alone"),
        ("sft", ("training.report_to=[wandb, wandb]",), "training.report_to", "named twice"),
        ("sft", ("training.warmup_steps=1.5",), "training.warmup_steps", "found 1.5"),
        ("quickstart", ("dataset.test_size=0",), "eval.metric", "holds none out"),
        ("sft", ("dataset.eval_split=train",), "dataset.eval_split", "the split that is trained on"),
        ("sft", ("dataset.eval_split=x", "dataset.test_size=5"), "dataset.test_size", "names the held-out rows"),
        ("sft", ("dataset.format=preference",), "dataset.format", "cannot be used by the method sft"),
        ("sft", ("method=distill", "sft=null"), "distill.teacher", "required, but missing"),
        ("sft", ("method=grpo", "sft=null"), "grpo.reward_funcs", "required, but missing"),
        ("sft", ("method=ppo", "sft=null"), "ppo.reward_model", "neither is set"),
        ("sft", ("model.revision=x", "model=builtin://tiny-llama"), "model.revision", "not from the Hub"),
        ("sft", ("model=hf://a/b@x", "model.revision=y"), "model.revision", "the URI names 'x'"),
    ],
)  # fmt: skip
def test_combinations_that_cannot_work(source: str, overrides: tuple[str, ...], key: str, words: str) -> None:
    found = faults(source, *overrides)
    assert [fault.key for fault in found if words in str(fault)] == [key]


def test_both_rewards_are_too_many_and_groups_must_fill_the_batch() -> None:
    both = ("method=ppo", "sft=null", "ppo.reward_model=hf://a/b", "ppo.reward_funcs=[{name: exact_match}]")
    assert "both are set" in str(faults("sft", *both)[0])
    grpo = ("method=grpo", "sft=null", "grpo.reward_funcs=[{name: exact_match}]")
    load_recipe("sft", overrides=grpo, environ={})
    assert "a batch of 8 completions" in str(faults("sft", *grpo, "grpo.num_generations=3")[0])
    assert "grpo.vllm_server_base_url" in str(faults("sft", *grpo, "grpo.use_vllm=true", "grpo.vllm_mode=server")[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ("training.max_steps=5",),
        ("lora=null",),
        ("lora.quantize_base=false",),
        ("resources.strategy=fsdp", "resources.num_nodes=2", "lora.quantize_base=false"),
        ("output.merge=false", "lora=null"),
        ("training.bf16=true", "resources.gpu=0"),
        ("lora.use_dora=true", "lora.use_rslora=true"),
        ("dataset.test_size=5",),
        ("resources.cpu=0.5",),
        ("training.optim=adamw_bnb_8bit", "resources.gpu=0"),
    ],
)
def test_combinations_that_do_work(overrides: tuple[str, ...]) -> None:
    load_recipe("sft-qlora", overrides=overrides, environ={})


@pytest.mark.parametrize(
    ("uri", "hint"),
    [
        ("./rows.jsonl", "Write `file://{cwd}/rows.jsonl`."),
        ("../rows.jsonl", "Write `file://{parent}/rows.jsonl`."),
        ("/data/rows.jsonl", "Write `file:///data/rows.jsonl`."),
        ("rows.jsonl", "Write `file://{cwd}/rows.jsonl`."),
        ("here", "Write `file://{cwd}/here`."),
        ("~/rows.jsonl", "Write `file://{home}/rows.jsonl`."),
        ("tatsu-lab/alpaca", "Write `hf://tatsu-lab/alpaca`."),
        ("hf:tatsu-lab/alpaca", "Write `hf://tatsu-lab/alpaca`."),
        ("file:/data/rows.jsonl", "Write `file:///data/rows.jsonl`."),
        ("file://rows.jsonl", "Write `file://{cwd}/rows.jsonl`."),
        ("file://./rows.jsonl", "Write `file://{cwd}/rows.jsonl`."),
        ("orders", "Write `builtin://orders`."),
        ("builtin://order", "Did you mean `builtin://orders`?"),
        ("builtin://tiny-llama", "`builtin://tiny-llama` is a model."),
        ("https://huggingface.co/datasets/tatsu-lab/alpaca", "Write `hf://tatsu-lab/alpaca`."),
        ("hf://datasets/tatsu-lab/alpaca", "Write `hf://tatsu-lab/alpaca`."),
        ("hf://alpaca", "The organisation or user comes first"),
        ("HF://a/b", "Write `hf://`."),
        ("s3://bucket/rows", "Copy the source to a local path"),
        ("C:\\data\\rows", "Write `file:///C:/data/rows`."),
    ],
)
def test_sources_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, hint: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    (fault,) = faults("sft", f"dataset={uri}")
    assert fault.key == "dataset.uri"
    assert uri in fault.problem or uri.partition(":")[0] in fault.problem
    assert fault.expected
    assert fault.hint.startswith(hint.format(cwd=tmp_path, parent=tmp_path.parent, home="/home/someone"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "found a list of 1 item; expected a JSON object"),
        ("null", "found null; expected a JSON object"),
        ('{"rank": 4}', "lora.rank: unknown key; expected a key of `lora`. Here it is called `r`."),
        ('{"lora_alhpa": 4}', "Did you mean `lora_alpha`?"),
        ('{"r": 4, "r": 5}', "duplicate key `r`"),
        ('{"r": "4"}', 'lora.r: found the string "4"; expected an integer'),
        ('{"peft_type": "IA3"}', 'lora.peft_type: found the string "IA3"; expected LORA'),
        ('{"task_type": "SEQ_CLS"}', "expected CAUSAL_LM"),
        ('{"r": NaN}', "found nan"),
        ("[" * 100000, "nested too deeply"),
    ],
)
def test_the_environment_has_faults_of_its_own(text: str, words: str) -> None:
    (fault,) = faults("sft", environ={"LORA_CONFIG": text})
    assert fault.where == "environment LORA_CONFIG"
    assert words in str(fault)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("lora.r=4", "recipe.yaml:3"),
        ("dataset.split=valid", "recipe.yaml:3"),
        ("dataset={}", "recipe.yaml:3"),
        ("dataset=null", "override 'dataset=null'"),
    ],
)
def test_the_recipe_is_what_lacks_a_required_key(tmp_path: Path, override: str, where: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("# a comment\n\nmethod: sft\nmodel: builtin://tiny-llama\n", encoding="utf-8")
    (fault,) = faults(str(path), override, "training.seed=1")
    assert (fault.where.replace(f"{tmp_path}/", ""), fault.problem) == (where, "required, but missing")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lora.target_modules=(("], "lora.target_modules: '((' is no regular expression"),
        (["lora.exclude_modules='[a'"], "lora.exclude_modules: '[a' is no regular expression"),
        (["lora.rank_pattern={'layers.*.q(': 4}"], "'layers.*.q(' is no regular expression"),
        (["lora.alpha_pattern={'*': 4}"], "'*' is no regular expression: nothing to repeat"),
        (["lora.r==4"], "Write one `=`: lora.r=4"),
        (["training.max_length=1e3"], "Write `1000`."),
        (["method=SFT"], "Did you mean `sft`?"),
        (["training.seed=1\nlora.r: 2"], "override 'training.seed=1\\nlora.r: 2': training.seed: found"),
        (["method=grpo", "sft=null", "grpo.reward_funcs=[{}]"], "grpo.reward_funcs[0].name: required, but missing"),
    ],
)
def test_one_fault_that_leads_on(overrides: list[str], words: str) -> None:
    (fault,) = faults("sft-lora", *overrides)
    assert words in str(fault)
    assert "\n" not in str(fault)
