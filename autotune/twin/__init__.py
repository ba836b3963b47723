"""The model of one live run: loss law, noise, throughput, health."""
