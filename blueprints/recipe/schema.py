"""The recipe's grammar: every block, key, type, default and range, for all six methods.

The docstring under a field is its documentation, once: the JSON schema, `blueprints explain` and the reference page are
generated from it. Field names are those the field already uses: PEFT's, Transformers' and TRL's.

A value of None in the source means "derived": `Recipe.resolve` fills it by the rule its docstring states, so that a
resolved recipe holds no open question and hashes the same everywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from blueprints.errors import RecipeError

SCHEMES = ("builtin", "file", "hf")
"""URI schemes this version reads."""
BUILTIN_MODELS = ("tiny-llama", "tiny-llama-orders")
BUILTIN_DATASETS = ("orders", "amounts", "reviews")

METHODS = ("sft", "dpo", "ppo", "grpo", "distill", "qat")
CUSTOM_METHOD = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
"""How a method of one's own is named: `package.module:function`."""
CustomMethod = Annotated[str, Field(pattern=CUSTOM_METHOD)]
Method = Literal["sft", "dpo", "ppo", "grpo", "distill", "qat"] | CustomMethod

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
URI_PATTERN = r"^(builtin|file|hf)://.+$"
Uri = Annotated[str, Field(min_length=1, max_length=2048, json_schema_extra={"pattern": URI_PATTERN})]
"""A source. Its scheme and form are checked with the whole recipe, where a wrong one gets a useful hint."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]


def _quantity(value: object) -> object:
    """Kubernetes takes `cpu: 8` for `cpu: "8"`, and so do recipes."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"
Quantity = Annotated[
    str,
    Field(pattern=QUANTITY),
    BeforeValidator(_quantity),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": QUANTITY}, {"type": "number", "minimum": 0}]}),
]


B = TypeVar("B", bound="Block")


class Block(BaseModel):
    """Base of every block: strict types, no unknown keys, immutable, docstrings as descriptions.

    Raises:
        RecipeError: on construction with values that do not fit, naming all of them.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, validate_default=True
    )

    if not TYPE_CHECKING:  # type checkers see the signature made of the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                from blueprints.recipe.faults import python_faults

                name = type(self).__name__
                raise RecipeError(python_faults(type(self), values, error), subject=f"python {name}") from None

        # Without this mark pydantic would call __init__ for every nested block too, and the first wrong block would
        # hide the faults of the others.
        __init__.__pydantic_base_init__ = True


class ModelConfig(Block):
    """The base model: where it comes from and how it is loaded."""

    uri: Uri
    """Source of the model: `hf://org/name`, `file:///dir` or `builtin://name`."""
    revision: Text | None = None
    """Branch, tag or commit of a `hf://` model; the commit it resolves to is recorded with the output."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type the weights are kept in. `auto`: float32 on CPU and where all weights are trained; frozen weights on GPU in
    the type the checkpoint was saved in. 16 bits halve memory and lose precision."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel, by Transformers' name. `auto` takes `sdpa`. A kernel that is not installed stops the run."""
    trust_remote_code: bool = False
    """Run Python code shipped inside the model's repository. It can do anything you can: leave it off."""
    chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own (for base models that have none)."""
    added_tokens: list[Text] = Field(default_factory=list)
    """Tokens to add to the vocabulary, such as `["<tool>", "</tool>"]`. Their embeddings start as the mean of all
    others, are trained (with `lora` these rows alone, saved with the adapter), and the tokenizer is saved with them."""
    ignore_patterns: list[str] = Field(default_factory=lambda: ["*.msgpack", "*.h5", "*.bin", "*.pt", "*.pth"])
    """Files of the source not to fetch, as glob patterns. The default skips pickles and other frameworks' weights."""


class DatasetConfig(Block):
    """The training rows: where they come from and how they are read."""

    uri: Uri
    """Source of the rows: `hf://org/name[@revision]`, `file:///path` (file, directory or glob) or `builtin://name`."""
    revision: Text | None = None
    """Branch, tag or commit of a `hf://` data set."""
    split: Text = "train"
    """Split to train on, recognised from file and directory names (`train.jsonl`, `data/train-00000-of-00001.parquet`).
    A source without named splits is all one split."""
    eval_split: Text | None = None
    """Split held out for evaluation. Default: the first of `validation`, `valid`, `dev`, `eval`, `test` that the source
    has, if `test_size` is not set."""
    test_size: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | NonNegativeInt | None = None
    """Rows to hold out of `split` for evaluation when there is no evaluation split: a share below 1, or a number of
    rows. 0: none, even if the source has an evaluation split. Default: none."""
    format: Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca", "text", "preference", "prompt"] = (
        "auto"
    )
    """Shape of the rows. `auto` detects it from the first rows and says in the log what it saw."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names the source uses, by the name the format expects: `{prompt: question, completion: answer}`."""
    max_rows: PositiveInt | None = None
    """Use only the first rows of the training split. Good for a trial run."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with an answer that `training.max_length` would cut: stop (a model that sees cut answers learns not to
    stop), drop the row and count it, or truncate it and count it. Plain text is always truncated and counted."""
    max_faults: PositiveInt = 100
    """Faults of rows to list; those beyond are counted."""
    ignore_patterns: list[str] = Field(default_factory=list)
    """Files of the source not to fetch, as glob patterns."""


