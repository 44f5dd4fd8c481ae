"""Cameras and recordings: each is read by a process of its own. Imports no torch."""
