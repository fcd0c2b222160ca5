"""Checkpoint folders, opened with verified content: for resuming, evaluation, generation and export."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import safetensors
import safetensors.torch

from muletrain.config.schema import RunConfig
from muletrain.data.chat import plain_template, resolved
from muletrain.data.encoder import Encoder
from muletrain.data.samples import open_data
from muletrain.data.tokens import TokenCache
from muletrain.errors import CheckpointError, ConfigError, DataError, MuletrainError
from muletrain.model.finite import finite
from muletrain.model.hf_files import TEXT_FILES, TOKENIZER
from muletrain.model.hf_writing import cast, new_folder
from muletrain.model.make import load_model, model_from_json
from muletrain.model.traced.adapter import merged, write_adapter
from muletrain.model.traced.architecture import build
from muletrain.model.traced.chain import TracedModel
from muletrain.model.traced.factory import Writes, state_dict, trained
from muletrain.model.traced.folder import with_adapter
from muletrain.model.traced.outline import ADAPTER
from muletrain.runs.base import weights_of
from muletrain.runs.folder import latest_checkpoint
from muletrain.runtime.checkpoint.store import open_place, read_manifest
from muletrain.script import look_in
from muletrain.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from muletrain.data.samples import Data
    from muletrain.model.chain import Model
    from muletrain.model.module import StageModule

COULD_NOT = "the checkpoint at {} could not be copied to the run folder ({}); 'run --resume' tries again"
FORMAT = 2
"""Version of the format. Incremented when older and newer versions cannot read each other's checkpoints."""


