"""What a script gives to its run: models, rows, token ids and datasets become files of the run folder, and nothing else
is read there as code."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from muletrain import given, script
from muletrain.config import trusted
from muletrain.config.load import load_config
from muletrain.config.model_sections import DataConfig
from muletrain.data.samples import SampleData
from muletrain.data.tokens import TokenCache
from muletrain.errors import ConfigError
from muletrain.given import Given
from muletrain.runs.assemble import resolve_start

from .chats import SMOLLM_3, chat_tokenizer, chats
from .traced_models import new_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Squares(Dataset[Any]):
    """Numbers, and classes below ``classes``."""

    def __init__(self, size: int = 40, classes: int = 5) -> None:
        self._size, self._classes = size, classes

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        return torch.full((4,), float(k)), k % self._classes


class Net(nn.Module):
    """Numbers [B, 4] -> one of five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), classes)


class Endless(IterableDataset[Any]):
    def __init__(self, sample: object) -> None:
        self._sample = sample

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self._sample)


class Raising(Squares):
    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        raise KeyError("image 0 is missing")


class Unsized:
    def __getitem__(self, k: int) -> str:
        return str(k)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "_folders", [])
    return tmp_path


def fields(**what: Any) -> dict[str, Any]:
    """The fields that a command gets, by name."""
    sections = {name: what.pop(name) for name in {*what} - {"model", "data", "tokenizer", "config", "command"}}
    found = Given(
        what.get("command", "run"),
        what.get("config"),
        what.get("model"),
        what.get("data"),
        what.get("tokenizer"),
        sections,
    )
    pairs = (word.split("=", 1) for word in found.arguments if "=" in word)
    return {name: json.loads(value) for name, value in pairs}


# Data -------------------------------------------------------------------------------------------------------------------


def rows_of(path: str) -> list[dict[str, Any]]:
    if path.endswith(".parquet"):
        return datasets.Dataset.from_parquet(path).to_list()
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.mark.parametrize(
    ("data", "first"),
    [
        (["one", "two"], {"text": "one"}),
        ((text for text in ("one", "two")), {"text": "one"}),
        ([{"text": "one"}, {"text": "two"}], {"text": "one"}),
        (datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}]), {"text": "one"}),
        (pandas.DataFrame([{"text": "one"}, {"text": "two"}]), {"text": "one"}),
        (datasets.Dataset.from_list([{"prompt": "one", "completion": "1"}] * 2), {"prompt": "one", "completion": "1"}),
        (datasets.Dataset.from_list([{"text": "one"}] * 2).to_iterable_dataset(), {"text": "one"}),
    ],
)
def test_rows_become_a_file(data: Any, first: dict[str, Any]) -> None:
    rows = rows_of(fields(data=data)["data.path"])
    assert rows[0] == first
    assert len(rows) == 2


def test_conversations_of_a_dataset_stay_whole() -> None:
    path = fields(data=datasets.Dataset.from_list(chats(4)))["data.path"]
    assert rows_of(path) == chats(4)


def test_splits_become_text_and_held_out_text() -> None:
    text = {name: datasets.Dataset.from_list([{"text": name}] * 3) for name in ("train", "test")}
    for data in (datasets.DatasetDict(text), {"path": text["train"], "validation": text["test"]}):
        found = fields(data=data)
        assert rows_of(found["data.path"])[0] == {"text": "train"}
        assert rows_of(found["data.validation"])[0] == {"text": "test"}


@pytest.mark.parametrize(
    "rows",
    [
        [[3, 5, 7], [4, 4]],
        [torch.tensor([3, 5, 7]), torch.tensor([4, 4])],
        [{"input_ids": [3, 5, 7]}, {"input_ids": [4, 4]}],
        datasets.Dataset.from_list([{"input_ids": [3, 5, 7]}, {"input_ids": [4, 4]}]),
        iter([[3, 5, 7], [4, 4]]),
    ],
)
def test_token_ids_are_the_tokens(rows: Any, here: Path) -> None:
    """And a number ends each list: one more than the largest, unless the data say another."""
    found = fields(data=rows)
    config = DataConfig(
        path=found["data.path"],
        tokenizer=found["data.tokenizer"],
        end_token=found["data.end_token"],
        heldout=0,
        cache=str(here),
    )
    cache = TokenCache.build(config, vocab=9)
    assert cache.train.tolist() == [3, 5, 7, 8, 4, 4, 8]
    assert not cache.stats.changes()
    assert cache.decode([3, 5]) == "3 5"


