"""A plan for people: each strategy's prediction, and where time, memory and traffic go."""

from __future__ import annotations

from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING

from rich.markup import escape

from muletrain.cli.show.console import say
from muletrain.cli.show.tables import new_table
from muletrain.planning.splits import named, title
from muletrain.sim.fleet.advice import WORTH
from muletrain.units import format_bytes, format_count, format_duration, format_memory, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console
    from rich.table import Table

    from muletrain.config.fleet_file import Fleet
    from muletrain.config.fleet_sections import Machine
    from muletrain.config.plan_file import Memory, Plan, Prediction, Traffic

CELL = len("125 ms, 55%")
"""Widest column of the table, so that five columns and labels fit into 80."""
LINKS = 6
"""Most pairs of regions in the table; '--json' has all."""


def tell(console: Console, plan: Plan, fleet: Fleet) -> None:
    """Print the whole plan."""
    kinds = ", ".join(kind_of(m.name, m.count, m.device, m.region) for m in fleet.machines)
    say(console, f"[bold]{escape(plan.fleet)}[/bold]: {escape(kinds)}")
    console.print(
        f"{plan.model} ({format_count(plan.params)} parameters), {plan.batch} sequences of {plan.context} tokens per step\n"
    )
    console.print(_table(plan))
    console.print()
    lacking = [p for p in plan.strategies if p.problem]
    for p in lacking:
        say(console, f"{title(p)} is not possible: {escape(p.problem)}")
    if lacking:
        console.print()
    if plan.recommended is not None:
        chosen = plan.strategies[plan.recommended]
        say(console, f"[bold]recommended: {escape(named(chosen))}[/bold]; {plan.why}")
        if chosen.played_step_s is not None:
            more = 100 * (chosen.played_step_s / chosen.step_s - 1)
            say(
                console,
                f"played with the production code: {format_duration(chosen.played_step_s)} per step, {abs(more):.1f} % "
                f"{'more' if more >= 0 else 'less'} than predicted",
            )
        _say_limit(console, plan, chosen)
        for table in (_layout(chosen, fleet), _memory(chosen)):
            console.print()
            console.print(table)
        console.print()
        for machines in plan.without_work:
            say(console, f"without work: {escape(machines)}")
    else:
        say(console, f"no strategy is recommended: {plan.why}")
    for note in _notes(plan, fleet):
        say(console, escape(note))


def kind_of(name: str, count: int, device: str | None, region: str) -> str:
    """A kind of machine, with the name that the other tables use: '20 x spot-east (T4 in virginia)'."""
    about = f"{device} in {region}" if device else f"in {region}"
    return f"{several(name, count)} ({about})"


def several(name: str, count: int) -> str:
    """'20 x spot-east', or 'desk'."""
    return name if count == 1 else f"{count} x {name}"


def _say_limit(console: Console, plan: Plan, chosen: Prediction) -> None:
    """Print the limits of the recommended strategy, and helpful changes of the run."""
    if chosen.limit:
        say(console, f"limit: {escape(chosen.limit)}")
    if plan.swapping:
        say(console, f"swapped: {escape(plan.swapping)}")
    if plan.fewer:
        say(console, f"fewer machines: {escape(plan.fewer)}")
    if not plan.improvements:
        say(console, f"no single change that 'plan' tried gives {100 * WORTH:.0f} % more throughput")
        return
    table = new_table("changes of the run that help", ["change"], ["tokens/s", "gain", "machines"])
    table.add_column("effect on training", overflow="fold")
    for better in plan.improvements:
        table.add_row(
            escape(f"--set {better.change}"),
            format_count(better.tokens_per_s),
            f"{100 * better.gain:.0f} %",
            str(better.machines),
            escape(better.training or "none"),
        )
    console.print()
    console.print(table)


