"""What a run on conversations, or of an adapter, is refused for: one or two lines that say what to do, with exit code 2,
before weights are read and text is tokenised; and nothing stays."""

from __future__ import annotations

import codecs
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import muletrain
from muletrain.cli import main
from muletrain.cli.actions.opening import prepare
from muletrain.config.load import load_config
from muletrain.data.chat import conversation
from muletrain.data.encoder import Encoder
from muletrain.data.microbatch import unmarked
from muletrain.data.tokens import TokenCache
from muletrain.errors import MuletrainError
from muletrain.runs import assemble

from .chats import MISTRAL, SMOLLM_3, chat_tokenizer, chats, write_rows
from .test_adapters import VOCAB, base_of
from .test_hub_models import Hub
from .traced_models import new_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Future", "User")]  # of peft
ASKED, SAID = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is four."}
ROW = {"messages": [ASKED, SAID]}
STRICT = MISTRAL.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}",
)
SMALL = ("model.context=48", "train.steps=2", "train.batch=4", "train.microbatch=2", "fleet.stages=1", "fleet.peers=1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models' folders, and adapters."""
    made = tmp_path_factory.mktemp("models")
    base_of(made / "base", "qwen2")
    base_of(made / "wide", "qwen2")
    new_model("qwen2", vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2).save_pretrained(made / "wide")
    for name, template in (("strict", STRICT), ("plain", None), ("small", SMOLLM_3)):
        shutil.copytree(made / "base", made / name, ignore=shutil.ignore_patterns("chat_template.jinja"))
        chat_tokenizer(made / name, template, VOCAB)
    new_model("qwen2", vocab_size=200, bos_token_id=0, eos_token_id=1, pad_token_id=0).save_pretrained(made / "small")
    own = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(made / "base"), own).save_pretrained(made / "adapter")
    return made


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a good data set."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.chdir(folder)
    write_rows(folder / "chat.jsonl", chats(40))
    return folder


def children() -> set[int]:
    """Processes of this one."""
    found = Path(f"/proc/self/task/{os.getpid()}/children")
    return {*map(int, found.read_text().split())} if found.exists() else set()


def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """The error of a command."""
    monkeypatch.setattr(sys, "argv", ["muletrain", *words])
    before, files = children(), {*Path().rglob("*")}
    with pytest.raises(SystemExit) as ended:
        main._run(main.app)
    said = capfd.readouterr().err
    assert ended.value.code == 2, said
    assert "Traceback" not in said
    assert children() <= before, "no process stays"
    assert {*Path().rglob("*")} == files, "no run folder stays"
    assert not [*Path(os.environ["XDG_CACHE_HOME"]).rglob(".building-*")]
    error = said[said.index("error: ") :].strip()
    assert len(error.splitlines()) <= 2, error
    return error


def with_rows(*rows: Any, before: int = 0) -> list[str]:
    """A data set of good rows, and then ``rows``."""
    return [f"data.path={write_rows(Path('mine.jsonl'), [*chats(before), *rows])}"]


def raw(content: bytes, name: str = "mine.jsonl") -> list[str]:
    Path(name).write_bytes(content)
    return [f"data.path={name}"]


def parquet(**columns: list[Any]) -> list[str]:
    pq.write_table(pa.table(columns), "mine.parquet")
    return ["data.path=mine.parquet"]


def calls(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
    }


