"""Backbones, action modules and the prefix features between them."""
