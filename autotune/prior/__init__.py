"""The meta-learned prior: what earlier training runs say of the hyperparameters of a new one."""
