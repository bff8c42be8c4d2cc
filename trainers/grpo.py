"""Group relative policy optimisation (arXiv:2402.03300), top to bottom: recipe -> model -> prompts -> TRL's GRPOTrainer
-> sample, score, train -> save -> prove.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import RepeatSampler

from blueprints.errors import DataError, EnvironmentFault
from blueprints.recipe.schema import GRPOOptions, Recipe
from trainers import evaluate, sharding
from trainers.checkpoint import ResumableTrainer
from trainers.completions import FILE, CompletionLog, sampled
from trainers.data import PreparedData, first_ids, open_prepared
from trainers.draws import SharedDraws
from trainers.evaluate import Question
from trainers.mask import mask_proof
from trainers.measures import Measures
from trainers.metrics import measure
from trainers.model import embedding_rows, load_model, load_tokenizer
from trainers.peft import with_adapter
from trainers.process import say, world
from trainers.rewards import Reward, Text, check_columns, load_rewards, total
from trainers.rollout import cut
from trainers.run import Run, learning_rate, refusals
from trainers.settings import Setting
from trainers.watch import WATCH

PATIENCE = 5
"""Batches in a row that teach nothing before it is said, and again after ten times as many."""
EQUAL = 0.9
"""Share of groups without any difference of reward from which a batch counts as teaching nothing."""


class PromptOrder(RepeatSampler):
    """TRL's order of prompts, whose shuffle is a function of the epoch: a resumed run meets the epoch's own.

    TRL draws each epoch's order from where the last one left the generator, which a new process does not know.
    """

    def begin(self, epoch: int) -> None:
        """Make the next pass that of `epoch`, counted from 0."""
        self.generator.manual_seed(self.seed)
        for _ in range(epoch):
            torch.randperm(self.num_samples, generator=self.generator)


class Trainer(GRPOTrainer, ResumableTrainer):
    """TRL's GRPOTrainer on prepared prompts, whose state between any two steps is in the checkpoint.

    Args:
        run: the run.
        rewards: of the recipe.
        settings: as TRL's trainer takes them; rows have `prompt`, `prompt_ids` and `columns`.
    """

    def __init__(self, run: Run, rewards: Sequence[Reward], **settings: Any) -> None:
        options = run.recipe.grpo
        assert options is not None
        self.run, self.rewards, self.options = run, rewards, options
        self.order: PromptOrder | None = None
        self._asked: list[list[int]] = []
        self._idle = {"equal": 0, "truncated": 0, "unscored": 0}
        super().__init__(reward_funcs=list(rewards), **settings)
        self.completions = CompletionLog(
            run.where.output / FILE, shown=options.num_completions_to_print, main=run.world.main
        )
        self.add_callback(self.completions)
        alone = run.world.size == 1 or options.use_vllm
        self.draws = None if alone else SharedDraws(self.args.seed, self.args.device, run.world)

    def create_model_card(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    # --- prompts -----------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> PromptOrder:
        seed = self.args.data_seed
        self.order = PromptOrder(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed if seed is None else seed,
        )
        return self.order

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        assert self.order is not None
        self.order.begin(epoch)
        if self.draws is not None:
            self.draws.begin_epoch()
        super()._run_epoch(epoch=epoch, **kwargs)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """The tokens that the initializer made, and no others."""
        assert len(prompts) == len(self._asked)
        return self._asked, None, {}

    # --- sampling and scoring ----------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._asked = [list(row["prompt_ids"]) for row in inputs]
        found: dict[str, Any] = super()._generate_and_score_completions(inputs)
        WATCH.tick()
        if self.model.training:
            self._note_completions()
            self._warn()
        return found

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], Any]:
        """TRL's; among several processes with the completions that one process would draw."""
        if self.draws is None:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        batch = self.processing_class.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt")
        settings = self.draws.begin(len(prompt_ids), self.generation_config)
        with (
            unwrap_model_for_generation(
                self.model_wrapped, self.accelerator, generation_kwargs=self.generation_kwargs | {"do_sample": False}
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            found = model.generate(
                **batch.to(self.args.device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([self.draws]),
            )
        self.draws.end(torch.empty(0, device=self.args.device))
        ends = frozenset(self.eos_token_ids)
        return [cut(row, ends) for row in found[:, batch["input_ids"].shape[1] :].tolist()], None

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Text],
        completions: list[Text],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        # TRL would hand every key of `inputs` to the rewards; the rows' own columns are all in one.
        columns = [{"columns": row["columns"]} for row in inputs]
        return super()._calculate_rewards(columns, prompts, completions, completion_ids_list)

    def _note_completions(self) -> None:
        """Write the batch down if a line of its steps is logged; what it says is of all processes."""
        step = self.state.global_step + 1
        per_step = self.args.gradient_accumulation_steps
        last = step - 1 + max(1, -(-self.args.steps_per_generation * self.num_iterations // per_step))
        if last // self.log_every == (step - 1) // self.log_every and last < self.state.max_steps:
            return
        logs = self._logs
        rewards = {name: [_number(value) for value in values] for name, values in logs["rewards"].items()}
        self.completions.add(
            sampled(
                step,
                list(logs["prompt"]),
                list(logs["completion"]),
                rewards,
                total(self.rewards, list(rewards.values())),
                list(logs["advantages"]),
            )
        )

    def _warn(self) -> None:
        """Say what keeps batches from teaching anything: after `PATIENCE` of them in a row, and now and then again."""
        metrics, limit = self._metrics["train"], self.max_completion_length
        equal, late = metrics["frac_reward_zero_std"][-1], metrics["completions/clipped_ratio"][-1]
        unscored = [each for each in zip(*self._logs["rewards"].values(), strict=True) if all(map(math.isnan, each))]
        masked = (
            ": none of them is trained on (grpo.mask_truncated_completions)" if self.mask_truncated_completions else ""
        )
        faults = {
            "equal": (
                equal >= EQUAL,
                f"in {equal:.0%} of the groups all {self.num_generations} completions got the same reward (mean "
                f"{metrics['reward'][-1]:.2f}): there is nothing to learn from them. If the reward is low, the task is too "
                "hard or the reward too strict: use easier prompts, a reward with steps in between, more "
                "grpo.num_generations or a higher grpo.temperature. If it is high, the model can do it already",
            ),
            "truncated": (
                late >= 1,
                f"no completion ended within grpo.max_completion_length={limit} tokens{masked}: raise it, or use a model "
                "that ends its answers",
            ),
            "unscored": (
                bool(unscored),
                f"no reward applies to {len(unscored)} of {len(self._logs['prompt'])} completions: they are left out",
            ),
        }
        for name, (holds, text) in faults.items():
            self._idle[name] = self._idle[name] + 1 if holds else 0
            if self._idle[name] % (10 * PATIENCE) == PATIENCE:
                say(f"warning: step {self.state.global_step + 1}, {self._idle[name]} batches in a row: {text}")

    def evaluate(self, *_args: Any, **_kwargs: Any) -> dict[str, float]:
        """The measures of greedy answers to held-out prompts, as `eval_reward` and so on."""
        assert self.run.measures is not None
        found = {f"eval_{name}": value for name, value in self.run.measures.now().items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    # --- numbers -----------------------------------------------------------------------------------

    @property
    def tokens_seen(self) -> int:
        """Tokens of prompts and completions so far, on all processes, as TRL counts them."""
        return int(self.state.num_input_tokens_seen)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the tokens so far, which TRL gives with new completions alone; leave out seconds, which curves never repeat."""
        if "loss" in logs:
            logs["num_tokens"] = float(self.tokens_seen)
            self._metrics["train"].pop("step_time", None)
        super().log(logs, start_time)

    # --- checkpoints -------------------------------------------------------------------------------

    def resumable_state(self) -> dict[str, Any]:
        """With the number of micro-steps, which says how far a batch of completions is used."""
        return super().resumable_state() | {"micro_steps": self._step, "idle": self._idle}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint's seal."""
        super().restore(state)
        self._step = int(state["micro_steps"])
        self._idle = dict(state["idle"])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        in_use = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        draws = None if self.draws is None else self.draws.generator.get_state()
        torch.save({"batch": self._buffered_inputs if in_use else None, "draws": draws}, _sampled_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        found = torch.load(_sampled_file(checkpoint), map_location="cpu", weights_only=True)
        if self.draws is not None:
            self.draws.generator.set_state(found["draws"])
        if found["batch"] is not None:
            self._buffered_inputs = [
                {name: value.to(self.args.device) for name, value in part.items()} for part in found["batch"]
            ]


def _sampled_file(checkpoint: str) -> Path:
    return Path(checkpoint) / f"sampled_{world().rank}.pt"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


# --- the run ---------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """Group relative policy optimisation on the prepared prompts."""
    recipe, where, options = run.recipe, run.where, run.recipe.grpo
    assert options is not None
    check_vllm(options)
    rewards = load_rewards(options.reward_funcs, "grpo.reward_funcs")
    args = config(run, options)
    tokenizer = load_tokenizer(where.model, recipe)
    model = load_model(where.model, recipe, args.device)
    data = open_prepared(where.dataset, recipe, embedding_rows(model))
    check_prompts(data, rewards, args)
    held_out = data.eval.select(range(min(len(data.eval), recipe.eval.max_rows))) if data.eval else None
    with refusals():
        model, adapter = with_adapter(run, model)
        trainer = Trainer(
            run,
            rewards,
            model=model,
            args=args,
            train_dataset=with_columns(data.train),
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=run.callbacks(),
        )
    run.fit(
        trainer,
        settings=settings(trainer, data),
        masks=mask_proof(answered(trainer, data.train), tokenizer),
        measures=held_out_measures(run, trainer, tokenizer, held_out),
    )
    run.finish(trainer, tokenizer, first_ids(data, recipe.output.proof_rows))


def config(run: Run, options: GRPOOptions) -> GRPOConfig:
    """TRL's settings."""
    vllm = {
        "use_vllm": True,
        "vllm_mode": options.vllm_mode,
        "vllm_server_base_url": options.vllm_server_base_url,
        "vllm_gpu_memory_utilization": options.vllm_gpu_memory_utilization,
        "vllm_tensor_parallel_size": options.vllm_tensor_parallel_size,
    }
    with refusals():
        return GRPOConfig(
            **run.arguments(),
            **(vllm if options.use_vllm else {}),
            num_generations=options.num_generations,
            num_generations_eval=1,  # TRL would want whole groups; `Trainer.evaluate` answers each prompt once
            steps_per_generation=options.steps_per_generation,
            max_completion_length=options.max_completion_length,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            beta=options.beta,
            loss_type=options.loss_type,
            importance_sampling_level=options.importance_sampling_level,
            epsilon=options.epsilon,
            epsilon_high=options.epsilon_high,
            num_iterations=options.num_iterations,
            scale_rewards=options.scale_rewards,
            reward_weights=[reward.weight for reward in options.reward_funcs],
            mask_truncated_completions=options.mask_truncated_completions,
            trust_remote_code=run.recipe.model.trust_remote_code,  # of the reference
            log_completions=False,
        )


def check_vllm(options: GRPOOptions) -> None:
    """vLLM is there if the recipe asks for it.

    Raises:
        EnvironmentFault: it is not installed.
    """
    if options.use_vllm and importlib.util.find_spec("vllm") is None:
        raise EnvironmentFault(
            "vLLM is not installed",
            where="grpo.use_vllm",
            todo="pip install vllm (TRL 1.16 works with 0.22 to 0.31), or set grpo.use_vllm=false: completions are then "
            "generated in the training process, in batches with a cache",
        )


def check_prompts(data: PreparedData, rewards: Sequence[Reward], args: GRPOConfig) -> None:
    """There are prompts for one batch, and the rewards can be called with their columns.

    Raises:
        DataError: too few prompts, or a column whose name is an argument of every reward.
        UsageError: a reward needs what the rows do not have.
    """
    wanted = args.generation_batch_size // args.num_generations
    if len(data.train) < wanted:
        raise DataError(
            f"there are {len(data.train)} prompts, and a batch of completions has {wanted} prompts "
            f"({args.generation_batch_size} completions in groups of {args.num_generations})",
            where="dataset",
            todo="lower training.per_device_train_batch_size or training.gradient_accumulation_steps, raise "
            "grpo.num_generations, or use more prompts",
        )
    check_columns(rewards, data.train["columns"])


def with_columns(rows: Dataset) -> Dataset:
    """`rows` as TRL and the rewards want them: `prompt` in the rows' own form, `prompt_ids`, and `columns` as objects.

    Where some rows have messages and others a text, all get messages: TRL looks at a batch's first row alone.
    """
    forms = {text[:1] for text in rows["messages"]}

    def asked(text: str) -> Text:
        found = json.loads(text)
        return [{"role": "user", "content": found}] if isinstance(found, str) and "[" in forms else found

    def opened(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            "prompt": [asked(text) for text in batch["messages"]],
            "prompt_ids": batch["prompt_ids"],
            "columns": [json.loads(text) for text in batch["columns"]],
        }

    return rows.with_transform(opened)


def answered(trainer: Trainer, rows: Dataset, count: int = 3) -> list[dict[str, list[int]]]:
    """Some prompts with what the model answers now, its tokens as labels: what steps train on, for the mask proof."""
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=trainer.max_completion_length,
        pad_token_id=trainer.processing_class.pad_token_id,
        eos_token_id=trainer.eos_token_ids,
    )
    model, found = trainer.model, []
    model.eval()
    with sharding.put_together(model):
        for row in rows.select(range(min(count, len(rows)))):
            prompt = torch.tensor([row["prompt_ids"]], device=trainer.args.device)
            with torch.no_grad(), torch.autocast(prompt.device.type, dtype=torch.bfloat16, enabled=trainer.args.bf16):
                ids = model.generate(input_ids=prompt, generation_config=config)[0].tolist()
            length = prompt.shape[1]
            found.append({"input_ids": ids, "labels": [-100] * length + ids[length:]})
    return found


def settings(trainer: Trainer, data: PreparedData) -> list[Setting]:
    """Lines of the effective settings on rewards, reference, sampling, loss, batches and steps."""
    args, options = trainer.args, trainer.options
    prompts, steps, per_epoch = plan(args, len(data.train))
    held_out = len(data.eval) if data.eval else 0
    parts = f"{args.per_device_train_batch_size} per process × {args.steps_per_generation} micro-steps"
    fresh = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
    clip = "idle: completions are as new as the model, so that the ratio is 1" if fresh else bounds(options)
    rewards = ", ".join(f"{reward.__name__} × {reward.weight:g}" for reward in trainer.rewards)
    seen = f"{trainer.loss_type}, ratios per {trainer.importance_sampling_level}"
    return [
        Setting("rewards", "", f"{rewards}; scaled by {trainer.scale_rewards}"),
        reference(trainer),
        Setting("sampling", "", sampling(trainer)),
        Setting("group", "", f"{args.num_generations} completions per prompt"),
        Setting(
            "batch of completions",
            "",
            f"{args.generation_batch_size} to {prompts} prompts ({parts} × {world().size} processes), "
            f"used in {args.num_iterations} pass{'es' if args.num_iterations > 1 else ''}",
        ),
        Setting("loss", f"{options.loss_type}, ratios per {options.importance_sampling_level}", seen),
        Setting("clipping", "", clip),
        Setting("truncated completions", "", "left out" if trainer.mask_truncated_completions else "trained on"),
        Setting("learning rate", "", learning_rate(args, steps)),
        Setting("steps", "", f"{steps} ({per_epoch} per epoch)"),
        Setting("rows", "", f"{len(data.train):,} prompts, {held_out:,} held out"),
    ]


def plan(args: GRPOConfig, rows: int) -> tuple[int, int, int]:
    """Prompts of a batch of completions, optimizer steps of the run, and of an epoch."""
    prompts = args.generation_batch_size // args.num_generations
    micro_steps = rows // prompts * args.steps_per_generation * args.num_iterations
    per_epoch = -(-micro_steps // args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(per_epoch * args.num_train_epochs)
    return prompts, steps, per_epoch


def bounds(options: GRPOOptions) -> str:
    """What keeps the policy ratio near 1."""
    low, high = options.epsilon, options.epsilon_high or options.epsilon
    if options.loss_type in ("sapo", "vespo"):
        return f"softly, as {options.loss_type} has it"
    return f"ratio at most {high:g}" if options.loss_type == "cispo" else f"ratio from {1 - low:g} to {1 + high:g}"


def reference(trainer: Trainer) -> Setting:
    """How the reference is computed, asserted: with an adapter there is never a second model."""
    adapter = bool(trainer.run.recipe.lora)
    if not trainer.beta:
        seen, ok = "none: beta is 0", trainer.ref_model is None
    elif adapter and "ref" in trainer.model.peft_config:
        seen, ok = "the base with the adapter of lora.from, as it was", trainer.ref_model is None
    elif adapter:
        seen, ok = "the base, with the adapter switched off", trainer.ref_model is None
    else:
        seen, ok = "a second copy of the model, frozen", trainer.ref_model is not None
    return Setting("reference", "", f"{seen}{f'; KL × {trainer.beta:g}' if trainer.beta else ''}", ok)


def sampling(trainer: Trainer) -> str:
    """How completions are drawn."""
    drawn = [f"temperature {trainer.temperature:g}"]
    drawn += [f"top_p {trainer.top_p:g}"] if trainer.top_p < 1 else []
    drawn += [f"top_k {trainer.top_k}"] if trainer.top_k else []
    drawn += [f"min_p {trainer.min_p:g}"] if trainer.min_p else []
    penalty = trainer.repetition_penalty
    drawn += [f"repetition penalty {penalty:g}"] if penalty != 1 else []
    engine = f"vLLM, {trainer.vllm_mode}" if trainer.use_vllm else "batched, with a cache"
    return f"{', '.join(drawn)}, at most {trainer.max_completion_length} tokens; {engine}"


def held_out_measures(
    run: Run, trainer: Trainer, tokenizer: PreTrainedTokenizerBase, held_out: Dataset | None
) -> Measures:
    """The mean reward of greedy answers to held-out prompts, exact match with their references, the recipe's metric."""
    if held_out is None:
        return Measures(run, trainer, tokenizer, rows=0)
    rows = list(with_columns(held_out))
    asked = [Question(list(row["prompt_ids"]), row["prompt"], row["reference"]) for row in held_out]

    def scores(given: Sequence[str]) -> dict[str, float]:
        return mean_reward(trainer.rewards, rows, given, tokenizer) | right_answers(run.recipe, given, asked)

    return Measures(run, trainer, tokenizer, rows=len(held_out), asked=asked, scores=scores)


def mean_reward(
    rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], given: Sequence[str], tokenizer: Any
) -> dict[str, float]:
    """The mean of the weighted sum over the answers that a reward applies to; empty if there are none."""
    completions: list[Text] = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, given, strict=True)
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in given]
    prompts, columns = [row["prompt"] for row in rows], [row["columns"] for row in rows]
    sums = total(rewards, [reward(prompts, completions, ids, columns) for reward in rewards])
    counted = [each for each in sums if each is not None]
    return {"reward": sum(counted) / len(counted)} if counted else {}


def right_answers(recipe: Recipe, given: Sequence[str], asked: Sequence[Question]) -> dict[str, float]:
    """The recipe's metric; exact match where it names none and every row has a right answer."""
    if recipe.eval.metric != "none":
        return evaluate.scores(recipe, given, asked)
    if not all(each.reference for each in asked):
        return {}
    return measure("exact_match", [each.prompt for each in asked], given, [each.reference for each in asked])
