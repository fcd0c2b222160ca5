"""Admits peers to a run, at step 0 and later.

Every member has an ``admission``: the admission chooses a newcomer's stage (``seating``) or refuses the newcomer, and
sends configuration, tokenizer and genesis. Before step 0 only the founder admits, to a waiting room (``rendezvous``)
instead of the roster. ``client`` is the newcomer's side, ``messages`` the protocol. ``founder`` and ``newcomer``
prepare a ``training.Seat``; ``limits`` protect a newcomer's machine. ``ticket`` lets a machine in, ``removal`` removes
a member.
"""
