"""What a peer process and whoever started it agree on."""

TICKET_FILE = "ticket"
EXIT_ERROR = 2
EXIT_NO_CHECKPOINT = 3
"""The run came to its end, but its last checkpoint is nowhere."""
