"""What comes out of a run: heads and their versions, export, the pretrained directory, predictions."""
