"""The cost model: step time and memory of plans, in closed form and by replay."""
