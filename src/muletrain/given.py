"""What a script gives to a run, as arguments of the command: objects become files of a new run folder.

A model of ``transformers`` is saved as such a folder, rows and a ``datasets.Dataset`` as a file of rows, lists of token
ids as rows of numbers with a tokenizer of numbers. Only a module and a dataset of (input, target) need the script's
code: see ``script``.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muletrain.errors import ConfigError
from muletrain.runs.folder import ROOT, new_run_folder
from muletrain.script import Part, keep, script_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ENDLESS = 5_000_000
"""Rows of an iterable without a length after which it counts as one that never ends."""
LOOKED_AT = 10_000
"""Samples of a dataset up to which all are read, to find the largest integer."""
HELDOUT = 0.05
"""Share of samples that is held out, unless data.heldout says another one."""
_SPLITS = ("validation", "test")
_TEXT = {"text", "messages", "conversations", "prompt", "instruction"}
"""Columns that hold what the token ids beside them were made of."""


class Given:
    """What is given to ``muletrain.train`` or ``start``. Raises ConfigError, and leaves no folder then."""

    def __init__(
        self,
        command: str,
        config: str | Path | None,
        model: Any,
        data: Any,
        tokenizer: Any,
        sections: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._command, self._config = command, config
        self._end: int | None = None
        """Token that ends a document, by the model that is given as an object."""
        self._name = command if config is None else Path(config).stem
        self.run: Path | None = None
        """The run folder that holds objects of the script; None: there are none."""
        for section, fields in sections.items():
            if not hasattr(fields, "items"):
                raise ConfigError(f"{section}={fields!r}: give the fields of the section: {section}={{...}}")
        self._found: dict[str, dict[str, Any]] = {name: dict(fields) for name, fields in sections.items()}
        try:
            self._found["model"] = self._model(model, tokenizer)
            self._found["data"] = self._data(data)
        except BaseException:
            self.give_up()
            raise
        self.factories = tuple({**_factories(config), **_named(self._found)})
        """Factories that the user named, or that are the script's."""
        self.arguments = [*([] if config is None else [str(config)]), *sets(self._found)]

    def give_up(self) -> None:
        """Remove the objects of a run that did not begin."""
        if self.run is not None and not (self.run / "config.toml").is_file():
            shutil.rmtree(self.run, ignore_errors=True)
            with suppress(OSError):
                ROOT.rmdir()  # unless other runs are in it

    # Models -----------------------------------------------------------------------------------------------------------

    def _model(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        if hasattr(model, "items") and not hasattr(model, "forward"):
            return self._fields(dict(model), tokenizer)
        if tokenizer is not None and not hasattr(model, "save_pretrained"):
            raise ConfigError(
                "tokenizer: it belongs to a transformers model that is given with it; otherwise set data={'tokenizer': ...}"
            )
        if model is None:
            return {}
        if isinstance(model, str | Path):
            return {"from": str(model)}
        built = not isinstance(model, type)
        if built:
            _check_weights(model)
        if built and hasattr(model, "save_pretrained"):
            return self._pretrained(model, tokenizer)
        if built and hasattr(model, "named_parameters"):
            return {"factory": self._kept("model", model, f"model={{'factory': '{_PACKAGE}models:build'}}")}
        raise ConfigError(
            f"model: {type(model).__name__}; give a name, a folder, a transformers model, an nn.Module, or the fields of the section"
        )

    def _fields(self, fields: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        """Fields of the section 'model', of which 'from' and 'factory' may be objects."""
        name = next((name for name in ("from", "factory") if name in fields), "from")
        given = fields.get(name)
        if given is None or isinstance(given, str | Path):
            self._model(given, tokenizer)  # raises for a tokenizer
            return fields
        found = self._model(given, tokenizer)
        if name not in found:
            raise ConfigError(
                f"model: {type(given).__name__} is no '{name}'; give model={{'{next(iter(found))}': ...}}"
            )
        return fields | found

    def _pretrained(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "model: it has an adapter of peft already; give the model without it and adapter={'rank': ...}, or save the "
                "adapter and give adapter={'from': FOLDER}"
            )
        end = getattr(getattr(model, "config", None), "eos_token_id", None)
        self._end = next(iter(end), None) if isinstance(end, list) else end
        folder = self._place() / "model"
        for thing in filter(None, (model, tokenizer)):
            thing.save_pretrained(folder)
        return {"from": str(folder)}

    # Data -------------------------------------------------------------------------------------------------------------

    def _data(self, data: Any) -> dict[str, Any]:
        if data is None:
            return {}
        if isinstance(data, str | Path):
            return {"path": str(data)}
        if hasattr(data, "iloc"):  # a table of pandas
            data = data.to_dict("records")
        if hasattr(data, "items"):
            return self._sides(dict(data))
        if isinstance(data, tuple | list) and len(data) == 2 and all(_is_samples(side) for side in data):
            return self._samples(*data)
        return self._side(data, "data")

    def _sides(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of the section 'data', of which 'path' and 'validation' may be objects; or splits of a dataset."""
        if "train" in fields and not isinstance(fields["train"], str):  # a datasets.DatasetDict
            held = next((fields[name] for name in _SPLITS if name in fields), None)
            fields = {"path": fields["train"], **({} if held is None else {"validation": held})}
        path, held = fields.get("path"), fields.get("validation")
        if path is None or isinstance(path, str | Path):
            return fields
        if _is_samples(path):
            share = fields.pop("heldout", HELDOUT)
            rest = {name: value for name, value in fields.items() if name not in ("path", "validation")}
            return {**rest, **self._samples(path, held, share)}
        found = self._side(path, "data", fields.get("end_token"))
        if held is not None and not isinstance(held, str | Path):
            if "tokenizer" in found:
                raise ConfigError("data: of token ids, a share is held out (heldout=...); leave out 'validation'")
            found["validation"] = self._side(held, "validation").get("path")
        return {**fields, **found}

    def _side(self, data: Any, name: str, end: Any = None) -> dict[str, Any]:
        """Text, conversations, token ids or samples."""
        if _is_samples(data):
            return self._samples(data)
        if _is_table(data):
            path = self._place() / f"{name}.parquet"
            data.to_parquet(path)
            return {"path": str(path)}
        rows = _ending(data)
        first = next(rows, None)
        if first is None:
            raise ConfigError(f"{name}: it has no rows; give some")
        if (ids := _ids(first)) is not None:
            return self._tokens(itertools.chain([ids], map(_ids, rows)), end)
        path = self._place() / f"{name}.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for n, row in enumerate(itertools.chain([first], rows)):
                file.write(_line(row, f"{name}: row {n}"))
        return {"path": str(path)}

    def _tokens(self, rows: Iterable[list[int] | None], end: Any) -> dict[str, Any]:
        """Documents of token ids, as numbers, and a tokenizer to which number 5 is token 5."""
        end = self._end if end is None else end
        if end is None and "from" in self._found["model"]:
            raise ConfigError(
                "data: name the token that ends a document of this model: data={'path': rows, 'end_token': ID}"
            )
        path, largest = self._place() / "tokens.jsonl", 0
        with path.open("w", encoding="utf-8") as file:
            for n, ids in enumerate(rows):
                if ids is None or min(ids, default=0) < 0:
                    raise ConfigError(f"data: row {n} is no list of token ids; give integers from 0 on")
                largest = max(largest, max(ids, default=0))
                file.write(json.dumps({"text": " ".join(map(str, ids))}) + "\n")
        last = largest + 1 if end is None else int(end)
        tokenizer = self._place() / "tokens.json"
        tokenizer.write_bytes(_of_numbers(max(largest, last) + 1))
        return {"path": str(path), "tokenizer": str(tokenizer), "end_token": _word(last)}

    def _samples(self, train: Any, heldout: Any = None, share: float = HELDOUT) -> dict[str, Any]:
        """A dataset of (input, target), of which every so many-th sample is held out unless ``heldout`` has others."""
        for side in (train, heldout) if heldout is not None else (train,):
            if not len(side):
                raise ConfigError("data: the dataset is empty; give some samples")
        name = type(train).__name__
        if heldout is None:
            held = range(0, len(train), max(2, round(1 / share)) if share else len(train))
            rest = sorted({*range(len(train))} - {*held})
            train, heldout = Part(train, rest), Part(train, held)
        name = self._kept("data", (train, heldout), f"data={{'factory': '{_PACKAGE}data:build'}}", name)
        model = self._found["model"]
        unknown = self._config is None and "vocab" not in model
        if unknown and (largest := _largest((train, heldout))) is not None:
            model["vocab"] = largest + 1
        return {"factory": name}

    # Files ------------------------------------------------------------------------------------------------------------

    def _kept(self, field: str, thing: object, remedy: str, name: str = "") -> str:
        """The factory of ``thing``. ``name``: of its class."""
        name = name or type(thing).__name__
        shown = name if field == "model" else "the dataset"
        if self._command == "start":
            raise ConfigError(
                f"{field}: {shown} is this script's, and its code goes to no other machine; install a package that builds it on "
                f"each machine, and give {remedy}"
            )
        try:
            return keep(self._run_folder(), name, thing)
        except ConfigError as e:
            raise ConfigError(f"{field}: {shown}: {e}") from e

    def _run_folder(self) -> Path:
        if self.run is None:
            self.run = new_run_folder(self._name)
        return self.run

    def _place(self) -> Path:
        return script_folder(self._run_folder())


_PACKAGE = "mypackage."


def sets(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """``--set`` for each field."""
    return [
        word
        for section, fields in sections.items()
        for name, value in fields.items()
        for word in ("--set", f"{section}.{name}={_toml(value)}")
    ]


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


def _factories(config: str | Path | None) -> dict[str, None]:
    """The factories that a TOML file names; what is wrong with the file, the command says."""
    if config is None:
        return {}
    with suppress(OSError, ValueError):
        return _named(tomllib.loads(Path(config).read_text(encoding="utf-8")))
    return {}


def _named(sections: Mapping[str, Any]) -> dict[str, None]:
    found = (sections.get(name, {}) for name in ("model", "data"))
    return {fields["factory"]: None for fields in found if isinstance(fields, dict) and "factory" in fields}


def _check_weights(model: Any) -> None:
    parameters = dict(model.named_parameters()) if hasattr(model, "named_parameters") else {}
    if meta := next((name for name, parameter in parameters.items() if parameter.is_meta), None):
        raise ConfigError(
            f"model: its parameter {meta} is on the meta device and has no values; load the weights first, or give the name or "
            f"the folder of the model"
        )


def _is_samples(data: Any) -> bool:
    """Is ``data`` a dataset of (input, target)? Raises ConfigError for one that nobody can index."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.utils.data.IterableDataset):
        if isinstance(next(iter(data), None), tuple):
            raise ConfigError(
                f"data: {type(data).__name__} has no length and no order, and every process needs sample number k; give a dataset "
                f"with __len__ and __getitem__"
            )
        return False
    if isinstance(data, str | Path) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return False
    if hasattr(data, "items") or hasattr(data, "column_names") or not len(data):
        return False
    try:
        first = data[0]
    except Exception as e:  # of the user's code
        raise ConfigError(
            f"data: {type(data).__name__}[0] raises {type(e).__name__}: {e}; samples have numbers from 0 on"
        ) from e
    return isinstance(first, tuple) and len(first) == 2


def _is_table(data: Any) -> bool:
    """Is ``data`` a ``datasets.Dataset`` of text or conversations?"""
    if not (hasattr(data, "to_parquet") and hasattr(data, "__len__") and hasattr(data, "column_names")):
        return False
    columns = {*data.column_names}
    return "input_ids" not in columns or bool(_TEXT & columns)


def _largest(sides: Iterable[Any]) -> int | None:
    """The largest integer of inputs and targets, if there are few samples; None: there is none, or many samples."""
    if sum(len(side) for side in sides) > LOOKED_AT:
        return None
    largest = None
    for side in sides:
        for k in range(len(side)):
            with suppress(Exception):  # a sample that cannot be read: data.on_error
                for value in map(np.asarray, side[k]):
                    if value.dtype.kind in "iu" and value.size:
                        largest = max(int(value.max()), 0 if largest is None else largest)
    return largest


def _ending(data: Any) -> Iterator[Any]:
    """The rows. Raises ConfigError if nobody can iterate over them, and if there is no end."""
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        yield from (data[k] for k in range(len(data)))
        return
    if not hasattr(data, "__iter__") and hasattr(data, "__getitem__"):
        raise ConfigError(f"data: {type(data).__name__} has no length; give it __len__")
    if not hasattr(data, "__iter__"):
        raise ConfigError(f"data: {type(data).__name__}; give a path, texts, rows, token ids, or a dataset")
    for n, row in enumerate(data):
        if n == ENDLESS and not hasattr(data, "__len__"):
            raise ConfigError(
                f"data: {n:,} rows and no end; give something with a length, or itertools.islice(rows, N), or the path of files"
            )
        yield row


def _ids(row: Any) -> list[int] | None:
    """The token ids of a row; None: the row is something else."""
    if hasattr(row, "items"):
        row = None if _TEXT & {*row} else row.get("input_ids")
    if row is None or isinstance(row, str | bytes):
        return None
    try:
        ids = np.asarray(row)
    except Exception:  # rows of several lengths, or objects
        return None
    return ids.tolist() if ids.ndim == 1 and (ids.dtype.kind in "iu" or not ids.size) else None


def _line(row: Any, place: str) -> str:
    """A row as JSON. Raises ConfigError."""
    row = {"text": row} if isinstance(row, str) else row
    if not hasattr(row, "items"):
        raise ConfigError(
            f"{place} is {type(row).__name__}; give texts, dictionaries as in a .jsonl file, lists of token ids, or a dataset of "
            f"(input, target)"
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{place} cannot be written as JSON ({e}); give text, numbers, lists and dictionaries") from e


def _word(number: int) -> str:
    """The token of a number. Its space belongs to it: ``data.encoder`` divides long texts where two tokens touch."""
    return f"\u2581{number}"


def _of_numbers(size: int) -> bytes:
    """A tokenizer.json for texts such as '5 17 3'. What is no such number would be a special token after the last one, which
    no model needs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    unknown = "[UNK]"
    tokenizer = Tokenizer(models.WordLevel({**{_word(k): k for k in range(size)}, unknown: size}, unk_token=unknown))
    tokenizer.add_special_tokens([unknown])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return str(tokenizer.to_str()).encode()
