"""Checkpoint folders: opened with their content verified, for evaluation, generation and export."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch

from muletrain.config.schema import RunConfig
from muletrain.errors import CheckpointError, ConfigError
from muletrain.model.generate import load_model
from muletrain.model.spec import ModelSpec
from muletrain.runs.folder import latest_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from muletrain.model.stage import Stage

FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its manifest was written last, and names every part by content."""

    folder: Path
    manifest: dict[str, Any]
    spec: ModelSpec
    config: RunConfig

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """The checkpoint ``path`` means (a run folder: its newest). Raises CheckpointError for a damaged or foreign one."""
        folder = latest_checkpoint(path)
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise CheckpointError(f"{folder}: written in format {manifest['format']}, this version reads {FORMAT}")
            spec = ModelSpec.from_json(json.dumps(manifest["spec"]))
            config = RunConfig.model_validate(manifest["config"])
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as e:
            raise CheckpointError(
                f"{folder}/manifest.json cannot be read ({e}); use another checkpoint of the run"
            ) from e
        return cls(folder, manifest, spec, config)

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def tokenizer_json(self) -> bytes:
        try:
            return (self.folder / "tokenizer.json").read_bytes()
        except OSError as e:
            raise CheckpointError(f"{self.folder}/tokenizer.json cannot be read ({e.strerror})") from e

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, fp32. Raises CheckpointError when a part is missing or not what the manifest says."""
        weights: dict[str, Tensor] = {}
        for part in self.manifest["parts"]:
            path = self.folder / part["file"]
            try:
                data = path.read_bytes()
            except OSError as e:
                raise CheckpointError(f"{path} cannot be read ({e.strerror}); use another checkpoint of the run") from e
            if hashlib.sha256(data).hexdigest() != part["sha256"]:
                raise CheckpointError(
                    f"{path} is damaged: its content is not what the manifest says; use another checkpoint"
                )
            tensors = safetensors.torch.load(data)
            weights |= {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
        return weights

    def model(self) -> Stage:
        """The whole model, on the CPU."""
        return load_model(self.spec, self.weights())
