"""The decoder and its parts; no parallel code."""
