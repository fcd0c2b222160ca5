"""The step protocol, the same for all strategies, in ten rooms. Imports run downwards only:

  peer          runs one peer: steps, incoming messages, joining and ending
  recovery      rolls the run back when a stage is lost, and merges histories after a partition
  checkpoint    writes parts of checkpoints, keeps copies, coordinates
  step          takes a step from the microbatches to the applied update: agree, average, record, apply
  averaging     reduces the accumulators of a stage's replicas to one mean gradient
  transfer      offers and takes states, the run's tokens, and the weights beside an adapter
  microbatch    distributes, computes and accounts for microbatches
  members       tracks present, reliable, moving and leaving peers
  pool          lets clients compute parts of a server's microbatches
  core          holds messages, waits, tasks, the transport of large data and the facts of a run

Each room's ``__init__`` lists its modules, and the parts that other rooms may use.
"""
