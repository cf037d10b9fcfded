"""Text to token files to batches."""