class LoraConfig(Block):
    """Low-rank adapters (PEFT). Absent: all weights are trained. `lora: {}`: adapters with every default."""

    r: PositiveInt = 16
    """Rank of the update. Higher learns more, costs memory and can overfit; 8 to 64 covers most uses."""
    lora_alpha: PositiveInt | None = None
    """Scale of the update, applied as lora_alpha / r (or / sqrt(r) with `use_rslora`). Default: 2 * r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input. A little (0.05) helps on small data."""
    target_modules: Text | list[Text] = "all-linear"
    """Layers that get an adapter: `all-linear`, a list of name endings (`[q_proj, v_proj]`) or a regular expression.
    Naming a layer the model does not have stops the run. `[]`: those of `target_parameters` alone."""
    target_parameters: list[Text] | None = None
    """Weights that get an adapter though they belong to no linear layer, as endings of parameter names: the experts of
    mixture-of-experts models, such as `[experts.gate_up_proj, experts.down_proj]`."""
    exclude_modules: Text | list[Text] | None = None
    """Layers never to adapt, as a list of name endings or a regular expression."""
    modules_to_save: list[Text] | None = None
    """Layers trained and saved whole beside the adapter, such as `lm_head` or `embed_tokens`."""
    use_rslora: bool = False
    """Rank-stabilised scaling, lora_alpha / sqrt(r) (arXiv:2312.03732). Better at high ranks."""
    use_dora: bool = False
    """Weight-decomposed adapters (arXiv:2402.09353). Often better at low ranks, slower."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained too."""
    init_lora_weights: bool | Literal["gaussian", "olora", "pissa", "orthogonal"] = True
    """How the adapter starts. `true`, `gaussian` and `orthogonal` leave the base as it is, `false` starts at random.
    `pissa` (arXiv:2404.02948) and `olora` (arXiv:2406.01775) take the adapter out of the base weights; it is saved as a
    plain adapter of twice the rank, which fits the untouched base."""
    layers_to_transform: NonNegativeInt | list[NonNegativeInt] | None = None
    """Layer indices to adapt. Default: all."""
    rank_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    """Other ranks for some layers, by name or regular expression."""
    alpha_pattern: dict[str, PositiveInt] = Field(default_factory=dict)
    """Other lora_alpha for some layers, by name or regular expression."""
    quantize_base: bool = False
    """QLoRA: keep the frozen base in 4 bits (bitsandbytes NF4). About a quarter of the memory, slower steps."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit type of the base with `quantize_base`."""
    bnb_4bit_use_double_quant: bool = True
    """Quantise the quantisation constants too (0.4 bits per weight saved) with `quantize_base`."""

    if not TYPE_CHECKING:  # a keyword of Python, but the field is called so everywhere: in recipes, in data, in hashes
        __annotations__["from"] = "Uri | None"
        locals()["from"] = Field(
            default=None,
            description="Adapter to go on from, as PEFT saves one: `file:///dir` or `hf://org/name[@revision]`. Rank, "
            "scale and layers are those of that adapter; what the recipe sets must agree. In Python: "
            "`LoraConfig(**{'from': 'file:///dir'})`. Default: a new adapter.",
        )

    @property
    def from_uri(self) -> str | None:
        """The key `from`, which Python cannot spell as an attribute."""
        uri: str | None = dict(self)["from"]
        return uri


class TrainingConfig(Block):
    """The optimisation, common to all methods. Names and meanings are those of Transformers' TrainingArguments."""

    learning_rate: PositiveFloat | None = None
    """Peak learning rate. Default by method: sft 2e-4 with LoRA, 2e-5 without; dpo 1e-5 / 1e-6; grpo and ppo 1e-5 /
    1e-6; distill 1e-4 / 1e-5; qat 2e-4 / 2e-5; a method of your own as sft."""
    num_train_epochs: PositiveFloat = 1.0
    """Passes over the training rows. Of no meaning with `max_steps`, so a recipe sets one or the other."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps. Default: as `num_train_epochs` says."""
    per_device_train_batch_size: PositiveInt = 8
    """Rows (packed sequences, with packing) per process and micro-step. The first dial for memory."""
    per_device_eval_batch_size: PositiveInt = 8
    """Rows per process in evaluation."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-steps per optimizer step. Raises the effective batch without memory."""
    max_length: PositiveInt = 1024
    """Longest sequence in tokens; also the length that packing fills. See `dataset.overlong`."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_steps: NonNegativeFloat = 0.03
    """Steps of rising learning rate; below 1: that share of all steps."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Clip the gradient's norm here. 0: no clipping."""
    adam_beta1: Fraction = 0.9
    """Decay of the optimizer's first moment."""
    adam_beta2: Fraction = 0.999
    """Decay of the optimizer's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Numerical floor in the optimizer."""
    optim: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "lion_32bit",
        "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "adafactor", "sgd",
    ] = "adamw_torch"  # fmt: skip
    """Optimizer, by Transformers' name. The 8-bit ones (bitsandbytes) keep a quarter of the state, for weights of 4,096
    values or more; the paged ones move state out of a GPU whose memory is full; lion keeps one moment of AdamW's two."""
    bf16: bool | Literal["auto"] = "auto"
    """Compute in bfloat16 (mixed precision). `auto`: on where the GPU supports it, off on CPU. `false`: float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: much less memory, about a third slower."""
    activation_offloading: bool = False
    """Keep activations in the machine's memory until the backward pass needs them: less GPU memory, slower. With TRL's
    trainers of sft, dpo and qat."""
    use_liger_kernel: bool = False
    """Liger's Triton kernels for norms, rotary embeddings and MLPs: less GPU memory, faster. Must be installed and know
    the model's architecture."""
    neftune_noise_alpha: PositiveFloat | None = None
    """Noise on the embeddings (arXiv:2310.05914), usually 5. Default: off."""
    seed: Seed = 42
    """Seed of initialisation, dropout and generation."""
    data_seed: Seed | None = None
    """Seed of the order of rows. Default: `seed`."""
    logging_steps: PositiveInt = 1
    """Optimizer steps between log lines."""
    eval_steps: PositiveInt | None = None
    """Optimizer steps between evaluations of the held-out loss. Default: only before and after training."""
    save_steps: PositiveInt = 100
    """Optimizer steps between checkpoints. A killed job repeats at most this many."""
    save_total_limit: PositiveInt = 2
    """Checkpoints to keep."""
    ddp_timeout: PositiveInt = 600
    """Seconds without progress after which a run of several processes ends and names the one that the others wait for.
    A process that has gone or does not answer at all is named sooner. Raise it where a single forward pass, reward or
    generation takes that long."""
    report_to: list[Literal["trackio", "tensorboard", "wandb", "mlflow"]] = Field(default_factory=list)
    """Trackers to report to, by name. One that is not installed stops the run."""


