"""The command line: ``main`` registers ``commands`` (options, help), which call ``actions``, which use ``show``."""