def changed(**fields: Any) -> str:
    """A folder of peft with other settings."""
    LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained("changed")
    file = Path("changed/adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return "changed"


CASES: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    # rows
    "a message without content": (
        lambda: with_rows({"messages": [ASKED, {"role": "assistant", "content": None}]}),
        ["mine.jsonl:1: message 2 of 'messages' has role (content is null); give a 'role' and a 'content'"],
    ),
    "an empty conversation": (
        lambda: with_rows({"messages": []}, before=3),
        ["mine.jsonl:4: 'messages' has no message; leave"],
    ),
    "a column missing in row 9,000": (
        lambda: with_rows({"text": "?"}, before=8999),
        ["mine.jsonl:9000: none of the columns messages", "is there, but text; rename one, or set data.format"],
    ),
    "no turn of the assistant": (
        lambda: with_rows(*[{"messages": [ASKED]}] * 9),
        ["in none of 9 conversations anything counts", "roles: user", "in which the role 'assistant' speaks"],
    ),
    "a role misspelt": (
        lambda: with_rows({"messages": [ASKED, {**SAID, "role": "asistant"}]}, before=2),
        ["mine.jsonl:3: message 2 of 'messages' has the role 'asistant'; did you mean 'assistant'?"],
    ),
    "roles that nobody learns from": (
        lambda: with_rows(*[{"messages": [ASKED, {**SAID, "role": "poet"}]}] * 5),
        ["anything counts", "roles: poet, user"],
    ),
    "roles out of order": (
        lambda: [*with_rows({"messages": [ASKED, ASKED, SAID]}, before=1), "model.from={models}/strict"],
        [
            "mine.jsonl:2: the template does not take this conversation: Conversation roles must alternate",
            "correct the row",
        ],
    ),
    "messages as text": (
        lambda: with_rows({"messages": "What is it?"}),
        ["'messages' is str; give a list of messages"],
    ),
    "messages as broken JSON": (lambda: with_rows({"messages": "[{"}), ["mine.jsonl:1: 'messages' is not JSON"]),
    "arguments of a tool that are no JSON": (
        lambda: with_rows({"messages": [ASKED, calls("{a: 1}")]}),
        ["message 2 of 'messages': the arguments of the tool call 'add' are not JSON"],
    ),
    "tool calls as text": (
        lambda: with_rows({"messages": [ASKED, {"role": "assistant", "tool_calls": ["add"]}]}),
        ["has tool_calls of str; give"],
    ),
    "tools that are no JSON": (lambda: with_rows({**ROW, "tools": "["}), ["'tools' is not JSON"]),
    "conversations longer than a sequence": (
        lambda: with_rows(*[{"messages": [{**ASKED, "content": "why " * 300}, SAID]}] * 6),
        ["in none of 6 conversations anything counts", "6 are longer than model.context = 48"],
    ),
    "a file that is no UTF-8": (
        lambda: raw(json.dumps(ROW).encode() + b'\n{"messages": "\xff"}\n'),
        ["mine.jsonl:2: not UTF-8 text (byte 0xff); convert the file"],
    ),
    "a file that is cut off": (lambda: raw(json.dumps(ROW).encode() + b'\n{"messages": ['), ["mine.jsonl:2: not JSON"]),
    "a table without the columns": (
        lambda: parquet(title=["a"] * 9),
        ["mine.parquet: no 'text'; for plain text set data.field to one of: title; for conversations rename"],
    ),
    "a table of another format": (
        lambda: [*parquet(text=["a"] * 9), "data.format=messages"],
        ["mine.parquet: none of the columns messages", "is there, but text"],
    ),
    "pairs that are conversations": (
        lambda: [*with_rows(ROW), "data.format=pairs"],
        ["none of the columns prompt, instruction, question is there, but messages"],
    ),
    "conversations as plain text": (
        lambda: [*with_rows(ROW), "data.format=text"],
        ["no 'text', but 'messages', in a run on plain text"],
    ),
    "text as conversations": (
        lambda: [*raw(b"Once.", "mine.txt"), "data.format=messages"],
        ["mine.txt is text, and this run trains conversations; leave it out"],
    ),
    "a folder without files": (
        lambda: [Path("empty").mkdir(), "data.path=empty"][1:],
        ["empty is a folder without files"],
    ),
    "a folder": (lambda: ["data.path={models}/base"], ["base is a folder; name its files by a glob"]),
    "a file that is not there": (lambda: ["data.path=mine.jsonl"], ["data.path: no such file: '", "check the path"]),
    # templates and tokenizers
    "no template": (
        lambda: ["model.from={models}/plain"],
        [
            "data.chat_template: the tokenizer '",
            "declares no chat template",
            "set it to 'chatml', to a file of Jinja text",
        ],
    ),
    "a template's file that is not there": (
        lambda: ["data.chat_template=mine.jinja"],
        ["data.chat_template: no such file: 'mine.jinja'; check the path, or give 'chatml'"],
    ),
    "a template that is no Jinja": (
        lambda: [*raw(b"hello\n{% for m in messages %}{{ m", "mine.jinja")[1:], "data.chat_template=mine.jinja"],
        ["data.chat_template: it is no Jinja template (line 2: ", "correct it"],
    ),
    "a template in another encoding": (
        lambda: [*raw(b"\xff\xfe{", "mine.jinja")[1:], "data.chat_template=mine.jinja"],
        ["data.chat_template: cannot read mine.jinja", "UTF-8 text"],
    ),
    "a template beside plain text": (
        lambda: [*raw(b"Once. " * 99, "mine.txt"), "data.chat_template=chatml"],
        ["data.chat_template: '", "holds plain text, not conversations; leave it out"],
    ),
    "a date that is none": (lambda: ["data.date=2024-02-31"], ["data.date: '2024-02-31' is no date"]),
    "a date as people write it": (lambda: ["data.date=31 Jan 2024"], ["data.date: expected date (year-month-day)"]),
    "a date that nothing prints": (
        lambda: ["data.date=2025-01-31"],
        ["data.date: the chat template prints no date", "leave it out"],
    ),
    "labels beyond the vocabulary": (
        lambda: ["model.from={models}/small"],
        ["tokens, and its model 200", "give data.tokenizer=FILE"],
    ),
    "loss_on misspelt": (
        lambda: ["data.loss_on=asistant"],
        ["data.loss_on: expected 'assistant', 'last' or 'all', got 'asistant'; did you mean 'assistant'?"],
    ),
    # adapters
    "targets that match nothing": (
        lambda: ['adapter.targets=["nothing"]'],
        ["adapter.targets: ['nothing']: Target modules", "give the ends of names of linear layers"],
    ),
    "a rank larger than a matrix": (
        lambda: ["adapter.rank=100"],
        ["adapter.rank: 100, but model.layers.0.", "take a smaller rank"],
    ),
    "an alpha of 0": (lambda: ["adapter.alpha=0"], ["adapter.alpha: must be greater than 0, got 0"]),
    "all inputs dropped": (lambda: ["adapter.dropout=1.0"], ["adapter.dropout: must be less than 1, got 1.0"]),
    "an adapter without a model": (
        lambda: ["model.from=none", "data.chat_template=chatml"],
        ["adapter.rank: an adapter belongs to a trained model; name one by model.from"],
    ),
    "alpha without an adapter": (
        lambda: ["adapter.rank=none", "adapter.alpha=3"],
        ["adapter.alpha: 3.0 has no effect without adapter.rank; set that, or leave"],
    ),
    "an adapter of another model": (
        lambda: ["adapter.rank=none", "adapter.from={models}/adapter", "model.from={models}/wide"],
        ["adapter.from: ", "it is an adapter of another model: give that as model.from"],
    ),
    "a rank beside adapter.from": (
        lambda: ["adapter.rank=8", "adapter.from={models}/adapter"],
        ["adapter.rank: 8 beside adapter.from, which has 4; leave it out"],
    ),
    "an adapter of some layers": (
        lambda: ["adapter.rank=none", f"adapter.from={changed(layers_to_transform=[1])}"],
        ["is an adapter with layers_to_transform, and only LoRA and DoRA are trained further; merge it into its model"],
    ),
    "an adapter with biases": (
        lambda: ["adapter.rank=none", f"adapter.from={changed(bias='all')}"],
        ["is an adapter with bias = 'all', and only LoRA and DoRA"],
    ),
    "an adapter of another kind": (
        lambda: ["adapter.rank=none", f"adapter.from={changed(peft_type='IA3')}"],
        ["is an adapter of the type IA3, and only LoRA and DoRA"],
    ),
    "an adapter without a rank": (
        lambda: ["adapter.rank=none", f"adapter.from={changed(r=None)}"],
        ["has no valid r, lora_alpha and target_modules"],
    ),
    "a model as an adapter": (
        lambda: ["adapter.rank=none", "adapter.from={models}/base"],
        ["adapter.from: ", "holds no adapter of peft (adapter_config.json)"],
    ),
    "an adapter as a model": (
        lambda: ["adapter.rank=none", "model.from={models}/adapter"],
        ["holds an adapter of peft, which is no whole model", "adapter.from="],
    ),
    # runs
    "epochs and steps": (
        lambda: ["train.epochs=2"],
        ["train.steps: 2 has no effect with train.epochs, which gives the steps"],
    ),
    "no epochs": (lambda: ["train.epochs=0"], ["train.epochs: must be greater than 0, got 0"]),
    "sequences longer than the model's": (
        lambda: ["model.context=4096"],
        ["was made for 64 tokens; set model.context = 64 or less, not 4096"],
    ),
}


