"""The run: configuration, step, optimizer, checkpoint, loop."""
