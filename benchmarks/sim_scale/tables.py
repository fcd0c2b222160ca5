"""Tables of README.md from the JSON beside it."""

from typing import Any

Results = dict[str, Any]
FLOW = "flow: peers|CPU [s]|events|CPU of an event [ms]|memory [MB]"
PROTOCOL = "protocol: peers|CPU [s]|messages|CPU of a message [ms]|messages/s|hops/s"
PROTOCOL += "|1,000 peers, 10 minutes: CPU [s]|memory [MB]"


def flow(results: Results) -> list[list[str]]:
    return [
        [f"{r['peers']:,}", r["cpu_s"], f"{r['events']:,}", f"{r['ms_per_event']:.2f}", r["mb"]]
        for r in results["flow"]
    ]


def protocol(results: Results) -> list[list[Any]]:
    return [
        [
            r["peers"],
            r["cpu_s"],
            *(f"{r['messages']:,}", r["ms_per_message"], f"{r['messages_per_s']:,}", f"{r['hops_per_s']:,}"),
            *(f"{r['goal_s']:,}", f"{r['mb']:,}"),
        ]
        for r in results["protocol"]
    ]


def questions(results: Results) -> list[float]:
    """Share of ``sync`` in the messages."""
    return [r["kinds"]["sync"] / r["messages"] for r in results["protocol"]]