LATE = {
    "an empty conversation",
    "a column missing in row 9,000",
    "no turn of the assistant",
    "a role misspelt",
    "roles that nobody learns from",
    "roles out of order",
    "conversations longer than a sequence",
    "a file that is no UTF-8",
    "a file that is cut off",
}
"""Found by reading all rows, before which the weights of a folder are checked. A model of the Hub is fetched afterwards."""


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_refused(
    name: str, models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in LATE:
        monkeypatch.setattr(assemble, "check_first_weights", lambda *_: pytest.fail("the weights were read"))
    make, parts = CASES[name]
    asked = [f"model.from={models}/base", "data.path=chat.jsonl", "adapter.rank=4", *SMALL, *make()]
    words = [word for text in asked for word in ("--set", text.replace("{models}", str(models)))]
    error = refused(capfd, monkeypatch, "run", *words)
    for part in parts:
        assert part in error


def test_a_fleet_of_processes_is_gone_too(
    models: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = [f"model.from={models}/plain", "data.path=chat.jsonl", "fleet.peers=2", "fleet.stages=2"]
    for command in ("run", "start"):
        words = [word for text in wrong for word in ("--set", text)]
        assert "declares no chat template" in refused(capfd, monkeypatch, command, *words)
    wrong = ["--set", f"model.from={models}/plain"]
    assert "declares no chat template" in refused(capfd, monkeypatch, "data", "chat.jsonl", *wrong)


# What looks wrong and is not ------------------------------------------------------------------------------------------------


def accepted(models: Path, *overrides: str, base: str = "base") -> TokenCache:
    config = load_config(
        None, [f"model.from={models}/{base}", "data.path=chat.jsonl", "data.heldout=0", *SMALL, *overrides]
    )
    data = prepare(config.local()).data
    assert isinstance(data, TokenCache)
    return data


def test_a_byte_order_mark_is_no_text(models: Path) -> None:
    content = Path("chat.jsonl").read_bytes()
    plain = accepted(models)
    marked = accepted(models, *raw(codecs.BOM_UTF8 + content))
    assert marked.train.tobytes() == plain.train.tobytes()
    Path("mine.jinja").write_text(SMOLLM_3, encoding="utf-8-sig")
    assert accepted(models, "data.chat_template=mine.jinja").train.tobytes() == plain.train.tobytes()


def test_messages_as_json_and_roles_in_other_letters_are_conversations(models: Path) -> None:
    plain, rows = accepted(models), chats(40)
    text = [{"messages": json.dumps(row["messages"])} for row in rows]
    named = {"user": "Human", "assistant": "Assistant"}
    other = [{"messages": [{**m, "role": named[m["role"]]} for m in row["messages"]]} for row in rows]
    for same in (text, other):
        assert accepted(models, *with_rows(*same)).train.tobytes() == plain.train.tobytes()


def test_arguments_of_tools_are_tables_also_if_they_come_as_text() -> None:
    """As OpenAI's interface returns them; templates write tables as JSON, and text as a string in quotes."""
    wanted = calls({"a": 2, "b": 2})
    assert conversation({"messages": [ASKED, calls('{"a": 2, "b": 2}')]}, "messages", "here")["messages"][1] == wanted
    assert conversation({"messages": [ASKED, wanted]}, "messages", "here")["messages"][1] == wanted


def test_a_template_that_begins_the_text_begins_it_once(models: Path) -> None:
    """Though the tokenizer would begin a text of its own in the same way."""
    data = accepted(models, "data.pack=false", base="strict")
    ids, _ = unmarked(data.train[:48])
    assert ids[0] == 0
    assert (ids[1:] == 0).sum() == 0


def test_padding_needs_no_token(models: Path) -> None:
    assert Encoder((models / "base" / "tokenizer.json").read_bytes()).tokenizer.padding is None
    data = accepted(models, "data.pack=false")
    assert data.stats.padding > 0
    assert data.stats.counted == int(unmarked(data.train)[1].sum())


# The Hub, and Python ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, models: Path) -> Iterator[Hub]:
    (tmp_path / "hub").mkdir()
    for name in ("base", "plain"):
        shutil.copytree(models / name, tmp_path / "hub" / name)
    served = Hub(tmp_path / "hub")
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    thread.join(10)


def run_of(hub: Hub, *settings: str) -> subprocess.CompletedProcess[str]:
    words = [word for text in settings for word in ("--set", text)]
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(Path("hub-cache").resolve()), "HF_HUB_DISABLE_XET": "1"}
    own["XDG_CACHE_HOME"] = str(Path("own-cache").resolve())
    command = [sys.executable, "-m", "muletrain", "run", *words]
    return subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["model.from=me/gated"], "model.from: me/gated is gated: accept its terms at http"),
        (["model.from=me/plain"], "data.chat_template: the tokenizer 'me/plain' declares no chat template"),
        (["model.from=me/base", 'adapter.targets=["nothing"]'], "adapter.targets: ['nothing']: Target modules"),
        (["model.from=me/base", "late"], "mine.jsonl:90: none of the columns messages"),
    ],
)
def test_what_is_wrong_is_found_before_weights_are_fetched(hub: Hub, overrides: list[str], why: str) -> None:
    path = with_rows({"text": "?"}, before=89) if overrides[-1] == "late" else ["data.path=chat.jsonl"]
    done = run_of(hub, *path, "adapter.rank=4", *SMALL, *(text for text in overrides if text != "late"))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert why in done.stderr
    assert not [file for file in hub.sent if file.endswith(".safetensors")]
    assert not Path("runs").exists()


def test_a_model_of_the_hub_trains_on_what_was_tokenised_before_it_was_fetched(hub: Hub) -> None:
    done = run_of(hub, "model.from=me/base", "data.path=chat.jsonl", "data.heldout=0", "adapter.rank=4", *SMALL)
    assert done.returncode == 0, done.stderr
    assert len([file for file in hub.sent if file.endswith(".safetensors")]) == 1
    assert len([*Path("own-cache").glob("muletrain/tokens/*")]) == 1, "tokenised once"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"data": [{"messages": [ASKED, {"role": "assistant", "content": None}]}]},
            r"data.jsonl:1: message 2 .*content is null",
        ),
        ({"data": [ROW] * 9, "adapter": {"rank": 4, "targets": ["nothing"]}}, r"adapter.targets: \['nothing'\]"),
        ({"data": {"path": "chat.jsonl", "loss_on": "asistant"}}, r"did you mean 'assistant'"),
    ],
)
def test_python_gets_the_same_errors(models: Path, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(MuletrainError, match=why):
        muletrain.train(model=models / "base", show=False, **fields)
    assert not Path("runs").exists()