def _notes(plan: Plan, fleet: Fleet) -> list[str]:
    able = [p for p in plan.strategies if not p.problem]
    whose = {note: [title(p) for p in able if note in p.notes] for p in able for note in p.notes}
    notes = [f"{'; '.join(names)}: {note}" for note, names in whose.items()]
    if any(p.churned_tokens_per_s is not None for p in able):
        notes.append(
            "'while machines leave' is with the file's churn (lost stages, steps taken back, states to be fetched), played as rates; all "
            "other figures are for machines that stay"
        )
    if plan.recommended is not None:
        full = [m for m in plan.strategies[plan.recommended].memory if _full(m)]
        notes += [
            f"{m.machine} is full: {100 * m.device_needs / (m.device_has or 1):.0f} % of its device by estimate, and other programs need "
            "some, too; with less room, state memory_gib and plan again"
            for m in full
        ]
    if any(m.host_needs and m.host_has is None for p in able for m in p.memory):
        notes.append("host memory is assumed to be enough where the fleet file does not state it (host_gib)")
    if any(peer.forward_s for peer in fleet.peers()):
        notes.append(
            "machines are paced (forward_ms): a stage takes the stated time, whatever its number of layers; set --stages"
        )
    return [
        *notes,
        *(f"estimated: {a}; to use a measured speed, add 'tflops' beside 'device'" for a in plan.assumed),
    ]


def _full(m: Memory) -> bool:
    return m.device_has is not None and m.device_needs > (1 - WORTH) * m.device_has


def _table(plan: Plan) -> Table:
    """One column per possible strategy."""
    table = new_table("prediction for each strategy", [""])
    able = [p for p in plan.strategies if not p.problem]
    chosen = None if plan.recommended is None else plan.strategies[plan.recommended]
    for p in able:
        table.add_column(
            title(p), justify="right", style="bold" if p is chosen else None, overflow="fold", max_width=CELL
        )

    def row(label: str, show: Callable[[Prediction], str], end: bool = False) -> None:
        if table.rows and table.rows[-1].end_section:
            table.add_row()
        table.add_row(escape(label), *map(show, able), end_section=end)

    if not all(p.runnable for p in able):
        row("runs today", lambda p: "yes" if p.runnable else "not yet")
    row(
        "stages",
        lambda p: f"1 ({plural(len(p.swapped), 'part')})" if p.swapped else str(len(p.stages)),
    )
    row("machines", lambda p: str(sum(len(set(s.machines)) for s in p.stages)))
    row("microbatches x sequences", lambda p: f"{sum(p.microbatches)} x {p.microbatch}", end=True)
    row("tokens/s", lambda p: format_count(p.tokens_per_s))
    if any(p.expected_per_s != p.tokens_per_s for p in able):
        row("  while machines leave", lambda p: format_count(p.expected_per_s))
    row("time", lambda p: format_duration(p.step_s))
    for label, part in (
        (" compute", "compute_s"),
        (" pipeline links", "pipeline_s"),
        (" data-parallel", "data_parallel_s"),
        (" bubble", "bubble_s"),
    ):
        row(label, lambda p, part=part: _part(getattr(p.split, part), p.step_s), end=part == "bubble_s")  # type: ignore[misc]
    if any(p.price_per_billion_tokens is not None for p in able):
        row("price of 10^9 tokens", lambda p: _price(p.price_per_billion_tokens), end=True)
    _memory_rows(plan, row)
    _traffic_rows(plan, row)
    return table


def _part(seconds: float, step_s: float) -> str:
    return f"{format_duration(seconds)}, {100 * seconds / step_s:.0f}%" if seconds >= 5e-4 * step_s else "-"


def _price(price: float | None) -> str:
    return "?" if price is None else f"{price:,.2f}" if price < 100 else f"{price:,.0f}"


def _memory_rows(plan: Plan, row: Callable[..., None]) -> None:
    rows = {(p.strategy, p.schedule, m.machine): m for p in plan.strategies for m in p.memory}
    entries = {m.machine: m for m in rows.values()}
    unit, name = _unit(rows.values())
    row(f"{name} (+ beside GPU)", lambda p: "")
    for n, (entry, m) in enumerate(entries.items()):
        has = "" if m.device_has is None else f", has {_has(m.device_has, unit)}"

        def show(p: Prediction, entry: str = entry) -> str:
            found = rows.get((p.strategy, p.schedule, entry))
            return "-" if found is None else _needs(found, unit)

        row(f" {entry}{has}", show, end=n == len(entries) - 1)


