"""The search space: its grammar, and the plans it holds with the rules that removed the others."""
