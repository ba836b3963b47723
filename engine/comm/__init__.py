"""Sums of gradients along routes that fit the links between the ranks."""
