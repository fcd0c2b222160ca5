"""A run on several machines: begin it on the first, and join with the ticket that it prints on the others.

python examples/several_machines.py                  # here; needs one open port
python examples/several_machines.py TICKET           # on each other machine
"""

import sys

import muletrain

given = sys.argv[1] if len(sys.argv) > 1 else "200"
if not given.isdecimal():
    muletrain.join(given).wait()
else:
    model = {"layers": 4, "width": 256, "heads": 4}
    run = muletrain.start(model=model, fleet={"stages": 2}, train={"steps": int(given)})
    print("on the other machines: python examples/several_machines.py", run.ticket, flush=True)
    for event in run.events():
        if event.kind == "peer_down":
            print("gone:", event)
    print(run.wait().status())