class EvalConfig(Block):
    """What is measured on held-out rows, before and after."""

    metric: (
        Literal["none", "exact_match", "contains", "numeric_match", "json_match", "token_f1", "rouge_l"] | CustomMethod
    ) = "none"
    """Score of generated answers against the references of the data set, between 0 and 1 (definitions in
    docs/evaluation.md), or a function of your own as `package.module:function`."""
    max_rows: PositiveInt = 200
    """Held-out rows to generate answers for (metric) and to compute the loss on."""
    samples: NonNegativeInt = 8
    """Held-out prompts whose answers before and after are shown in the report."""
    max_new_tokens: PositiveInt = 64
    """Longest generated answer in tokens."""


class SFTOptions(Block):
    """Supervised fine-tuning. Names are those of TRL's SFTConfig."""

    packing: bool = False
    """Fill sequences of `training.max_length` with several rows. Faster on short rows; rows stay isolated: attention
    and positions restart at each."""
    completion_only_loss: bool = True
    """Train on the answers alone. `false` trains on the prompts too."""
    loss_type: Literal["nll", "dft"] = "nll"
    """`nll`: cross-entropy. `dft`: dynamic fine-tuning (arXiv:2508.05629)."""


class DPOOptions(Block):
    """Direct preference optimisation. Names are those of TRL's DPOConfig."""

    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference model (the regularisation of `ipo`). Higher stays closer, lower follows
    the preferences further; 0.01 to 0.5 is usual."""
    loss_type: Literal[
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
    ] = "sigmoid"  # fmt: skip
    """Preference loss, by TRL's name. `sigmoid`: DPO itself (arXiv:2305.18290). `ipo` (arXiv:2310.12036) and
    `sigmoid_norm` weigh log-probabilities per token. `robust` (arXiv:2403.00409) and `exo_pair` (arXiv:2402.00856) expect
    wrong preferences. `sft` trains on the chosen answers alone."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of preferences that are the wrong way round. Only `robust`, `exo_pair` (which needs some, such as
    1e-3), `aot` and `aot_unpaired` know it."""
    reference_free: bool = False
    """No reference: all answers count as equally likely to it. Saves its computation; nothing keeps the model close to
    where it started."""
    precompute_ref_log_probs: bool | None = None
    """Compute the reference's log-probabilities of all rows once, before step 1, and keep them in the output. `false`
    computes them at each step: with LoRA by switching the adapter off, without by a second model in memory. Default: on
    without `lora`, and where the base under the adapter is not the starting model."""


class RewardFunction(Block):
    """One reward of PPO or GRPO."""

    name: Text
    """`exact_match`, `numeric_match`, `regex`, `json_schema`, `format`, `length`, or a function of your own as
    `package.module:function`. What each rewards and how to write one: docs/rewards.md."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Its weight in the sum. Negative: a penalty. 0: it is computed and shown, and does not count."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it, such as `{pattern: '^\\d+$'}`."""


class PPOOptions(Block):
    """Proximal policy optimisation. Names are those TRL's PPOConfig had."""

    reward_model: Uri | None = None
    """Sequence classification model with one label that scores completions. Either this or `reward_funcs`."""
    reward_funcs: list[RewardFunction] = Field(default_factory=list)
    """Functions that score completions. Either these or `reward_model`."""
    missing_eos_penalty: PositiveFloat | None = None
    """Taken off the score of a completion that ran into `max_completion_length`. Default: nothing; its score counts."""
    num_ppo_epochs: PositiveInt = 4
    """Optimisation passes over each batch of completions. More learn more of a batch, until clipping stops them."""
    num_mini_batches: PositiveInt = 1
    """Optimizer steps in each pass. A batch has `num_mini_batches` times the effective batch of
    `training.per_device_train_batch_size`, `training.gradient_accumulation_steps` and all processes; `training.max_steps`
    counts optimizer steps, so a batch makes `num_ppo_epochs` times `num_mini_batches` of them."""
    value_head: Literal["shared", "separate"] = "shared"
    """What foresees the score. `shared`: a linear head on the policy's last hidden state, in no more memory. `separate`:
    a linear head on a transformer of its own, which costs a second forward and backward pass and the memory of another
    adapter on the same frozen weights, without `lora` that of a second trained model; steadier where the scores are hard
    to foresee."""
    kl_coef: NonNegativeFloat = 0.05
    """Weight of the penalty on each token for leaving the reference model. 0: no penalty, and no reference."""
    kl_estimator: Literal["k1", "k3"] = "k1"
    """Estimate of the KL divergence per token: `k1` the log-ratio, `k3` one that is never negative and less noisy."""
    kl_target: PositiveFloat | None = None
    """Adapt `kl_coef` after each batch so that the mean KL of a completion stays near this many nats
    (arXiv:1909.08593). Default: `kl_coef` stays as it is."""
    kl_horizon: PositiveFloat = 10000.0
    """Completions over which `kl_coef` adapts: more is slower."""
    cliprange: PositiveFloat = 0.2
    """Clip range of the policy ratio: how far one batch may move a token's probability."""
    vf_coef: NonNegativeFloat = 0.1
    """Weight of the value loss."""
    cliprange_value: PositiveFloat = 0.2
    """Clip range of the value: how far one batch may move it. In the score's own units: raise it for large scores."""
    gamma: Fraction = 1.0
    """Discount."""
    lam: Fraction = 0.95
    """Lambda of generalised advantage estimation (arXiv:1506.02438). 1 trusts the scores alone, 0 the values alone."""
    whiten_rewards: bool = False
    """Scale the rewards of all tokens of a batch to variance 1."""
    whiten_advantages: bool = True
    """Shift and scale the advantages of all tokens of a batch to mean 0 and variance 1."""
    temperature: PositiveFloat = 0.7
    """Sampling temperature. The policy that is trained is the one at this temperature."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens alone. 0: from all. Log-probabilities are those over all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Sample from the most likely tokens that have this probability together. 1: from all."""
    max_completion_length: PositiveInt = 128
    """Longest completion in tokens."""
    local_rollout_forward_batch_size: PositiveInt = 64
    """Completions per process that are generated at once: more is faster and needs more memory."""
    num_completions_to_print: NonNegativeInt = 2
    """Completions of the newest batch shown at each log line, the best and the worst first. All are in
    `output/completions.jsonl`."""


