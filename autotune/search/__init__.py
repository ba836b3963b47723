"""Proposes candidates and ranks what came back: samplers, Pareto front, knee."""
