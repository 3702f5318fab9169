"""The command line: one short function per command; each imports its room when it runs."""
