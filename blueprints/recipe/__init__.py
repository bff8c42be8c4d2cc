"""The recipe: grammar, layers, faults and explanations."""
