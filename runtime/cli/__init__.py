"""The command line, `stepcast`; needs the extra "cli"."""
