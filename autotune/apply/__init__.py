"""Turns a chosen candidate into the files of a production run."""