class GRPOOptions(Block):
    """Group relative policy optimisation. Names are those of TRL's GRPOConfig."""

    reward_funcs: list[RewardFunction] = Field(default_factory=list)
    """Functions that score completions; at least one. See docs/rewards.md."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt: the group. Larger is steadier and slower."""
    max_completion_length: PositiveInt = 256
    """Longest completion in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Too low and the group agrees: nothing to learn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this. 1: from all."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most likely tokens. 0: from all."""
    min_p: Fraction | None = None
    """Sample from tokens at least this likely, as a share of the most likely one's probability. Default: from all."""
    repetition_penalty: PositiveFloat = 1.0
    """Makes tokens that came before less likely (above 1) or more (below 1). 1: no penalty."""
    beta: NonNegativeFloat = 0.0
    """Weight of the KL term against the reference: the model as it was, with LoRA the base under the adapter switched
    off, without LoRA a second copy in memory. 0: no reference."""
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "luspo", "cispo", "sapo", "vespo"] = "dapo"
    """Loss, by TRL's name. `grpo`: mean over each completion's tokens, then over completions (arXiv:2402.03300).
    `dapo`: mean over all tokens of the step (arXiv:2503.14476). `dr_grpo`: sum over a constant length
    (arXiv:2503.20783). `bnpo`: mean over the tokens of the micro-batch. `luspo`: for sequence-level ratios
    (arXiv:2602.05261). `cispo` (arXiv:2506.13585), `sapo` (arXiv:2511.20347) and `vespo` (arXiv:2602.10693) bound the
    ratio in other ways than by clipping."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios of each token, or of whole completions (GSPO, arXiv:2507.18071; with `loss_type: grpo`)."""
    epsilon: PositiveFloat = 0.2
    """Clip range of the policy ratio. It bites where completions are trained on more than once: `num_iterations` above
    1 or `steps_per_generation` above `training.gradient_accumulation_steps`."""
    epsilon_high: PositiveFloat | None = None
    """Upper clip range. Default: `epsilon`; with `cispo`, where it bounds the ratio itself, 5."""
    num_iterations: PositiveInt = 1
    """Optimisation passes over each batch of completions."""
    steps_per_generation: PositiveInt | None = None
    """Micro-steps that one batch of completions is shared out to: larger batches are sampled faster and grow stale.
    Default: `training.gradient_accumulation_steps`, one optimizer step."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation the advantage is divided by: the group's, the batch's, or none (arXiv:2503.20783)."""
    mask_truncated_completions: bool = False
    """Leave completions that ran into the limit out of the loss."""
    num_completions_to_print: NonNegativeInt = 2
    """Completions shown at each log line, the best and the worst first. All are in `output/completions.jsonl`."""
    use_vllm: bool = False
    """Generate with vLLM, which must be installed. Needs GPUs."""
    vllm_mode: Literal["colocate", "server"] = "colocate"
    """vLLM in the training process or at `vllm_server_base_url`."""
    vllm_server_base_url: str | None = None
    """Address of a vLLM server, started with `trl vllm-serve`, such as `http://127.0.0.1:8000`."""
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of each GPU's memory for a colocated vLLM."""
    vllm_tensor_parallel_size: PositiveInt = 1
    """GPUs that one colocated vLLM model is spread over."""


class DistillOptions(Block):
    """Knowledge distillation from a teacher. Names are those of TRL's DistillationConfig and GKDConfig."""

    teacher: Uri | None = None
    """The teacher model, with the same tokenizer as the model. Needed, but for `seq_kd` on text the teacher has written
    already."""
    teacher_revision: str | None = None
    """Branch, tag or commit of a `hf://` teacher."""
    teacher_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type the teacher's weights are loaded in. `auto`: float32 on CPU, the type they were saved in on GPU."""
    teacher_quantize: bool = False
    """Load the teacher in 4 bits (bitsandbytes NF4): about a quarter of its memory, a little less exact."""
    teacher_top_k: PositiveInt | None = None
    """Score the rows before training, and keep the teacher's log-probabilities of its this many likeliest tokens at each
    position, and of all others together: training then needs no teacher in memory. For `lmbda: 0` alone. The divergence
    is taken over these outcomes; it is the whole one if this is the size of the vocabulary. 32 to 128 is usual. Default:
    the teacher runs beside the student."""
    lmbda: Fraction = 0.5
    """Share of batches that the student answers itself (on-policy); the others are the rows' answers. 0: only the rows; 1:
    only the student, and the rows may be prompts alone. On-policy batches are slower, and teach what the student will
    meet when it runs."""
    beta: Fraction = 0.5
    """Divergence: 0 forward KL (covers all the teacher does), 1 reverse KL (keeps to what the teacher does most), between:
    generalised Jensen-Shannon (arXiv:2306.13649), which weighs the teacher's side with `beta`. Its scale shrinks towards
    both ends (0 and 1 are the KL divergences themselves)."""
    temperature: PositiveFloat = 0.9
    """Temperature of both distributions and of sampling. Above 1 the teacher's less likely tokens count more."""
    max_completion_length: PositiveInt = 128
    """Longest sampled answer in tokens."""
    seq_kd: bool = False
    """Sequence-level distillation (arXiv:1606.07947): train on the teacher's text by its likelihood. With a `teacher` it
    answers each batch's prompts; without one the rows' answers are its text."""


