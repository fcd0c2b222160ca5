"""Names of files that a peer process and whoever started it agree on."""

TICKET_FILE = "ticket"
