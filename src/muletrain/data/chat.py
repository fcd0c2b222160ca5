"""Conversations and pairs become tokens: a chat template renders each, and some of the tokens count towards the loss.

A template is Jinja text, rendered by ``transformers`` in a sandbox. The tokens that count are the template's own
``{% generation %}`` blocks; in a template without these, what a turn of the assistant adds to the text before that
turn, up to where the next turn begins.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from muletrain.data.corpus import Corpus
from muletrain.data.files import Columns, Document, EveryColumn, TextColumn, once
from muletrain.data.microbatch import SILENT
from muletrain.errors import CheckpointError, DataError
from muletrain.model.hf_hub import is_hub_name, text_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from muletrain.config.model_sections import DataConfig, Format
    from muletrain.data.encoder import Encoder

    Span = tuple[int, int]

ASSISTANT = "assistant"
_ROLES = {
    **{role: role for role in ("system", "user", ASSISTANT, "tool")},
    **{"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "ai": ASSISTANT},
}
"""Roles in small letters, as ShareGPT and others write them, by the names that templates use."""
MESSAGES = ("messages", "conversations", "conversation")
QUESTIONS, ANSWERS = ("prompt", "instruction", "question"), ("completion", "output", "response", "answer")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NOW = re.compile(r"\bstrftime_now\b")
_FORMAT = re.compile(r"""\bstrftime_now\(\s*(["'])(.+?)\1""")
_USUAL_FORMAT = "%d %b %Y"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""``data.chat_template = "chatml"``, for models without a template."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")
_SAID = "well enough"
_RESOLVED = "{# muletrain #}"
"""Begins a template in which nothing is left to look up."""


@dataclass(frozen=True)
class ChatColumns:
    """Rows that are conversations, or pairs of a question and an answer. A document is the JSON of
    ``conversation``."""

    kind: Format
    whole = True

    def chosen(self, names: Sequence[str], place: str) -> list[str]:
        """See ``files.Columns``."""
        if self.kind == "messages":
            return [_first_of(MESSAGES, names, place), *({"tools"} & {*names})]
        extra = [name for name in ("input", "system", "tools") if name in names]
        return [_first_of(QUESTIONS, names, place), _first_of(ANSWERS, names, place), *extra]

    def document(self, row: dict[str, Any], place: str) -> Document:
        """See ``files.Columns``."""
        found = conversation(row, self.kind, place)
        return Document(place, partial(once, json.dumps(found, ensure_ascii=False)), row=True)


def columns_of(config: DataConfig) -> Columns:
    """What a row of ``data.path`` holds, once ``data.format`` is known."""
    return ChatColumns(config.format) if config.counts else TextColumn(config.field)


def kind_of(names: Iterable[str], field: str) -> Format:
    """The format of rows with these columns; ``field``: the column of plain text, which goes before."""
    names = {*names}
    if field in names or not names:
        return "text"
    if names & {*MESSAGES}:
        return "messages"
    return "pairs" if names & {*QUESTIONS} and names & {*ANSWERS} else "text"


def conversation(row: Mapping[str, Any], kind: Format, place: str) -> dict[str, Any]:
    """``{"messages": [...], "tools": [...]}`` of a row: each message with a role. Raises DataError."""
    if kind == "messages":
        name = _first_of(MESSAGES, row, place)
        messages = _messages(row[name], place, name)
    else:
        question, answer = _first_of(QUESTIONS, row, place), _first_of(ANSWERS, row, place)
        asked, said = (_turns(row[name], role, place, name) for name, role in ((question, "user"), (answer, ASSISTANT)))
        if (more := row.get("input")) and isinstance(more, str) and isinstance(asked[-1].get("content"), str):
            asked[-1]["content"] += f"\n\n{more}"
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        messages = [*system, *asked, *said]
    tools = row.get("tools") or None
    try:
        return {"messages": messages, "tools": json.loads(tools) if isinstance(tools, str) else tools}
    except ValueError as e:
        raise DataError(f"data.path: {place}: 'tools' is not JSON: {e}") from e


def _first_of(wanted: Sequence[str], names: Iterable[str], place: str) -> str:
    names = list(names)
    found = next((name for name in wanted if name in names), None)
    if found is None:
        raise DataError(
            f"data.path: {place}: none of the columns {', '.join(wanted)} is there, but {', '.join(names) or 'none'}; rename "
            f"one, or set data.format"
        )
    return found


def _turns(value: object, role: str, place: str, name: str) -> list[dict[str, Any]]:
    """A cell of a pair as messages: a text, or messages already."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages(value, place, name)


def _messages(value: object, place: str, name: str) -> list[dict[str, Any]]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise DataError(f"data.path: {place}: '{name}' is not JSON: {e}") from e
    if not isinstance(value, list):
        raise DataError(f"data.path: {place}: '{name}' is {type(value).__name__}; give a list of messages")
    found = [_message(message, f"{place}: message {n} of '{name}'") for n, message in enumerate(value, start=1)]
    if not found:
        raise DataError(f"data.path: {place}: '{name}' has no message; leave the row out")
    return found


def _message(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"data.path: {place} is {type(value).__name__}; give {{'role': ..., 'content': ...}}")
    message = {key: item for key, item in value.items() if item is not None}
    if "role" not in message and isinstance(message.get("from"), str):
        message = {"role": message.pop("from"), "content": message.pop("value", ""), **message}
    role = message.get("role")
    if not isinstance(role, str) or not ("content" in message or "tool_calls" in message):
        empty = [key for key, item in value.items() if item is None]
        raise DataError(
            f"data.path: {place} has {', '.join(message) or 'nothing'}{f' ({empty[0]} is null)' if empty else ''}; give a 'role' "
            f"and a 'content' (or 'from' and 'value'), both text"
        )
    message["role"] = _ROLES.get(role.strip().lower(), role)
    if message["role"] != ASSISTANT and difflib.get_close_matches(role.lower(), [ASSISTANT], cutoff=0.8):
        raise DataError(f"data.path: {place} has the role '{role}'; did you mean '{ASSISTANT}'?")
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_called(call, place) for call in calls]
    return message


def _called(call: Any, place: str) -> Any:
    """A tool call with its arguments as a table, as templates take them; OpenAI's interface has them as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise DataError(
            f"data.path: {place} has tool_calls of {type(call).__name__}; give {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        function = {**function, "arguments": json.loads(function["arguments"])}
    except ValueError as e:
        raise DataError(
            f"data.path: {place}: the arguments of the tool call '{function.get('name')}' are not JSON: {e}"
        ) from e
    return {**call, "function": function} if "function" in call else function


def with_format(config: DataConfig) -> DataConfig:
    """``config`` with the format of its rows, by the first one. Raises DataError."""
    if config.factory is not None or config.format != "auto":
        return config
    found = kind_of(Corpus(config.path, EveryColumn()).first_row(), config.field)
    return config.model_copy(update={"format": found})


def resolved(config: DataConfig, before: str | None = None) -> DataConfig:
    """``config`` with the format of its rows, by the first one, and with the text of the chat template. ``before``: see
    ``chat_template``. Raises DataError."""
    if config.factory is not None:
        return config
    known = with_format(config)
    if known.counts and config.special_tokens == "text":
        raise DataError("data.special_tokens: 'text', but a chat template writes special tokens; leave it out")
    if not known.counts and config.chat_template is not None:
        raise DataError(
            f"data.chat_template: '{config.path}' holds plain text, not conversations; leave it out, or set data.format"
        )
    return known.model_copy(update={"chat_template": chat_template(known, before)}) if known.counts else known


# Templates ------------------------------------------------------------------------------------------------------------


def is_resolved(template: str | None) -> bool:
    """Is there nothing left to look up for ``data.chat_template``?"""
    return template is not None and template.startswith(_RESOLVED)


def chat_template(config: DataConfig, before: str | None = None) -> str:
    """The text of ``data.chat_template``, or the tokenizer's own, with its special tokens bound. ``before``: what this
    gave when a resumed run began, for a tokenizer that is only a file now. Raises DataError."""
    given = config.chat_template
    if given is not None and is_resolved(given):
        return given
    own, tokens = _declared(config.tokenizer)
    if given is None and own is None:
        if before is not None:
            return before
        raise DataError(
            f"data.chat_template: the tokenizer '{config.tokenizer}' declares no chat template, and data.path holds "
            f"conversations; set it to 'chatml', to a file of Jinja text, or to the template of a model that was trained alike"
        )
    if given is None:
        text = own or ""
    elif given == "chatml":
        text = CHATML
    elif "{" in given:
        text = given
    elif os.path.isfile(path := os.path.expanduser(given)):
        text = _read(Path(path))
    else:
        text, tokens = _of_another(given)
    bound = "".join(f"{{% set {name} = {json.dumps(token)} %}}" for name, token in sorted(tokens.items()))
    fixed = _fixed_date(text, config.date)
    if _NOW.search(text):
        bound += fixed
    elif config.date != type(config).model_fields["date"].default:
        raise DataError("data.date: the chat template prints no date (strftime_now); leave it out")
    return f"{_RESOLVED}{bound}\n{text}"


def _fixed_date(template: str, day: str) -> str:
    """A macro in place of the function by which a template prints today's date: tokens depend on no clock."""
    try:
        fixed = date.fromisoformat(day)
    except ValueError as e:
        raise DataError(f"data.date: '{day}' is no date ({e}); write it as 2024-07-26") from e
    other = sorted({form for _, form in _FORMAT.findall(template)} - {_USUAL_FORMAT})
    cases = "".join(f"{{% if format == {json.dumps(form)} %}}{fixed:{form}}{{% else %}}" for form in other)
    return (
        f"{{% macro strftime_now(format) %}}{cases}{fixed:{_USUAL_FORMAT}}{'{% endif %}' * len(other)}{{% endmacro %}}"
    )


def declares_template(name: str) -> bool:
    """Does a model's folder, or the model of that name, declare a chat template? Raises DataError."""
    return _declared(name)[0] is not None


def prints_date(config: DataConfig) -> bool:
    """Does the chat template print a date? ``config``: resolved."""
    return config.counts and _NOW.search(config.chat_template or "") is not None


def plain_template(config: DataConfig) -> str | None:
    """The template of a run on conversations for other programs, which bind special tokens themselves; else None."""
    return chat_template(config).partition("\n")[2] if config.counts else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"data.chat_template: cannot read {path}: {e}; give a file of UTF-8 text") from e


