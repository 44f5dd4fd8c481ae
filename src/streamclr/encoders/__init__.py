"""Encoders, projection head, frozen feature extractor, and running them on stored images. May import base only."""
