"""Memory for time: recomputation; and measuring memory."""
