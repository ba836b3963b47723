"""One module per command of the `autotune` program; each is imported only when its command is used."""
