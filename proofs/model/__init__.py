"""A model of one step's agreement: pure ``rules``, every execution within bounds (``space``, ``search``), and known hard
executions as scripts (``executions``)."""
