"""llmtrain: pretrain small language models on one box."""

__version__ = "0.1.0"
