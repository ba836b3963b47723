"""The training stack: runs one configuration, on its own or under the tuner."""
