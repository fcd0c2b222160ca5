"""Commands declare options and help, and import actions only at run time."""
