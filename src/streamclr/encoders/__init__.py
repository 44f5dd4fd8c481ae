"""The encoders, the projection head, and running them on stored images. Imports base only."""
