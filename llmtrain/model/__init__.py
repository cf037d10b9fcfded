"""The transformer and what it costs."""
