"""Fine-tune any Hugging Face language model from one recipe."""
