"""What the parent and its ranks both know. Imports nothing of the other rooms."""