class QATOptions(Block):
    """Quantisation-aware training (torchao)."""

    base_config: Literal[
        "int8_dynamic_act_int4_weight", "int8_weight_only", "int4_weight_only", "int3_weight_only", "int2_weight_only"
    ] = "int8_dynamic_act_int4_weight"
    """The quantisation the model is trained for, by torchao's names: weights of so many bits, symmetric, with a scale for
    each group; the first rounds the layers' inputs to 8 bits as well. The fewer bits, the more there is to win back."""
    group_size: Annotated[int, Field(ge=8)] = 32
    """Weights that share one scale. Smaller is more precise and larger on disk. The inputs of every layer must be a whole
    number of groups."""
    compare: bool = True
    """First train the same without rounding, to report three held-out losses: full precision, quantised after training,
    quantised with QAT. Doubles the time of training; `false` leaves the first two out. Needs held-out rows."""
    packing: bool = False
    """Fill sequences of `training.max_length` with several rows."""
    completion_only_loss: bool = True
    """Train on the answers alone."""


class OutputConfig(Block):
    """What is left behind when the run has ended."""

    merge: bool = False
    """Also save the model with the adapter merged in (`/workspace/output/model`); proved like the adapter."""
    proof_rows: PositiveInt = 8
    """Held-out rows on which the reloaded artifact's logits are compared with the live model's."""
    proof_tolerance: PositiveFloat | None = None
    """Largest difference of a logit allowed by the proof. Default: 1e-3 in float32, 0.1 in 16 bits or 4 bits (0.2 for a
    merged model), times the standard deviation of the live model's logits where that is above 1."""


class ResourcesConfig(Block):
    """What one run may use."""

    num_nodes: PositiveInt = 1
    """Machines (Pods). More than one trains data-parallel."""
    gpu: NonNegativeInt = 0
    """GPUs per node. 0: CPU."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the GPU resource in the cluster (`amd.com/gpu`, `nvidia.com/mig-1g.10gb`, ...)."""
    num_proc_per_node: PositiveInt | None = None
    """Training processes per node. Default: `gpu`, at least 1."""
    cpu: Quantity | None = None
    """CPU per node, as a Kubernetes quantity (`"8"`, `"500m"`). Default: the runtime's."""
    memory: Quantity | None = None
    """Memory per node, as a Kubernetes quantity (`64Gi`). Default: the runtime's."""
    strategy: Literal["auto", "ddp", "fsdp", "zero2", "zero3"] = "auto"
    """How several processes share the work. `ddp`: each holds the whole model. `fsdp`: PyTorch's fully_shard, each holds a
    part of weights, gradients and optimizer state. `zero2`, `zero3`: DeepSpeed, which shares gradients and optimizer
    state, with `zero3` the weights too; needs `pip install 'llm-blueprints[deepspeed]'`. `auto`: ddp."""


class KeyRef(Block):
    """One key of a Secret or ConfigMap."""

    name: Text
    """Of the Secret or ConfigMap, in the job's namespace."""
    key: Text
    """Which of its keys."""
    optional: bool = False
    """Whether the job may start without it; the variable is unset then."""


class EnvSource(Block):
    """Where a variable's value comes from: one of the two."""

    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""


class Toleration(Block):
    """A taint of nodes that the trainer's Pods tolerate. Names and meaning are Kubernetes'."""

    key: str | None = None
    """Key of the taint. Default, with operator `Exists`: every taint."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Exists` takes any value."""
    value: str | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: every effect."""
    toleration_seconds: NonNegativeInt | None = None
    """Seconds to stay on a node that gets a `NoExecute` taint. Default: for ever."""


class Volume(Block):
    """Something that every step of the job sees at a path: one of the three kinds."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
    """A name for it, unlike every other volume's."""
    mount_path: Annotated[str, Field(pattern=r"^/[^:]*$")]
    """Where it is seen, such as `/data`."""
    persistent_volume_claim: Text | None = None
    """A claim of the namespace, by its name. Several nodes need one with ReadWriteMany or ReadOnlyMany."""
    secret: Text | None = None
    """A Secret, its keys as files."""
    config_map: Text | None = None
    """A ConfigMap, its keys as files."""
    read_only: bool = False
    """Whether steps may only read it."""


class RuntimeConfig(Block):
    """The ClusterTrainingRuntime the job runs on, and what the job adds to it."""

    name: str | None = None
    """Name of the runtime. Default: `llm-<method>`; with `distill.teacher_top_k` `llm-distill-offline`, or
    `llm-distill-offline-gpu` where `resources.gpu` is set."""
    image: str | None = None
    """Trainer image instead of the runtime's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the trainer. Never put a secret here: use `env_from`."""
    env_from: dict[str, EnvSource] = Field(default_factory=dict)
    """Environment of the trainer from Secrets and ConfigMaps, by variable:
    `{WANDB_API_KEY: {secret_key_ref: {name: trackers, key: api-key}}}`. On this machine: from the environment."""
    secret_ref: str | None = None
    """Secret whose keys (`HF_TOKEN`, `ACCESS_TOKEN`, ...) become the initializers' environment."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the TrainJob, such as `kueue.x-k8s.io/queue-name`."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the TrainJob."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the nodes of the trainer's Pods must have."""
    tolerations: list[Toleration] = Field(default_factory=list)
    """Taints of nodes that the trainer's Pods tolerate."""
    volumes: list[Volume] = Field(default_factory=list)
    """Claims, Secrets and ConfigMaps that every step sees as files, such as `{name: data, mount_path: /data,
    persistent_volume_claim: rows}`."""
    service_account_name: Text | None = None
    """Service account of every Pod, for stores that know it. Default: the namespace's."""
    image_pull_secrets: list[Text] = Field(default_factory=list)
    """Secrets with the registry's login, for every Pod."""
    suspend: bool = False
    """Create the job suspended; `blueprints resume` lets it start. A queue does this by itself."""
    managed_by: Literal["kueue.x-k8s.io/multikueue"] | None = None
    """Who runs the job. `kueue.x-k8s.io/multikueue`: a worker cluster that MultiKueue chooses. Default: this cluster."""
    active_deadline_seconds: PositiveInt | None = None
    """Seconds after which the job is stopped and failed. Default: no limit."""


