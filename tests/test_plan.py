"""``muletrain plan FLEET.toml``: what it prints adds up, and errors say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from muletrain.cli.actions.simulate_fleet import what_if
from muletrain.cli.main import app
from muletrain.config.fleet_file import load_fleet
from muletrain.config.load import load_config
from muletrain.config.plan_file import Plan, Prediction, Stage
from muletrain.errors import CapacityError, MuletrainError
from muletrain.model.spec import ModelSpec
from muletrain.planning.splits import named, recommend
from muletrain.sim.plan import swarm as plan_swarm
from muletrain.sim.plan.planner import in_order
from muletrain.sim.plan.question import Question
from muletrain.sim.plan.swarm import NoSteps, played_step_s
from muletrain.strategies import STRATEGIES
from scripts.reference import PLAN
from tests.planned_fleets import FLEET, TINY

# --- recommended -------------------------------------------------------------------------------------------------------


def test_what_does_not_run_is_not_recommended() -> None:
    slow = Prediction(strategy="swarm", runnable=True, tokens_per_s=10.0)
    fast = Prediction(strategy="swap", runnable=False, tokens_per_s=25.0)
    best, why = recommend([fast, slow])
    assert best == 1
    assert why.startswith("the fastest strategy that runs today")
    assert "not yet runnable: swap (2.50 times as fast)" in why
    assert recommend([slow.model_copy(update={"problem": "no room"}), fast])[0] is None


def test_where_machines_are_left_out_a_plan_that_names_the_others_is_recommended_of_equal_ones() -> None:
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=10.0)
    named = swarm.model_copy(update={"strategy": "pipeline", "schedule": "1f1b", "tokens_per_s": 9.95})
    assert recommend([swarm, named])[0] == 0
    swarm = swarm.model_copy(update={"left_out": ("b",)})
    assert recommend([swarm, named])[0] == 1
    assert recommend([swarm, named.model_copy(update={"tokens_per_s": 9.0})])[0] == 0


def test_a_hub_without_clients_is_recommended_only_where_nothing_else_is_as_fast() -> None:
    stages = (Stage(layers=(0, 2), machines=("a",)), Stage(layers=(2, 4), machines=("b",)))
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=9.95, stages=stages)
    hub = swarm.model_copy(update={"strategy": "hub", "tokens_per_s": 10.0})
    assert recommend([swarm, hub]) == (0, "the fastest strategy that runs today; as fast: hub")
    assert recommend([swarm.model_copy(update={"tokens_per_s": 9.0}), hub])[0] == 1
    helped = stages[1].model_copy(update={"machines": ("b", "c"), "clients": ("c",)})
    assert recommend([swarm, hub.model_copy(update={"stages": (stages[0], helped)})])[0] == 1


def test_of_one_machine_all_strategies_are_as_fast_and_the_machine_is_named() -> None:
    stages = (Stage(layers=(0, 4), machines=("a",)),)
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=10.0, stages=stages, left_out=("b",))
    planned = swarm.model_copy(update={"strategy": "pipeline", "schedule": "1f1b"})
    assert recommend([swarm, planned]) == (1, "the fastest strategy that runs today; as fast: swarm")
    assert named(planned) == "a alone (pipeline, 1F1B)"
    assert (
        recommend([swarm.model_copy(update={"left_out": ("c",)}), planned])[1] == "the fastest strategy that runs today"
    )


def test_where_machines_may_leave_no_planned_pipeline_is_recommended_of_equal_ones() -> None:
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=9.95, left_out=("b",))
    planned = Prediction(strategy="pipeline", schedule="1f1b", runnable=True, tokens_per_s=10.0)
    assert recommend([planned, swarm])[0] == 0
    assert recommend([planned, swarm], all_stay=False) == (
        1,
        "the fastest strategy that runs today; as fast: pipeline, 1F1B; "
        "some machines may leave (reliable = false), which costs a planned pipeline most",
    )
    assert recommend([planned, swarm.model_copy(update={"tokens_per_s": 9.0})], all_stay=False)[0] == 0


# --- a fleet -----------------------------------------------------------------------------------------------------------


MANY_SMALL = FLEET.replace("memory_gib = 1.0", "memory_gib = 0.01").replace("count = 3", "count = 40")

ALONE = '[[machines]]\nname = "a"\ndevice = "CPU"\n'
TWO_WAYS = """
machines = [
    {{ name = "near", region = "x", tflops = 0.02, memory_gib = 0.05 }},
    {{ name = "far", region = "y", tflops = 0.02, memory_gib = 0.05 }},
]
[matrix]
regions = ["x", "y"]
rtt_ms = [[1, 20], [80, 1]]
bandwidth_mbps = [[1000, {}], [{}, 1000]]
"""


def planned(tmp_path: Path, *arguments: str, text: str = FLEET) -> str:
    (tmp_path / "fleet.toml").write_text(text)
    sets = [x for setting in TINY for x in ("--set", setting)]
    result = CliRunner().invoke(
        app, ["plan", str(tmp_path / "fleet.toml"), "--batch", "64", "--time-limit", "1", *sets, *arguments]
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_a_plan_adds_up(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json"))
    names = {"near-0", "near-1", "near-2", "far-0", "far-1"}
    assert [p.problem for p in found.strategies] == [""] * len(found.strategies)
    for p in found.strategies:
        used = [name for stage in p.stages for name in stage.machines]
        assert p.split is not None
        assert p.split.step_s == pytest.approx(p.step_s)
        assert p.tokens_per_s == pytest.approx(64 * 512 / p.step_s)
        assert sum(p.microbatches) * p.microbatch == 64
        assert len(used) == len(set(used))
        assert {*used, *p.spares, *p.left_out} == names
        assert not set(used) & set(p.spares)
        assert [layers for stage in p.stages for layers in range(*stage.layers)] == list(range(4))
        assert {m.machine for m in p.memory} == {name.split("-")[0] for name in used}
        for m in p.memory:
            assert m.device_has == 2**30 >= m.device_needs
            whole = m.weights + m.optimizer + m.gradients + m.activations + m.buffers
            assert m.device_needs + m.host_needs == whole
        hourly = sum(0.5 if name.startswith("near") else 1.0 for name in used)
        assert p.price_per_billion_tokens == pytest.approx(hourly / 3600 / p.tokens_per_s * 1e9)
    assert found.recommended is not None
    chosen = found.strategies[found.recommended]
    assert chosen.tokens_per_s == max(p.tokens_per_s for p in found.strategies if p.runnable)
    assert all(p.runnable for p in found.strategies), "also a hub that has no clients here"


def test_a_strategy_that_nothing_predicts_is_in_the_plan_with_what_is_missing() -> None:
    swarm = Prediction(strategy="swarm", runnable=True, tokens_per_s=10.0)
    first, *others = in_order({"swarm": [swarm]})
    assert first is swarm
    assert [p.strategy for p in others] == [s.name for s in STRATEGIES if s.name != "swarm"]
    for p in others:
        assert p.problem == (
            f"nothing predicts strategy {p.strategy} yet: write sim/plan/{p.strategy}.py, and name it in sim/plan/planner.py"
        )
    assert recommend([first, *others])[0] == 0


def test_what_crosses_links_is_what_the_layout_says(tmp_path: Path) -> None:
    """Two stages side by side in two regions: 64 microbatches there and back, and halves of nothing."""
    text = FLEET.replace("count = 3", "count = 1").replace("count = 2", "count = 1")
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", text=text))
    swarm, *pipelines = (p for p in found.strategies if p.strategy in ("swarm", "pipeline"))
    for p in (swarm, *pipelines):
        assert {(t.sender, t.receiver) for t in p.traffic} == {("x", "y"), ("y", "x")}
        assert sum(t.averaging for t in p.traffic) == 0
        assert sum(t.gradients for t in p.traffic) == pytest.approx(64 * (512 * 256 + 4 * 512 * 256 / 4096))
        assert p.traffic[0].bandwidth_bytes_per_s == 12.5e6
        assert p.traffic[0].delay_s == 0.03


def test_plan_and_simulate_need_the_same_memory(tmp_path: Path) -> None:
    """What is said is what the smallest microbatch needs, not the largest that was tried."""
    text = "".join(f'[[machines]]\nname = "{d}"\ndevice = "{d}"\n' for d in ("RTX 4090", "RTX 3090", "CPU"))
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(CapacityError) as simulated:
        what_if(tmp_path / "fleet.toml", None, "llama-7b", [], hours=1.0, seed=0, plot=(), json=True, choice="swarm")
    arguments = ["plan", str(tmp_path / "fleet.toml"), "--model", "llama-7b", "--time-limit", "1", "--json"]
    found = Plan.model_validate_json(CliRunner().invoke(app, arguments).stdout)
    needs = "needs 127 GiB in 3 stages, all machines together have 64 GiB"
    assert needs in str(simulated.value)
    runnable = [p for p in found.strategies if p.runnable]
    assert {p.strategy for p in runnable} == {"swarm", "pipeline", "hub", "swap"}
    assert all(needs in p.problem for p in runnable if p.strategy not in ("hub", "swap"))
    assert {p.strategy for p in runnable if not p.problem} == {"swap"}, "what is beside the GPU is assumed to be enough"


@pytest.mark.parametrize(("count", "host_gib", "needs"), [(1, 128, 16), (1, 256, 28), (2, 400, 56)])
def test_a_machine_alone_needs_less_memory_for_a_model_that_it_swaps(
    tmp_path: Path, count: int, host_gib: int, needs: int
) -> None:
    """Bytes a parameter, beside what goes from one sub-model to the next. With room it copies the state for a checkpoint,
    and where others may join there are copies for them, past gradients and a mean gradient."""
    entry = (
        f'[[machines]]\nname = "gpu"\ndevice = "RTX 4090"\nmemory_gib = 16\nhost_gib = {host_gib}\ncount = {count}\n'
    )
    (tmp_path / "fleet.toml").write_text(entry)
    settings = ["model.preset=llama-7b", "swap.whole=true", "fleet.stages=1", "train.microbatch=1"]
    run = load_config(None, settings)
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model))
    (need,) = question.needs(question.scene(1, 1))
    assert need.swapped is not None
    beside = need.swapped.between + need.swapped.update
    assert question.memory("gpu", 0, need).host_needs == needs * question.spec.params + beside <= host_gib * 2**30


def test_what_is_recommended_is_played(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", "--batch", "16", "--confirm"))
    assert found.recommended is not None
    for n, p in enumerate(found.strategies):
        assert p.played_step_s == (pytest.approx(p.step_s, rel=0.1) if n == found.recommended else None)


def test_what_comes_to_no_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fleet.toml").write_text(
        '[[machines]]\nname = "a"\ncount = 2\nforward_ms = 90000\nbackward_ms = 90000\n'
    )
    run = load_config(None, [*TINY, "train.batch=16"])
    question = Question(load_fleet(tmp_path / "fleet.toml"), run, ModelSpec.from_config(run.model), 2, 1)
    with pytest.raises(NoSteps, match=r"played .* for 190 s, hardly any step .* Plan more stages or a larger batch"):
        played_step_s(question.scene(2, 1), 1.0)

    def never(*_: object, **__: object) -> float:
        raise NoSteps("hardly any step came to its end")

    monkeypatch.setattr(plan_swarm, "played_step_s", never)
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", "--batch", "16", "--confirm"))
    assert found.recommended is not None
    chosen = found.strategies[found.recommended]
    assert chosen.played_step_s is None
    assert "hardly any step came to its end" in chosen.notes


def test_prices_and_links_that_are_not_stated(tmp_path: Path) -> None:
    text = FLEET.replace("price_per_hour = 1.0\n", "").replace("bandwidth_mbps = 100\n", "")
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    assert all(p.price_per_billion_tokens is None for p in found.strategies if not p.spares)


def test_one_machine(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=ALONE))
    assert [p.problem for p in found.strategies] == [""] * len(found.strategies)
    assert all(p.split is not None and p.split.data_parallel_s == 0 for p in found.strategies)
    assert found.assumed == ("CPU: 0.3 TFLOP/s (eight cores of 40 GFLOP/s in fp32)",)


def test_machines_whose_memory_is_too_small_are_left_out(tmp_path: Path) -> None:
    text = FLEET.replace(
        'region = "x"\ntflops = 0.02\nmemory_gib = 1.0', 'region = "x"\ntflops = 0.02\nmemory_gib = 0.01'
    )
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    for p in found.strategies:
        assert set(p.spares) >= {"near-0", "near-1", "near-2"}


def test_links_may_have_unequal_directions(tmp_path: Path) -> None:
    """Neither machine holds the model: half of it each. Both ways count as they are; which of them is the narrow one
    changes nothing."""
    steps = []
    for narrow, wide in ((20, 200), (200, 20)):
        found = Plan.model_validate_json(planned(tmp_path, "--json", text=TWO_WAYS.format(narrow, wide)))
        for p in (p for p in found.strategies if p.strategy == "swarm" or p.schedule == "1f1b"):
            assert len(p.stages) == 2
            ways = {(t.sender, t.receiver): (t.bandwidth_bytes_per_s, t.delay_s) for t in p.traffic}
            assert ways == {("x", "y"): (narrow * 125e3, 0.01), ("y", "x"): (wide * 125e3, 0.04)}
            steps.append(p.step_s)
    assert steps[:2] == pytest.approx(steps[2:], rel=0.05)


def test_a_hub_needs_someone_who_stays(tmp_path: Path) -> None:
    text = FLEET.replace("tflops", "reliable = false\ntflops")
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    problems = {p.strategy: p.problem for p in found.strategies}
    assert "reliable" in problems.pop("hub")
    assert set(problems.values()) == {""}


def test_paced_machines_take_what_the_file_says(tmp_path: Path) -> None:
    text = '[[machines]]\nname = "a"\ncount = 2\nforward_ms = 100\nbackward_ms = 200\n'
    found = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    problems = {p.strategy: p.problem for p in found.strategies}
    assert problems["swarm"] == ""
    assert "paced" in problems["swap"]


def test_one_machine_is_no_two_stages(tmp_path: Path) -> None:
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--stages", "2", text=ALONE))
    for p in (p for p in found.strategies if p.strategy in ("swarm", "pipeline")):
        assert "1 machines in all have room for a stage" in p.problem
        assert "each stage needs one" in p.problem


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (
            FLEET,
            ("--set", "model.width=8192", "--set", "model.layers=48"),
            ("machines[", "'near'", "add", "smaller model"),
        ),
        (MANY_SMALL, (), ("machines[0].memory_gib", "machine with more memory")),
        (FLEET, ("--stages", "9"), ("--stages 9", "4 layers")),
        (FLEET.replace("tflops = 0.02\n", ""), (), ("machines[0].tflops", "missing")),
        (FLEET, ("--pipelines", "2"), ("--pipelines belongs to --network",)),
        (FLEET, ("--network", "dtfm-case1"), ("FLEET.toml", "--network")),
        (FLEET, ("--microbatch", "3"), ("does not divide",)),
        (
            FLEET.replace("bandwidth_mbps = 100", "bandwidth_mbps = 0"),
            (),
            ("defaults.bandwidth_mbps", "greater than 0"),
        ),
        (TWO_WAYS.format("0", "50"), (), ("matrix.bandwidth_mbps[0][1]", "greater than 0")),
        (FLEET.replace("up_mbps = 200", "up_mbps = 0"), (), ("machines[1].up_mbps", "greater than 0")),
    ],
)
def test_what_cannot_be_planned_is_told(
    tmp_path: Path, text: str, arguments: tuple[str, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(MuletrainError) as error:
        planned(tmp_path, *arguments, text=text)
    assert all(word in str(error.value) for word in said), str(error.value)


def test_a_network_says_what_it_needs() -> None:
    result = CliRunner().invoke(app, ["plan", "--network", "dtfm-case1", "--stages", "8"])
    assert "--pipelines, --activation-bytes, --gradient-bytes" in str(result.exception)


def test_people_see_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = planned(tmp_path, "--plot", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    words = " ".join(out.split())
    for said in (
        "recommended: ",
        "hub: without clients",
        "pipeline links",
        "x to y",
        "100 Mb/s, 30 ms",
        "price of 10^9 tokens",
    ):
        assert said in words


@pytest.mark.parametrize("churn", ["", "[churn]\nleave_per_hour = 0.5\n"])
def test_nothing_is_said_about_machines_that_leave_unless_the_file_has_churn(tmp_path: Path, churn: str) -> None:
    out = planned(tmp_path, text=FLEET + churn)
    for words in ("while machines leave", "while machines come and go", "the file's churn"):
        assert (words in " ".join(out.split())) == bool(churn), words


def test_a_machine_has_one_name_in_all_tables(tmp_path: Path) -> None:
    lines = planned(tmp_path, text=ALONE).splitlines()
    assert lines[0] == "fleet: a (CPU in here)"
    assert any(line.startswith(" a") for line in lines), "its memory"
    assert any(line.split()[0] == "0" and line.endswith("  a") for line in lines if line), "its place"


def test_delayed_updates_leave_swap_in_the_plan_which_does_without(tmp_path: Path) -> None:
    """A model that does not fit as a whole: a swapped one has no second copy of its weights."""
    text = '[[machines]]\nname = "a"\ndevice = "RTX 3090"\nmemory_gib = 0.03\nhost_gib = 8\n'
    found = Plan.model_validate_json(planned(tmp_path, "--json", "--set", "optimizer.delayed=true", text=text))
    swap = next(p for p in found.strategies if p.strategy == "swap")
    assert swap.problem == ""
    assert swap.swapped
    assert "with optimizer.delayed=false, which this strategy needs" in swap.notes
    at_once = Plan.model_validate_json(planned(tmp_path, "--json", text=text))
    assert swap.tokens_per_s == next(p.tokens_per_s for p in at_once.strategies if p.strategy == "swap")


def test_without_a_file_the_example_is_planned() -> None:
    result = CliRunner().invoke(
        app, ["plan", "--stages", "3", "--microbatch", "1", "--batch", "64", "--time-limit", "0.2"]
    )
    assert "this is the example" in result.output
    assert "spot-t4.toml" in result.output


def test_every_field_is_explained() -> None:
    """In the reference of the documentation, which is made from these descriptions (``scripts/reference.py``)."""
    missing = [f"{kind.__name__}.{n}" for kind in PLAN for n, i in kind.model_fields.items() if not i.description]
    assert missing == []
