"""Which dtype is used where."""
