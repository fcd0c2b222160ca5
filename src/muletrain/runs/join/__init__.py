"""How peers come into a run, at step 0 and later.

Every member has an ``admission``: it chooses a newcomer's stage (``seating``) or refuses it, and hands out what it needs
to begin. Before step 0 only the founder admits, to a waiting room (``rendezvous``) instead of the roster. ``client`` is
the newcomer's side, ``messages`` what both say. ``founder`` and ``newcomer`` use them to take a ``training.Seat``;
``limits`` protect a newcomer's machine. ``ticket`` lets a machine in, ``removal`` puts it out.
"""
