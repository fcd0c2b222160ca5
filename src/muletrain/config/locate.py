"""Lines of keys in a TOML file, for error messages; ``tomllib`` returns values without lines."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field

KeyPath = tuple[str | int, ...]

_SKIP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_TOKEN = re.compile(
    r'''"""(?:\\[\s\S]|[^\\])*?"{3,5}(?!")|\'\'\'[\s\S]*?\'{3,5}(?!\')'''  # strings over several lines
    r"""|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[\s\S]"""
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every key and table header of ``text``, which must be valid TOML. Keys inside inline tables are
    left out."""
    return _Scanner(text).scan()


@dataclass
class _Scanner:
    text: str
    at: int = 0
    lines: dict[KeyPath, int] = field(default_factory=dict)
    counts: dict[KeyPath, int] = field(default_factory=dict)  # elements of each [[array of tables]] so far

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip():
            line = self.text.count("\n", 0, self.at) + 1
            if self.text[self.at] == "[":
                table = self._header()
                self._note(table, line)
            else:
                self._note((*table, *self._key()), line)
                self._value()
        return self.lines

    def _skip(self) -> bool:
        self.at = _SKIP.match(self.text, self.at).end()  # type: ignore[union-attr] # matches the empty string too
        return self.at < len(self.text)

    def _note(self, path: KeyPath, line: int) -> None:
        for n in range(1, len(path) + 1):  # `model.layers = 4` also opens `model`
            self.lines.setdefault(path[:n], line)

    def _header(self) -> KeyPath:
        is_array = self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        self.at += len(self.text[self.at :]) - len(self.text[self.at :].lstrip(" \t"))
        path = self._inside(self._key())
        if is_array:
            self.counts[path] = self.counts.get(path, 0) + 1
            path = (*path, self.counts[path] - 1)
        self.at = self.text.index("]]" if is_array else "]", self.at) + (2 if is_array else 1)
        return path

    def _inside(self, key: KeyPath) -> KeyPath:
        """The path of a header: below an array of tables, the path is in the newest element."""
        path: KeyPath = ()
        for part in key[:-1]:
            path = (*path, part)
            if path in self.counts:
                path = (*path, self.counts[path] - 1)
        return (*path, key[-1])

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while match := _KEY.match(self.text, self.at):
            raw, self.at = match.group(), match.end()
            parts.append(tomllib.loads(f"k = {raw}")["k"] if raw[0] in "\"'" else raw)
            dot = _DOT.match(self.text, self.at)
            if dot is None:
                break
            self.at = dot.end()
        return tuple(parts)

    def _value(self) -> None:
        depth = 0
        while match := _TOKEN.match(self.text, self.at):
            self.at, token = match.end(), match.group()
            depth += (token in "[{") - (token in "]}")
            if token == "\n" and depth == 0:
                break


@dataclass
class Origins:
    """The origin of each value: a line of a file, or a ``--set``."""

    file: str | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def override(self, path: KeyPath, text: str) -> None:
        """Remember that ``--set text`` wrote ``path``."""
        self.overrides[path] = text

    def knows(self, path: KeyPath) -> bool:
        """Whether the user set exactly this key."""
        return path in self.overrides or path in self.lines

    def where(self, path: KeyPath) -> str:
        """The most precise known place of ``path``: 'FILE:LINE', '--set TEXT', 'FILE', or 'default configuration'."""
        for n in range(len(path), 0, -1):
            if path[:n] in self.overrides:
                return f"--set {self.overrides[path[:n]]}"
            if path[:n] in self.lines:
                return f"{self.file}:{self.lines[path[:n]]}"
        for known, text in self.overrides.items():
            if known[: len(path)] == path:  # the first to name a section that no file has
                return f"--set {text}"
        return self.file or "default configuration"
