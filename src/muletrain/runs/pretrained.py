"""The model of a Hugging Face folder, or of the Hub, for use without a run: to measure the loss, and to write text."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from muletrain.config.schema import RunConfig
from muletrain.data.chat import declares_template, resolved
from muletrain.data.encoder import with_end
from muletrain.data.tokenizer import check_own, has_tokenizer, read_tokenizer, tokenizer_json
from muletrain.data.tokens import TokenCache
from muletrain.errors import ConfigError
from muletrain.model.finite import finite
from muletrain.model.hf import stops_in
from muletrain.model.hf_files import stored
from muletrain.model.hf_hub import is_hub_name, local_folder
from muletrain.model.traced.adapter import CONFIG, base_of, with_weights
from muletrain.model.traced.architecture import Whole
from muletrain.model.traced.folder import USUAL_CONTEXT, traced_in, whole_in
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.folder import ROOT, has_checkpoint

if TYPE_CHECKING:
    from muletrain.data.samples import Data
    from muletrain.model.module import StageModule
    from muletrain.model.traced.chain import TracedModel


def trained_in(where: Path) -> Checkpoint:
    """The newest checkpoint of the run folder ``where``, the checkpoint there, or the model of a Hugging Face folder or of
    the Hub. Raises MuletrainError."""
    hub = is_hub_name(str(where)) and where.parent != ROOT
    foreign = not has_checkpoint(where) and (hub or any(where.glob("*.json")))
    return Pretrained.of(str(where)) if foreign else Checkpoint.open(where)


class Pretrained(Checkpoint):
    """A model of ``transformers`` that was not trained here: computed by the model's class, not traced."""

    spec: TracedModel

    @classmethod
    def of(cls, name: str) -> Pretrained:
        """The model in the folder ``name``, or of that name on the Hub; of an adapter's folder with the model that it names.
        Raises MuletrainError."""
        adapter = {"from": str(Path(name).resolve())} if (Path(name) / CONFIG).is_file() else {}
        folder = local_folder(base_of(Path(name)) if adapter else name).resolve()
        try:
            spec = traced_in(folder)
        except ConfigError:  # the model declares no longest sequence
            spec = traced_in(folder, context=USUAL_CONTEXT)
        model = {"from": str(folder), "stops": stops_in(folder)}
        text = str(Path(name).resolve() if has_tokenizer(Path(name)) else folder)  # an adapter may bring its own
        data = {"tokenizer": text, "format": "messages" if declares_template(text) else "text"}
        config = RunConfig.model_validate({"model": model, "adapter": adapter, "data": data})
        return cls(folder, {"step": 0, "parts": [], "files": []}, spec, config)

    @property
    def params(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in stored(self.folder).values())

    @property
    def tokenizer_json(self) -> bytes:
        """See ``Checkpoint``. Without a declared end of documents, a text ends only at the maximum length. Raises
        DataError."""
        check_own(Path(self.config.data.tokenizer), self.spec.vocab)
        tokenizer, end = read_tokenizer(self.config.data.tokenizer)
        return tokenizer_json(tokenizer if end is None else with_end(tokenizer, end))

    def corpus(self, path: str | None = None) -> Data:
        """The tokens of the text ``path`` by the model's tokenizer, all held out. Raises DataError."""
        if path is None:
            raise ConfigError(f"--data: {self.folder} is a model without a text of its own; give one to measure it on")
        given = {"path": path, "format": "auto", "pack": False}  # right for any architecture
        data = resolved(self.config.data.model_copy(update=given))
        return TokenCache.build(data, self.spec.vocab, measured=True, context=self.spec.context)

    def measured(self) -> Pretrained:
        """The same model with sequences as long as a run's would be."""
        spec = dataclasses.replace(self.spec, context=min(self.spec.context, USUAL_CONTEXT))
        return dataclasses.replace(self, spec=spec)

    def computed(self, source: Path | None = None) -> StageModule:
        """Load the whole model on the CPU, in fp32. Raises CheckpointError, and ConfigError for a ``source``."""
        if source is not None:
            raise ConfigError(f"--source: {self.folder} is a whole model, which needs no other; leave it out")
        whole = whole_in(str(self.folder), self.spec.architecture)
        if self.config.adapter.from_ is not None:
            whole = with_weights(whole, Path(self.config.adapter.from_))
        check = finite(dict(whole.named_parameters()).__getitem__, str(self.folder))
        for name, _ in whole.named_parameters():
            check(name)
        return Whole(self.spec, whole).eval()
