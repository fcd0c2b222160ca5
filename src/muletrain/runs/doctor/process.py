"""The process that makes the checks of one part. ``python -m muletrain.runs.doctor.process PART`` reads a ``Question``
from standard input (a question may contain a ticket), and prints a line of JSON per ``Check``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict

from muletrain.runs.doctor.examination import NETWORK, Check, Question


async def _network(question: Question) -> None:
    from muletrain.runs.doctor.network_checks import network_checks

    async for check in network_checks(question):
        _print(check)


def _print(check: Check) -> None:
    print(json.dumps(asdict(check)), flush=True)


def main() -> None:
    question = Question.model_validate_json(sys.stdin.read())
    if sys.argv[1] == NETWORK.name:
        asyncio.run(_network(question))
    else:
        from muletrain.runs.doctor.machine_checks import machine_checks

        for check in machine_checks(question):
            _print(check)
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads of torch and of the daemon


if __name__ == "__main__":
    main()
