"""The command line: the table of commands, their parsers, and one file of functions per group. Nothing imports it."""