LEARNING_RATES: dict[str, tuple[float, float]] = {
    "sft": (2e-4, 2e-5),
    "dpo": (1e-5, 1e-6),
    "ppo": (1e-5, 1e-6),
    "grpo": (1e-5, 1e-6),
    "distill": (1e-4, 1e-5),
    "qat": (2e-4, 2e-5),
}
"""Default learning rates by method: with LoRA, without."""


class Run(Block):
    """What a recipe and a Python configuration have in common."""

    method: Method
    """How the model is trained: sft, dpo, ppo, grpo, distill, qat, or a trainer of your own as
    `package.module:function` (see docs/custom-methods.md)."""
    model: ModelConfig | None = None
    """The base model; short form: its URI."""
    dataset: DatasetConfig | None = None
    """The training rows; short form: their URI."""
    lora: LoraConfig | None = None
    """Train low-rank adapters. Absent: all weights. `{}`: adapters with every default."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """The optimisation."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """What is measured on held-out rows."""
    output: OutputConfig = Field(default_factory=OutputConfig)
    """What is left behind."""
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)
    """What the run may use."""
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    """The runtime it runs on; short form: its name."""

    @field_validator("model", "dataset", mode="before")
    @classmethod
    def _uri_short_form(cls, value: object) -> object:
        return {"uri": value} if isinstance(value, str) else value

    @field_validator("runtime", mode="before")
    @classmethod
    def _name_short_form(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    def as_layer(self) -> dict[str, Any]:
        """What was set explicitly, as plain nested data: a layer for `load_recipe(None, base=...)`."""
        return {"method": self.method} | self.model_dump(exclude_unset=True)


class SFTConfig(Run):
    """Supervised fine-tuning, as configured from Python."""

    method: Literal["sft"] = "sft"
    """The method; nothing else fits."""
    sft: SFTOptions = Field(default_factory=SFTOptions)
    """Knobs of supervised fine-tuning."""


class DPOConfig(Run):
    """Direct preference optimisation, as configured from Python."""

    method: Literal["dpo"] = "dpo"
    """The method; nothing else fits."""
    dpo: DPOOptions = Field(default_factory=DPOOptions)
    """Knobs of direct preference optimisation."""


class PPOConfig(Run):
    """Proximal policy optimisation, as configured from Python."""

    method: Literal["ppo"] = "ppo"
    """The method; nothing else fits."""
    ppo: PPOOptions = Field(default_factory=PPOOptions)
    """Knobs of proximal policy optimisation."""


class GRPOConfig(Run):
    """Group relative policy optimisation, as configured from Python."""

    method: Literal["grpo"] = "grpo"
    """The method; nothing else fits."""
    grpo: GRPOOptions = Field(default_factory=GRPOOptions)
    """Knobs of group relative policy optimisation."""


class DistillConfig(Run):
    """Knowledge distillation, as configured from Python."""

    method: Literal["distill"] = "distill"
    """The method; nothing else fits."""
    distill: DistillOptions = Field(default_factory=DistillOptions)
    """Knobs of distillation."""


class QATConfig(Run):
    """Quantisation-aware training, as configured from Python."""

    method: Literal["qat"] = "qat"
    """The method; nothing else fits."""
    qat: QATOptions = Field(default_factory=QATOptions)
    """Knobs of quantisation-aware training."""


class CustomConfig(Run):
    """A method of your own, as configured from Python."""

    method: CustomMethod
    """The function that trains, as `package.module:function` (see docs/custom-methods.md)."""
    custom: dict[str, Any] = Field(default_factory=dict)
    """Its knobs: any keys, read by that function."""


class Recipe(Run):
    """A whole fine-tuning run: what to train, on what, how, and where."""

    model: ModelConfig
    """The base model; short form: its URI."""
    dataset: DatasetConfig
    """The training rows; short form: their URI."""
    sft: SFTOptions | None = None
    """Knobs of supervised fine-tuning."""
    dpo: DPOOptions | None = None
    """Knobs of direct preference optimisation."""
    ppo: PPOOptions | None = None
    """Knobs of proximal policy optimisation."""
    grpo: GRPOOptions | None = None
    """Knobs of group relative policy optimisation."""
    distill: DistillOptions | None = None
    """Knobs of distillation."""
    qat: QATOptions | None = None
    """Knobs of quantisation-aware training."""
    custom: dict[str, Any] | None = None
    """Knobs of a method of your own (`method: package.module:function`): any keys, read by that function."""

    @model_validator(mode="before")
    @classmethod
    def _own_method_block(cls, value: object) -> object:
        """The method's own block exists even when the recipe does not mention it."""
        if not isinstance(value, dict):
            return value
        method = value.get("method")
        block = "custom" if isinstance(method, str) and ":" in method else method
        if isinstance(block, str) and block in (*METHODS, "custom") and value.get(block) is None:
            return value | {block: {}}
        return value

    def derived(self) -> dict[str, Any]:
        """Values that other values decide, by dotted key: derived defaults, and knobs that mean nothing here.

        A knob that means nothing (see `IDLE`) gets its default, so that two recipes which train alike hash alike.
        """
        training, resources = self.training, self.resources
        values: dict[str, Any] = {}
        if training.learning_rate is None:
            with_lora, without = LEARNING_RATES.get(self.method, LEARNING_RATES["sft"])
            values["training.learning_rate"] = with_lora if self.lora else without
        if training.data_seed is None:
            values["training.data_seed"] = training.seed
        if self.lora and self.lora.lora_alpha is None:
            values["lora.lora_alpha"] = 2 * self.lora.r
        if self.grpo and self.grpo.epsilon_high is None:
            values["grpo.epsilon_high"] = 5.0 if self.grpo.loss_type == "cispo" else self.grpo.epsilon
        if self.grpo and self.grpo.steps_per_generation is None:
            values["grpo.steps_per_generation"] = training.gradient_accumulation_steps
        if self.dpo and self.dpo.precompute_ref_log_probs is None:
            values["dpo.precompute_ref_log_probs"] = self.lora is None or self.base_changes
        if resources.num_proc_per_node is None:
            values["resources.num_proc_per_node"] = max(1, resources.gpu)
        if self.runtime.name is None:
            values["runtime.name"] = self._runtime_name()
        for idle in IDLE:
            block, key = self.part(idle.key)
            if block is not None and idle.when(self):
                values[idle.key] = type(block).model_fields[key].get_default(call_default_factory=True)
        return values

    def _runtime_name(self) -> str:
        if self.is_custom:
            return "llm-custom"
        if self.distill and self.distill.teacher_top_k is not None:  # a step more: the teacher scores the rows
            return "llm-distill-offline-gpu" if self.resources.gpu else "llm-distill-offline"
        return f"llm-{self.method}"

    @property
    def base_changes(self) -> bool:
        """Whether the model with its adapter switched off is not the one that training starts from, all along: PiSSA and
        OLoRA change the base's weights, trained biases are the base's, and an earlier adapter is gone on from."""
        lora = self.lora
        return lora is not None and (
            lora.bias != "none" or lora.init_lora_weights in ("pissa", "olora") or lora.from_uri is not None
        )

    @property
    def is_custom(self) -> bool:
        """Whether the method is a function of the user's own."""
        return ":" in self.method

    def part(self, dotted: str) -> tuple[Block | None, str]:
        """The block that holds the two-part key `dotted`, None if absent from this recipe, and the key's last part."""
        name, key = dotted.split(".")
        block: Block | None = vars(self)[name]
        return block, key

    def resolve(self) -> Self:
        """This recipe with every derived default filled in.

        Which values were set explicitly (`model_fields_set`) stays as it was.

        Returns:
            a recipe of the same content without None where a docstring above states a rule.
        """
        blocks: dict[str, dict[str, Any]] = {}
        for dotted, value in self.derived().items():
            name, key = dotted.split(".")
            blocks.setdefault(name, {})[key] = value
        own = dict(self)
        updates = {name: _replace(own[name], values) for name, values in blocks.items()}
        return _replace(self, updates)

    def canonical_json(self) -> str:
        """The resolved recipe as one line of sorted JSON: what the hash is taken of."""
        data = self.resolve().model_dump(mode="json", exclude_none=True)
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    def hash(self) -> str:
        """sha256 of the resolved recipe, as 64 hex digits; equal wherever the recipe is resolved."""
        return hashlib.sha256(self.canonical_json().encode("utf-8", "surrogatepass")).hexdigest()


