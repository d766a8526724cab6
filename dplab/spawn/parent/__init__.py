"""The notebook's side of a run: it starts ranks, watches them, and says what became of them."""
