"""The command line: parses options, calls the other rooms and prints. Nothing imports it."""