def _replace(block: B, values: dict[str, Any]) -> B:
    """`block` with other values, unchecked, and the same record of what was set explicitly."""
    return type(block).model_construct(_fields_set=set(block.model_fields_set), **(dict(block) | values))


@dataclass(frozen=True)
class Idle:
    """A knob that does nothing in some recipes: setting it there is a fault, not a silence.

    Attributes:
        key: the knob.
        switch: the key that makes it idle.
        when: whether it does.
        reason: why, to be read after "`key` does nothing: ".
        todo: what to do.
        off_is_fine: whether setting the knob to its default is no fault, because it asks for nothing.
    """

    key: str
    switch: str
    when: Callable[[Recipe], bool]
    reason: str
    todo: str
    off_is_fine: bool = False


def _no_betas(recipe: Recipe) -> bool:
    return recipe.training.optim in ("adafactor", "sgd")


def _no_epsilon(recipe: Recipe) -> bool:
    return _no_betas(recipe) or "lion" in recipe.training.optim


def _no_quantized_base(recipe: Recipe) -> bool:
    return recipe.lora is None or not recipe.lora.quantize_base


def _likelihood(recipe: Recipe) -> bool:
    return recipe.distill is not None and recipe.distill.seq_kd


def _no_teacher(recipe: Recipe) -> bool:
    return recipe.distill is not None and recipe.distill.teacher is None


def _nothing_sampled(recipe: Recipe) -> bool:
    distill = recipe.distill
    return distill is not None and (distill.teacher is None if distill.seq_kd else distill.lmbda == 0)


def _unsmoothed(recipe: Recipe) -> bool:
    return recipe.dpo is not None and recipe.dpo.loss_type not in SMOOTHED_LOSSES


def _without_reference(recipe: Recipe) -> bool:
    return recipe.dpo is not None and recipe.dpo.reference_free


def _no_vllm(recipe: Recipe) -> bool:
    return recipe.grpo is None or not recipe.grpo.use_vllm


def _no_vllm_inside(recipe: Recipe) -> bool:
    return recipe.grpo is not None and recipe.grpo.use_vllm and recipe.grpo.vllm_mode == "server"


def _ratio_not_clipped(*losses: str) -> Callable[[Recipe], bool]:
    return lambda recipe: recipe.grpo is not None and recipe.grpo.loss_type in losses


def _goes_on(recipe: Recipe) -> bool:
    return recipe.lora is not None and recipe.lora.from_uri is not None


SMOOTHED_LOSSES = ("robust", "exo_pair", "aot", "aot_unpaired")
"""Losses of DPO that `dpo.label_smoothing` has a part in."""


def _no_reference(recipe: Recipe) -> bool:
    return recipe.ppo is None or recipe.ppo.kl_coef == 0


