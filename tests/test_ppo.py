"""PPO as a user runs it: what it computes, that it goes on where it stopped, and what it says of faults."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import methods_kit as kit
import pytest
import torch
from sft_workspace import losses, run_record, train, train_here
from test_ppo_math import gae, policy_loss, rewards_of, value_loss, whitened
from test_resume import start, wait_for

from blueprints.errors import BlueprintError, DataError, JobFailedError, UsageError

pytestmark = pytest.mark.usefixtures("proved_here")
OPTIONS = """
ppo:
  reward_funcs: [{name: length, args: {max: 3}}]
  max_completion_length: 8
  num_ppo_epochs: 2
  num_mini_batches: 2
eval: {max_new_tokens: 8, samples: 4}
"""
CRITIC = "critic.safetensors"


def workspace(root: Path, options: str = OPTIONS) -> Path:
    return kit.build(root, "ppo", kit.prompts, options)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Train in this process, to the proved artifact."""
    return lambda root, *overrides: train_here(root, monkeypatch, *overrides)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Train some steps in this process; the checkpoint after them."""

    def some(root: Path, count: int, *overrides: str) -> Path:
        kit.interrupt(root, monkeypatch, count, *overrides, "training.max_steps=100")
        return root / "output" / f"checkpoint-{count}"

    return some


# --- what is computed -------------------------------------------------------------------------------


def test_steps_equal_those_written_out_by_hand(tmp_path: Path, steps: Callable[..., Path]) -> None:
    """Two batches of four steps: sampled tokens aside, all is computed again, sequence by sequence, without padding."""
    root = workspace(tmp_path / "run")
    asked = ("training.lr_scheduler_type=constant", "ppo.kl_coef=0.3", "ppo.temperature=0.9",
             "ppo.gamma=0.97", "ppo.whiten_rewards=true", "ppo.missing_eos_penalty=0.5")  # fmt: skip
    checkpoint = steps(root, 8, *asked)
    by_hand = ByHand(root)
    expected = [loss for number in range(2) for loss in by_hand.batch(number)]
    assert len(expected) == 8
    assert losses(root) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    trained = weights(checkpoint)
    for name, parameter in by_hand.value.named_parameters():
        torch.testing.assert_close(trained.pop(f"value_head.{name}"), parameter.data, rtol=1e-4, atol=1e-6)
    assert len(trained) == 28
    for name, tensor in trained.items():
        mine = by_hand.model.get_parameter(name.replace(".weight", ".default.weight"))
        torch.testing.assert_close(tensor, mine.data, rtol=1e-4, atol=1e-6)


class ByHand:
    """PPO with LoRA as a plain loop, for the settings of the test above."""

    def __init__(self, root: Path) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, set_seed

        from trainers.rollout import Sampling

        set_seed(42)
        model = AutoModelForCausalLM.from_pretrained(root / "model")
        self.model = get_peft_model(
            model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        self.value = torch.nn.Linear(32, 1)
        torch.nn.init.zeros_(self.value.weight)
        torch.nn.init.zeros_(self.value.bias)
        self.trained = [p for p in [*self.model.parameters(), *self.value.parameters()] if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=5e-3, weight_decay=0.0)
        self.how = Sampling(0.9, 0, 1.0, 8, frozenset({1}), 0)
        self.prompts = kit.tokenised_prompts(root)

    def seen(self, ids: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and values of the tokens from `start` on."""
        out = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        logprobs = (out.logits[0] / 0.9).log_softmax(dim=-1)
        at = range(start - 1, len(ids) - 1)
        values = self.value(out.hidden_states[-1][0, start - 1 : len(ids) - 1])[:, 0]
        return torch.stack([logprobs[index, ids[index + 1]] for index in at]), values

    def batch(self, number: int) -> list[float]:
        """The losses of the steps on one batch."""
        from trainers.ppo import Plan
        from trainers.rollout import sample, seed_of

        plan = Plan(40, 4, 1, 1, 2, 2, 42, 1.0, 8)
        prompts = [self.prompts[row] for row in plan.prompts(number)]
        self.model.eval()
        seeds = [seed_of(42, number, place) for place in range(8)]
        answers = sample(self.model.get_base_model(), prompts, seeds, self.how)
        with torch.no_grad():
            old = [self.seen(p + a, len(p)) for p, a in zip(prompts, answers, strict=True)]
            with self.model.disable_adapter():
                reference = [self.seen(p + a, len(p))[0] for p, a in zip(prompts, answers, strict=True)]
        rewards = []
        for answer, (logprobs, _), ref in zip(answers, old, reference, strict=True):
            score = 1.0 if len(answer) <= 3 else 1 - (len(answer) - 3) / 3 if len(answer) < 6 else 0.0
            score -= 0.0 if answer[-1] == 1 else 0.5
            rewards.append(rewards_of(score, logprobs.tolist(), ref.tolist(), 0.3, "k1"))
        rewards = whitened(rewards, shift=False)
        found = [gae(r, v.tolist(), 0.97, 0.95) for r, (_, v) in zip(rewards, old, strict=True)]
        advantages = whitened([each for each, _ in found], shift=True)
        return [
            self.step(
                [(prompts[i], answers[i], *old[i], advantages[i], found[i][1]) for i in plan.chosen(4 * number + s)]
            )
            for s in range(4)
        ]

    def step(self, rows: list[Any]) -> float:
        """One optimizer step on some completions."""
        count = sum(len(answer) for _, answer, *_ in rows)
        total = 0.0
        for prompt, answer, logprobs, values, advantages, returns in rows:
            new, value = self.seen(prompt + answer, len(prompt))
            for t in range(len(answer)):
                ratio = torch.exp(new[t] - logprobs[t])
                limited = torch.clamp(ratio, 0.8, 1.2)
                policy = -torch.minimum(ratio * advantages[t], limited * advantages[t])
                near = torch.clamp(value[t], values[t] - 0.2, values[t] + 0.2)
                error = 0.5 * torch.maximum((value[t] - returns[t]) ** 2, (near - returns[t]) ** 2)
                # The formulas as plain numbers are those of test_ppo_math.
                assert policy.item() == pytest.approx(
                    policy_loss(new[t].item(), logprobs[t].item(), advantages[t], 0.2), abs=1e-5
                )
                assert error.item() == pytest.approx(
                    value_loss(value[t].item(), values[t].item(), returns[t], 0.2), abs=1e-5
                )
                total = total + (policy + 0.1 * error) / count
        assert isinstance(total, torch.Tensor)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()


