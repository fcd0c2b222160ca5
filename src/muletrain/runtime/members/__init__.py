"""Who is there and who is counted on: the ``roster``, what one peer's actors share with probes and doubts (``context``,
``silence``), how newcomers introduce themselves (``membership``), what a peer takes in frames (``expected``), a device
that hangs (``watchdog``), who serves which stage while the run lasts (``rebalancing``, ``hot_spares``), and leaving in
order (``leaving``).

``Roster`` and ``Context`` are for all rooms above; only they change who counts as alive.
"""