def bring_home(where: str, into: Path) -> None:
    """Copy a complete checkpoint from the shared place ``where``. Raises CheckpointError."""
    partial = into.with_name(f".{into.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        fs, path = fsspec.core.url_to_fs(where)
        fs.get(f"{path.rstrip('/')}/", f"{partial}/", recursive=True)
        shutil.rmtree(into, ignore_errors=True)
        partial.replace(into)
    except (OSError, ImportError, ValueError) as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(COULD_NOT.format(where, e)) from e


def bring_newest_home(place: str, folder: Path) -> None:
    """Copy the newest intact checkpoint of ``place`` into the run folder, unless present. Raises ConfigError or
    CheckpointError."""
    try:
        source = open_place(place, keep=1)
        complete = sorted(source.complete(), reverse=True)
    except OSError as e:
        raise CheckpointError(f"checkpoint.place: {place} cannot be read: {e}") from e
    for key in complete:
        into = folder / "checkpoints" / f"step-{key.step:08d}"
        if not _is_intact(into):
            bring_home(source.where(key), into)
        if _is_intact(into):
            return


def newest_checkpoint(folder: Path, place: str | None, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint of the run in ``folder``, also if only the shared ``place`` has it; None: there is none.
    Raises MuletrainError if there are only damaged ones."""
    if place is not None:
        bring_newest_home(place, folder)
    checkpoint = Checkpoint.newest_intact(folder, say)
    if checkpoint is None and any((folder / "checkpoints").glob("step-*")):
        raise MuletrainError(f"{folder}: none of its checkpoints can be used (see above); start a new run")
    if checkpoint is None:
        say(f"{folder} has no complete checkpoint: the run starts over")
    return checkpoint


def _is_intact(folder: Path) -> bool:
    try:
        Checkpoint.intact(folder)
    except CheckpointError:
        return False
    return True


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A complete checkpoint. The manifest is written last, and names every part by content."""

    folder: Path
    manifest: dict[str, Any]
    spec: Model
    config: RunConfig

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open the checkpoint at ``path``, or the newest in a run folder. Raises CheckpointError for a damaged or
        foreign checkpoint."""
        folder = latest_checkpoint(path)
        look_in(folder)
        try:
            manifest = read_manifest((folder / "manifest.json").read_bytes(), FORMAT)
            spec = model_from_json(json.dumps(manifest["spec"]))
            config = RunConfig.model_validate_json(json.dumps(manifest["config"]), strict=True)
        except (OSError, ValueError, ConfigError) as e:
            raise CheckpointError(
                f"{folder}/manifest.json cannot be read ({e}); use another checkpoint of the run"
            ) from e
        return cls(folder, manifest, spec, config)

    @classmethod
    def newest_intact(cls, run: Path, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint of a run folder that is complete and intact, or None. Removes half-written checkpoints.
        ``say`` gets a message for every checkpoint that is removed or passed over."""
        for partial in (run / "checkpoints").glob(".step-*.partial"):
            say(f"{partial.name}: was being written when the run ended; removed")
            shutil.rmtree(partial, ignore_errors=True)
        for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
            try:
                return cls.intact(folder)
            except CheckpointError as e:
                say(f"{folder.name} is passed over: {e}")
        return None

    @classmethod
    def intact(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint and verify all files. Raises CheckpointError."""
        try:
            checkpoint = cls.open(folder)
            for file in checkpoint.manifest["files"]:
                checkpoint.verify(file)
            for part in checkpoint.manifest["parts"]:
                for _ in checkpoint._tensors(part, ""):
                    pass
        except (MuletrainError, KeyError, TypeError) as e:
            raise CheckpointError(str(e)) from e
        return checkpoint

    @property
    def parts(self) -> list[Path]:
        """The safetensors file of each stage."""
        return [self.folder / part["file"] for part in self.manifest["parts"]]

    @property
    def digests(self) -> list[bytes]:
        """SHA-256 of each of ``parts``."""
        return [bytes.fromhex(part["sha256"]) for part in self.manifest["parts"]]

    def verify(self, part: dict[str, str]) -> Path:
        """The path of one of the manifest's files. Raises CheckpointError for a missing file, or content that does not
        match the manifest."""
        path = self.folder / part["file"]
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read ({e.strerror}); use another checkpoint of the run") from e
        if digest != part["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its content is not what the manifest says; use another checkpoint"
            )
        return path

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder}: step {self.step}, {plural(self.params, 'parameter')}>"

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        return self.spec.params

    @property
    def tokenizer_json(self) -> bytes:
        """The tokenizer's JSON. Raises CheckpointError for a file that is missing or does not match the manifest."""
        for file in self.manifest["files"]:
            if file["file"] == "tokenizer.json":
                return self.verify(file).read_bytes()
        raise CheckpointError(f"{self.folder}: its manifest names no tokenizer.json; use another checkpoint of the run")

    @property
    def encoder(self) -> Encoder:
        """Text to tokens and back, as in training. Raises CheckpointError."""
        return Encoder(self.tokenizer_json, self.config.data.special_tokens)

    @property
    def stops(self) -> set[int]:
        """Tokens that end a text: the end of documents, and the stops of ``model.from``, if the run uses that
        tokenizer."""
        return {*(self.config.model.stops or ()), *self.encoder.end}

    def source(self, moved_to: Path | None) -> Path | None:
        """The Hugging Face folder that the run started from, if any. Raises CheckpointError for a missing folder."""
        if self.config.model.from_ is None:
            return None
        folder = moved_to or Path(self.config.model.from_)
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"the run started from {folder} (model.from), and the export keeps that folder's settings; it is gone: "
                f"give its new place by --source FOLDER"
            )
        return folder

    def corpus(self, path: str | None = None) -> Data:
        """The run's tokens or samples. With another ``path``: the run's text, if moved there, or else a different text,
        of which all tokens are held out. Raises DataError for a missing text."""
        data, own = self.config.data, str(self.folder / "tokenizer.json")
        if path is not None and data.factory is not None:
            raise DataError(f"data.path: the run trains on samples of data.factory = '{data.factory}', not on text")
        if path is None:
            if data.tokenizer != "train":  # the original may be gone
                data = data.model_copy(update={"tokenizer": own})
            return open_data(data, self.spec)
        data = data.model_copy(update={"path": path, "tokenizer": own, "validation": None})
        if self.config.data.validation is None:
            moved = TokenCache.build(data, self.spec.vocab, context=self.spec.context)
            if moved.digest == self.manifest.get("data"):
                return moved
        data = resolved(data.model_copy(update={"format": "auto"}))
        return TokenCache.build(data, self.spec.vocab, measured=True, context=self.spec.context)

    def weights(self, source: Path | None = None) -> dict[str, Tensor]:
        """All weights by name, in fp32. ``source``: new place of ``model.from``, for the weights beside an adapter. Raises
        CheckpointError for a part that is missing or does not match the manifest."""
        base = weights_of(self.config, self.spec, source)
        return self.state() | {name: tensor.float() for name, tensor in base.items()}

    def state(self) -> dict[str, Tensor]:
        """The weights in the checkpoint by name, in fp32. Raises as ``weights``."""
        parts = (self._tensors(part, "model/") for part in self.manifest["parts"])
        return {name.removeprefix("model/"): tensor for part in parts for name, tensor in part}

    def _tensors(self, part: dict[str, str], prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one of the manifest's parts by name. Raises CheckpointError if the part is missing or does not
        match the manifest, and for a value that is not finite."""
        path = self.verify(part)
        with safetensors.safe_open(path, framework="pt") as file:
            load = finite(file.get_tensor, str(path), remedy="use another checkpoint of the run")
            for name in file.keys():  # noqa: SIM118 # no mapping
                if name.startswith(prefix):
                    yield name, load(name)

    def export_module(self, folder: Path, dtype: str) -> tuple[Path, str | None]:
        """Write the state_dict of a user's module to ``folder``/model.safetensors, with parameters in ``dtype``.
        Returns that file, and ``cast``'s remark. Raises CheckpointError, and ConfigError for an unusable factory."""
        assert isinstance(self.spec, TracedModel)
        weights, remark = cast(self.weights(), dtype, self.spec.frozen)
        state, file = state_dict(self.spec.config, weights), folder / "model.safetensors"
        with new_folder(folder):
            safetensors.torch.save_file(state, file, metadata={"format": "pt"})
        return file, remark

    def export_adapter(self, folder: Path, base: Path | None) -> None:
        """Write the trained adapter as peft does, with the tokenizer. ``base``: the folder of the model that it belongs to.
        Raises CheckpointError."""
        assert isinstance(self.spec, TracedModel)
        with new_folder(folder):
            plain = build(with_adapter(self.spec, None).config)
            write_adapter(folder, plain, self.spec.config[ADAPTER], self.state(), None if base is None else str(base))
            for name in (TOKENIZER, *TEXT_FILES):
                if base is not None and (base / name).is_file():
                    shutil.copyfile(base / name, folder / name)
            if (template := plain_template(self.config.data)) is not None:
                (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    def merged(self, source: Path | None = None) -> tuple[dict[str, Tensor], Model]:
        """The weights, and the model, with the adapter added to the base. ``source``: see ``weights``. Raises
        CheckpointError."""
        assert isinstance(self.spec, TracedModel)
        return merged(build(self.spec.config), self.weights(source)), with_adapter(self.spec, None)

    def model(self, source: Path | None = None) -> nn.Module:
        """Load the whole model on the CPU, in fp32: tokens int64 [B, T] to logits [B, T, V]. A user's own module is that module
        itself, with the trained weights, for evaluation. ``source``: see ``weights``. Raises CheckpointError."""
        return self.module() if self.spec.own_loss else self.computed(source)

    def computed(self, source: Path | None = None) -> StageModule:
        """Load the whole model on the CPU as peers compute it, a user's module with its loss. ``source``: see ``weights``."""
        return load_model(self.spec, self.weights(source))

    def module(self) -> nn.Module:
        """A user's own module (``model.factory``) with the trained weights, on the CPU. Raises CheckpointError for a run of
        another model, and ConfigError for an unusable factory."""
        if not (isinstance(self.spec, TracedModel) and self.spec.own_loss):
            raise CheckpointError(f"{self.folder}: the run trained no module of yours; model() loads what it trained")
        return trained(self.spec.config, self.weights())

    def writer(self, source: Path | None = None) -> StageModule:
        """Load, on the CPU, the model that continues a text. ``source``: see ``weights``. Raises ConfigError for a user's
        module that takes no text, or for an unusable factory."""
        if not self.spec.own_loss:
            return self.computed(source)
        assert isinstance(self.spec, TracedModel)
        if self.spec.borders:
            raise ConfigError(
                "model.compression: the module itself writes the text, and it lacks the layers that compress between stages; "
                "'muletrain eval' measures the trained model"
            )
        if self.spec.inputs.shape is not None:
            raise ConfigError(
                f"model.factory: the module takes {self.spec.inputs}, not text, so it writes none; 'muletrain export' gives you "
                f"its weights"
            )
        return Writes(self.spec, self.spec.config, self.weights())
