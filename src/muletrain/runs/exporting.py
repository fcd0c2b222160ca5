"""Writes a trained model for other programs: a Hugging Face folder, an adapter of ``peft``, or a module's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muletrain.data.chat import plain_template
from muletrain.errors import CheckpointError
from muletrain.model.hf import export_hf

if TYPE_CHECKING:
    from pathlib import Path

    from muletrain.runs.checkpoint import Checkpoint


def export(
    checkpoint: Checkpoint, folder: Path, *, merge: bool = False, source: Path | None = None, dtype: str = "fp32"
) -> str:
    """Write ``folder``, a new one. ``merge``: add a trained adapter to the model, and write the whole. ``source``: the
    folder of ``model.from`` if it moved. ``dtype``: a name of ``finite.NAMES``. Returns what people should know, and how
    the result is loaded. Raises CheckpointError."""
    if checkpoint.spec.borders:
        raise CheckpointError(
            "the model was trained with layers that compress between stages (model.compression), and no architecture of transformers has "
            "them; 'muletrain eval', 'muletrain generate' and 'run --resume' take the checkpoint as it is"
        )
    adapted = checkpoint.config.adapter.rank is not None
    if merge and not adapted:
        raise CheckpointError("--merge: the run trained no adapter (adapter.rank); leave it out")
    if adapted and not merge:
        checkpoint.export_adapter(folder, checkpoint.source(source))
        return f"wrote {folder}: load it with peft.PeftModel.from_pretrained(model, '{folder}'), or merge it by --merge"
    if checkpoint.spec.own_loss:
        file, remark = checkpoint.export_module(folder, dtype)
        written = f"wrote {file}: module.load_state_dict(safetensors.torch.load_file(...)) takes it"
    else:
        weights, spec = checkpoint.merged(source) if merge else (checkpoint.weights(), checkpoint.spec)
        remark = export_hf(
            weights,
            spec,
            checkpoint.tokenizer_json,
            folder,
            end_of_text=checkpoint.encoder.end_token,
            source=checkpoint.source(source),
            dtype=dtype,
            chat_template=plain_template(checkpoint.config.data),
        )
        written = f"wrote {folder}: load it with transformers.AutoModelForCausalLM.from_pretrained('{folder}')"
    return "\n".join(filter(None, (remark, written)))
