"""A sweep on disk and in motion: storage, leases, child-process trials, outcomes."""
