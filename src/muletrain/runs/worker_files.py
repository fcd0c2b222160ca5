"""What a peer process and whoever started it agree on."""

TICKET_FILE = "ticket"
SCRATCH = "MULETRAIN_SCRATCH"
"""Environment: the folder for temporary files, which goes with whoever started the process."""
EXIT_ERROR = 2
EXIT_NO_CHECKPOINT = 3
"""The run came to its end, but its last checkpoint is nowhere."""
