"""Names of files that a peer process and whoever started it agree on."""

TICKET_FILE = "ticket"
OWNER_FILE = "owner.key"
"""The private key of the run's owner, where it was founded."""
