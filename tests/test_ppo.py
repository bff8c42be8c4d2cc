"""PPO as a user runs it: what it computes, that it goes on where it stopped, and what it says of faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import methods_kit as kit
import pytest
import torch
from sft_workspace import losses, train, train_here
from test_ppo_math import gae, policy_loss, rewards_of, value_loss, whitened

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


def adapter(root: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(root / "output" / "adapter" / "adapter_model.safetensors")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Train in this process."""
    return lambda root, *overrides: train_here(root, monkeypatch, *overrides)


# --- what is computed -------------------------------------------------------------------------------


def test_steps_equal_those_written_out_by_hand(tmp_path: Path, here: Callable[..., int]) -> None:
    """Two batches of four steps: sampled tokens aside, all is computed again, sequence by sequence, without padding."""
    root = workspace(tmp_path / "run")
    asked = ("training.max_steps=8", "training.lr_scheduler_type=constant", "ppo.kl_coef=0.3", "ppo.temperature=0.9",
             "ppo.gamma=0.97", "ppo.whiten_rewards=true", "ppo.missing_eos_penalty=0.5")  # fmt: skip
    assert here(root, *asked) == 0
    by_hand = ByHand(root)
    expected = [loss for number in range(2) for loss in by_hand.batch(number)]
    assert len(expected) == 8
    assert losses(root) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, tensor in adapter(root).items():
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


def test_accumulated_steps_are_those_of_a_larger_batch(tmp_path: Path, here: Callable[..., int]) -> None:
    whole, parts = workspace(tmp_path / "whole"), workspace(tmp_path / "parts")
    assert here(whole) == 0
    assert here(parts, "training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=4",
                "ppo.local_rollout_forward_batch_size=3") == 0  # fmt: skip
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4, abs=1e-6)
    for name in ("entropy", "value_loss", "approx_kl", "explained_variance", "reward", "kl", "objective"):
        assert kit.curve(parts, name) == pytest.approx(kit.curve(whole, name), rel=1e-3, abs=1e-6), name


@pytest.mark.covers(method="ppo", tuning="lora", world="ddp", feature="train")
def test_two_processes_train_as_one(tmp_path: Path, here: Callable[..., int]) -> None:
    one, two = workspace(tmp_path / "one"), workspace(tmp_path / "two")
    assert here(one) == 0
    done = train(two, "training.per_device_train_batch_size=2", "resources.num_proc_per_node=2", processes=2)
    assert done.returncode == 0, done.stdout
    assert losses(two) == pytest.approx(losses(one), rel=1e-4, abs=1e-6)
    for name in ("entropy", "value_loss", "policy_clipfrac", "ratio", "reward", "kl", "num_tokens"):
        assert kit.curve(two, name) == pytest.approx(kit.curve(one, name), rel=1e-3, abs=1e-6), name
    for name, tensor in adapter(one).items():
        torch.testing.assert_close(adapter(two)[name], tensor, rtol=1e-3, atol=1e-5)
