"""Mixture of experts: router, experts, dispatch, balance."""
