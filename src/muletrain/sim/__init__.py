"""The virtual world: production peers on a virtual clock, and models that predict how fast a fleet is.

How fast is a fleet? The models, from the most exact to the cheapest; each is needed because the one above it costs about
a hundred times as much:

- ``fleet.protocol`` plays the production code with every message: the reference, and ``plan --confirm``.
- ``steps`` plays microbatches and averaging without messages, in milliseconds a step: what ``plan`` predicts. Queues at
  single peers need it: closed forms are up to 60 % off on unequal machines (``fleet.pace``).
- ``fleet.rates`` is a closed form of strategy swarm: memberships under churn change too often to play each.
- ``fleet.flow`` carries rates through days of churn; ``fleet.pace`` corrects them by steps of similar memberships.
- ``fleet.churn`` has equal peers and no links: hundreds of runs of 32 hours for SWARM's table 5 and figures 5 and 7.
- ``planning.splits.roughly_s`` estimates one pipeline, to rank thousands of placements before a few are played.
- ``planning.swapping`` is ATOM's closed form of swapping.
- ``papers.baselines`` are other systems as their papers describe them (sends that block), and predict nothing of ours.
"""