@pytest.mark.covers(method="ppo", tuning=["full", "lora", "qlora", "dora"], world="1 process", feature="train")
@pytest.mark.parametrize("case", list(kit.TUNINGS))
def test_golden_losses(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.check_golden("ppo", case, workspace(tmp_path / "run"), monkeypatch)


def test_accumulated_steps_are_those_of_a_larger_batch(tmp_path: Path, steps: Callable[..., Path]) -> None:
    whole, parts = workspace(tmp_path / "whole"), workspace(tmp_path / "parts")
    steps(whole, 5)
    steps(parts, 5, "training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=4",
          "ppo.local_rollout_forward_batch_size=3")  # fmt: skip
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4, abs=1e-6)
    for name in ("entropy", "value_loss", "approx_kl", "explained_variance", "reward", "kl", "objective"):
        assert kit.curve(parts, name) == pytest.approx(kit.curve(whole, name), rel=1e-3, abs=1e-6), name


@pytest.mark.covers(method="ppo", tuning="lora", world="ddp", feature="train")
def test_two_processes_train_as_one(tmp_path: Path, steps: Callable[..., Path]) -> None:
    one, two = workspace(tmp_path / "one"), workspace(tmp_path / "two")
    asked = ("training.lr_scheduler_type=constant",)
    checkpoint = steps(one, 5, *asked)
    done = train(two, *asked, "training.max_steps=5", "training.per_device_train_batch_size=2",
                 "resources.num_proc_per_node=2", processes=2)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert losses(two) == pytest.approx(losses(one), rel=1e-4, abs=1e-6)
    for name in ("entropy", "value_loss", "policy_clipfrac", "ratio", "reward", "kl", "num_tokens"):
        assert kit.curve(two, name) == pytest.approx(kit.curve(one, name), rel=1e-3, abs=1e-6), name
    found = weights(two / "output" / "adapter")
    for name, tensor in weights(checkpoint).items():
        if "value_head" not in name:
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)


# --- going on ---------------------------------------------------------------------------------------