def _unit(rows: Iterable[Memory]) -> tuple[int, str]:
    """Bytes and name of the unit that suits all rows."""
    return (2**30, "GiB") if any(m.device_needs >= 2**30 for m in rows) else (2**20, "MiB")


def _number(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.3g}" if nbytes < 999.5 * unit else f"{nbytes / unit:,.0f}"


def _has(nbytes: int, unit: int) -> str:
    """The amount, with a separate unit if the table's is too small."""
    return _number(nbytes, unit) if nbytes < 999.5 * unit else format_memory(nbytes)


def _needs(m: Memory, unit: int) -> str:
    """'11.2 + 17': on the device, and in host memory."""
    return _number(m.device_needs, unit) + (f" + {_number(m.host_needs, unit)}" if m.host_needs else "")


def _traffic_rows(plan: Plan, row: Callable[..., None]) -> None:
    """Link speeds are of the machines that work in the recommended strategy, or else in one that runs today."""
    most: dict[tuple[str, str], tuple[bool, bool, float, Traffic]] = {}
    for n, p in enumerate(plan.strategies):
        for t in p.traffic:
            rank = n == plan.recommended, p.runnable, t.total, t
            pair = t.sender, t.receiver
            most[pair] = max(most.get(pair, rank), rank, key=itemgetter(0, 1, 2))
    busiest = [t for *_, t in sorted(most.values(), key=itemgetter(0, 1, 2), reverse=True)][:LINKS]
    row("bytes; speed of a pair", lambda p: "")  # links of a region's machines are not added up
    for t in busiest:

        def show(p: Prediction, pair: tuple[str, str] = (t.sender, t.receiver)) -> str:
            return next((format_bytes(own.total) for own in p.traffic if (own.sender, own.receiver) == pair), "-")

        row(f" {t.sender} to {t.receiver}\n  {link_speed(t)}", show)
    if len(most) > len(busiest):
        row(f" {len(most) - len(busiest)} more in --json", lambda p: "")


def link_speed(t: Traffic) -> str:
    """'1.1 Gb/s, 34 ms'."""
    if t.bandwidth_bytes_per_s is None:
        return f"{1000 * t.delay_s:.3g} ms"
    mbps = 8e-6 * t.bandwidth_bytes_per_s
    width = f"{mbps / 1000:.3g} Gb/s" if mbps >= 1000 else f"{mbps:.3g} Mb/s"
    return f"{width}, {1000 * t.delay_s:.3g} ms"


def _layout(p: Prediction, fleet: Fleet) -> Table:
    entries = entry_of(fleet)
    table = new_table("placement", ["stage", "layers", "machines"])
    for n, stage in enumerate(p.stages):
        counts = Counter(entries[name].name for name in set(stage.machines))
        who = ", ".join(several(m.name, counts[m.name]) for m in fleet.machines if m.name in counts)
        first, end = stage.layers
        table.add_row(str(n), f"{first} to {end - 1}" if end - first > 1 else str(first), escape(who))
    return table


def _memory(p: Prediction) -> Table:
    unit, name = _unit(p.memory)
    table = new_table(f"the fullest machine of each kind, in {name}", ["memory"], gap=1)
    for heading in ("weights", "optimizer", "gradients", "activations", "buffers", "on device", "beside"):
        table.add_column(heading, justify="right", min_width=len(heading))

    def of(needs: int, has: int | None) -> str:
        return _number(needs, unit) + ("" if has is None else f" of {_has(has, unit)}")

    for m in p.memory:
        parts = (m.weights, m.optimizer, m.gradients, m.activations, m.buffers)
        table.add_row(
            escape(f"{m.machine}, stage {m.stage}"),
            *(_number(part, unit) for part in parts),
            of(m.device_needs, m.device_has),
            of(m.host_needs, m.host_has) if m.host_needs else "-",
        )
    return table


def entry_of(fleet: Fleet) -> dict[str, Machine]:
    """The entry of the fleet file for each machine, by name."""
    entries = (m for m in fleet.machines for _ in range(m.count))
    return {peer.name: entry for peer, entry in zip(fleet.peers(), entries, strict=True)}
