"""A reward model: a sequence classifier with one label, whose score of prompt and completion is the reward."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from blueprints.errors import DataError, JobFailedError, UsageError

KEY = "ppo.reward_model"


class RewardModel:
    """Scores by a model of its own, which reads text: its tokenizer and chat template may differ from the policy's.

    With a chat template, that makes the text, of a prompt that is plain text as of a user's message. Without one, prompt
    and completion follow one another as they are, messages line by line.

    Args:
        directory: the model as `from_pretrained` reads it.
        device: where it runs. On CPU in float32, on a GPU in the type it was saved in.
        batch_size: texts at once; one by one if its tokenizer has no padding token.

    Raises:
        DataError: it cannot be loaded, or its scores would come from random weights.
        UsageError: it has several labels.
    """

    weight = 1.0

    def __init__(self, directory: Path, device: torch.device, batch_size: int) -> None:
        self.__name__ = "reward_model"
        try:
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                directory, local_files_only=True, use_safetensors=True, output_loading_info=True,
                dtype=torch.float32 if device.type == "cpu" else "auto",
            )  # fmt: skip
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"the reward model cannot be loaded: {' '.join(str(error).split())[:300]}",
                where=str(directory),
                todo="use a sequence classification model saved as safetensors, with its tokenizer",
            ) from error
        _check(model, report, directory)
        self.model = model.requires_grad_(False).eval().to(device)
        self.device = device
        self.batch_size = batch_size if self._pads() else 1
        self.longest = min(self.tokenizer.model_max_length, _context(model.config))
        self.cut = 0

    def _pads(self) -> bool:
        """Whether several texts can be scored at once: the classifier must tell padding from text."""
        token = self.tokenizer.pad_token_id
        if token is None or token == self.tokenizer.eos_token_id:
            return False
        self.model.config.pad_token_id = token
        return True

    @property
    def parameters(self) -> int:
        """Its size."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @torch.no_grad()
    def __call__(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        completions: Sequence[str | list[dict[str, Any]]],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
        **_more: Any,
    ) -> list[float | None]:
        """One score per completion; see `trainers.rewards.Reward`. Texts beyond its context lose their beginning.

        Raises:
            JobFailedError: a score is no finite number.
        """
        rows = [self._ids(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        scores: list[float | None] = []
        for start in range(0, len(rows), self.batch_size):
            chosen = rows[start : start + self.batch_size]
            width = max(map(len, chosen))
            ids = torch.full((len(chosen), width), self.tokenizer.pad_token_id or 0, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for line, row in enumerate(chosen):
                ids[line, : len(row)], mask[line, : len(row)] = torch.tensor(row), 1
            found = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
            scores += found.float().squeeze(-1).tolist()
        for score, completion in zip(scores, completions, strict=True):
            if score is None or not math.isfinite(score):
                raise JobFailedError(
                    f"the reward model gave {score} to the completion {completion!r:.200}",
                    where=KEY,
                    todo="use a reward model whose scores are finite, or one saved in another type than float16",
                )
        return scores

    def _ids(self, prompt: str | list[dict[str, Any]], completion: str | list[dict[str, Any]]) -> list[int]:
        if self.tokenizer.chat_template is not None:
            messages = [*_messages(prompt, "user"), *_messages(completion, "assistant")]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(_plain(prompt) + _plain(completion, last=True))["input_ids"]
        self.cut += len(ids) > self.longest
        return ids[-self.longest :]


def _messages(text: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def _plain(text: str | list[dict[str, Any]], *, last: bool = False) -> str:
    if isinstance(text, str):
        return text
    return "\n".join(str(message["content"]) for message in text) + ("" if last else "\n")


def _context(config: Any) -> int:
    """The most tokens a model sees at once; no limit where its configuration names none."""
    settings: dict[str, Any] = json.loads(config.get_text_config().to_json_string(use_diff=False))
    return int(settings.get("max_position_embeddings") or 1 << 30)


def _check(model: Any, report: Mapping[str, Any], directory: Path) -> None:
    labels = int(model.config.num_labels)
    if labels != 1:
        raise UsageError(
            f"the reward model has {labels} labels: which of their scores would be the reward?",
            where=KEY,
            todo="use a reward model with one label (num_labels=1), or wrap this classifier in a function and name it in "
            "ppo.reward_funcs",
        )
    random = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if random:
        raise DataError(
            f"{len(random)} weights of the reward model are missing ({', '.join(random[:3])}): its scores would be random",
            where=str(directory),
            todo="use a model trained as a reward model; a language model has no head for scores",
        )