@pytest.mark.covers(method="ppo", tuning=["full", "lora"], world="1 process", feature="resume")
@pytest.mark.parametrize(
    ("lora", "options"),
    [
        ("lora.lora_dropout=0.1", ("ppo.kl_target=0.5", "ppo.kl_horizon=50.0")),
        ("lora.init_lora_weights=pissa", ("ppo.value_head=shared",)),
        ("lora.lora_dropout=0.0", ("ppo.value_head=separate", "training.gradient_accumulation_steps=2")),
        ("lora=null", ("ppo.value_head=separate",)),
    ],
    ids=["adapted penalty", "kept reference", "critic of its own", "full"],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    lora: str, options: tuple[str, ...], tmp_path: Path, steps: Callable[..., Path]
) -> None:
    """Bit for bit, stopped within a batch (steps 1 and 6) and after one (step 4)."""
    unbroken, broken = workspace(tmp_path / "unbroken"), workspace(tmp_path / "broken")
    expected = steps(unbroken, 7, lora, *options)
    found = [steps(broken, step, lora, *options) for step in (1, 4, 6, 7)][-1]
    for name in ("loss", "reward", "kl", "kl_coef", "value_loss", "num_tokens", "explained_variance"):
        assert kit.curve(broken, name) == kit.curve(unbroken, name), name
    logs = [(root / "output" / "completions.jsonl").read_text() for root in (broken, unbroken)]
    assert logs[0] == logs[1]
    assert logs[0].count("\n") == 2 * 8 * (2 if "accumulation_steps=2" in str(options) else 1)
    names = sorted(path.name for path in expected.glob("*.safetensors"))
    assert len(names) == 2
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.covers(method="ppo", tuning="lora", world=name, feature="resume"))
        for name in ("ddp", "zero2", "zero3")
    ],
)
def test_two_killed_processes_go_on_within_a_batch(strategy: str, tmp_path: Path) -> None:
    whole, broken = workspace(tmp_path / "whole"), workspace(tmp_path / "broken")
    asked = ("training.per_device_train_batch_size=2", "resources.num_proc_per_node=2", "training.max_steps=12",
             "training.save_steps=3", "lora.lora_dropout=0.1", f"resources.strategy={strategy}")  # fmt: skip
    done = train(whole, *asked, processes=2, launch=True)
    assert done.returncode == 0, done.stdout
    process = start(broken, *asked, processes=2, launch=True)
    wait_for(broken / "output" / "checkpoint-3" / "complete.json", process, broken)
    process.kill()
    process.wait()
    again = train(broken, *asked, processes=2, launch=True)
    assert again.returncode == 0, again.stdout
    assert "going on from checkpoint-" in again.stdout
    assert losses(broken) == pytest.approx(losses(whole), rel=1e-6, abs=1e-7)
    assert kit.curve(broken, "reward") == kit.curve(whole, "reward")


@pytest.mark.covers(method="ppo", tuning="lora", world="1 process", feature="export")
def test_a_checkpoint_holds_the_value_head_and_the_artifact_does_not(tmp_path: Path, here: Callable[..., int]) -> None:
    from safetensors.torch import load_file

    root = workspace(tmp_path)
    assert here(root, "training.save_steps=3") == 0
    checkpoint = root / "output" / "checkpoint-3"
    assert set(load_file(checkpoint / CRITIC)) == {"value_head.weight", "value_head.bias"}
    assert (checkpoint / "rollout.pt").exists()  # step 3 is within a batch of four steps
    assert not (root / "output" / "checkpoint-4" / "rollout.pt").exists()
    assert all("lora" in name for name in weights(root / "output" / "adapter"))
    record = run_record(root)
    assert record["proofs"]["adapter"]["passed"]
    assert "no second model" in record["effective"]["reference"]
    assert record["effective"]["value head"] == "33 parameters on the policy's last hidden state"
    assert record["effective"]["rollout"] == "8 completions, then 4 steps (2 passes × 2 mini-batches)"


# --- rewards, references, value heads ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "reference"),
    [
        (("lora=null",), "a frozen copy of 23,968 parameters"),
        (("lora.init_lora_weights=pissa",), "trained values as they started"),
        (("ppo.kl_coef=0",), "none: kl_coef is 0"),
    ],
)
def test_every_reference_is_the_model_before_training(
    asked: tuple[str, ...], reference: str, tmp_path: Path, steps: Callable[..., Path]
) -> None:
    root = workspace(tmp_path)
    steps(root, 5, *asked)
    assert reference in run_record(root)["effective"]["reference"]
    kl = kit.curve(root, "kl")
    assert max(map(abs, kl[:4])) < 1e-5  # the first batch is sampled from the reference itself
    assert (max(map(abs, kl[4:])) > 1e-4) == ("kl_coef" not in asked[0])