def test_a_long_list_of_token_ids_loses_none(here: Path) -> None:
    ids = [k * 7919 % 30_000 for k in range(50_000)]
    found = fields(data={"path": [ids], "end_token": 0})
    config = DataConfig(
        path=found["data.path"],
        tokenizer=found["data.tokenizer"],
        end_token=found["data.end_token"],
        heldout=0,
        cache=str(here),
    )
    tokens = TokenCache.build(config, vocab=30_000).train
    assert tokens.tolist() == [*ids, 0]


def test_samples_are_read_elsewhere_as_they_are_here() -> None:
    found = fields(model=Net(), data=Squares())
    assert found["model.vocab"] == 5, "all 40 samples were looked at"
    trusted.trust(found["data.factory"])
    data = SampleData.build(found["data.factory"])
    assert (len(data.train), len(data.heldout)) == (38, 2)
    assert {float(data.train[k][0][0]) for k in range(38)} == {*map(float, range(40))} - {0.0, 20.0}


def test_both_sides_may_be_given() -> None:
    for data in (
        (Squares(30), Squares(10)),
        [Squares(30), Squares(10)],
        {"path": Squares(30), "validation": Squares(10), "on_error": "skip"},
    ):
        found = fields(model=Net(), data=data)
        trusted.trust(found["data.factory"])
        built = SampleData.build(found["data.factory"])
        assert (len(built.train), len(built.heldout)) == (30, 10)


def test_a_tensor_dataset_of_numbers_alone_has_no_vocabulary() -> None:
    assert "model.vocab" not in fields(model=Net(), data=TensorDataset(torch.rand(40, 4), torch.rand(40, 2)))


# Models -----------------------------------------------------------------------------------------------------------------


def test_a_model_of_transformers_begins_with_its_weights_of_now(here: Path) -> None:
    model = new_model("qwen2", vocab_size=400)
    with torch.no_grad():
        model.lm_head.weight.fill_(0.25)
    folder = Path(fields(model={"from": model, "context": 16}, tokenizer=None)["model.from"])
    assert folder.is_relative_to(here / "runs")
    assert type(model).from_pretrained(folder).lm_head.weight.unique().tolist() == [0.25]


