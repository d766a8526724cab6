"""Scripts that show one thing each: run them with ``python -m`` or under torchrun."""
