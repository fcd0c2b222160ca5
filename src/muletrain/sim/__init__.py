"""The virtual world: production peers on a virtual clock, and models that predict how fast a fleet is.

How fast is a fleet? The models, from the most exact to the cheapest; each is needed because the model above costs about
a hundred times as much:

- ``fleet.protocol`` plays the production code with every message: the reference, and ``plan --confirm``.
- ``steps`` plays microbatches and averaging without messages, in milliseconds a step: the prediction of ``plan``.
  Closed forms cannot model queues at single peers, and are up to 60 % off on unequal machines (``fleet.pace``).
- ``fleet.rates`` is a closed form of strategy swarm: memberships under churn change too often to play each.
- ``fleet.flow`` carries rates through days of churn; ``fleet.pace`` corrects the rates by steps of similar memberships.
- ``reproduction.churn`` has equal peers and no links: hundreds of runs of 32 hours for SWARM's table 5, figures 5 and
  7.
- ``planning.splits.roughly_s`` estimates one pipeline, to rank thousands of placements before a few are played.
- ``planning.swapping`` is ATOM's closed form of swapping.
- ``reproduction.baselines`` are other systems as described in their papers (blocking sends), and predict nothing of
  ours.
"""
