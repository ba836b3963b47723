"""Checkpoints that hold everything, and Hugging Face weights in and out."""
