"""A run on several machines: begin it on the first, and join with the ticket that it prints on the others.

python examples/several_machines.py                  # here; needs one open port
python examples/several_machines.py TICKET           # on each other machine
"""

import sys

import muletrain

if len(sys.argv) > 1:
    muletrain.join(sys.argv[1]).wait()
else:
    run = muletrain.start(model={"layers": 4, "width": 256, "heads": 4}, fleet={"stages": 2}, train={"steps": 200})
    print("on the other machines: python examples/several_machines.py", run.ticket)
    for event in run.events():
        if event.kind == "peer_down":
            print("gone:", event)
    print(run.wait().status())
