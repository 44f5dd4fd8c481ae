"""One exported file: written, quantised, and read back without executing anything in it."""
