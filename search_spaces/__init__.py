"""The spaces users start from, as YAML; the grammar is in README.md beside them."""