IDLE = (
    *(
        Idle(
            f"ppo.{key}",
            "ppo.kl_coef",
            _no_reference,
            "with `ppo.kl_coef: 0` there is no KL penalty",
            "Leave it out or raise `ppo.kl_coef`.",
        )
        for key in ("kl_estimator", "kl_target")
    ),
    Idle(
        "ppo.kl_horizon",
        "ppo.kl_target",
        lambda recipe: _no_reference(recipe) or recipe.ppo is None or recipe.ppo.kl_target is None,
        "without `ppo.kl_target` the weight of the KL penalty stays as it is",
        "Set `ppo.kl_target` or leave it out.",
    ),
    Idle(
        "ppo.cliprange_value",
        "ppo.vf_coef",
        lambda recipe: recipe.ppo is None or recipe.ppo.vf_coef == 0,
        "with `ppo.vf_coef: 0` no value is learnt",
        "Leave it out or raise `ppo.vf_coef`.",
    ),
    Idle(
        "lora.init_lora_weights",
        "lora.from",
        _goes_on,
        "the adapter of `lora.from` starts as it was saved",
        "Leave it out.",
    ),
    Idle(
        "training.num_train_epochs",
        "training.max_steps",
        lambda recipe: recipe.training.max_steps is not None,
        "`training.max_steps` decides how long the training is",
        "Keep one of the two; `training.max_steps=null` unsets the other.",
    ),
    *(
        Idle(
            f"lora.{key}",
            "lora.quantize_base",
            _no_quantized_base,
            "the base is kept in 4 bits only with `lora.quantize_base: true`",
            "Set `lora.quantize_base: true` or leave it out.",
        )
        for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    ),
    *(
        Idle(
            f"training.{key}",
            "training.optim",
            when,
            f"`training.optim` has no {what}",
            "Leave it out or choose an AdamW optimizer.",
        )
        for key, when, what in (
            ("adam_beta1", _no_betas, "such moment"),
            ("adam_beta2", _no_betas, "such moment"),
            ("adam_epsilon", _no_epsilon, "such floor"),
        )
    ),
    Idle(
        "training.warmup_steps",
        "training.lr_scheduler_type",
        lambda recipe: recipe.training.lr_scheduler_type == "constant",
        "the schedule `constant` has no warm-up",
        "Leave it out or choose `constant_with_warmup`.",
    ),
    Idle(
        "dpo.label_smoothing",
        "dpo.loss_type",
        _unsmoothed,
        "the loss does not know it",
        f"Leave it out or choose one of the losses {', '.join(SMOOTHED_LOSSES)}.",
        off_is_fine=True,
    ),
    Idle(
        "dpo.beta",
        "dpo.loss_type",
        lambda recipe: recipe.dpo is not None and recipe.dpo.loss_type == "sft",
        "the loss `sft` has no reference to be pulled back to",
        "Leave it out or choose another loss.",
    ),
    Idle(
        "dpo.precompute_ref_log_probs",
        "dpo.reference_free",
        _without_reference,
        "with `dpo.reference_free: true` there is no reference",
        "Keep one of the two.",
        off_is_fine=True,
    ),
    Idle(
        "lora.lora_dropout",
        "method",
        lambda recipe: recipe.method == "dpo",
        "policy and reference are compared without dropout, as TRL does",
        "Leave it out.",
        off_is_fine=True,
    ),
    Idle(
        "lora.lora_dropout",
        "method",
        lambda recipe: recipe.method == "qat",
        "the sum of weight and adapter is rounded, and dropout acts on the adapter's input alone",
        "Leave it out.",
        off_is_fine=True,
    ),
    Idle(
        "output.merge",
        "method",
        lambda recipe: recipe.method == "qat",
        "what is quantised is the merged model, which is saved in any case",
        "Leave it out.",
    ),
    *(
        Idle(
            f"grpo.{key}",
            "grpo.use_vllm",
            _no_vllm,
            "vLLM generates only with `grpo.use_vllm: true`",
            "Set `grpo.use_vllm: true` or leave it out.",
        )
        for key in ("vllm_mode", "vllm_server_base_url", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
    ),
    *(
        Idle(
            f"grpo.{key}",
            "grpo.vllm_mode",
            _no_vllm_inside,
            "the server was started with its own",
            "Leave it out, or set `grpo.vllm_mode: colocate`.",
        )
        for key in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
    ),
    *(
        Idle(
            f"grpo.{key}",
            "grpo.loss_type",
            _ratio_not_clipped(*losses),
            "this `grpo.loss_type` does not clip the policy ratio there",
            "Leave it out, or choose another loss.",
        )
        for key, losses in (("epsilon", ("cispo", "sapo", "vespo")), ("epsilon_high", ("sapo", "vespo")))
    ),
    *(
        Idle(
            f"distill.{key}",
            "distill.seq_kd",
            _likelihood,
            "with `distill.seq_kd: true` the loss is the likelihood of the teacher's text",
            "Leave it out or unset `distill.seq_kd`.",
        )
        for key in ("lmbda", "beta")
    ),
    *(
        Idle(
            f"distill.{key}",
            "distill.teacher",
            _no_teacher,
            "there is no `distill.teacher`: the rows hold the teacher's text",
            "Leave it out or name a teacher.",
        )
        for key in ("teacher_dtype", "teacher_quantize", "temperature")
    ),
    Idle(
        "distill.max_completion_length",
        "distill.lmbda",
        _nothing_sampled,
        "nothing is sampled: all batches are the rows' own answers",
        "Leave it out, or raise `distill.lmbda`.",
    ),
    Idle(
        "output.merge",
        "lora",
        lambda recipe: recipe.lora is None,
        "without `lora` there is no adapter to merge; the whole model is saved anyway",
        "Leave it out, or train adapters with `lora: {}`.",
        off_is_fine=True,
    ),
)
"""Every knob that can be idle. `Recipe.derived` resets them, the loader refuses them where they were set on purpose."""

SHORT_FORMS = {"model": "uri", "dataset": "uri", "runtime": "name"}
"""Blocks that may be written as one string, and the key that string is."""

BLOCK_ORDER = (
    "method",
    "model",
    "dataset",
    "lora",
    "training",
    *METHODS,
    "custom",
    "eval",
    "output",
    "resources",
    "runtime",
)
"""The order in which a recipe is written and shown."""


def field_of_block(block: str, key: str) -> FieldInfo | None:
    """The field `key` of the recipe's block `block`, None if there is no such block or key."""
    found = Recipe.model_fields.get(block)
    for arm in get_args(found.annotation) or (found.annotation,) if found is not None else ():
        if isinstance(arm, type) and issubclass(arm, Block):
            return arm.model_fields.get(key)
    return None
