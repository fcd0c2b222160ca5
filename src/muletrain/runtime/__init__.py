"""The step protocol, the same for all strategies, in rooms; imports run downwards through them:

``peer`` (a peer's life and its dispatch) over ``recovery`` (stepping back, merging histories) over ``checkpoint`` over
``step`` (agree on a step, average, apply) over ``transfer`` (states and tokens in blocks) over ``microbatch`` (give
out, compute, account) over ``members`` (who is there, who is counted on) over ``core`` (messages, waits).
"""
