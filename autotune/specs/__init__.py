"""What a sweep is about: the machines, from a probe or the catalogue."""
