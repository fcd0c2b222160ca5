"""The step protocol, the same for all strategies, in ten rooms. Imports run downwards only:

    peer          runs one peer: its steps, what arrives, joining and ending
    recovery      rolls the run back when a stage is lost, and merges histories after a partition
    checkpoint    writes parts of checkpoints, keeps copies, coordinates
    step          takes a step from its microbatches to the applied update: agree, average, record, apply
    averaging     reduces the accumulators of a stage's replicas to one mean gradient
    transfer      copies states and tokens in blocks
    microbatch    gives out microbatches, computes and accounts for them
    members       knows who is there, who can be counted on, who moves and leaves
    pool          has clients compute parts of a server's microbatches
    core          holds messages, waits, tasks and the facts of a run

Each room's ``__init__`` says what lives there and what other rooms may use.
"""