def _of_another(name: str) -> tuple[str, dict[str, str]]:
    """The template of another model's folder or name."""
    if not os.path.isdir(os.path.expanduser(name)) and (
        Path(name).suffix in _SUFFIXES or name.startswith(("/", "~", "."))
    ):
        raise DataError(
            f"data.chat_template: no such file: '{name}'; check the path, or give 'chatml' or a model's name"
        )
    own, tokens = _declared(name)
    if own is None:
        raise DataError(
            f"data.chat_template: '{name}' is no file, and no model with a chat template; give 'chatml', a file of Jinja text, a "
            f"model's folder, or a Hugging Face name"
        )
    return own, tokens


def _declared(name: str) -> tuple[str | None, dict[str, str]]:
    """The template in a model's folder, by the name of its tokenizer, and its special tokens. Raises DataError."""
    path = Path(name).expanduser()
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        if not is_hub_name(name):
            return None, {}
        try:
            folder = text_folder(name, ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
        except CheckpointError as e:
            raise DataError(f"data.chat_template: {e}") from e
    settings = _json(folder / "tokenizer_config.json")
    template: Any = settings.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    if (file := folder / "chat_template.jinja").is_file():
        template = _read(file)
    tokens = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[key] = token
    return template if isinstance(template, str) else None, tokens


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Rendered(NamedTuple):
    """A conversation as text, and the parts of it that count."""

    text: str
    counted: list[Span]


class Template:
    """Renders conversations. ``loss_on``: 'assistant' (each of its turns), 'last' (its last one) or 'all' (every
    token)."""

    def __init__(self, text: str, loss_on: str) -> None:
        self._text, self._loss_on = text, loss_on
        self._marks = _GENERATION.search(text) is not None

    def rendered(self, chat: Mapping[str, Any], place: str) -> Rendered:
        """Render ``conversation``. Raises DataError if the template does not take it, or changes turns later."""
        messages, tools = chat["messages"], chat["tools"]
        if self._loss_on == "all":
            text, _ = self._render(messages, tools, place)
            return Rendered(text, [(0, len(text))])
        if self._marks:
            text, spans = self._render(messages, tools, place, marks=True)
            spans = [(begin, end) for begin, end in spans if begin < end]
            return Rendered(text, spans[-1:] if self._loss_on == "last" else spans)
        text, _ = self._render(messages, tools, place)
        turns = [n for n, message in enumerate(messages) if message["role"] == ASSISTANT]
        if self._loss_on == "last":
            turns = turns[-1:]
        return Rendered(text, [self._turn(text, n, chat, place) for n in turns])

    def asked(self, question: str) -> tuple[str, str]:
        """The text in which a user asks ``question`` and the assistant has the word, and what ends its turn."""
        user = {"role": "user", "content": question}
        text, _ = self._render([user], None, "the question", asks=True)
        said, _ = self._render([user, {"role": ASSISTANT, "content": _SAID}], None, "the question")
        return text, said.rpartition(_SAID)[2]

    def _turn(self, text: str, n: int, chat: Mapping[str, Any], place: str) -> Span:
        """What turn ``n`` of the assistant adds to ``text``: from where the text differs without it, to where the text
        differs without what follows."""
        messages, tools = chat["messages"], chat["tools"]
        last, first = n + 1 == len(messages), n == 0
        end = len(text) if last else _common(text, self._render(messages[: n + 1], tools, place)[0])
        begin = 0 if first else _common(text, self._render(messages[:n], tools, place, asks=True)[0])
        said, heard = _content(messages[n]), "" if first else _content(messages[n - 1])
        if begin >= end or said not in text[begin:end] or heard not in text[:begin]:
            raise DataError(
                f"data.chat_template: {place}: the template writes turn {n + 1} in another way once later turns follow (or "
                f"before it is asked for), so what the assistant says there cannot be told from the rest; set "
                f"data.loss_on = 'last' or 'all', or enclose it in {{% generation %}} ... {{% endgeneration %}} in a template of yours"
            )
        return begin, end

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        place: str,
        *,
        marks: bool = False,
        asks: bool = False,
    ) -> tuple[str, list[Span]]:
        from jinja2 import TemplateError, TemplateSyntaxError  # with transformers, takes seconds to import
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._text,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=asks,
            )
        except TemplateSyntaxError as e:
            line = e.lineno - self._text.startswith(_RESOLVED)
            raise DataError(
                f"data.chat_template: it is no Jinja template (line {line}: {e.message}); correct it, or give another one"
            ) from e
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as e:
            raise DataError(
                f"data.chat_template: {place}: the template does not take this conversation: {e}; correct the row, or give another "
                f"template"
            ) from e
        return texts[0], [(int(begin), int(end)) for begin, end in (spans[0] if spans else [])]


