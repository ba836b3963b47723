"""Text to batches: documents, tokens, sample order, prefetching."""
