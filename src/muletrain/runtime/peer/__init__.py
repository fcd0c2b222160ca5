"""One peer: its ``service`` of one stage after the other, the ``peer`` itself (dispatch of frames to actors, its loop over steps),
frames that came too early (``early_frames``), and what it tells of its steps (``reporting``).
"""
