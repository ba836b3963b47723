"""Retunes a live run: proposes, tries as a canary, commits or rolls back, and keeps the ledger."""
