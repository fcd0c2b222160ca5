"""What every room stands on: frames and calls as validated messages (``messages``, with bounds on their ``sizes``),
waits with deadlines (``waiting``), labels of the run's beginnings (``branches``), and a disk that may hang (``disk``).

No actor lives here, and nothing here knows who is there.
"""
