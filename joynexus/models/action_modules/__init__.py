"""The built-in action modules, one file each."""
