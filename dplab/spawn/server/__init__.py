"""The process that ranks are forked from, and how the parent starts it and asks it for ranks."""