def test_a_critic_of_its_own_stands_on_the_same_frozen_weights(tmp_path: Path) -> None:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from blueprints.recipe import load_recipe
    from trainers.actor_critic import ActorCritic, critic_trunk
    from trainers.peft import adapter_config

    root = workspace(tmp_path)
    recipe = load_recipe(str(root / "recipe.yaml"), overrides=["ppo.value_head=separate"], environ={}).recipe
    base = AutoModelForCausalLM.from_pretrained(root / "model")
    weights = sum(parameter.numel() for parameter in base.parameters())
    trunk = critic_trunk(base, recipe)
    assert recipe.lora is not None
    both = ActorCritic(get_peft_model(base, adapter_config(recipe.lora, base)), trunk, 1.0)
    adapters = sum(parameter.numel() for parameter in both.parameters() if parameter.requires_grad) - 33
    assert sum(parameter.numel() for parameter in both.parameters()) == weights + adapters + 33
    assert adapters == 2 * 4096
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    found = both(tokens, torch.ones_like(tokens), torch.tensor([[3, 4]]), 3)
    (found["values"].sum() + found["logprobs"].sum()).backward()
    assert both.value_head.weight.grad is not None


def save_reward_model(directory: Path, labels: int = 1, template: str | None = None, pad: str | None = "<pad>") -> Any:
    """A random classifier that reads letters: its tokenizer is not the policy's."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    letters = ["<pad>", "<unk>", *" :cdopsuaeriWw0123456789"]
    raw = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=pad, unk_token="<unk>")
    tokenizer.chat_template = template
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(letters), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_labels=labels, pad_token_id=0 if pad else None, initializer_range=0.5,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return tokenizer


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
MODEL_OPTIONS = OPTIONS.replace("reward_funcs: [{name: length, args: {max: 3}}]", "reward_model: file:///reward")


@pytest.mark.parametrize("pad", ["<pad>", None])
@pytest.mark.parametrize(
    ("template", "prompt", "completion", "text"),
    [
        (None, "copy w1", " W1", "copy w1 W1"),
        (TEMPLATE, "copy w1", "W1", "user: copy w1 assistant: W1 "),
        (TEMPLATE, [{"role": "user", "content": "copy w1"}], [{"role": "assistant", "content": "W1"}],
         "user: copy w1 assistant: W1 "),
        (None, [{"role": "user", "content": "copy w1"}], [{"role": "assistant", "content": "W1"}], "copy w1W1"),
    ],
    ids=["text", "text with a template", "messages with a template", "messages"],
)  # fmt: skip
def test_a_reward_model_reads_text_in_its_own_way(
    template: str | None, prompt: Any, completion: Any, text: str, pad: str | None, tmp_path: Path
) -> None:
    """Whatever else is scored with it, and however long that is."""
    from transformers import AutoModelForSequenceClassification

    from trainers.reward_model import RewardModel

    tokenizer = save_reward_model(tmp_path, template=template, pad=pad)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.tensor([tokenizer(text.replace("w1W1", "w1\nW1") if not template else text)["input_ids"]])
    expected = model(input_ids=ids).logits.item()
    other = "copy" if isinstance(prompt, str) else [{"role": "user", "content": "copy w0 w1 w2"}]
    found = RewardModel(tmp_path, torch.device("cpu"), 4)([other, prompt], [completion] * 2, [[1], [2]], [{}, {}])
    assert found[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.covers(method="ppo", tuning="lora", world="1 process", feature=["train", "eval"])
def test_a_reward_model_scores_a_run(tmp_path: Path, here: Callable[..., int]) -> None:
    root = workspace(tmp_path, MODEL_OPTIONS)
    save_reward_model(root / "reward_model")
    assert here(root, "training.eval_steps=2") == 0
    record = run_record(root)
    assert "the model file:///reward of 2,784 parameters" in record["effective"]["reward"]
    assert record["metrics"]["reward_before"] != record["metrics"]["reward_after"]
    assert kit.curve(root, "eval_reward")[1] == pytest.approx(record["metrics"]["reward_after"], rel=1e-6)
    assert max(kit.curve(root, "reward_std")) > 0


def test_a_classifier_with_several_labels_is_no_reward_model(tmp_path: Path, here: Callable[..., int]) -> None:
    root = workspace(tmp_path, MODEL_OPTIONS)
    save_reward_model(root / "reward_model", labels=3)
    with pytest.raises(UsageError, match="has 3 labels"):
        here(root)


def test_a_language_model_is_no_reward_model(tmp_path: Path, here: Callable[..., int]) -> None:
    root = workspace(tmp_path, MODEL_OPTIONS)
    shutil.copytree(root / "model", root / "reward_model")
    with pytest.raises((UsageError, DataError), match=r"labels|would be random"):
        here(root)


def test_scores_that_are_no_numbers_stop_the_run(tmp_path: Path, here: Callable[..., int]) -> None:
    from safetensors.torch import load_file, save_file

    root = workspace(tmp_path, MODEL_OPTIONS)
    save_reward_model(root / "reward_model")
    path = root / "reward_model" / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"score.weight": weights["score.weight"] * math.nan}, path, metadata={"format": "pt"})
    with pytest.raises(JobFailedError, match="gave nan to the completion"):
        here(root)


FUNCTIONS = """
def boom(prompts, completions, **columns):
    raise KeyError("colour")

