"""What may change when a run is resumed: one table, which the check and docs/howto/resume.md share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from muletrain.config.load import load_config
from muletrain.config.schema import RunConfig
from muletrain.errors import CheckpointError, ConfigError
from muletrain.runs.assemble import RunFacts
from muletrain.runs.checkpoint import Checkpoint
from muletrain.runs.resuming import TABLE, as_markdown, changes, checked, continued, rule_of

if TYPE_CHECKING:
    from muletrain.data.samples import Data

DOCS = Path(__file__).parent.parent / "docs" / "howto" / "resume.md"


class Corpus:
    def __init__(self, digest: str = "ab", tokenizer: bytes = b"{}") -> None:
        self.digest, self.tokenizer_json = digest, tokenizer


class Known(Checkpoint):
    """A checkpoint without its files."""

    tokenizer_json = b"{}"


def checkpoint_of(*overrides: str, step: int = 20, data: str = "ab", **more: object) -> Known:
    config = load_config(None, overrides)
    facts = RunFacts.of(config)
    manifest = {**facts.manifest("run"), "step": step, "data": data, **more}
    return Known(Path("runs/a/checkpoints/step-00000020"), manifest, facts.spec, config)


def goes_on(
    before: Checkpoint, *overrides: str, data: Corpus | None = None, meant: bool = False
) -> tuple[RunConfig, list[str]]:
    given: Data = data or Corpus()  # type: ignore[assignment]
    return continued(before, load_config(None, overrides), given, meant=meant)


def test_the_table_in_the_docs_is_the_one_that_decides() -> None:
    assert as_markdown() in DOCS.read_text(encoding="utf-8")


def test_each_rule_is_about_fields_that_exist_and_each_field_has_a_rule() -> None:
    fields = {
        f"{section}.{info.alias or name}"
        for section, part in RunConfig.model_fields.items()
        for name, info in part.annotation.model_fields.items()  # type: ignore[union-attr]
    }
    used = {rule_of(field).fields for field in fields}
    assert used == {rule.fields for rule in TABLE}
    assert len(TABLE) == len({rule.fields for rule in TABLE})


@pytest.mark.parametrize(
    "override",
    ["model.width=96", "model.layers=2", "model.vocab=512", "model.activation=silu", "model.untie=true"],
)
def test_another_model_is_refused_with_both_values(override: str) -> None:
    field, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"{field} \(.* before, \"?{value}\"? now\).*docs/howto/resume.md"):
        goes_on(checkpoint_of(), override)


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=900",
        "train.microbatch=2",
        "optimizer.lr=0.001",
        "optimizer.eps=1e-07",
        "optimizer.delayed=true",
        "optimizer.name=lamb",
        "wire.activations=fp32",
        "fleet.stages=4",
        "fleet.peers=3",
        "compute.precision=bf16",
        "model.context=64",
        "train.batch=32",
    ],
)
def test_everything_else_may_change_and_what_changes_numbers_is_said(override: str) -> None:
    field, _, value = override.partition("=")
    config, lines = goes_on(checkpoint_of(), override)
    section, name = field.split(".")
    assert str(getattr(getattr(config, section), name)) in (value, value.title())
    named = [line for line in lines if line.startswith(f"{field}: ")]
    assert len(named) == (rule_of(field).may == "from then on")
    assert all(f"{value} from step 20 on" in line.replace('"', "") for line in named)


def test_nothing_is_said_where_nothing_changes_and_precision_stays_as_measured() -> None:
    config, lines = goes_on(checkpoint_of(precision="bf16"))
    assert (config.compute.precision, lines) == ("bf16", [])


def test_stages_that_share_blocks_cannot_be_cut_again() -> None:
    with pytest.raises(ConfigError, match=r"fleet.stages \(2 before, 4 now\)"):
        goes_on(checkpoint_of("model.share_layers=true"), "model.share_layers=true", "fleet.stages=4")


def test_the_data_go_on_where_they_were_whatever_the_batch() -> None:
    """20 steps of 16 sequences are done: the next one is number 320, again at each further resume."""
    once, _ = goes_on(checkpoint_of(), "train.batch=32")
    assert once.train.data_offset + 20 * 32 == 320
    again, _ = goes_on(
        checkpoint_of("train.batch=32", f"train.data_offset={once.train.data_offset}", step=30), "train.batch=8"
    )
    assert again.train.data_offset + 30 * 8 == 320 + 10 * 32
    tokens, _ = goes_on(checkpoint_of("model.context=128"), "model.context=64")
    assert tokens.train.data_offset + 20 * 16 == 640


def test_other_data_begin_a_first_pass_if_the_user_means_them() -> None:
    before, other = checkpoint_of(), Corpus("cd")
    with pytest.raises(CheckpointError, match=r"the corpus is not what the run was trained on.*--set data.path=pydoc"):
        goes_on(before, data=other)
    for asked in ({"meant": True}, {}):
        overrides = [] if asked else ["data.path=more.txt"]
        config, (said,) = goes_on(before, *overrides, data=other, **asked)
        assert "another corpus from step 20 on; a first pass" in said
        assert config.train.data_offset + 20 * config.train.batch == 0
    moved, lines = goes_on(before, "data.path=elsewhere/text.txt")
    assert (moved.train.data_offset, lines) == (0, [])
    with pytest.raises(ConfigError, match=r"data.tokenizer: .* is not the tokenizer"):
        goes_on(before, "data.tokenizer=other.json", data=Corpus("cd", b"{1}"))


def test_a_field_that_an_older_version_did_not_have_was_at_its_default() -> None:
    old = json.loads(load_config().model_dump_json(by_alias=True))
    del old["optimizer"]["delayed"]
    before = RunConfig.model_validate(old)
    assert changes(before, load_config()) == []
    (change,) = changes(before, load_config(None, ["optimizer.delayed=true"]))
    assert change.values == ("false", "true")
    assert checked(checkpoint_of(), load_config()) == []