def _common(a: str, b: str) -> int:
    """Characters with which both texts begin."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else ""


def tokens_of(encoder: Encoder, rendered: Rendered) -> npt.NDArray[np.uint32]:
    """Tokens of a conversation, as ``apply_chat_template`` gives them; those that do not count, and the first one, are
    ``SILENT``. A token counts if it begins or goes on in a part that counts, and ends there."""
    encoding = encoder.tokenizer.encode(rendered.text, add_special_tokens=False)
    ids = np.asarray(encoding.ids, dtype=np.uint32)
    offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    counts = np.zeros(len(ids), dtype=bool)
    for begin, end in rendered.counted:
        counts |= (offsets[:, 1] > begin) & (offsets[:, 1] <= end) & (offsets[:, 0] < offsets[:, 1])
    counts[:1] = False
    return np.where(counts, ids, ids | np.uint32(SILENT))


# Rows of tokens -------------------------------------------------------------------------------------------------------

OPEN = 1 << 10
"""Rows that a conversation may still go into."""


def packed(lengths: Iterable[int], size: int) -> list[int]:
    """The row of each conversation, first fit: the oldest of ``OPEN`` rows of ``size`` tokens that has room."""
    left, names, made, found = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0, []
    for length in lengths:
        fits = left >= length
        k = int(fits.argmax()) if fits.any() else len(left)
        if k == len(left):
            if len(left) == OPEN:  # the fullest one is closed
                closed = int(left.argmin())
                left, names = np.delete(left, closed), np.delete(names, closed)
            left, names, made = np.append(left, size), np.append(names, made), made + 1
            k = len(left) - 1
        left[k] -= length
        found.append(int(names[k]))
    return found
