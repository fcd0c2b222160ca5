"""Commands declare options and help, and import their actions only when they run."""