def test_a_module_is_read_with_its_weights_by_this_user_alone() -> None:
    net = Net()
    name = fields(model={"factory": net, "vocab": 5})["model.factory"]
    (path,) = script._folders[0].glob("Net_*.pt")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    trusted.trust(name)
    again = trusted.imported("model.factory", name)()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_no_process_reads_what_its_user_did_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    name = fields(model=Net())["model.factory"]
    monkeypatch.setattr(trusted, "_named", set())
    with pytest.raises(ConfigError, match=f"needs '{name}', which is code.*--factory {name}"):
        trusted.imported("model.factory", name)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b"0"), "no script of yours wrote this content"),
        (lambda path: path.chmod(0o644), "others than you can write or read it"),
        (lambda path: path.unlink(), "in none of the run folders here"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_not_read(spoil: Callable[[Path], object], why: str) -> None:
    name = fields(model=Net())["model.factory"]
    (path,) = script._folders[0].glob("Net_*.pt")
    spoil(path)
    trusted.trust(name)
    with pytest.raises(ConfigError, match=why):
        trusted.imported("model.factory", name)()


def test_the_run_folder_of_someone_else_brings_nothing_that_runs(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """Even if it is named: the digest of another user, or of another machine, is another one."""
    name = fields(model=Net())["model.factory"]
    trusted.trust(name)
    assert isinstance(trusted.imported("model.factory", name)(), Net)
    monkeypatch.setenv("XDG_DATA_HOME", str(here / "mine"))
    with pytest.raises(ConfigError, match="no script of yours wrote this content on this machine"):
        trusted.imported("model.factory", name)()
    assert stat.S_IMODE((here / "mine" / "muletrain" / script.KEY).stat().st_mode) == 0o600


LOCAL = """
import torch, sys
from muletrain.given import Given

def build():
    scale = 2.0
    class Local(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act = torch.nn.Linear(2, 2), lambda x: scale * x
        def forward(self, x, y):
            return ((self.act(self.layer(x)) - y) ** 2).mean()
    return Local()

print(Given("run", None, build(), None, None, {}).factories[0])
"""


def test_local_classes_and_lambdas_of_a_script_travel(here: Path) -> None:
    """To another process, which has neither the class nor the script."""
    name = subprocess.run([sys.executable, "-c", LOCAL], capture_output=True, text=True, check=True).stdout.strip()
    (run,) = (here / "runs").iterdir()
    script.look_in(run)
    trusted.trust(name)
    module = trusted.imported("model.factory", name)()
    assert type(module).__name__ == "Local"
    assert module(torch.zeros(1, 2), 2 * module.layer.bias.detach()).item() == 0


class Distance(nn.Module):
    """Numbers [B, 4] -> numbers; the loss is a plain mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return ((x - wanted) ** 2).mean()


def test_a_module_whose_loss_is_a_plain_mean_is_traced() -> None:
    found = Given("run", None, Distance(), TensorDataset(torch.rand(40, 4), torch.rand(40, 4)), None, {})
    config = resolve_start(load_config(None, found.arguments[1::2]))
    assert config.model.layers == 3


BESIDE = """
import helper
from muletrain.given import Given
print(Given("run", None, helper.Helper(), None, None, {}).factories[0])
"""


def test_a_module_may_come_from_a_file_beside_the_script(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the script was called."""
    (here / "own").mkdir()
    (here / "own" / "helper.py").write_text(
        "import torch\nclass Helper(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
    )
    (here / "own" / "main.py").write_text(BESIDE)
    done = subprocess.run([sys.executable, "own/main.py"], capture_output=True, text=True, check=True)
    (run,) = (here / "runs").iterdir()
    script.look_in(run)
    trusted.trust(name := done.stdout.strip())
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert type(trusted.imported("model.factory", name)()).__name__ == "Helper"


# What cannot be given ---------------------------------------------------------------------------------------------------


def locked() -> nn.Module:
    net = Net()
    net.lock = threading.Lock()
    return net


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"model": locked()}, r"model: Net: it cannot be copied to the run's processes \(.*lock"),
        ({"model": on_meta()}, r"model: its parameter layers.0.weight is on the meta device and has no values"),
        ({"model": {"from": Net()}}, r"model: Net is no 'from'; give model=\{'factory': ...\}"),
        ({"model": Net}, r"model: type; give a name"),
        ({"model": 7}, r"model: int; give a name"),
        ({"model": Net(), "command": "start"}, r"model: Net is this script's, and its code goes to no other machine"),
        ({"model": Net(), "data": Squares(), "command": "start"}, r"its code goes to no other machine"),
        (
            {"data": Squares(), "command": "start"},
            r"data: the dataset is this script's.*data=\{'factory': 'mypackage.data:build'\}",
        ),
        ({"data": []}, r"data: it has no rows"),
        ({"data": 7}, r"data: int; give a path"),
        ({"data": [3]}, r"data: row 0 is int; give texts"),
        ({"data": ["a", 3]}, r"data: row 1 is int; give texts"),
        ({"data": [[1, 2], "a"]}, r"data: row 1 is no list of token ids"),
        ({"data": [[1, -2]]}, r"data: row 0 is no list of token ids; give integers from 0 on"),
        ({"data": [{"text": {1}}]}, r"data: row 0 cannot be written as JSON"),
        ({"data": itertools.repeat("a")}, r"data: 1,000 rows and no end; give something with a length"),
        ({"data": Endless({"text": "a"})}, r"data: 1,000 rows and no end"),
        ({"data": Endless((1.0, 2)), "model": Net()}, r"data: Endless has no length and no order"),
        ({"data": Raising(), "model": Net()}, r"data: Raising\[0\] raises KeyError: 'image 0 is missing'"),
        ({"data": Unsized()}, r"data: Unsized has no length; give it __len__"),
        ({"data": [[1, 2]], "model": "a/b"}, r"data: name the token that ends a document of this model"),
        ({"train": 3}, r"train=3: give the fields of the section"),
    ],
)
def test_what_cannot_be_given_is_refused_and_leaves_nothing(
    what: dict[str, Any], why: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "ENDLESS", 1000)
    with pytest.raises(ConfigError, match=why):
        fields(**what)
    assert os.listdir(here) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_a_model_of_peft_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(new_model("qwen2", vocab_size=400), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"it has an adapter of peft already"):
        fields(model=adapted)


def test_a_tokenizer_that_comes_with_a_model_is_in_its_folder(here: Path) -> None:
    tokenizer = chat_tokenizer(here / "tokenizer", SMOLLM_3, 400)
    folder = Path(fields(model=new_model("qwen2", vocab_size=400), tokenizer=tokenizer)["model.from"])
    assert (folder / "tokenizer.json").is_file()
