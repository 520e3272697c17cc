"""The built-in backbones, one file each."""