def nothing(prompts, completions, **columns):
    return [None] * len(completions)

def constant(prompts, completions, **columns):
    return [0.25] * len(completions)
"""


@pytest.mark.parametrize(
    ("name", "said"), [("boom", "raised KeyError: 'colour'"), ("nothing", "no reward applies to row")]
)
def test_a_faulty_reward_is_named(
    name: str, said: str, tmp_path: Path, here: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"rewards_{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    root = workspace(tmp_path / "run", OPTIONS.replace("length, args: {max: 3}", f"'rewards_{name}:{name}'"))
    with pytest.raises(BlueprintError, match=said) as fault:
        here(root)
    assert "rewards_boom.py:3" in str(fault.value) or name == "nothing"


def test_rewards_that_teach_nothing_are_told(
    tmp_path: Path, steps: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards_same.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    options = OPTIONS.replace("length, args: {max: 3}", "'rewards_same:constant'").replace("length: 8", "length: 2")
    steps(workspace(tmp_path / "run", options), 9)
    said = capsys.readouterr().out
    assert said.count("all 8 completions got the reward 0.25: there is nothing to learn from them") == 1
    assert said.count("none of 8 completions ended within ppo.max_completion_length=2 tokens") == 1


# --- sampling ---------------------------------------------------------------------------------------


def test_samples_depend_on_their_seed_alone(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from trainers.rollout import Sampling, sample

    root = workspace(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(root / "model").eval()
    prompts = kit.tokenised_prompts(root)[:6]
    how = Sampling(1.0, 0, 1.0, 8, frozenset({1}), 0)
    together = sample(model, prompts, range(6), how)
    assert together == [sample(model, [prompt], [seed], how)[0] for seed, prompt in enumerate(prompts)]
    assert sample(model, prompts, range(6, 12), how) != together
    # What the model's generation_config.json adds to other generations has no part in these, and stays as it was.
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.suppress_tokens = list(range(40))
    assert sample(model, prompts, range(6), how) == together
    assert model.generation_config.repetition_penalty == 5.0


@pytest.mark.parametrize(("top_k", "top_p", "possible"), [(0, 1.0, 5), (2, 1.0, 2), (0, 0.8, 2)])
def test_tokens_are_drawn_from_the_tempered_distribution(top_k: int, top_p: float, possible: int) -> None:
    from trainers.rollout import Sampling, SeededSampling

    logits = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0])
    count = 20_000
    scores = logits.repeat(count, 1)
    for warp in Sampling(0.8, top_k, top_p, 1, frozenset(), 0).warpers():
        scores = warp(torch.zeros(count, 1, dtype=torch.long), scores)
    drawn = SeededSampling(range(count), torch.device("cpu"))(torch.zeros(count, 1), scores).argmax(dim=-1)
    shares = torch.bincount(drawn, minlength=5) / count
    kept = (logits / 0.8).topk(possible).indices
    expected = torch.zeros(5).index_put((kept,), (logits[kept] / 0.8).softmax(dim=0))
    torch.testing.assert_close(shares, expected, atol=0.012, rtol=0)


def test_every_prompt_comes_once_in_an_epoch_and_every_completion_once_in_a_pass() -> None:
    from trainers.ppo import Plan

    plan = Plan(
        rows=24, micro=2, accumulated=2, processes=2, mini_batches=3, passes=2, seed=1, epochs=2.5, max_steps=None
    )
    assert (plan.step_size, plan.completions, plan.steps_per_batch) == (8, 24, 6)
    assert plan.steps == 3 * 6  # 60 prompts need three batches of 24
    assert all(sorted(plan.prompts(number)) == list(range(24)) for number in range(3))
    assert plan.prompts(0) != plan.prompts(1)
    for turn in range(2):
        steps = [plan.chosen(6 + 3 * turn + part) for part in range(3)]
        assert sorted(chain(*steps)) == list(range(24))
        for step in steps:
            shares = [plan.share(step, rank, micro) for rank in range(2) for micro in range(2)]
            assert sorted(chain(*shares)) == sorted(step)
            assert all(len(share) == 2 for share in shares)
    assert plan.chosen(6) != plan.chosen(9)
    few = Plan(rows=5, micro=8, accumulated=1, processes=1, mini_batches=1, passes=1, seed=1, epochs=1, max_steps=None)
    assert len(few.prompts(0)) == 8
    assert set(few.prompts(0)) == set(range(5))
