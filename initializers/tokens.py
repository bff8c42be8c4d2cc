"""The model's tokenizer and chat template: rows become text, text becomes tokens, and each token knows its loss.

The mask is exact or the row is refused. Where the template marks the assistant's words (`{% generation %}`) its marks
are used. Elsewhere an answer is what the full text has beyond the prompt that inference would see: the template is
rendered up to the question with the generation prompt, and again with the answer, and the one must begin with the
other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError, TemplateSyntaxError

from blueprints.digests import tokenizer_digest
from blueprints.errors import DataError, UsageError
from blueprints.tokens import add_tokens
from initializers.messages import Answered, Chat, Instruction, Message, Pair, Preference, Prompt, Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.int8]
T = TypeVar("T")

ALPACA_INTRO = {
    True: "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n",
    False: "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n",
}
_TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What a template can raise on a row that it was not written for."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of one sequence.

    Attributes:
        text: what is tokenised.
        spans: the half-open ranges of characters that carry loss.
        plain: outside the chat template: the tokenizer's own start token and the end token are added.
        whole: plain text, of which everything is trained and which may be cut.
        opening: a prompt alone: a conversation ends in the generation prompt, plain text has no end token.
        chat: the conversation it is the template's rendering of; None for plain text.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    plain: bool = False
    whole: bool = False
    chat: Chat | None = None
    opening: bool = False


@dataclass(slots=True)
class Tokens:
    """Tokens of one sequence with their loss mask; of a held-out row also what it asks.

    Attributes:
        prompt: the question as a person reads it, without the template; empty for plain text.
        prompt_length: tokens before the last answer; 0 for plain text.
    """

    ids: Ids
    mask: Mask
    prompt: str = ""
    prompt_length: int = 0

    def answer_start(self) -> int:
        """Tokens before the last stretch that carries loss."""
        trained = np.flatnonzero(self.mask)
        gaps = np.flatnonzero(np.diff(trained) > 1)
        return int(trained[gaps[-1] + 1] if gaps.size else trained[0]) if trained.size else 0


class Refused(Exception):
    """One row that cannot be rendered or masked exactly; the message says why.

    Attributes:
        hint: what to do.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


@dataclass
class Notes:
    """What happened on the way, counted."""

    unrolled: int = 0
    """Conversations split into one sequence per answer, as the template rewrites earlier turns."""
    merged_boundaries: int = 0
    """Answers whose first token begins in the prompt."""
    retokenised_prompts: int = 0
    """Of the proved rows: answers whose prompt, alone as at inference, has other tokens than in training."""
    unended: int = 0
    """Sequences whose last trained token is not one that ends generation."""
    ignored_reasoning: int = 0
    """Answers whose `reasoning_content` the template does not show."""
    extended: int = 0
    """Answers whose end token the template's marks leave out; it was added to the mask."""


