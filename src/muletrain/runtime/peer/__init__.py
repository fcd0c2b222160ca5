"""One peer: its ``service`` of one stage after the other, and the ``peer`` itself, which makes all its actors and loops
over steps.

``dispatch`` gives what arrives to the actors (what comes too early waits in ``early_frames``); ``arrival`` is how a
peer comes to where the run is, ``ending`` how it goes with the run; ``parts`` says when it writes checkpoints,
``reporting`` what it tells of its steps.
"""
