"""Proximal policy optimisation (arXiv:1707.06347), top to bottom: recipe -> policy with value head -> prompts -> sample,
score, train -> save -> prove.

A batch of prompts is answered by the policy and scored; on these completions the policy and its value head then take
`num_ppo_epochs` × `num_mini_batches` optimizer steps; then the next batch is sampled. Transformers' Trainer makes the
steps, so that they are logged, stopped, saved and resumed as those of any other method. The formulas are in
`trainers.ppo_math`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from blueprints.errors import UsageError
from blueprints.recipe.schema import PPOOptions, Recipe
from trainers import evaluate, rollout
from trainers.actor_critic import ActorCritic, Reference, completion_logprobs, critic_trunk, language_model
from trainers.checkpoint import ResumableTrainer
from trainers.completions import FILE, CompletionLog, Sampled
from trainers.data import PreparedData, first_ids, open_prepared
from trainers.evaluate import Question
from trainers.mask import mask_proof
from trainers.measures import Measures
from trainers.model import embedding_rows, load_model, load_tokenizer
from trainers.peft import with_adapter
from trainers.ppo_math import (
    adapted_kl_coef,
    advantages_and_returns,
    explained_variance,
    kl_estimate,
    masked_mean,
    policy_losses,
    token_rewards,
    value_losses,
    whiten,
)
from trainers.process import say, world
from trainers.reward_model import RewardModel
from trainers.rewards import Reward, Score, check_columns, load_rewards, total
from trainers.rollout import Completion, Rollout, Sampling
from trainers.run import Run, learning_rate, refusals
from trainers.settings import Setting
from trainers.sharding import loaded_whole, put_together
from trainers.watch import WATCH

CRITIC, ROLLOUT = "critic.safetensors", "rollout.pt"
"""What a checkpoint holds beside the policy: the value head, and the completions that are being trained on."""


@dataclass(frozen=True)
class Plan:
    """Which prompts each batch has and which of its completions each optimizer step trains on.

    A function of the recipe and of the number of a step alone: nothing to restore, the same for any number of processes.

    Attributes:
        rows: prompts of the data set.
        micro: completions per process and forward pass (`training.per_device_train_batch_size`).
        accumulated: forward passes per optimizer step.
        processes: how many share the work.
        mini_batches, passes: `ppo.num_mini_batches`, `ppo.num_ppo_epochs`.
        seed: of the order of rows.
        epochs, max_steps: how long; `max_steps`, in optimizer steps, decides if it is given.
    """

    rows: int
    micro: int
    accumulated: int
    processes: int
    mini_batches: int
    passes: int
    seed: int
    epochs: float
    max_steps: int | None

    @property
    def step_size(self) -> int:
        """Completions that an optimizer step trains on."""
        return self.micro * self.accumulated * self.processes

    @property
    def completions(self) -> int:
        """Completions of a batch."""
        return self.step_size * self.mini_batches

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps taken on each batch."""
        return self.passes * self.mini_batches

    @property
    def steps(self) -> int:
        """Optimizer steps of the run: enough batches for all epochs, unless `max_steps` says how many."""
        return self.max_steps or -int(-self.epochs * self.rows // self.completions) * self.steps_per_batch

    def epoch(self, step: int) -> float:
        """Passes over the prompts after `step` optimizer steps."""
        return -(-step // self.steps_per_batch) * self.completions / self.rows

    def prompts(self, number: int) -> list[int]:
        """The rows whose prompts batch `number` answers: the rows in a new random order in each epoch."""
        found = []
        for place in range(number * self.completions, (number + 1) * self.completions):
            epoch, index = divmod(place, self.rows)
            found.append(self._shuffled(self.rows, epoch)[index])
        return found

    def chosen(self, step: int) -> list[int]:
        """Completions of the batch that optimizer step `step` trains on: a part of a new random order in each pass."""
        turn, part = divmod(step % self.steps_per_batch, self.mini_batches)
        order = list(range(self.completions))
        if self.mini_batches > 1:
            order = self._shuffled(self.completions, step // self.steps_per_batch, turn)
        return order[part * self.step_size : (part + 1) * self.step_size]

    def share(self, chosen: Sequence[int], rank: int, micro_step: int) -> list[int]:
        """Of the chosen completions those of one process and forward pass."""
        return list(chosen[rank :: self.processes][micro_step * self.micro : (micro_step + 1) * self.micro])

    def _shuffled(self, count: int, *key: int) -> list[int]:
        order = list(range(count))
        random.Random(f"{self.seed}/{count}/{key}").shuffle(order)
        return order


class Scorer:
    """Turns completions into scores, by functions or by a reward model.

    Args:
        rewards: functions of the recipe, or the reward model alone.
        rows: prompts with their `messages` and `columns`, as the initializer wrote them.
        tokenizer: the policy's.
    """

    def __init__(
        self, rewards: Sequence[Reward | RewardModel], rows: Dataset, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.rewards, self.rows, self.tokenizer = rewards, rows, tokenizer

    def __call__(self, rows: Sequence[int], completions: Sequence[list[int]]) -> tuple[list[list[Score]], list[float]]:
        """Scores of the completions of some rows.

        Returns:
            of each completion, the score of each reward; their weighted sum.

        Raises:
            UsageError: a reward is at fault, or none applies to a completion.
        """
        asked = self.rows.select(rows)
        prompts = [json.loads(text) for text in asked["messages"]]
        columns = [json.loads(text) for text in asked["columns"]]
        texts = self.tokenizer.batch_decode(list(completions), skip_special_tokens=True)
        answers = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        scores = [
            reward(prompts=prompts, completions=answers, completion_ids=completions, columns=columns)
            for reward in self.rewards
        ]
        sums: list[float] = []
        for row, score in zip(rows, total(self.rewards, scores), strict=True):
            if score is None:
                raise UsageError(
                    f"no reward applies to row {row}, whose prompt is {asked['prompt'][len(sums)]!r:.200}",
                    where="ppo.reward_funcs",
                    todo="add a reward that applies to every row, or leave such rows out of the data set",
                )
            sums.append(score)
        return [list(each) for each in zip(*scores, strict=True)], sums


class Trainer(ResumableTrainer):
    """Transformers' Trainer, whose micro-steps are numbers: what each trains on, the plan says.

    Args:
        run: the run.
        plan: which prompts and completions each step has.
        scorer: of the training rows.
        sampling: how completions are drawn.
        reference: what the policy is held to; None without a KL penalty.
        settings: of Transformers' Trainer; `model` is the `ActorCritic`.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the tokens of the whole optimizer step

    def __init__(
        self, run: Run, plan: Plan, scorer: Scorer, sampling: Sampling, reference: Reference | None, **settings: Any
    ) -> None:
        options = run.recipe.ppo
        assert options is not None
        self.run, self.plan, self.scorer, self.sampling, self.options = run, plan, scorer, sampling, options
        self.reference, self.kl_coef = reference, options.kl_coef
        self.rollout: Rollout | None = None
        self._sums: dict[str, torch.Tensor] = {}
        self._idle = {"equal": 0, "late": 0}
        self.completions = CompletionLog(
            run.where.output / FILE, shown=options.num_completions_to_print, main=run.world.main
        )
        super().__init__(**settings)
        self.add_callback(self.completions)
        self._total_train_tokens = 0

    @property
    def language_model(self) -> Any:
        return self.model.policy

    def free_memory(self) -> None:
        """With the reference, the rewards and what was sampled last."""
        self.reference = self.rollout = None
        self.scorer.rewards = ()
        super().free_memory()

    # --- sampling ----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The numbers of all micro-steps of the run, the same on every process."""
        count = self.plan.steps * self.plan.accumulated
        return DataLoader(range(count), batch_size=1, collate_fn=lambda numbers: {"micro_step": numbers[0]})

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """What this process trains on in a micro-step; the first one of a batch samples it."""
        step, micro_step = divmod(inputs["micro_step"], self.plan.accumulated)
        number = step // self.plan.steps_per_batch
        if self.rollout is None or self.rollout.number != number:
            self.rollout = self.collect(number)
        chosen = self.plan.chosen(step)
        if micro_step == 0:
            self._sums = {}
            self._total_train_tokens += sum(len(self.rollout.sequences[index]) for index in chosen)
        mine = self.plan.share(chosen, world().rank, micro_step)
        return self.rollout.batch(mine, self.args.device) | {"tokens": self.rollout.tokens(chosen)}

    def collect(self, number: int) -> Rollout:
        """Answer and score the prompts of batch `number`; every process does its share, all get all."""
        here, rows = world(), self.plan.prompts(number)
        places = list(range(here.rank, len(rows), here.size))
        prompts = [list(ids) for ids in self.scorer.rows.select([rows[place] for place in places])["prompt_ids"]]
        with evaluating(self.model), torch.no_grad(), self.autocast():
            tokens = self.sample(prompts, number, places)
            scores, sums = self.scorer([rows[place] for place in places], tokens)
            known = [
                each
                for start in range(0, len(places), self.plan.micro)
                for each in self.known(
                    prompts[start : start + self.plan.micro], tokens[start : start + self.plan.micro]
                )
            ]
        mine = [
            Completion(rows[place], prompt, ids, ids[-1] in self.sampling.ends, each, score, *of_tokens)
            for place, prompt, ids, each, score, of_tokens in zip(
                places, prompts, tokens, scores, sums, known, strict=True
            )
        ]
        found = interleaved(mine, here.size)
        made = assemble(number, found, self.options, self.kl_coef, [reward.__name__ for reward in self.scorer.rewards])
        if self.options.kl_target is not None:
            self.kl_coef = adapted_kl_coef(
                self.kl_coef, made.stats["kl"], self.options.kl_target, self.options.kl_horizon, len(found)
            )
        self._note(found, made)
        return made

    def sample(self, prompts: Sequence[list[int]], number: int, places: Sequence[int]) -> list[list[int]]:
        """A completion of each prompt, at its place of batch `number`."""
        seeds = [rollout.seed_of(self.args.seed, number, place) for place in places]
        size, model = self.options.local_rollout_forward_batch_size, language_model(self.model.policy)
        found = []
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            found += rollout.sample(model, prompts[part], seeds[part], self.sampling)
            WATCH.tick()
        return found

    def known(
        self, prompts: Sequence[list[int]], tokens: Sequence[list[int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Log-probabilities under policy and reference, and values, of each completion's tokens."""
        lengths = [len(ids) for ids in tokens]
        inputs = rollout.padded([p + c for p, c in zip(prompts, tokens, strict=True)], lengths)
        batch = {name: inputs[name].to(self.args.device) for name in ("input_ids", "attention_mask", "places")}
        first = int(inputs["places"].min())
        WATCH.tick()
        found = self.model(**batch, first=first)
        reference = None
        if self.reference is not None:
            with self.reference.model() as model:
                reference = completion_logprobs(
                    model, **batch, first=first, temperature=self.options.temperature, keeps=self.model.keeps
                )["logprobs"].cpu()
        logprobs, values = found["logprobs"].cpu(), found["values"].cpu()
        for line, length in enumerate(lengths):
            kept = None if reference is None else reference[line, :length].clone()
            yield logprobs[line, :length].clone(), kept, values[line, :length].clone()

    def autocast(self) -> torch.autocast:
        """bfloat16 where the run computes in it."""
        return torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=self.args.bf16)

    def _note(self, found: Sequence[Completion], made: Rollout) -> None:
        """Write the batch down, and say what keeps it from teaching anything: at first, then at every tenth in a row."""
        asked = self.scorer.rows.select([each.row for each in found])["prompt"]
        texts = self.scorer.tokenizer.batch_decode([each.tokens for each in found], skip_special_tokens=True)
        names = [reward.__name__ for reward in self.scorer.rewards]
        advantages = made.tensors["advantages"].sum(dim=1) / torch.tensor(made.lengths)
        self.completions.add(
            [
                Sampled(
                    self.state.global_step + 1,
                    prompt,
                    text,
                    dict(zip(names, each.scores, strict=True)),
                    each.score,
                    advantage,
                )
                for prompt, text, each, advantage in zip(asked, texts, found, advantages.tolist(), strict=True)
            ]
        )
        faults = {
            "equal": (
                len({each.score for each in found}) == 1,
                f"all {len(found)} completions got the reward {found[0].score:g}: there is nothing to learn from them. Look "
                "at the rewards, the prompts and ppo.temperature",
            ),
            "late": (
                not any(each.ended for each in found),
                f"none of {len(found)} completions ended within ppo.max_completion_length={self.sampling.max_new_tokens} "
                "tokens: raise it, or teach the model to end with ppo.missing_eos_penalty",
            ),
        }
        for name, (holds, text) in faults.items():
            self._idle[name] = self._idle[name] + 1 if holds else 0
            if self._idle[name] % 10 == 1:
                say(f"warning: {text}")

    # --- training ----------------------------------------------------------------------------------

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Clipped policy loss and value loss, summed over this process's tokens and divided by those of the step.

        Times the number of processes, because gradients are averaged over them.
        """
        options, mask, tokens = self.options, inputs["mask"], inputs["tokens"]
        names = ("input_ids", "attention_mask", "places")
        seen = model(**{name: inputs[name] for name in names}, first=int(inputs["places"].min()))
        policy, clipped = policy_losses(seen["logprobs"], inputs["logprobs"], inputs["advantages"], options.cliprange)
        value, limited = value_losses(seen["values"], inputs["values"], inputs["returns"], options.cliprange_value)
        change = (seen["logprobs"] - inputs["logprobs"]).detach()
        numbers = {
            "policy_loss": policy.detach(),
            "value_loss": value.detach(),
            "entropy": seen["entropy"],
            "approx_kl": 0.5 * change**2,
            "ratio": change.exp(),
            "policy_clipfrac": clipped,
            "value_clipfrac": limited,
        }
        for name, number in numbers.items():
            self._sums[name] = (
                self._sums.get(name, torch.zeros((), device=mask.device)) + (number * mask).sum() / tokens
            )
        return ((policy + options.vf_coef * value) * mask).sum() / tokens * world().size

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the step's own numbers and those of its batch."""
        if "loss" in logs and self.rollout is not None:
            logs = logs | self.rollout.stats | self._step_numbers() | {"num_tokens": float(self.tokens_seen)}
            self.state.epoch = self.plan.epoch(self.state.global_step)
        super().log(logs, start_time)

    def _step_numbers(self) -> dict[str, float]:
        values = torch.stack(list(self._sums.values()))
        if world().size > 1:
            torch.distributed.all_reduce(values)
        return dict(zip(self._sums, values.tolist(), strict=True))

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """The mean reward of greedy answers to held-out prompts, as `eval_reward`."""
        assert self.run.measures is not None
        found = {f"eval_{name}": value for name, value in self.run.measures.now().items()}
        self.log(found)
        return found

    # --- checkpoints -------------------------------------------------------------------------------

    def resumable_state(self) -> dict[str, Any]:
        """With the weight of the KL penalty, which may have been adapted, and for how long nothing was learnt."""
        return super().resumable_state() | {"kl_coef": self.kl_coef, "idle": self._idle}

    def restore(self, state: Any) -> None:
        """Take up the state of a checkpoint's seal."""
        super().restore(state)
        self.kl_coef = float(state["kl_coef"])
        self._idle = dict(state["idle"])

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        directory = Path(output_dir or self.args.output_dir)
        with self._policy_alone():
            super()._save(str(directory), state_dict)
        if self.args.should_save:
            save_file(self.model.critic_state(), directory / CRITIC)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self._policy_alone():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.model.load_critic(load_file(Path(resume_from_checkpoint) / CRITIC))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        in_use = self.state.global_step % self.plan.steps_per_batch > 0
        if in_use and self.rollout is not None and self.args.should_save:
            torch.save(self.rollout.state(), Path(output_dir) / ROLLOUT)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / ROLLOUT).exists():
            self.rollout = rollout.from_state(torch.load(Path(checkpoint) / ROLLOUT, weights_only=True))

    @contextmanager
    def _policy_alone(self) -> Iterator[None]:
        """Transformers saves and loads `model`: a language model, or its adapter."""
        both = self.model
        self.model = both.policy
        try:
            yield
        finally:
            self.model = both


def interleaved(mine: list[Completion], processes: int) -> list[Completion]:
    """The completions of all processes, of which each made every `processes`-th."""
    if processes == 1:
        return mine
    shares: list[list[Completion]] = [[] for _ in range(processes)]
    torch.distributed.all_gather_object(shares, mine)
    return [each for together in zip(*shares, strict=True) for each in together]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: no dropout."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def assemble(
    number: int, found: Sequence[Completion], options: PPOOptions, kl_coef: float, names: Sequence[str]
) -> Rollout:
    """From what is known of a batch's completions to advantages and returns.

    Args:
        kl_coef: the weight of the KL penalty for this batch.
        names: of the rewards.
    """
    lengths = [len(each.tokens) for each in found]
    mask = rollout.filled([torch.ones(length) for length in lengths])
    logprobs, values = (rollout.filled([vars(each)[name] for each in found]) for name in ("logprobs", "values"))
    kl = torch.zeros_like(mask)
    if kl_coef:
        reference = rollout.filled([each.ref_logprobs for each in found if each.ref_logprobs is not None])
        kl = kl_estimate(logprobs, reference, options.kl_estimator) * mask
    scores = torch.tensor([each.score for each in found])
    late = torch.tensor([float(not each.ended) for each in found])
    rewards = token_rewards(scores - (options.missing_eos_penalty or 0.0) * late, kl, mask, kl_coef)
    objective = rewards.sum(dim=1).mean().item()
    if options.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = advantages_and_returns(rewards, values, mask, options.gamma, options.lam)
    stats = {
        "reward": scores.mean().item(),
        "reward_std": scores.std(correction=0).item(),
        **(reward_means(found, names) if len(names) > 1 else {}),
        "kl": kl.sum(dim=1).mean().item(),
        "kl_coef": kl_coef,
        "objective": objective,
        "value": masked_mean(values, mask).item(),
        "explained_variance": explained_variance(values, returns, mask),
        "completions/mean_length": mask.sum(dim=1).mean().item(),
        "completions/clipped_ratio": late.mean().item(),
    }
    tensors = {
        "logprobs": logprobs,
        "values": values,
        "advantages": whiten(advantages, mask) if options.whiten_advantages else advantages,
        "returns": returns,
    }
    return Rollout(number, [each.prompt + each.tokens for each in found], lengths, tensors, stats)


def reward_means(found: Sequence[Completion], names: Sequence[str]) -> dict[str, float]:
    """The mean of each reward over the completions it applies to; 0 where it applies to none."""
    means = {}
    for index, name in enumerate(names):
        scores = [score for each in found if (score := each.scores[index]) is not None]
        means[f"rewards/{name}"] = sum(scores) / max(1, len(scores))
    return means


# --- the run ---------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Proximal policy optimisation on the prepared prompts."""
    recipe, where, options = run.recipe, run.where, run.recipe.ppo
    assert options is not None
    set_seed(recipe.training.seed)
    tokenizer = load_tokenizer(where.model, recipe)
    args = TrainingArguments(**run.arguments())
    base = load_model(where.model, recipe, args.device)
    data = open_prepared(where.dataset, recipe, embedding_rows(base))
    plan = plan_of(recipe, len(data.train))
    args.max_steps = plan.steps
    held_out = data.eval.select(range(min(len(data.eval), recipe.eval.max_rows))) if data.eval else None
    rewards = load(options, run, args.device, data.train)
    with refusals():
        trunk = critic_trunk(base, recipe) if options.value_head == "separate" else None
        model, adapter = with_adapter(run, base)
        policy = get_peft_model(model, adapter) if adapter else model
        trainer = Trainer(
            run,
            plan,
            Scorer(rewards, data.train, tokenizer),
            sampling(options, policy, tokenizer),
            reference_of(policy, run, args) if options.kl_coef else None,
            model=without_dropout(ActorCritic(policy, trunk, options.temperature)),
            args=args,
            train_dataset=data.train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            callbacks=run.callbacks(),
        )
    run.fit(
        trainer,
        settings=settings(trainer, data),
        masks=mask_proof(sampled_rows(trainer), tokenizer),
        measures=held_out_measures(run, trainer, tokenizer, held_out),
    )
    run.finish(trainer, tokenizer, first_ids(data, recipe.output.proof_rows))


def plan_of(recipe: Recipe, rows: int) -> Plan:
    """The plan of a run over `rows` prompts."""
    training, options = recipe.training, recipe.ppo
    assert options is not None
    return Plan(
        rows=rows,
        micro=training.per_device_train_batch_size,
        accumulated=training.gradient_accumulation_steps,
        processes=world().size,
        mini_batches=options.num_mini_batches,
        passes=options.num_ppo_epochs,
        seed=training.seed if training.data_seed is None else training.data_seed,
        epochs=training.num_train_epochs,
        max_steps=training.max_steps,
    )


def load(options: PPOOptions, run: Run, device: torch.device, rows: Dataset) -> Sequence[Reward | RewardModel]:
    """What scores completions: the recipe's functions, or its reward model."""
    if options.reward_model is None:
        rewards = load_rewards(options.reward_funcs, "ppo.reward_funcs")
        check_columns(rewards, rows["columns"])
        return rewards
    return [RewardModel(run.where.root / "reward_model", device, run.recipe.training.per_device_eval_batch_size)]


def reference_of(policy: Any, run: Run, args: TrainingArguments) -> Reference:
    """The policy as it starts; without an adapter a second model, which is whole on every process."""
    if run.recipe.lora is not None:
        return Reference(policy, run.recipe)
    with loaded_whole(args):
        return Reference(policy, run.recipe, load_model(run.where.model, run.recipe, args.device))


def sampling(options: PPOOptions, policy: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How completions are drawn; they end with the model's and the tokenizer's end tokens."""
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        max_new_tokens=options.max_completion_length,
        ends=frozenset(evaluate.end_tokens(language_model(policy), tokenizer)),
        pad=tokenizer.pad_token_id,
    )


def without_dropout(model: ActorCritic) -> ActorCritic:
    """Switch off the models' own dropout: it would change log-probabilities that are compared with those at sampling.

    That of the adapter is the recipe's choice (`lora.lora_dropout`).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
            module.p = 0.0
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.0
    return model


def sampled_rows(trainer: Trainer, count: int = 3) -> list[dict[str, list[int]]]:
    """Some prompts with a sampled completion, its tokens as labels: what steps will train on, for the mask proof."""
    rows = trainer.scorer.rows
    prompts = [list(ids) for ids in rows.select(range(min(count, len(rows))))["prompt_ids"]]
    with evaluating(trainer.model), trainer.autocast(), put_together(trainer.model):
        tokens = trainer.sample(prompts, 0, range(len(prompts)))
    inputs = rollout.padded([p + c for p, c in zip(prompts, tokens, strict=True)], [len(ids) for ids in tokens])
    labels = torch.full_like(inputs["input_ids"], -100)
    trained = inputs["mask"].bool()
    lines = torch.arange(len(tokens))[:, None].expand_as(trained)
    at = lines[trained], inputs["places"][trained]
    labels[at] = inputs["input_ids"][at]
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return [
        {"input_ids": ids[:length], "labels": targets[:length]}
        for ids, targets, length in zip(inputs["input_ids"].tolist(), labels.tolist(), lengths, strict=True)
    ]


def settings(trainer: Trainer, data: PreparedData) -> list[Setting]:
    """Lines of the effective settings on reward, reference, value head, batches and steps."""
    options, plan, args = trainer.options, trainer.plan, trainer.args
    counts, held_out = data.counts("train"), len(data.eval) if data.eval else 0
    drawn = f"temperature {options.temperature:g}"
    drawn += f", top_k {options.top_k}" if options.top_k else ""
    drawn += f", top_p {options.top_p:g}" if options.top_p < 1 else ""
    parts = f"{plan.micro} per process × {plan.accumulated} accumulated × {plan.processes} processes"
    return [
        Setting("reward", "", shown(trainer.scorer.rewards, options)),
        Setting("reference", "", str(trainer.reference) if trainer.reference else "none: kl_coef is 0"),
        Setting("KL penalty", "", kl_penalty(options)),
        Setting("value head", "", value_head(trainer.model)),
        Setting("sampling", "", f"{drawn}, at most {options.max_completion_length} tokens"),
        Setting("learning rate", "", learning_rate(args, plan.steps)),
        Setting("effective batch", "", f"{plan.step_size} completions ({parts})"),
        Setting(
            "rollout",
            "",
            f"{plan.completions} completions, then {plan.steps_per_batch} steps ({plan.passes} passes × "
            f"{plan.mini_batches} mini-batches)",
        ),
        Setting("steps", str(plan.steps), str(args.max_steps), plan.steps == args.max_steps),
        Setting("rows", "", f"{counts['rows']:,} prompts, {held_out:,} held out"),
    ]


def shown(rewards: Sequence[Reward | RewardModel], options: PPOOptions) -> str:
    """What scores, with which weights."""
    model = rewards[0]
    if isinstance(model, RewardModel):
        return f"the model {options.reward_model} of {model.parameters:,} parameters"
    return ", ".join(f"{reward.__name__} × {reward.weight:g}" for reward in rewards)


def kl_penalty(options: PPOOptions) -> str:
    """How the policy is held to the reference."""
    if not options.kl_coef:
        return "none"
    target = f", adapted to {options.kl_target:g} nats per completion" if options.kl_target is not None else ""
    return f"{options.kl_coef:g} × {options.kl_estimator} per token{target}"


def value_head(model: ActorCritic) -> str:
    """What foresees the score, and what of it is trained."""
    trained = sum(tensor.numel() for tensor in model.critic_state().values())
    if model.trunk is None:
        return f"{trained:,} parameters on the policy's last hidden state"
    return f"{trained:,} trained parameters on a transformer of its own"


def held_out_measures(run: Run, trainer: Trainer, tokenizer: Any, held_out: Dataset | None) -> Measures:
    """The mean reward of greedy answers, and the recipe's metric on them."""
    if held_out is None:
        return Measures(run, trainer, tokenizer, rows=0)
    recipe, scorer = run.recipe, Scorer(trainer.scorer.rewards, held_out, tokenizer)
    asked = [Question(list(row["prompt_ids"]), row["prompt"], row["reference"]) for row in held_out]

    def scores(given: Sequence[str]) -> dict[str, float]:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in given]
        _, sums = scorer(range(len(given)), ids)
        return {"reward": sum(sums) / len(sums)} | evaluate.scores(recipe, given, asked)

    return Measures(run, trainer, tokenizer, rows=len(held_out), asked=asked, scores=scores)
