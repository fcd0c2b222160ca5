"""Stop a run when the held-out loss has not improved for three measurements, and draw the losses.

python examples/early_stop.py
"""

import sys

import muletrain
from muletrain.events import Validated

PATIENCE = 3
every = int(sys.argv[1]) if len(sys.argv) > 1 else 20
run = muletrain.train(train={"steps": 100 * every, "validate_every": every}, wait=False)
losses: list[float] = []


@run.on(Validated)
def measured(event: Validated) -> None:
    losses.append(event.loss)
    if len(losses) - losses.index(min(losses)) > PATIENCE or len(losses) == 10:
        run.stop()


run.wait()
for n, loss in enumerate(losses):
    print(f"step {n * every:5}  {loss:6.3f}  {'#' * round(8 * loss)}")