@dataclass
class ChatTokenizer:
    """The tokenizer and template of a model directory, for training.

    Attributes:
        tokenizer: Transformers' fast tokenizer.
        template_source: `model.chat_template` of the recipe, `the tokenizer`, or empty without a template.
        completion_only: mask everything but the answers.
        end_ids: tokens that end generation.
        model_vocab: rows of the model's embedding; None if its configuration does not say.
        model_context: tokens the model can see at once; None if its configuration does not say.
    """

    tokenizer: PreTrainedTokenizerBase
    template_source: str
    completion_only: bool
    end_ids: frozenset[int]
    model_vocab: int | None
    model_context: int | None
    files_sha256: str
    notes: Notes = field(default_factory=Notes)

    @cached_property
    def backend(self) -> Any:
        """The Rust tokenizer."""
        return self.tokenizer._tokenizer

    @property
    def template(self) -> str | None:
        """The chat template for rows without tools; None if there is none."""
        return self.tokenizer.get_chat_template() if self.template_source else None

    @cached_property
    def prefix(self) -> list[int]:
        """Tokens that the tokenizer puts before plain text (BOS, mostly)."""
        with_special = self.backend.encode("x", add_special_tokens=True).ids
        without = self.backend.encode("x", add_special_tokens=False).ids
        for start in range(len(with_special) - len(without) + 1):
            if with_special[start : start + len(without)] == without:
                return list(with_special[:start])
        return []

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset(index for index, token in added.items() if token.special) | self.end_ids

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.convert_ids_to_tokens(sorted(self._special)))

    @cached_property
    def longest_token(self) -> int:
        """Characters that one token can stand for, at most."""
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)

    # --- rows to text ------------------------------------------------------------------------

    def render(self, example: Answered) -> list[Rendered]:
        """The sequences of one row; more than one where the template rewrites earlier turns.

        Raises:
            Refused: the template does not take the row, or no exact mask exists.
        """
        if isinstance(example, Text):
            return [Rendered(example.text, ((0, len(example.text)),), plain=True, whole=True)]
        if isinstance(example, Chat):
            if not self.template_source:
                raise _no_template()
            return self._chat(example)
        if self.template_source:
            return self._chat(_as_chat(example))
        prompt, completion = _plain_layout(example)
        text = prompt + completion
        return [Rendered(text, ((len(prompt), len(text)),), plain=True)]

    def render_prompt(self, example: Prompt) -> Rendered:
        """What the model is given to answer: up to and with the template's generation prompt.

        Raises:
            Refused: the template does not take the row.
        """
        asked = example.asked
        if isinstance(asked, Chat) or self.template_source:
            if not self.template_source:
                raise _no_template()
            chat = _without_weights(asked) if isinstance(asked, Chat) else Chat(_as_chat(asked).messages[:-1])
            return self._either(chat, self._opening)
        return Rendered(_plain_layout(asked)[0], (), plain=True, opening=True)

    def _opening(self, chat: Chat) -> Rendered:
        text = self.template_text(chat.messages, chat.tools, prompt=True)
        self._require_complete(chat, text)
        return Rendered(text, (), chat=chat, opening=True)

    def render_preference(self, example: Preference) -> tuple[Rendered, Rendered]:
        """The two whole conversations of a preference; the span of each is its answer.

        Raises:
            Refused: the template does not take the row, or renders the question otherwise before an answer.
        """
        chosen, rejected = example.chosen, example.rejected
        if not self.template_source and example.transcript is not None:
            chosen, rejected = example.transcript
        return self._answered(chosen), self._answered(rejected)

    def _answered(self, side: Chat | Pair) -> Rendered:
        if self.template_source:
            return self._either(_without_weights(side) if isinstance(side, Chat) else _as_chat(side), self._last_answer)
        if isinstance(side, Chat):
            raise _no_template()
        return self.render(side)[0]

    def _last_answer(self, chat: Chat) -> Rendered:
        found = self._by_prefixes(chat, [len(chat.messages) - 1])[0]
        self._require_complete(chat, found.text)
        return found

    def template_text(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """`messages` rendered by the chat template, with the generation prompt if asked."""
        return self._apply(messages, tools, prompt=prompt, marks=False)[0]

    def _apply(
        self, messages: Sequence[Message], tools: Any, *, prompt: bool, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.tokenizer.get_chat_template(tools=tools)
        variables: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        try:
            result: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **variables,
            )
        except _TEMPLATE_ERRORS as error:
            problem = f"the chat template does not take it: {str(error).splitlines()[0] if str(error) else error!r}"
            raise Refused(problem, "change the row, or give another template by model.chat_template") from None
        texts, spans = result
        return texts[0], (spans[0] if marks else [])

    def _chat(self, chat: Chat) -> list[Rendered]:
        return self._either(chat, self._rendered)

    def _either(self, chat: Chat, render: Callable[[Chat], T]) -> T:
        """Render a conversation with its calls' arguments as JSON, or else as the text of that JSON."""
        if not any("tool_calls" in message for message in chat.messages):
            return render(chat)
        try:
            return render(chat)
        except Refused:
            # Most templates print a call's arguments as JSON, some expect them to be JSON text already.
            try:
                return render(_arguments_as_text(chat))
            except Refused:
                pass
            raise

    def _rendered(self, chat: Chat) -> list[Rendered]:
        plain = _without_weights(chat)
        turns = [
            index
            for index, message in enumerate(chat.messages)
            if message["role"] == "assistant" and index >= chat.trained_from and message.get("weight", 1) != 0
        ]
        every = [index for index, message in enumerate(plain.messages) if message["role"] == "assistant"]
        if not self.completion_only:
            text = self.template_text(plain.messages, plain.tools)
            found = [Rendered(text, ((0, len(text)),), chat=plain)]
        elif _GENERATION.search(self.tokenizer.get_chat_template(tools=plain.tools)):
            text, marks = self._apply(plain.messages, plain.tools, prompt=False, marks=True)
            if turns != every:
                marks = self._marks_of(turns, plain.messages, plain.tools, text, marks)
            found = [Rendered(text, tuple((start, end) for start, end in marks if end > start), chat=plain)]
        else:
            found = self._by_prefixes(plain, turns)
        self._require_complete(plain, found[-1].text)
        return found

    def _require_complete(self, chat: Chat, text: str) -> None:
        """Refuse a row of which the template leaves something out: the model would be trained on another one."""
        for index, message in enumerate(chat.messages):
            # Reasoning models' templates drop the thoughts of earlier turns on purpose.
            content = str(message["content"]).rpartition("</think>")[2].strip()
            if message["role"] != "tool" and content not in text:
                raise Refused(
                    f"the chat template leaves out the {message['role']}'s message {index}",
                    "change the row, or give another template by model.chat_template",
                )
            for call in message.get("tool_calls", ()):
                if str(call.get("function", call)["name"]) not in text:
                    raise Refused(
                        f"the chat template leaves out the tool call of message {index}",
                        "the model's template knows no tools: give another one by model.chat_template",
                    )
        reasoning = str(chat.messages[-1].get("reasoning_content") or "").strip()
        self.notes.ignored_reasoning += reasoning not in text

    def _marks_of(
        self, turns: Sequence[int], messages: Sequence[Message], tools: Any, text: str, marks: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The template's marks that belong to `turns`."""
        kept = []
        for index in turns:
            start = len(self.template_text(messages[:index], tools)) if index else 0
            head = self.template_text(messages[: index + 1], tools)
            if not text.startswith(head):
                raise Refused(
                    "only some answers are trained, and the chat template rewrites earlier turns",
                    "split the conversation into one row per trained answer",
                )
            kept += [mark for mark in marks if start <= mark[0] and mark[1] <= len(head)]
        return kept

    def _by_prefixes(self, chat: Chat, turns: Sequence[int]) -> list[Rendered]:
        messages, tools = chat.messages, chat.tools
        full = self.template_text(messages, tools)
        spans, alone = [], []
        stable = True
        for index in turns:
            prompt = self.template_text(messages[:index], tools, prompt=True)
            answered = full if index == len(messages) - 1 else self.template_text(messages[: index + 1], tools)
            if not answered.startswith(prompt):
                raise Refused(
                    _unstable(prompt, answered),
                    "for a model that thinks aloud, put its thoughts into reasoning_content; else give a template by "
                    "model.chat_template",
                )
            span = (len(prompt), self._trimmed(answered, len(prompt)))
            stable = stable and full.startswith(answered)
            spans.append(span)
            alone.append(Rendered(answered, (span,), chat=Chat(messages[: index + 1], tools)))
        if stable:
            return [Rendered(full, tuple(spans), chat=chat)]
        # The template shows earlier turns otherwise than it asked for them (Qwen3 drops their thoughts). Each answer
        # becomes a sequence of its own, in the very context that inference would see.
        self.notes.unrolled += 1
        return alone

    def _trimmed(self, text: str, start: int) -> int:
        """The end of an answer without the white space that a template prints after its end token."""
        stripped = text.rstrip()
        return len(stripped) if len(stripped) > start and stripped.endswith(self._special_texts) else len(text)

    # --- text to tokens ------------------------------------------------------------------------

    def encode(self, batch: Sequence[Rendered]) -> list[Tokens]:
        """Tokens and masks of a batch of texts.

        Raises:
            DataError: a token lies outside the model's vocabulary.
        """
        encodings = self.backend.encode_batch([item.text for item in batch], add_special_tokens=False)
        return [self._sequence(item, encoding) for item, encoding in zip(batch, encodings, strict=True)]

    def _sequence(self, item: Rendered, encoding: Any) -> Tokens:
        ids = np.asarray(encoding.ids, dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.int8)
        for start, end in item.spans:
            self._mark(mask, ids, encoding, start, end)
        if item.plain:
            ids, mask = self._plain(ids, mask, ended=not item.opening)
        if len(mask):
            mask[0] = 0  # nothing comes before the first token, so nothing can predict it
        if len(ids) and self.model_vocab is not None and int(ids.max()) >= self.model_vocab:
            raise DataError(
                f"token {int(ids.max())} lies outside the model's vocabulary of {self.model_vocab}",
                where="tokenizer",
                todo="the tokenizer does not belong to this model: check the model directory",
            )
        if not item.whole and mask.any():
            last = set(map(int, ids[np.flatnonzero(mask)[-3:]]))  # some templates mark white space after the end token
            self.notes.unended += last.isdisjoint(self.end_ids)
        return Tokens(ids, mask)

    def _mark(self, mask: Mask, ids: Ids, encoding: Any, start: int, end: int) -> None:
        """Give loss to every token that has a character of [start, end), and to the end token right after it."""
        first = _token_at(encoding, range(start, end))
        last = _token_at(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            return
        while last + 1 < len(ids) and encoding.token_to_chars(last + 1) is not None:
            if encoding.token_to_chars(last + 1)[0] >= end:
                break
            last += 1  # one character over several tokens
        if start and encoding.token_to_chars(first)[0] < start:
            self.notes.merged_boundaries += 1
        mask[first : last + 1] = 1
        if int(ids[last]) not in self.end_ids and last + 1 < len(ids) and int(ids[last + 1]) in self.end_ids:
            mask[last + 1] = 1
            self.notes.extended += 1

    def _plain(self, ids: Ids, mask: Mask, *, ended: bool) -> tuple[Ids, Mask]:
        """Add what the tokenizer puts before text, unless the text has it already, and the end token if `ended`."""
        prefix = self.prefix if list(ids[: len(self.prefix)]) != self.prefix else []
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "the tokenizer has no end token (eos_token), so a model could not learn to stop",
                where="tokenizer_config.json",
                todo="set eos_token in the model's tokenizer_config.json",
            )
        suffix = [end] if ended and (not len(ids) or int(ids[-1]) != end) else []
        whole = 0 if self.completion_only else 1
        return (
            np.concatenate([np.asarray(prefix, np.int32), ids, np.asarray(suffix, np.int32)]),
            np.concatenate([np.full(len(prefix), whole, np.int8), mask, np.ones(len(suffix), np.int8)]),
        )

    # --- proofs ----------------------------------------------------------------------------------

    def prove(self, rendered: Rendered, sequence: Tokens) -> None:
        """Check one sequence against Transformers' own tokenisation and back to text.

        Raises:
            DataError: the tokens are not those of `apply_chat_template`, or decode to another text.
        """
        ids = list(map(int, sequence.ids))
        if rendered.chat is not None:
            tools: Any = rendered.chat.tools
            theirs = self.tokenizer.apply_chat_template(
                rendered.chat.messages,
                tools=tools,
                tokenize=True,
                return_dict=False,
                add_generation_prompt=rendered.opening,
            )
            if ids != theirs:
                raise DataError(
                    "the tokens differ from those of apply_chat_template",
                    where="chat template",
                    todo="the template depends on something else than the row: give another by model.chat_template",
                )
            if self._double_start(ids):
                raise DataError(
                    f"the text begins with {self.tokenizer.bos_token!r} twice",
                    where="chat template",
                    todo="remove bos_token from the template",
                )
        bare = self.backend.encode(rendered.text, add_special_tokens=False).ids
        offset = next((at for at in range(len(self.prefix) + 1) if ids[at : at + len(bare)] == bare), None)
        if offset is None:
            raise DataError("the tokens differ from one encoding to the next", where="tokenizer")
        for start, _ in () if rendered.whole else rendered.spans:
            prompt = self.backend.encode(rendered.text[:start], add_special_tokens=False).ids
            self.notes.retokenised_prompts += bare[: len(prompt)] != prompt
        self._round_trip(rendered.text, bare)

    def _double_start(self, ids: Sequence[int]) -> bool:
        bos = self.tokenizer.bos_token_id
        return bos is not None and list(ids[:2]) == [bos, bos]

    def _round_trip(self, text: str, ids: list[int]) -> None:
        back = str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        # SentencePiece tokenizers add and drop spaces around special tokens: white space alone is no loss of words.
        if back == text or "".join(back.split()) == "".join(text.split()):
            return
        at = next((i for i, pair in enumerate(zip(back, text, strict=False)) if pair[0] != pair[1]), len(back))
        raise DataError(
            f"the tokens do not decode to the text they were made of: {text[max(0, at - 20) : at + 20]!r} "
            f"came back as {back[max(0, at - 20) : at + 20]!r}",
            where="tokenizer",
            todo="the tokenizer loses characters, so the model would be trained on another text: use another model",
        )


def _token_at(encoding: Any, positions: Iterable[int]) -> int | None:
    """The token of the first of these characters that has one (tokenizers drop some white space)."""
    return next((token for token in map(encoding.char_to_token, positions) if token is not None), None)


def _as_chat(example: Answered) -> Chat:
    if isinstance(example, Pair):
        question, answer, system = example.prompt, example.completion, ""
    elif isinstance(example, Instruction):
        question = f"{example.instruction}\n\n{example.input}" if example.input.strip() else example.instruction
        answer, system = example.output, example.system
    else:
        raise TypeError(f"{type(example).__name__} is no question and answer")
    start = [{"role": "system", "content": system}] if system.strip() else []
    return Chat([*start, {"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _without_weights(chat: Chat) -> Chat:
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in chat.messages]
    return Chat(messages, chat.tools, chat.trained_from)


def _arguments_as_text(chat: Chat) -> Chat:
    def text_of(call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function", call))
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return call | {"function": function} if "function" in call else function

    messages = [
        message | {"tool_calls": [text_of(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in chat.messages
    ]
    return Chat(messages, chat.tools, chat.trained_from)


def _plain_layout(example: Pair | Instruction) -> tuple[str, str]:
    """Prompt and answer without a chat template: a pair as it stands, an instruction in Stanford Alpaca's layout."""
    if isinstance(example, Pair):
        return example.prompt, example.completion
    has_input = bool(example.input.strip())
    intro = f"{example.system}\n\n" if example.system.strip() else ALPACA_INTRO[has_input]
    body = f"### Instruction:\n{example.instruction}\n\n"
    body += f"### Input:\n{example.input}\n\n" if has_input else ""
    return f"{intro}{body}### Response:\n", example.output


def _unstable(prompt: str, answered: str) -> str:
    at = next((i for i, pair in enumerate(zip(prompt, answered, strict=False)) if pair[0] != pair[1]), len(answered))
    return (
        f"no exact mask: the template asks with {prompt[max(0, at - 15) :][:60]!r} but renders the answered turn as "
        f"{answered[max(0, at - 15) :][:60]!r}, so the model would be trained on what inference never asks"
    )


def _no_template() -> DataError:
    return DataError(
        "the model has no chat template, and the rows are conversations",
        where="model.chat_template",
        todo="set model.chat_template to a Jinja template, or use the model's instruction-tuned version",
    )


# --- loading ---------------------------------------------------------------------------------------


def load_tokenizer(
    model: Path,
    *,
    chat_template: str | None,
    completion_only: bool,
    trust_remote_code: bool = False,
    added: Sequence[str] = (),
) -> ChatTokenizer:
    """The tokenizer in a model directory.

    Args:
        model: the directory, as `from_pretrained` reads it.
        chat_template: template that replaces the tokenizer's own.
        completion_only: mask everything but the answers.
        trust_remote_code: run Python code of the model directory.
        added: tokens to add to the vocabulary.

    Raises:
        DataError: there is no tokenizer, or it has no fast version.
        UsageError: the template is not Jinja; an added token is there already.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise DataError(
            f"the tokenizer cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}",
            where=str(model),
            todo="the model directory needs tokenizer.json (or tokenizer.model) and tokenizer_config.json",
        ) from None
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} has no fast version, so tokens cannot be traced to characters",
            where=str(model),
            todo="convert it once: AutoTokenizer.from_pretrained(..., from_slow=True).save_pretrained(...)",
        )
    add_tokens(tokenizer, added)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    source = "model.chat_template" if chat_template is not None else "the tokenizer" if tokenizer.chat_template else ""
    loaded = ChatTokenizer(
        tokenizer=tokenizer,
        template_source=source,
        completion_only=completion_only,
        end_ids=_end_ids(model, tokenizer),
        model_vocab=_vocabulary(model, tokenizer if added else None),
        model_context=_model_number(model, "max_position_embeddings", "n_positions", "max_sequence_length"),
        files_sha256=tokenizer_digest(model),
    )
    _check_template(loaded)
    return loaded


def _check_template(loaded: ChatTokenizer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    if not loaded.template_source:
        return
    try:
        render_jinja_template(conversations=[[{"role": "user", "content": "x"}]], chat_template=loaded.template)
    except TemplateSyntaxError as error:
        kind = UsageError if loaded.template_source == "model.chat_template" else DataError
        raise kind(f"not a Jinja template: {error}", where=loaded.template_source) from None
    except _TEMPLATE_ERRORS:
        return  # this toy row is not for this template; real rows report their own faults


def _config(model: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((model / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _model_number(model: Path, *names: str) -> int | None:
    """A number of the model's configuration, under the first of these names that it has."""
    config = _config(model, "config.json")
    text = config.get("text_config")
    for name in names:
        size = (text if isinstance(text, dict) else config).get(name)
        if isinstance(size, int):
            return size
    return None


def _vocabulary(model: Path, grown: Any) -> int | None:
    """Rows of the model's embeddings; as many as the tokenizer `grown` needs where tokens are added."""
    size = _model_number(model, "vocab_size")
    return size if size is None or grown is None else max(size, len(grown))


def _end_ids(model: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end generation: the tokenizer's and those that the model's generation settings name."""
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    for name in ("generation_config.json", "config.json"):
        value = _config(model, name).get("eos_token_id")
        found |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    return frozenset(found)
