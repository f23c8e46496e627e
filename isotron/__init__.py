"""isotron: write the model once, train it on any layout, on any device, and get the same numbers."""

__version__ = "0.1.0"
