"""What a trained model is used for: generate, evaluate."""
